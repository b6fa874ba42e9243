"""Losslessness of ps.verify to rounding error, by reading its distributions off the operators
themselves.

Draws are the caller's, and every decision is monotone in its draw. Bisection over the 64 bits of a
draw therefore gives each acceptance probability and each cell of an inverse CDF exactly, of the
code that runs in production. Put together by enumeration they are the distribution of the emitted
tokens, and that has to be the distribution ps.sample draws from to 1e-12, float32 exponentials and
all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import evidence
import numpy as np
import pytest
import reference as ref
import torch
from draws import tensor_of
from reference import Floats, Sampling, Verified, Words

import polyspec_ext as ps

RULES = ("token", "block")
SAMPLINGS = {
    "plain": Sampling(),
    "warm": Sampling(0.6),
    "top_k": Sampling(1.0, top_k=3),
    "top_p": Sampling(1.2, top_p=0.8),
    "all": Sampling(1.5, 4, 0.9, 0.1),
    "greedy": Sampling(0.0),
}


def bisect(cells: int, below: Callable[[Words], torch.Tensor]) -> list[int]:
    """For each of `cells` monotone questions, how many of the 2^64 draws answer yes (the
    lowest)."""
    found = np.zeros(cells, dtype=np.uint64)
    for bit in range(63, -1, -1):
        step = np.uint64(1 << bit)
        found += np.where(below(found + (step - np.uint64(1))).numpy(), step, np.uint64(0))
    full = (found == ref.ALL_ONES) & below(found).numpy()
    return [int(n) + int(f) for n, f in zip(found, full, strict=True)]


def sampled_distribution(logits: torch.Tensor, sampling: Sampling) -> Floats:
    """Distributions [R, V] that ps.sample draws from, for logits [R, V]."""
    count, vocab = logits.shape
    edges = torch.arange(vocab).repeat(count)
    each = logits.repeat_interleave(vocab, 0)

    def up_to(bits: Words) -> torch.Tensor:
        drawn = ps.sample(each, **sampling.kwargs(), draws=tensor_of(bits[:, None]))
        return drawn.tokens <= edges

    return _differences(bisect(count * vocab, up_to), count, vocab)


def _differences(edges: Sequence[int], count: int, vocab: int) -> Floats:
    cumulative = np.asarray(edges, dtype=object).reshape(count, vocab)
    return np.asarray(np.diff(cumulative, axis=1, prepend=0) / 2.0**64, dtype=np.float64)


class Operator:
    """The verifications of ps.verify on every block of a toy, all found in one bisection."""

    def __init__(
        self,
        target: dict[tuple[int, ...], torch.Tensor],
        draft: dict[tuple[int, ...], torch.Tensor] | None,
        blocks: Sequence[tuple[int, ...]],
        sampling: Sampling,
        rule: str,
        **options: Any,
    ) -> None:
        self.k, self.rule = len(blocks[0]), rule
        self.target = torch.stack(
            [torch.stack([target[b[:i]] for i in range(self.k + 1)]) for b in blocks]
        )
        self.draft = None
        if draft is not None:
            proposals = [torch.stack([draft[b[:i]] for i in range(self.k)]) for b in blocks]
            self.draft = torch.stack(proposals)
        self.blocks = torch.tensor(blocks)
        self.options: dict[str, Any] = {**sampling.kwargs(), **options}
        self.found = dict(zip(blocks, self._measure(len(blocks)), strict=True))

    def _verify(self, index: torch.Tensor, draws: Words) -> ps.VerifyResult:
        return ps.verify(
            self.target[index],
            self.blocks[index],
            None if self.draft is None else self.draft[index],
            rule=self.rule,
            draws=tensor_of(draws),
            **self.options,
        )

    def _measure(self, count: int) -> list[Verified]:
        k, vocab = self.k, self.target.shape[-1]
        # Acceptance test i: the others are made to pass (token) or to fail (block) by their draws.
        index = torch.arange(count).repeat_interleave(k)
        test = np.tile(np.arange(k), count)
        column = np.arange(k + 1)[None, :]

        def passes(bits: Words) -> torch.Tensor:
            others = np.where(column < test[:, None], 0, ref.ALL_ONES).astype(np.uint64)
            draws = np.where(column == test[:, None], bits[:, None], others)
            return self._verify(index, draws).num_accepted > torch.from_numpy(test)

        accept = np.asarray(bisect(count * k, passes), dtype=object).reshape(count, k) / 2.0**64
        accept = accept.astype(np.float64)
        # The token after n accepted ones, with the acceptance draws that lead there.
        stops = list(itertools.product(range(count), range(k + 1)))
        index = torch.tensor([b for b, _ in stops]).repeat_interleave(vocab)
        n = np.repeat([n for _, n in stops], vocab)
        token = torch.arange(vocab).repeat(len(stops))
        lead = np.where(column < n[:, None], 0, ref.ALL_ONES).astype(np.uint64)
        reached = self._verify(index, lead).num_accepted.numpy() == n

        def up_to(bits: Words) -> torch.Tensor:
            draws = np.where(column == k, bits[:, None], lead)
            tokens = self._verify(index, draws).tokens
            return tokens[torch.arange(len(n)), torch.from_numpy(n)] <= token

        emit = _differences(bisect(len(n), up_to), len(stops), vocab)
        emit = emit.reshape(count, k + 1, vocab)
        out = []
        for b in range(count):
            stop = ref.stopping_distribution(accept[b], self.rule)
            missed = ~reached.reshape(count, k + 1, vocab)[b, :, 0]
            assert (stop[missed] < 1e-15).all(), "a stop with some probability was not reached"
            out.append(Verified(accept[b], stop, emit[b], np.zeros(k)))
        return out

    def __call__(self, p: Floats, q: Floats, block: tuple[int, ...]) -> Verified:
        return self.found[block]


def toy(
    seed: int, vocab: int, depth: int, dtype: torch.dtype = torch.float32
) -> dict[tuple[int, ...], torch.Tensor]:
    table = evidence.markov_rows(np.random.default_rng(seed), vocab, depth, 1.5)
    return {prefix: torch.from_numpy(row).to(dtype) for prefix, row in table.items()}


def gap(
    vocab: int,
    k: int,
    sampling: Sampling,
    rule: str,
    *,
    deterministic: bool = False,
    draft_vocab: int | None = None,
    target_to_draft: list[int] | None = None,
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
) -> float:
    """Total variation between what a verified block emits and k+1 tokens of ps.sample."""
    target = toy(1, vocab, k + 1, dtypes[0])
    draft = {x: row[: draft_vocab or vocab] for x, row in toy(2, vocab, k + 1, dtypes[1]).items()}
    prefixes = list(target)
    p = dict(
        zip(prefixes, sampled_distribution(torch.stack([*target.values()]), sampling), strict=True)
    )
    if deterministic:
        q = {x: np.eye(1, vocab, (sum(x) + len(x)) % vocab)[0] for x in prefixes}
    else:
        statistics = sampled_distribution(torch.stack([draft[x] for x in prefixes]), sampling)
        ids = target_to_draft or [i if i < statistics.shape[1] else -1 for i in range(vocab)]
        padded = np.append(statistics, np.zeros((len(statistics), 1)), 1)
        q = dict(zip(prefixes, padded[:, ids], strict=True))
    options: dict[str, Any] = (
        {} if target_to_draft is None else {"target_to_draft": torch.tensor(target_to_draft)}
    )
    blocks = [block for block, _ in evidence.blocks(q.__getitem__, vocab, k)]
    operator = Operator(target, None if deterministic else draft, blocks, sampling, rule, **options)
    return evidence.total_variation(
        evidence.emitted_distribution(p.__getitem__, q.__getitem__, vocab, k, operator),
        evidence.target_distribution(p.__getitem__, vocab, k),
    )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("vocab", "k"), [(2, 3), (3, 2), (5, 1)])
def test_a_block_emits_the_sampled_distribution(
    vocab: int, k: int, name: str, rule: str, deterministic: bool
) -> None:
    assert gap(vocab, k, SAMPLINGS[name], rule, deterministic=deterministic) < 1e-12


@pytest.mark.parametrize("rule", RULES)
def test_one_token_is_lossless(rule: str) -> None:
    assert gap(1, 2, SAMPLINGS["all"], rule) == 0.0


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_smaller_draft_vocabulary_is_lossless(name: str, rule: str) -> None:
    assert gap(5, 1, SAMPLINGS[name], rule, draft_vocab=3) < 1e-12


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_mapped_draft_vocabulary_is_lossless(name: str, rule: str) -> None:
    mapped = [2, -1, 0, 1, -1]
    assert gap(5, 1, SAMPLINGS[name], rule, draft_vocab=3, target_to_draft=mapped) < 1e-12


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.bfloat16, torch.float16),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.float32),
    ],
    ids=str,
)
def test_mixed_dtypes_are_lossless(rule: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    assert gap(3, 2, SAMPLINGS["all"], rule, dtypes=dtypes) < 1e-12


@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_sampled_distribution_is_the_processed_distribution(name: str) -> None:
    logits = torch.randn(8, 7, generator=torch.Generator().manual_seed(5)) * 2
    for row, distribution in zip(
        logits, sampled_distribution(logits, SAMPLINGS[name]), strict=True
    ):
        want = ref.processed_distribution(row.double().numpy(), SAMPLINGS[name])
        np.testing.assert_array_equal(distribution > 0, want.masses > 0)
        assert evidence.total_variation(distribution, want.probs) <= want.rounding + 1e-12
