"""Allow-masks: an operator with one gives what it gives for logits with -inf at the forbidden ids,
bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bitwise import equal

import polyspec_ext as ps

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8, "min_p": 0.02},
)
VOCABULARIES = (1, 31, 32, 33, 1000, 1025, 4099)


def masks(*rows: int, vocab: int, density: float = 0.6) -> tuple[torch.Tensor, torch.Tensor]:
    """Return allowed ids, bool, and the same as words. Some rows allow little, or nothing; bits
    behind the vocabulary mean nothing."""
    allowed = torch.rand(*rows, vocab) < density
    few = torch.rand(*rows) < 0.2
    allowed &= ~few[..., None] | (torch.rand(*rows, vocab) < 4 / vocab)
    words = -(-vocab // 32)
    padding = torch.rand(*rows, 32 * words - vocab) < 0.5
    bits = torch.cat([allowed, padding], -1).view(*rows, words, 32)
    values = (bits.long() << torch.arange(32)).sum(-1)
    return allowed, values.where(values < 2**31, values - 2**32).to(torch.int32)


def masked(logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    return logits.masked_fill(~allowed, -torch.inf)


def drafted(logits: torch.Tensor, sampling: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return draft tokens of logits ``[B, K, V]`` and their statistics."""
    drawn = [
        ps.sample(logits[:, i], **sampling, seed=3, position=i, level=2)
        for i in range(logits.shape[1])
    ]
    return torch.stack([d.tokens for d in drawn], 1), torch.stack([d.statistics for d in drawn], 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_sample(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(40, vocab + 3)[:, :vocab].mul(2).to(dtype)
    logits[torch.rand(40, vocab) < 0.01] = torch.nan  # harmless where it is forbidden
    allowed, words = masks(40, vocab=vocab)
    logits, words, dense = logits.to(device), words.to(device), allowed.to(device)
    for sampling in SAMPLING:
        call = {**sampling, "seed": torch.arange(40, device=device)}
        r = ps.sample(logits, **call, allowed=words)
        assert equal(r, ps.sample(masked(logits, dense), **call))
        fine = r.status == 0
        assert dense[fine, r.tokens[fine]].all()
        empty = ~dense.any(-1)
        assert (r.status[empty] == ps.Status.EMPTY_ROW).all()
    assert fine.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_verify(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    """Draft rows as they were drawn, with and without statistics, of another type or a smaller
    vocabulary, by both rules, with rows by offsets."""
    torch.manual_seed(vocab)
    batch, k, few = 24, 4, max(1, vocab - 5)
    draft = torch.randn(batch, k, vocab)
    target = torch.randn(batch, k + 1, vocab)
    target[:, :k] = draft + 0.3 * target[:, :k]
    allowed, words = masks(batch, k + 1, vocab=vocab, density=0.9)
    draft, target = draft.to(device, dtype), target.to(device, dtype)
    words, dense = words.to(device), allowed.to(device)
    accepted = 0
    for sampling in SAMPLING:
        tokens, statistics = drafted(draft, sampling)
        fewer, _ = drafted(draft[..., :few], sampling)
        seed = {**sampling, "seed": torch.arange(batch, device=device)}
        for rule in ("token", "block"):
            for call in (
                {"draft_tokens": tokens, "draft_logits": draft, "draft_statistics": statistics},
                {"draft_tokens": tokens, "draft_logits": draft.half()},
                {"draft_tokens": fewer, "draft_logits": draft[..., :few]},
                {"draft_tokens": tokens},
            ):
                options: dict[str, Any] = {**call, **seed, "rule": rule}
                r = ps.verify(target, **options, allowed=words)
                assert equal(r, ps.verify(masked(target, dense), **options))
                accepted += int(r.num_accepted.sum())
                drawn = r.tokens >= 0
                assert dense[drawn.nonzero(as_tuple=True)[0], drawn.nonzero(as_tuple=True)[1]][
                    torch.arange(int(drawn.sum())), r.tokens[drawn]
                ].all()
        ragged = {
            "draft_tokens": torch.nn.functional.pad(tokens, (0, 1)).flatten(),
            "offsets": torch.arange(batch + 1, device=device) * (k + 1),
            "draft_len": k,
            **seed,
        }
        got = ps.verify(target.flatten(0, 1), **ragged, allowed=words.flatten(0, 1))
        assert equal(got, ps.verify(target, tokens, **seed, allowed=words))
    assert accepted or vocab == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1025, 4099])
def test_residuals(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    """With draws of the caller corrections come from the masses of all ids, without tries: of ids
    that the draft lacks, from anywhere in a word on, and of ids that it has elsewhere."""
    torch.manual_seed(vocab)
    batch, k, few = 24, 2, vocab // 3
    target = torch.randn(batch, k + 1, vocab, device=device).to(dtype)
    draft = torch.randn(batch, k, few, device=device).to(dtype)
    made = masks(batch, k + 1, vocab=vocab, density=0.5)
    dense, words = (each.to(device) for each in made)
    draft_ids = torch.full((vocab,), -1, device=device)
    target_ids = torch.randperm(vocab, device=device)[:few]
    draft_ids[target_ids] = torch.arange(few, device=device)
    tokens, _ = drafted(draft, {})
    corrected = 0
    for rule in ("token", "block"):
        for call in (
            {"draft_tokens": tokens, "draft_logits": draft},
            {"draft_tokens": tokens},
            {
                "draft_tokens": target_ids[tokens],
                "draft_logits": draft,
                "target_to_draft": draft_ids,
            },
        ):
            draws = torch.randint(-(2**63), 2**63 - 1, (batch, k + 1), device=device)
            options: dict[str, Any] = {**call, "rule": rule, "draws": draws}
            r = ps.verify(target, **options, allowed=words)
            assert equal(r, ps.verify(masked(target, dense), **options))
            corrected += int(((r.num_accepted < k) & (r.status == 0)).sum())
    assert corrected > 60


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_verify_tree(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    """Children that are deterministic, or drawn."""
    torch.manual_seed(vocab)
    batch, nodes = 24, 6
    parents = torch.tensor([-1, -1, 0, 0, 1, 4]).expand(batch, -1).to(device)
    pool = torch.randn(batch, nodes + 1, vocab)
    target = (pool + 0.3 * torch.randn(batch, nodes + 1, vocab)).to(device, dtype)
    pool = pool.to(device, dtype)
    allowed, words = masks(batch, nodes + 1, vocab=vocab, density=0.8)
    words, dense = words.to(device), allowed.to(device)
    likely = pool.topk(min(2, vocab), -1).indices.expand(-1, -1, 2)
    tokens = torch.stack([likely[:, parent + 1, i % 2] for i, parent in enumerate(parents[0])], 1)
    rows = torch.arange(batch * (nodes + 1), device=device).view(batch, nodes + 1)
    accepted = 0
    for sampling in SAMPLING:
        seed = {**sampling, "seed": torch.arange(batch, device=device)}
        for drawn in ({}, {"draft_logits": pool.flatten(0, 1), "draft_rows": rows}):
            r = ps.verify_tree(target, tokens, parents, **drawn, **seed, allowed=words)
            assert equal(r, ps.verify_tree(masked(target, dense), tokens, parents, **drawn, **seed))
            accepted += int(r.num_accepted.sum())
    assert accepted or vocab == 1


@pytest.mark.parametrize(
    ("mask", "error", "text"),
    [
        (torch.ones(2, 2, dtype=torch.int64), TypeError, "allowed: expected an int32 tensor"),
        (torch.ones(2, 33, dtype=torch.bool), TypeError, "allowed: expected an int32 tensor"),
        (torch.ones(2, 1, dtype=torch.int32), ValueError, r"allowed: .* \[2, 2\], given \[2, 1\]"),
        ([[1, 1]], TypeError, "allowed: expected an int32 tensor"),
    ],
)
def test_errors(mask: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        ps.sample(torch.zeros(2, 33), allowed=mask)
