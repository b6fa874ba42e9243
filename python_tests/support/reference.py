"""An oracle for the operators in numpy: slow, plain and written from the papers and the headers
alone.

Distributions are kept twice: as the integer masses that csrc/include/polyspec/types.hpp defines,
and as float64 probabilities. Nothing here calls the library, so agreement is evidence.

Sources: Leviathan et al. 2023 (rule "token"), Sun et al. 2024, arXiv 2403.10444 (rule "block"),
Salmon et al., SC 2011 (Philox4x32-10).

The library evaluates its exponential in float32 and may be off by `Distribution.error`; it promises
that what it *emits* has the distribution it *samples* from to 1e-15 (the enumerations
of csrc/tests/exactness ask for that). What it does with a draw, bit for bit,
`reference_rules` says; here are the distributions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint64]

# Status bits of csrc/include/polyspec/status.hpp.
NAN, INF, EMPTY_ROW, DRAFT_ROW = 1 << 0, 1 << 1, 1 << 2, 1 << 3
TOKEN_OUT_OF_RANGE, BAD_LENGTH, BAD_PARAMETER = 1 << 4, 1 << 5, 1 << 6
DRAFT_STATISTICS_MISMATCH = 1 << 7
ZERO_RESIDUAL = 1 << 16

# Purposes of a draw (csrc/include/polyspec/philox.hpp).
SAMPLE, ACCEPT, EMIT = 0, 1, 2

EPS32 = 2.0**-23
ALL_ONES = 2**64 - 1


# --------------------------------------------------------------------------------------------- dist


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of one request; the defaults leave the distribution alone."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments of ps.sample and ps.verify."""
        return dict(vars(self))


PLAIN = Sampling()


@dataclass(frozen=True)
class Distribution:
    """A processed distribution: integer `masses` [V] with sum `total`, `log_probs` [V] in nats
    (-inf where the mass is 0), `error` [V], the relative error of a mass allowed to float32 (1e9: a
    filter's edge may fall on either side of the token), and `rounding`, the total variation that
    comes of it."""

    masses: Words
    total: int
    log_probs: Floats
    error: Floats
    rounding: float = 0.0

    @property
    def probs(self) -> Floats:
        return np.asarray(self.masses.astype(np.float64) / float(self.total))


def mass_bits(vocab: int) -> int:
    """S of types.hpp: masses are at most 2^S, so that a row's total fits in 62 bits."""
    return 62 - (vocab - 1).bit_length()


def processed_distribution(logits: npt.ArrayLike, sampling: Sampling = PLAIN) -> Distribution:
    """Temperature, then top-k, top-p, min-p, each on what the last kept; ties at an edge are kept.

    logits: [V], with a finite maximum and no NaN. Parameters are rounded to float32, as they
    travel.
    """
    z = np.asarray(logits, dtype=np.float64)
    if np.isnan(z).any() or not np.isfinite(z.max()):
        raise ValueError("the row has no distribution")
    if sampling.temperature == 0.0:
        return one_hot(int(np.argmax(z)), z.size)  # numpy's argmax takes the lowest index of a tie
    temperature = float(np.float32(sampling.temperature))
    top_p, min_p = float(np.float32(sampling.top_p)), float(np.float32(sampling.min_p))
    gap = z - z.max()
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        nats = np.where(gap == 0, 0.0, gap / temperature)
    masses = np.floor(np.exp2(nats * math.log2(math.e)) * 2.0 ** mass_bits(z.size))
    error = np.where((masses > 0) & (gap != 0), EPS32 * (2.0 + 2.0 * np.abs(nats)), 0.0)
    keep, vague = np.ones(z.size, dtype=bool), np.zeros(z.size, dtype=bool)
    if 0 < sampling.top_k < z.size:
        keep = z >= np.partition(z, -sampling.top_k)[-sampling.top_k]
    if top_p < 1.0:
        before, total = _mass_above(z, np.where(keep, masses, 0.0))
        slack = 2.0 * float((masses * error)[keep].sum())
        vague |= keep & (before > 0) & (np.abs(before - top_p * total) <= slack)
        keep &= (before < top_p * total) | (before == 0)
    if min_p > 0.0:
        ratio = np.exp(nats)
        vague |= (gap != 0) & (np.abs(ratio - min_p) <= 4 * (error + EPS32) * min_p)
        keep &= ratio >= min_p
    rounding = float((masses * error)[keep].sum() + 2 * masses[vague].sum()) / masses[keep].sum()
    masses = np.where(keep, masses, 0.0).astype(np.uint64)
    total = int(masses.sum(dtype=np.uint64))
    log_total = math.log(total) - mass_bits(z.size) * math.log(2.0)
    log_probs = np.where(masses > 0, nats - log_total, -np.inf)
    return Distribution(masses, total, log_probs, np.where(vague, 1e9, error), rounding)


def _mass_above(z: Floats, masses: Floats) -> tuple[Floats, float]:
    """For each token the mass of the tokens with a larger logit, and the mass of all."""
    order = np.argsort(-z, kind="stable")
    up_to = np.cumsum(masses[order])
    first = np.append(True, z[order][1:] != z[order][:-1])  # of a run of ties
    start = np.maximum.accumulate(np.where(first, np.arange(z.size), 0))
    before = np.empty(z.size)
    before[order] = np.append(0.0, up_to)[start]
    return before, float(up_to[-1])


def one_hot(token: int, vocab: int) -> Distribution:
    masses = np.zeros(vocab, dtype=np.uint64)
    masses[token] = 1
    return Distribution(masses, 1, np.where(masses > 0, 0.0, -np.inf), np.zeros(vocab))


# -------------------------------------------------------------------------------------------- draws


def draw_bits(
    seed: npt.ArrayLike, position: npt.ArrayLike, level: int, round_: npt.ArrayLike, purpose: int
) -> Words:
    """64 Philox bits per (seed, position, round); the arrays broadcast."""
    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    at, key, turn = (np.asarray(a, dtype=np.uint64) for a in (position, seed, round_))
    x0, x1, x2, key0, key1 = at & low, at >> half, turn & low, key & low, key >> half
    x3 = np.uint64(level << 16 | purpose)
    for _ in range(10):
        a, b = x0 * np.uint64(0xD2511F53), x2 * np.uint64(0xCD9E8D57)
        x0, x1, x2, x3 = (b >> half) ^ x1 ^ key0, b & low, (a >> half) ^ x3 ^ key1, a & low
        key0 = (key0 + np.uint64(0x9E3779B9)) & low
        key1 = (key1 + np.uint64(0xBB67AE85)) & low
    return np.asarray(x1 << half | x0, dtype=np.uint64)


def random_bits(shape: tuple[int, ...], rng: np.random.Generator) -> Words:
    return rng.integers(0, 2**64, shape, np.uint64)


def admits(distribution: Distribution, token: int, bits: int) -> bool:
    """Whether a draw may give this token: it lies in the token's cell, or within rounding of it."""
    high = int(np.cumsum(distribution.masses, dtype=np.uint64)[token])
    low = high - int(distribution.masses[token])
    r, slack = (
        (bits * distribution.total) >> 64,
        distribution.rounding * distribution.total + distribution.masses.size,
    )
    return (
        distribution.masses[token] > 0 or distribution.error[token] > 1
    ) and low - slack <= r < high + slack


# ---------------------------------------------------------------------------------------- the rules


@dataclass(frozen=True)
class Verified:
    """What a rule says of one block: `accept` [m] (a_i or h_i), `stop` [m+1] the distribution of
    the number of accepted tokens, `emit` [m+1, V] the distribution of the token that follows them,
    `left` [m] the residual's mass."""

    accept: Floats
    stop: Floats
    emit: Floats
    left: Floats


def verify(p: Floats, q: Floats, block: Sequence[int], rule: str) -> Verified:
    """p: [m+1, V] target, q: [m, V] proposals, block: m tokens with q > 0."""
    m = len(block)
    ratio = np.asarray([p[i, y] / q[i, y] for i, y in enumerate(block)], dtype=np.float64)
    weight = np.ones(m + 1)  # p_i of the block rule
    if rule == "block":
        for i in range(m):
            weight[i + 1] = min(1.0, weight[i] * ratio[i])
    left = np.maximum(weight[:m, None] * p[:m] - q, 0.0).sum(axis=1)
    if rule == "token":
        accept = np.minimum(ratio, 1.0)
    else:
        h = np.ones(m + 1)
        for i in range(1, m):
            h[i] = left[i] / (left[i] + 1.0 - weight[i]) if weight[i] < 1.0 else 1.0
        h[m] = weight[m]
        accept = h[1:]
    emit = np.stack([residual(p[i], q[i], weight[i]) for i in range(m)] + [p[m]])
    return Verified(accept, stopping_distribution(accept, rule), emit, left)


def stopping_distribution(accept: Floats, rule: str) -> Floats:
    """Distribution [m+1] of the number of accepted tokens, from `accept` [m]."""
    if rule == "token":  # up to the first test that fails
        reached = np.append(1.0, np.cumprod(accept))
        return np.asarray(reached * np.append(1.0 - accept, 1.0))
    fails_after = np.append(np.cumprod(1.0 - accept[::-1])[::-1], 1.0)  # the last test that passes
    return np.asarray(np.append(1.0, accept) * fails_after)


def residual(p: Floats, q: Floats, weight: float = 1.0) -> Floats:
    """norm(max(weight p - q, 0)), or p itself where nothing is left."""
    left = np.maximum(weight * p - q, 0.0)
    return left / left.sum() if left.sum() > 0 else p
