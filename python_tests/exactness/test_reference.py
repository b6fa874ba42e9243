"""The oracle verified without the library, and the statistics by wrong samplers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import evidence
import numpy as np
import pytest
import reference as ref
import reference_rules
import torch
from reference import Floats, Sampling, Verified
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

RULES = ("token", "block")


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(0.7),
        Sampling(1.3, top_k=5),
        Sampling(1.0, top_p=0.8),
        Sampling(0.9, min_p=0.1),
        Sampling(0.8, 20, 0.9, 0.05),
    ],
    ids=str,
)
def test_processed_distribution_agrees_with_the_warpers_of_transformers(sampling: Sampling) -> None:
    rng = np.random.default_rng(1)
    for vocab in (2, 7, 200):
        logits = rng.normal(0, 2, (20, vocab))
        scores = torch.from_numpy(logits)
        ids = torch.zeros(20, 1, dtype=torch.long)
        scores = TemperatureLogitsWarper(float(np.float32(sampling.temperature)))(ids, scores)
        if sampling.top_k:
            scores = TopKLogitsWarper(sampling.top_k)(ids, scores)
        if sampling.top_p < 1:
            scores = TopPLogitsWarper(sampling.top_p)(ids, scores)
        if sampling.min_p > 0:
            scores = MinPLogitsWarper(sampling.min_p)(ids, scores)
        for row, expected in zip(logits, scores.softmax(-1).numpy(), strict=True):
            distribution = ref.processed_distribution(row, sampling)
            np.testing.assert_allclose(distribution.probs, expected, atol=1e-12)
            kept = expected > 0
            np.testing.assert_allclose(
                distribution.log_probs[kept], np.log(expected[kept]), atol=1e-9
            )
            # What the operators draw from, bit for bit by test_properties.py, is that to rounding.
            drawn = reference_rules.distribution(row.astype(np.float32), **sampling.kwargs())
            rounded = ref.processed_distribution(row.astype(np.float32), sampling)
            gap = evidence.total_variation(drawn.masses / drawn.mass, rounded.probs)
            assert gap <= rounded.rounding + 1e-12


def test_ties_at_an_edge_are_kept() -> None:
    row = [2.0, 1.0, 1.0, 1.0, 0.0]

    def kept(row: list[float], **filters: float) -> list[bool]:
        found = ref.processed_distribution(row, Sampling(**filters)).masses > 0
        return [bool(one) for one in found]

    for filters, count in (
        ({"top_k": 2}, 4),
        ({"top_p": 0.5}, 4),
        ({"top_p": 0}, 1),
        ({"min_p": 1}, 1),
    ):
        assert kept(row, **filters) == [i < count for i in range(5)]
    # top-p measures what top-k kept: half of {2, 1, 1, 1} is less than half of the row
    wide = [1.0, 0.9, 0.8] + [0.7] * 40
    assert sum(kept(wide, top_k=2, top_p=0.5)) == 1
    assert sum(kept(wide, top_p=0.5)) == 43


def test_philox_gives_the_published_vectors() -> None:
    # Random123, philox4x32-10: zeros, ones, and the digits of pi
    ones = 2**64 - 1
    assert int(ref.draw_bits(0, 0, 0, 0, 0)) == 0xE169C58D6627E8D5
    assert int(ref.draw_bits(ones, ones, 0xFFFF, 2**32 - 1, 0xFFFF)) == 0x41C83B0E408F276D
    pi = ref.draw_bits(0x299F31D0A4093822, 0x85A308D3243F6A88, 0x0370, 0x13198A2E, 0x7344)
    assert int(pi) == 0x94FDCCEBD16CFE09


def toy(seed: int, vocab: int, m: int) -> tuple[evidence.Rows, evidence.Rows]:
    rng = np.random.default_rng(seed)
    p = evidence.markov_rows(rng, vocab, m + 1, 1.5)
    q = {prefix: row + rng.normal(0, 1.2, vocab) for prefix, row in p.items()}
    sampling = Sampling(0.9, min_p=0.05)
    return (
        lambda prefix: ref.processed_distribution(p[prefix], sampling).probs,
        lambda prefix: ref.processed_distribution(q[prefix], sampling).probs,
    )


def gap(verify: evidence.Verifier, vocab: int = 4, m: int = 3, seed: int = 0) -> float:
    p, q = toy(seed, vocab, m)
    return evidence.total_variation(
        evidence.emitted_distribution(p, q, vocab, m, verify),
        evidence.target_distribution(p, vocab, m),
    )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("vocab", "m"), [(1, 1), (2, 1), (2, 4), (3, 3), (5, 2)])
def test_the_rules_are_lossless_by_enumeration(rule: str, vocab: int, m: int) -> None:
    for seed in range(3):
        assert gap(lambda p, q, y: ref.verify(p, q, y, rule), vocab, m, seed) < 1e-14


def test_block_rule_accepts_more() -> None:
    def accepted(rule: str) -> float:
        p, q = toy(4, 3, 3)
        total = 0.0
        for block, weight in evidence.blocks(q, 3, 3):
            p_rows = np.stack([p(block[:i]) for i in range(4)])
            q_rows = np.stack([q(block[:i]) for i in range(3)])
            total += weight * float(ref.verify(p_rows, q_rows, block, rule).stop @ np.arange(4))
        return total

    assert accepted("block") > accepted("token") + 0.01


def _no_residual(p: Floats, q: Floats, block: tuple[int, ...], rule: str) -> Verified:
    return replace(ref.verify(p, q, block, rule), emit=p)


def _wrong_row(p: Floats, q: Floats, block: tuple[int, ...], rule: str) -> Verified:
    right = ref.verify(p, q, block, rule)
    emit = right.emit.copy()
    emit[0] = ref.residual(p[0], q[-1])
    return replace(right, emit=emit)


def _unit_weight(p: Floats, q: Floats, block: tuple[int, ...], rule: str) -> Verified:
    right = ref.verify(p, q, block, rule)
    return replace(right, emit=ref.verify(p, q, block, "token").emit)


def _always_accept(p: Floats, q: Floats, block: tuple[int, ...], rule: str) -> Verified:
    right = ref.verify(p, q, block, rule)
    return replace(right, stop=np.eye(1, len(block) + 1, len(block))[0])


@pytest.mark.parametrize(
    ("mutant", "rule"),
    [
        (_no_residual, "token"),
        (_no_residual, "block"),
        (_wrong_row, "token"),
        (_wrong_row, "block"),
        (_unit_weight, "block"),
        (_always_accept, "token"),
    ],
)
def test_enumeration_catches_wrong_rules(mutant: Callable[..., Verified], rule: str) -> None:
    assert gap(lambda p, q, y: mutant(p, q, y, rule)) > 1e-3


def test_a_leak_of_a_tenth_is_seen() -> None:
    # FlashInfer's frequency tests ask for a cosine > 0.99, which such a leak passes.
    rng = np.random.default_rng(1)
    p, q = rng.dirichlet(np.ones(30), 2)
    leaky = 0.9 * p + 0.1 * q
    counts = rng.multinomial(100_000, leaky)
    assert counts @ p / np.linalg.norm(counts) / np.linalg.norm(p) > 0.99
    assert evidence.chi_square(counts, p) < evidence.ALPHA
    assert evidence.chi_square(rng.multinomial(100_000, p), p) > evidence.ALPHA
