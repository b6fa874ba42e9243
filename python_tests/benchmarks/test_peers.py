"""The peers of ``benchmarks kernels`` do the same work: their distributions are ours, and all of
them take part."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import evidence
import numpy as np
import pytest
import torch
from reference_rules import distribution as distribution_of

from benchmarks import operators
from benchmarks.operators import Case, Feed, Filters


def _distributions(logits: np.ndarray, filters: Filters) -> evidence.Floats:
    rows = [distribution_of(row, **filters.options()) for row in logits]
    return np.stack([row.masses / row.mass for row in rows])


def _ours(operator: str, feed: Feed) -> operators.Verified:
    r = operators.call_of(operator, feed)()
    return r.tokens, r.num_accepted


def _transformers(feed: Feed) -> operators.Verified:
    verified = [operators.transformers_verify(one)() for one in _single(feed)]
    k = feed.tokens.shape[1]
    pad = torch.nn.functional.pad
    tokens = [pad(t[0], (0, k + 1 - t.shape[1]), value=-1) for ((t, _),) in verified]
    return torch.stack(tokens), torch.stack([n for ((_, n),) in verified])


def _single(feed: Feed) -> list[operators.Block]:
    parts = zip(feed.target, feed.tokens, feed.draft, strict=True)
    return [operators.Block(z[None], y[None], w[None], feed.filters) for z, y, w in parts]


def _vllm(feed: Feed) -> operators.Verified:
    try:
        return operators.vllm_verify(feed)()
    except ImportError as error:
        pytest.skip(str(error))


VERIFIERS: dict[str, tuple[Callable[[Feed], operators.Verified], str]] = {
    "ours token": (partial(_ours, "verify-token"), "token"),
    "ours bare": (partial(_ours, "verify-token-bare"), "token"),
    "eager token": (operators.token_rule, "token"),
    "transformers": (_transformers, "token"),
    "vLLM": (_vllm, "token"),
    "ours block": (partial(_ours, "verify-block"), "block"),
    "eager block": (operators.block_rule, "block"),
}


@pytest.mark.parametrize("filters", [Filters(), Filters(top_k=4, top_p=0.9)])
@pytest.mark.parametrize("name", VERIFIERS)
def test_every_peer_has_the_same_distribution(name: str, filters: Filters) -> None:
    """Compare, on fixed logits and a fixed block, the distribution of (number accepted, token
    after them)."""
    verify, rule = VERIFIERS[name]
    n = 4000
    one = operators.make(Case("verify-token", 1, 3, 7, "float32", 0.6, filters), "cpu", 7, draws=1)
    one.load(0)
    p, q = (_distributions(logits[0].numpy(), filters) for logits in (one.target, one.draft))
    block = one.tokens[0].tolist()
    feed = Feed(
        one.target.expand(n, -1, -1), one.tokens.expand(n, -1).contiguous(),
        one.draft.expand(n, -1, -1), filters, one.statistics.expand(n, -1, -1).contiguous(),
        one.drawn, torch.arange(n), 0.6,
    )  # fmt: skip
    tokens, accepted = verify(feed)
    counts = np.zeros((4, 7))
    for row, count in zip(tokens.tolist(), accepted.tolist(), strict=True):
        assert row[:count] == block[:count]
        assert row[count + 1 :] == [-1] * (3 - count)
        counts[count, row[count]] += 1
    distribution = evidence.verify(p, q, block, rule)
    assert distribution.stop.max() < 0.9, "a case that cannot tell distributions apart"
    expected = distribution.stop[:, None] * distribution.emit
    assert evidence.chi_square(counts, expected) > evidence.ALPHA


def test_every_peer_takes_part_or_is_named() -> None:
    feed = operators.make(Case("verify-token", 1, 3, 7, "float32", 0.7, Filters()), "cpu", 0)
    made, notes = operators.contenders("verify-token", feed)
    always = {operators.LOGSUMEXP, operators.EAGER, operators.TRANSFORMERS}
    names = [one.name for one in made] + [note.split(":")[0] for note in notes]
    assert {one.name for one in made} - {operators.VLLM} == always
    assert sorted(names) == sorted([*always, operators.VLLM, operators.FLASHINFER])
