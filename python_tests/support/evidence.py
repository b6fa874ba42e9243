"""What counts as evidence: exact enumeration of a verified block, and tests of drawn counts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch
from reference import Floats, Verified
from scipy import stats  # type: ignore[import-untyped]

ALPHA = 1e-6  # false alarms per statistical test

# ------------------------------------------------------------------------------------- losslessness

Rows = Callable[[tuple[int, ...]], Floats]  # the distribution [V] after a prefix
Verifier = Callable[[Floats, Floats, tuple[int, ...]], Verified]


def markov_rows(
    rng: np.random.Generator, vocab: int, depth: int, scale: float
) -> dict[tuple[int, ...], Floats]:
    """Random logits [V] for every prefix shorter than `depth`."""
    prefixes = itertools.chain.from_iterable(
        itertools.product(range(vocab), repeat=n) for n in range(depth)
    )
    return {prefix: rng.normal(0.0, scale, vocab) for prefix in prefixes}


def blocks(q: Rows, vocab: int, m: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every block of m tokens that q proposes, with its probability."""
    for block in itertools.product(range(vocab), repeat=m):
        weight = math.prod(float(q(block[:i])[y]) for i, y in enumerate(block))
        if weight > 0:
            yield block, weight


def emitted_distribution(p: Rows, q: Rows, vocab: int, m: int, verify_block: Verifier) -> Floats:
    """Distribution [V^(m+1)] of the first m+1 tokens: one verified block, completed by p."""
    out = np.zeros((vocab,) * (m + 1))
    for block, weight in blocks(q, vocab, m):
        p_rows = np.stack([p(block[:i]) for i in range(m + 1)])
        q_rows = np.stack([q(block[:i]) for i in range(m)])
        j = verify_block(p_rows, q_rows, block)
        for n in range(m + 1):
            for token in range(vocab):
                mass = weight * float(j.stop[n] * j.emit[n, token])
                if mass > 0:
                    _complete(out, (*block[:n], token), mass, p)
    return out


def target_distribution(p: Rows, vocab: int, m: int) -> Floats:
    """Distribution [V^(m+1)] of m+1 tokens drawn from p alone."""
    out = np.zeros((vocab,) * (m + 1))
    _complete(out, (), 1.0, p)
    return out


def _complete(out: Floats, prefix: tuple[int, ...], mass: float, p: Rows) -> None:
    if len(prefix) == out.ndim:
        out[prefix] += mass
        return
    for token, prob in enumerate(p(prefix)):
        if prob > 0:
            _complete(out, (*prefix, token), mass * float(prob), p)


def total_variation(a: Floats, b: Floats) -> float:
    return float(np.abs(a - b).sum() / 2)


# ------------------------------------------------------------------------------------------- counts


def chi_square(counts: npt.ArrayLike, probs: npt.ArrayLike, least: float = 5.0) -> float:
    """p-value of `counts` under `probs`; cells that expect fewer than `least` are pooled."""
    seen, distribution = np.asarray(counts, float).ravel(), np.asarray(probs, float).ravel()
    assert not seen[distribution == 0].any(), "a token of probability 0 was drawn"
    expected = distribution * seen.sum()
    big = expected >= least
    seen = np.append(seen[big], seen[~big].sum())
    expected = np.append(expected[big], expected[~big].sum())
    seen, expected = seen[expected > 0], expected[expected > 0]
    if seen.size < 2:
        return 1.0
    return float(stats.chi2.sf(((seen - expected) ** 2 / expected).sum(), seen.size - 1))


def law_of_texts(table: torch.Tensor, length: int) -> torch.Tensor:
    """Return the law ``[V ** length]`` of texts whose next token follows row `last` of a table
    ``[V, V]`` of logits, from last = 0 on."""
    steps = table.double().softmax(-1)
    law = steps[0]
    for _ in range(length - 1):
        law = (law.view(-1, len(table))[:, :, None] * steps).flatten()
    return law
