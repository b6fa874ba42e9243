"""The peers of ``benchmarks kernels`` do the same work: same distributions, and all of them take
part."""

from __future__ import annotations

from collections.abc import Callable

import evidence
import numpy as np
import pytest
import reference
import torch

import polyspec_ext as ps
from benchmarks import grid, inputs, kernels, peers, rules, vllm_kernels
from benchmarks.grid import Case, Filters

CUT = Filters(top_k=6, top_p=0.85, min_p=0.02)


@pytest.mark.parametrize("filters", [Filters(), CUT, Filters(top_p=0.8), Filters(min_p=0.1)])
def test_processed_distribution(filters: Filters) -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (5, 40)).astype(np.float32)
    sampling = reference.Sampling(**filters.given())
    wanted = np.stack([reference.processed_distribution(row, sampling).probs for row in logits])
    found = rules.processed(torch.from_numpy(logits), filters).numpy()
    assert ((found > 0) == (wanted > 0)).all()
    np.testing.assert_allclose(found, wanted, atol=2e-6)


def _statistics(feed: inputs.Feed) -> tuple[reference.Floats, reference.Floats]:
    sampling = reference.Sampling(**feed.case.filters.given())
    target = [
        reference.processed_distribution(row.numpy(), sampling).probs for row in feed.target[0]
    ]
    draft = [reference.processed_distribution(row.numpy(), sampling).probs for row in feed.draft[0]]
    return np.stack(target), np.stack(draft)


Verifier = Callable[[inputs.Feed], tuple[torch.Tensor, torch.Tensor]]


def _ours(rule: str) -> Verifier:
    def call(feed: inputs.Feed) -> tuple[torch.Tensor, torch.Tensor]:
        r = ps.verify(
            feed.target, feed.tokens, feed.draft, draft_statistics=feed.statistics, seed=feed.seeds,
            rule=rule, **feed.case.filters.given(),
        )  # fmt: skip
        return r.tokens, r.num_accepted

    return call


def _eager(rule: Callable[..., rules.Verified]) -> Verifier:
    return lambda feed: rule(feed.target, feed.tokens, feed.draft, feed.case.filters)


def _transformers(feed: inputs.Feed) -> tuple[torch.Tensor, torch.Tensor]:
    verified = peers.transformers_rule(feed)()
    k = feed.case.draft_len
    tokens = [torch.nn.functional.pad(t[0], (0, k + 1 - t.shape[1]), value=-1) for t, _ in verified]
    return torch.stack(tokens), torch.stack([n for _, n in verified])


def _vllm(feed: inputs.Feed) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        operators = vllm_kernels.load()
    except ImportError as error:
        pytest.skip(str(error))
    return vllm_kernels.verifier(operators, feed)()


VERIFIERS = {
    "ours token": (_ours("token"), "token"),
    "eager token": (_eager(rules.token_rule), "token"),
    "transformers": (_transformers, "token"),
    "vLLM": (_vllm, "token"),
    "ours block": (_ours("block"), "block"),
    "eager block": (_eager(rules.block_rule), "block"),
}


@pytest.mark.parametrize("filters", [Filters(), Filters(top_k=4, top_p=0.9)])
@pytest.mark.parametrize("name", VERIFIERS)
def test_everybody_has_the_same_distribution(name: str, filters: Filters) -> None:
    """On fixed logits and a fixed block: the distribution of (number accepted, token after
    them)."""
    verify, rule = VERIFIERS[name]
    n = 4000
    one = inputs.make(Case("verify-token", 1, 3, 7, "float32", 0.6, filters), "cpu", 7, draws=1)
    one.load(0)
    p, q = _statistics(one)
    block = one.tokens[0].tolist()
    feed = inputs.Feed(
        Case("verify-token", n, 3, 7, "float32", 0.6, filters),
        one.target.expand(n, -1, -1), one.draft.expand(n, -1, -1),
        one.statistics.expand(n, -1, -1).contiguous(), one.drawn, one.tokens.expand(n,
        -1).contiguous(), torch.arange(n), 0.6, 3,
    )  # fmt: skip
    tokens, accepted = verify(feed)
    counts = np.zeros((4, 7))
    for row, count in zip(tokens.tolist(), accepted.tolist(), strict=True):
        assert row[:count] == block[:count]
        assert row[count + 1 :] == [-1] * (3 - count)
        counts[count, row[count]] += 1
    distribution = reference.verify(p, q, block, rule)
    assert distribution.stop.max() < 0.9, "a case that cannot tell distributions apart"
    assert (
        evidence.chi_square(counts, distribution.stop[:, None] * distribution.emit) > evidence.ALPHA
    )


@pytest.mark.parametrize("filters", [Filters(), CUT])
def test_samplers_have_the_same_distribution(filters: Filters) -> None:
    logits = torch.from_numpy(np.random.default_rng(2).normal(0, 1.5, 12).astype(np.float32))
    distribution = reference.processed_distribution(
        logits.numpy(), reference.Sampling(**filters.given())
    ).probs
    rows = logits.expand(4000, -1)
    case = Case("sample", 4000, 0, 12, "float32", 0, filters)
    feed = inputs.make(case, "cpu", 0)
    feed.target = rows[:, None]
    feed.load(0)
    ours = kernels.ours(feed)
    made, notes = peers.contenders(feed, compiled=False)
    assert not notes
    assert {one.name for one in made} >= {peers.EAGER}
    for contender in [ours, *made]:
        result = contender.call()
        tokens = getattr(result, "tokens", result).flatten()
        counts = torch.bincount(tokens, minlength=12).numpy()
        assert evidence.chi_square(counts, distribution) > evidence.ALPHA, contender.name


def test_every_peer_of_the_targets_takes_part() -> None:
    feed = inputs.make(Case("verify-token", 1, 3, 7, "float32", 0.7, Filters()), "cpu", 0)
    made, notes = peers.contenders(feed, compiled=True)
    always = {peers.LOGSUMEXP, peers.EAGER, peers.COMPILED, peers.TRANSFORMERS}
    assert {one.name for one in made} - {peers.VLLM} == always
    assert [note.split(":")[0] for note in notes] == [peers.VLLM] * (5 - len(made))
    feed = inputs.make(Case("sample", 1, 0, 70, "float32", 0, grid.CUT), "cpu", 0)
    names = {one.name for one in peers.contenders(feed, compiled=False)[0]}
    assert names == {peers.SORT, peers.WARPERS, peers.EAGER}
