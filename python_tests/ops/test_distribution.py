"""The distribution of what ps.sample and ps.verify draw, against the oracle: draw by draw with
draws of the test's own, and by counts over many seeds with the library's."""

from __future__ import annotations

import evidence
import numpy as np
import pytest
import reference as ref
import torch
from draws import distributions_of, injected, one_round, rows, tensor_of
from evidence import ALPHA
from reference import Sampling
from reference_rules import Distribution, pick, verify

import polyspec_ext as ps

VOCABULARIES = (1, 2, 31, 32, 33, 1000, 1023, 1025, 50257, 128256)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FILTERS = {
    "plain": Sampling(),
    "hot": Sampling(1.7),
    "top_k": Sampling(0.8, top_k=20),
    "top_p": Sampling(1.0, top_p=0.9),
    "min_p": Sampling(1.2, min_p=0.02),
    "all": Sampling(0.9, 50, 0.85, 0.01),
    "greedy": Sampling(0.0),
}
RULES = ("token", "block")

by_vocabulary = pytest.mark.parametrize("vocab", VOCABULARIES)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
by_filter = pytest.mark.parametrize("name", FILTERS)
# Every filter in float32; the short types, where ties abound, with none and with all.
by_dtype_and_filter = pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.float32, name) for name in FILTERS]
    + [(dtype, name) for dtype in DTYPES[1:] for name in ("plain", "all")],
    ids=lambda x: str(x).removeprefix("torch."),
)
by_rule = pytest.mark.parametrize("rule", RULES)


def oracle(logits: torch.Tensor, sampling: Sampling) -> list[ref.Distribution]:
    return [ref.processed_distribution(row, sampling) for row in logits.double().numpy()]


@by_vocabulary
@by_dtype_and_filter
def test_sample_draws_the_processed_distribution(vocab: int, dtype: torch.dtype, name: str) -> None:
    sampling = FILTERS[name]
    rng = np.random.default_rng(vocab)
    logits = rows(vocab, 1, vocab).to(dtype)
    (distribution,) = oracle(logits, sampling)
    n = 1024 if vocab < 2000 else 64
    bits = ref.stratified_bits(n, rng)
    got = ps.sample(logits.expand(n, vocab), **sampling.kwargs(), draws=tensor_of(bits[:, None]))
    assert not got.status.any()
    tokens = got.tokens.numpy()
    evidence.assert_stratified(tokens, distribution.probs, 2 * distribution.rounding)
    assert all(ref.admits(distribution, int(t), int(b)) for t, b in zip(tokens, bits, strict=True))
    np.testing.assert_allclose(got.logprobs.numpy(), distribution.log_probs[tokens], atol=1e-5)


@pytest.mark.parametrize("vocab", [2, 31, 33, 1000])
@by_filter
def test_sample_over_seeds(vocab: int, name: str) -> None:
    sampling, n = FILTERS[name], 100_000
    logits = rows(vocab, 1, vocab)
    (distribution,) = oracle(logits, sampling)
    got = ps.sample(logits.expand(n, vocab), **sampling.kwargs(), seed=torch.arange(n), position=9)
    counts = np.bincount(got.tokens.numpy(), minlength=vocab)
    assert evidence.chi_square(counts, distribution.probs) > ALPHA


def drafted(statistics: list[Distribution], batch: int, rng: np.random.Generator) -> torch.Tensor:
    """[batch, K] independent draws from K rows."""
    out = [
        [pick(distribution.masses, int(b)) for b in ref.random_bits((batch,), rng)]
        for distribution in statistics
    ]
    return torch.tensor(out).T.contiguous()


@by_vocabulary
@by_dtype_and_filter
@by_rule
def test_verify_agrees_with_the_reference(
    vocab: int, dtype: torch.dtype, name: str, rule: str
) -> None:
    sampling, k = FILTERS[name], 3
    batch = 96 if vocab < 2000 else 8
    rng = np.random.default_rng(vocab)
    target = rows(vocab, k + 1, vocab)
    draft = (target[:k] + 0.25 * rows(vocab + 1, k, vocab)).to(dtype)
    target = target.to(dtype)
    p, q = distributions_of(target, sampling), distributions_of(draft, sampling)
    tokens = drafted(q, batch, rng)
    lengths = torch.from_numpy(rng.integers(0, k + 1, batch))
    for proposals in (q, None):
        bits = ref.random_bits((batch, k + 1), rng)
        got = ps.verify(
            target.expand(batch, k + 1, vocab),
            tokens,
            None if proposals is None else draft.expand(batch, k, vocab),
            **sampling.kwargs(),
            draft_lengths=lengths,
            rule=rule,
            draws=tensor_of(bits),
        )
        assert not (got.status & (ref.ZERO_RESIDUAL - 1)).any()
        for b in range(batch):
            block = tokens[b, : int(lengths[b])].tolist()
            emitted, logprobs = verify(p, block, proposals, injected(bits[b]), rule)
            n = len(emitted)
            assert got.tokens[b].tolist() == emitted + [-1] * (k + 1 - n)
            assert int(got.num_accepted[b]) == n - 1
            assert all(p[i].masses[token] > 0 for i, token in enumerate(emitted))
            assert got.logprobs[b, :n].tolist() == logprobs
            assert got.logprobs[b, n:].isnan().all()


@by_vocabulary
@by_rule
def test_the_correction_has_the_residual_distribution(vocab: int, rule: str) -> None:
    """Stratified draws on a rejected row: the counts are the residual's within 2."""
    sampling = Sampling(0.9, min_p=0.001)
    rng = np.random.default_rng(vocab)
    target, draft = rows(7, 2, vocab), rows(8, 1, vocab)
    p, q = oracle(target, sampling), oracle(draft, sampling)
    over = np.nonzero(q[0].probs > 1.001 * p[0].probs)[0]
    if over.size == 0:
        assert vocab == 1
        return
    n = 512 if vocab < 2000 else 48
    y = int(over[0])
    draws = np.stack([np.full(n, ref.ALL_ONES, np.uint64), ref.stratified_bits(n, rng)], 1)
    got = ps.verify(
        target.expand(n, 2, vocab),
        torch.full((n, 1), y),
        draft.expand(n, 1, vocab),
        **sampling.kwargs(),
        rule=rule,
        draws=tensor_of(draws),
    )
    assert not got.status.any()
    assert not got.num_accepted.any()
    distribution = ref.residual(p[0].probs, q[0].probs)
    loose = (p[0].rounding + q[0].rounding) / np.maximum(p[0].probs - q[0].probs, 0).sum()
    evidence.assert_stratified(got.tokens[:, 0].numpy(), distribution, 2 * float(loose))


@by_dtype
@by_vocabulary
def test_the_acceptance_threshold_is_p_over_q(vocab: int, dtype: torch.dtype) -> None:
    sampling = Sampling(1.1, top_k=100)
    target, draft = rows(1, 2, vocab).to(dtype), rows(2, 1, vocab).to(dtype)
    p, q = oracle(target, sampling), oracle(draft, sampling)
    ratio = p[0].probs[q[0].probs > 0] / q[0].probs[q[0].probs > 0]
    ids = np.nonzero(q[0].probs > 0)[0]
    clear = (ratio < 0.999) & ((ratio > 1e-3) | (ratio == 0))
    below = (clear & (ratio > 0), ratio * (1 - 2e-5))
    above = (clear, ratio * (1 + 2e-5))
    surely = (ratio > 1.001, np.full(ratio.size, 1 - 2.0**-52))
    for accept, (which, u) in ((True, below), (False, above), (True, surely)):
        bits = (u[which] * 2.0**52).astype(np.uint64) << np.uint64(12)
        n = int(which.sum())
        draws = np.stack([bits, np.zeros(n, np.uint64)], 1)
        got = ps.verify(
            target.expand(n, 2, vocab),
            torch.from_numpy(ids[which])[:, None],
            draft.expand(n, 1, vocab),
            **sampling.kwargs(),
            draws=tensor_of(draws),
        )
        assert not got.status.any()
        assert (got.num_accepted == int(accept)).all()


# ------------------------------------------------------------- chains of draws from Philox alone


@by_filter
@by_rule
@pytest.mark.parametrize(("vocab", "k"), [(2, 3), (5, 2)])
def test_rounds_over_seeds_have_the_target_distribution(
    name: str, rule: str, vocab: int, k: int
) -> None:
    assert one_round(vocab, 100_000, vocab, k, FILTERS[name], rule) > ALPHA


def test_a_sampler_that_leaks_a_tenth_of_the_draft_fails() -> None:
    assert one_round(5, 100_000, 5, 2, FILTERS["plain"], "token", leak=0.1) < ALPHA
