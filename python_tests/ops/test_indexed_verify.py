"""Draft rows in a pool, parameters at slots, rows without gaps: the same bits, and checks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calls import arguments_of, equal, pooled, ragged, slotted

import polyspec_ext as ps

B, K, V, VD = 5, 3, 60, 50


@pytest.fixture
def block(device: torch.device) -> dict[str, Any]:
    """Return a rectangular call: drafted blocks with some accepted tokens, parameters by
    request."""
    torch.manual_seed(3)
    draft = torch.randn(B, K, VD, device=device)
    target = torch.randn(B, K + 1, V, device=device)
    target[:, :K, :VD] = draft + 0.5 * target[:, :K, :VD]
    temperature = 0.6 + 0.1 * torch.arange(B, device=device)
    drawn = [ps.sample(draft[:, i], temperature=temperature, position=i, level=2) for i in range(K)]
    return {
        "target_logits": target,
        "draft_tokens": torch.stack([d.tokens for d in drawn], 1),
        "draft_logits": draft,
        "draft_statistics": torch.stack([d.statistics for d in drawn], 1),
        "draft_lengths": torch.arange(B, device=device) % (K + 1),
        "temperature": temperature,
        "seed": torch.arange(B, device=device) + 11,
        "position": torch.arange(B, device=device) * 7,
    }


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


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("ways", [(), (pooled,), (pooled, slotted)])
def test_lengths_beside_offsets(block: dict[str, Any], ways: Any, rule: str) -> None:
    """Rows that are not used change nothing; without a bonus row there is no bonus."""
    seed, lengths = block["seed"], block["draft_lengths"]
    more = torch.tensor([0, 2, 0, 0, 1], device=seed.device)  # further rows
    full = torch.nn.functional.pad(block["target_logits"], (0, 0, 0, 1), value=torch.nan)
    mask = torch.arange(K + 2, device=seed.device) < (lengths + more)[:, None]
    allowed = torch.randint(-(2**31), 2**31, (B, K + 1, 2), device=seed.device).int()
    every = torch.full_like(lengths, 2**40)
    bare = 0
    for step in range(20):
        call = {**block, "rule": rule, "seed": seed + 100 * step}
        if step % 4 == 0:
            call["temperature"] = torch.zeros_like(block["temperature"])
        if step % 3 == 0:
            call["allowed"] = allowed | 1  # (not empty)
        room = every.where(more > 0, lengths)
        expected = ps.verify(**call, room=room)
        for way in ways:
            call = way(call)

        def by_row(table: torch.Tensor, width: int) -> torch.Tensor:
            return torch.nn.functional.pad(table, (0, width), value=-9)[mask]

        call |= {"target_logits": full[mask], "draft_len": K}
        call["offsets"] = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0))
        for name in {"draft_tokens", "draft_rows"} & call.keys():
            call[name] = by_row(call[name], 2)
        if "allowed" in call:
            call["allowed"] = torch.nn.functional.pad(call["allowed"], (0, 0, 0, 1))[mask]
        assert equal(ps.verify(**call), expected[:5])
        cut = ps.verify(**call, eos=-1)
        assert equal(cut[:6], expected[:6])
        assert equal(cut[8:], expected[8:])
        assert not cut.ended.any()
        whole = (more == 0) & (cut.num_emitted == lengths) & (lengths > 0)
        read = cut.next_positions.where(whole, expected.cache_lengths)
        assert torch.equal(cut.cache_lengths, read)
        bare += int(whole.sum())
    assert bare > 10
    for wrong in (-1, 3, K + 1, 2**62):  # request 2 has two rows
        changed = lengths.clone()
        changed[2] = wrong
        got = ps.verify(**{**call, "draft_lengths": changed})
        assert got.status.tolist() == [0, 0, ps.Status.BAD_LENGTH, 0, 0]
        assert (got.tokens[2] == -1).all()


@pytest.mark.parametrize("rule", ["token", "block"])
def test_proposals_of_both_kinds(block: dict[str, Any], rule: str) -> None:
    """A token without a draft row is a token with a one-hot draft row."""
    call = pooled({**block, "draft_lengths": None, "rule": rule})
    call["draft_statistics"] = None
    certain = torch.zeros(B, K, dtype=torch.bool, device=call["seed"].device)
    certain[::2, 1] = certain[1::2, 0] = True
    one_hot = {**call, "draft_logits": call["draft_logits"].clone()}
    rows = call["draft_rows"][certain]
    one_hot["draft_logits"][rows] = -torch.inf
    one_hot["draft_logits"][rows, call["draft_tokens"][certain]] = 1.0
    call["draft_rows"] = call["draft_rows"].masked_fill(certain, -1)
    for seed in range(50):
        call["seed"] = one_hot["seed"] = seed
        assert equal(ps.verify(**call), ps.verify(**one_hot))


def test_indices_out_of_range_are_of_their_request(block: dict[str, Any]) -> None:
    for way, name, bad in [
        (pooled, "draft_rows", [-2, B * K + 4, 2**62]),
        (slotted, "slots", [-1, B + 3, 2**62]),
        (ragged, "offsets", [-1, 10**6, -(2**62)]),
    ]:
        call = way({**block, "draft_lengths": torch.full_like(block["seed"], K)})
        good = ps.verify(**call)
        for value in bad:
            index = call[name].clone()
            index.view(-1)[-1 if name == "offsets" else (B - 1) * index[0].numel()] = value
            wrong = ps.verify(**{**call, name: index})
            assert wrong.status[-1] & ps.Status.BAD_INDEX
            assert wrong.tokens[-1].tolist() == [-1] * (K + 1)
            assert equal([t[:-1] for t in wrong], [t[:-1] for t in good])
            with pytest.raises(ps.RequestError, match="a slot, an offset or a draft row's id"):
                ps.raise_for_status(wrong.status, level=1, position=0)
    long = ragged({**block, "draft_lengths": torch.full_like(block["seed"], K)})
    wrong = ps.verify(
        **{**long, "draft_len": K - 1, "draft_statistics": None, "draft_logits": None}
    )
    assert wrong.status.tolist() == [ps.Status.BAD_LENGTH] * B
    assert wrong.tokens.shape == (B, K)


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


def test_nodes_out_of_range_are_of_their_request(device: torch.device) -> None:
    nodes = torch.arange(16, device=device) * 2**12
    bad = ps.sample(torch.zeros(16, 99, device=device), node=nodes)
    assert bad.status.tolist() == [0] * 4 + [ps.Status.BAD_PARAMETER] * 12
