"""Draft rows in a pool, parameters at slots, rows without gaps: the same bits, and checks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calls import arguments_of, blocks, equal, pooled, ragged, slotted

import polyspec_ext as ps

B, K, V, VD = 5, 3, 60, 50


@pytest.fixture
def block(device: torch.device) -> dict[str, Any]:
    """Return a rectangular call with parameters by request."""
    torch.manual_seed(3)
    each = torch.arange(B, device=device)
    made = blocks(B, K, V, VD, device=device, temperature=0.6 + 0.1 * each)
    return {**made, "seed": each + 11, "position": each * 7}


WAYS = [(pooled,), (ragged,), (slotted,), (pooled, ragged), (pooled, ragged, slotted)]


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("ways", WAYS, ids=lambda ways: "-".join(way.__name__ for way in ways))
def test_same_bits_however_the_rows_lie(block: dict[str, Any], ways: Any, rule: str) -> None:
    for cut in (False, True):
        call = {**block, "rule": rule}
        if cut:
            call["room"] = torch.arange(B, device=call["seed"].device)
            call["eos"] = call["draft_tokens"][:, :2]
        expected = ps.verify(**call)
        assert int(expected.num_accepted.sum()) > 0
        for way in ways:
            call = way(call)
        assert equal(ps.verify(**call), expected)
        call["draft_statistics"] = None
        assert equal(ps.verify(**call), expected)


@pytest.mark.parametrize(
    ("change", "error", "texts"),
    [
        ({"draft_rows": torch.zeros(B, K)}, TypeError, ["draft_rows", "integer"]),
        ({"draft_rows": torch.zeros(B, dtype=torch.int64)}, ValueError, ["draft_rows", "[B, K]"]),
        ({"draft_rows": None}, ValueError, ["draft_logits", "[B, K, Vd]"]),
        ({"draft_statistics": torch.zeros(B, K, 2).long()}, ValueError, ["[R, 2]", "[5, 3, 2]"]),
        ({"slots": torch.zeros(B, dtype=torch.int64)}, ValueError, ["slots", "[S]", "none"]),
        ({"slots": torch.zeros(B + 1).long(), "seed": torch.zeros(9).long()}, ValueError, ["[B]"]),
        (
            {
                "slots": torch.zeros(B).long(),
                "seed": torch.zeros(9).long(),
                "temperature": torch.ones(8),
            },
            ValueError,
            ["seed", "[8]", "slot", "[9]"],
        ),
        ({"offsets": torch.zeros(B + 1).long()}, ValueError, ["target_logits", "[N, V]"]),
        ({"draft_len": K + 1}, ValueError, ["draft_len", "K = 3", "4"]),
    ],
)
def test_wrong_arguments_are_named(block, change, error, texts) -> None:
    call = {**pooled(block), "seed": 0, "temperature": 1.0, "position": 0}
    change = {
        n: v.to(block["seed"].device) if v is not None and not isinstance(v, int) else v
        for n, v in change.items()
    }
    with pytest.raises(error) as raised:
        ps.verify(**{**call, **change})
    for text in texts:
        assert text in str(raised.value), raised.value


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        ({"offsets": torch.zeros(2, 2).long()}, ["offsets", "[B+1]", "[2, 2]"]),
        ({"draft_len": None}, ["draft_len", "most draft tokens", "None"]),
        ({"draft_len": -1}, ["draft_len", "integer in [0", "-1"]),
        ({"draft_lengths": torch.zeros(B + 1).long()}, ["draft_lengths", "[B]", "[6]"]),
        ({"draft_tokens": torch.zeros(B, K).long()}, ["draft_tokens", "[N]"]),
    ],
)
def test_wrong_offsets_are_named(block, change, texts) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        ps.verify(**{**ragged(block), **change})
    for text in texts:
        assert text in str(raised.value), raised.value


def test_opcheck_and_compile(block: dict[str, Any]) -> None:
    """Use fully accepted greedy blocks: opcheck compares outputs, and padding is NaN."""
    logits = block["target_logits"]
    call = {**block, "draft_tokens": logits.argmax(-1)[:, :K], "draft_logits": logits[:, :K, :VD]}
    call |= {"temperature": torch.zeros_like(block["temperature"])}
    call["draft_lengths"] = torch.full_like(block["seed"], K)
    for way in (pooled, ragged, slotted):
        call = way(call)
    operator = torch.ops.polyspec.verify.default
    for more in ({}, {"eos": [-1]}, {"room": 9}):
        given = {**call, **more}
        (arguments,) = arguments_of(operator, lambda given=given: ps.verify(**given))
        torch.library.opcheck(operator, arguments)
        torch._dynamo.reset()
        compiled = torch.compile(lambda **c: tuple(ps.verify(**c)), fullgraph=True, backend="eager")
        assert equal(compiled(**given), ps.verify(**given))
