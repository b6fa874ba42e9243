"""Draft rows in a pool, parameters at slots, rows without gaps: the same bits, and checks."""

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


SEEDS = torch.zeros(9).long()


@pytest.mark.parametrize(
    ("way", "change", "texts"),
    [
        (pooled, {"draft_rows": torch.zeros(B, K)}, ["draft_rows", "integer"]),
        (pooled, {"draft_rows": torch.zeros(B).long()}, ["draft_rows", "[B, K]"]),
        (pooled, {"draft_rows": None}, ["draft_logits", "[B, K, Vd]"]),
        (pooled, {"draft_statistics": torch.zeros(B, K, 2).long()}, ["[R, 2]", "[5, 3, 2]"]),
        (pooled, {"slots": torch.zeros(B).long()}, ["slots", "[S]", "none"]),
        (pooled, {"slots": torch.zeros(B + 1).long(), "seed": SEEDS}, ["[B]"]),
        (
            pooled,
            {"slots": torch.zeros(B).long(), "seed": SEEDS, "temperature": torch.ones(8)},
            ["seed", "[8]", "slot", "[9]"],
        ),
        (pooled, {"offsets": torch.zeros(B + 1).long()}, ["target_logits", "[N, V]"]),
        (pooled, {"draft_len": K + 1}, ["draft_len", "K = 3", "4"]),
        (ragged, {"offsets": torch.zeros(2, 2).long()}, ["offsets", "[B+1]", "[2, 2]"]),
        (ragged, {"draft_len": None}, ["draft_len", "most draft tokens", "None"]),
        (ragged, {"draft_len": -1}, ["draft_len", "integer in [0", "-1"]),
        (ragged, {"draft_lengths": torch.zeros(B + 1).long()}, ["draft_lengths", "[B]", "[6]"]),
        (ragged, {"draft_tokens": torch.zeros(B, K).long()}, ["draft_tokens", "[N]"]),
    ],
)
def test_wrong_arguments_are_named(block, way, change, texts) -> None:
    call = {**way(block), "seed": 0, "temperature": 1.0, "position": 0, **change}
    device = block["seed"].device
    call = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in call.items()}
    with pytest.raises(TypeError if texts[-1] == "integer" else ValueError) as raised:
        ps.verify(**call)
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
