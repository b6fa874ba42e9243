"""Formulas of the papers that the planner does not use: how many tokens a verification emits by the
token, block and tree rules, Theorem 3.3 and its erratum, and Cascade Speculative Drafting."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from polyspec_ext.planning import Floats


def accepted_distribution(accept: Sequence[float]) -> Floats:
    """Return ``[m + 1]``, the probability that exactly j of m tokens are accepted.

    Args:
        accept: ``accept[j]``, the probability that token j is, if those before it are.
    """
    reach = np.cumprod([1.0, *accept])
    found: Floats = reach - np.append(reach[1:], 0.0)
    return found


def length_mean(acceptance: float, most: int) -> float:
    """Return ``E[N] = (1 - a^n) / (1 - a)`` of N = min(Geometric, n) in 1 ... n: tokens emitted by
    a verification of n - 1 tokens, each accepted with probability a (Theorem 3.3)."""
    return float(sum(acceptance**j for j in range(most)))


def length_variance(acceptance: float, most: int) -> float:
    """Theorem 3.3, correct; for a = 1 it is 0."""
    a, n = acceptance, most
    if a == 1:
        return 0.0
    return (a * (1 - a ** (2 * n - 1)) - (2 * n - 1) * (1 - a) * a**n) / (1 - a) ** 2


def length_variance_as_printed(alpha: float, most: int) -> float:
    """Theorem 3.3 as the paper prints it, which is wrong: ``sigma^2 = alpha [1 - (n^2-1) alpha^n -
    (n^2-1) alpha^{n+1}] / (1 - alpha)^2``.

    Erratum. Where n = 1, N is always 1 and its variance 0, and this gives alpha / (1 - alpha)^2; at
    alpha = .9 and n = 12 it is negative. It also takes alpha for the probability of a rejection
    where the proof has that of an acceptance. What holds is `length_variance`, and that the
    deviation over the mean goes to 0 as acceptance goes to 1 at a fixed n.
    """
    n = most
    many = (n * n - 1) * (alpha**n + alpha ** (n + 1))
    return alpha * (1 - many) / (1 - alpha) ** 2


def token_length(ratios: ArrayLike, probabilities: ArrayLike) -> float:
    """Expected tokens emitted per verification by the token rule (Leviathan et al. 2023):
    ``1 + sum_i E_q[prod_{k<=i} min(1, r_k)]``.

    Args:
        ratios: ``[N, m]``, ``r_k = p(y_k | ..) / q(y_k | ..)`` along each possible draft.
        probabilities: ``[N]``, of each draft under q.
    """
    each, weights = _joint(ratios, probabilities)
    return 1 + float(weights @ np.cumprod(np.minimum(each, 1), axis=1).sum(1))


def block_length(ratios: ArrayLike, probabilities: ArrayLike) -> float:
    """Return the length by the block rule (Sun et al. 2024, arXiv 2403.10444): ``1 + sum_i
    E_q[p_i]`` with ``p_i = min(1, p_{i-1} r_i)``, since at least i tokens are accepted with
    probability p_i given the first i of them."""
    each, weights = _joint(ratios, probabilities)
    reach, total = np.ones(len(each)), 1.0
    for column in each.T:
        reach = np.minimum(1, reach * column)
        total += float(weights @ reach)
    return total


def _joint(ratios: ArrayLike, probabilities: ArrayLike) -> tuple[Floats, Floats]:
    each, weights = np.asarray(ratios, np.float64), np.asarray(probabilities, np.float64)
    if each.ndim != 2 or weights.shape != each.shape[:1]:
        raise ValueError(
            "ratios: expected [N, m] and probabilities [N], given "
            f"{list(each.shape)} and {list(weights.shape)}"
        )
    return each, weights


def tree_length(parents: Sequence[int], accept: Sequence[float]) -> float:
    """Expected tokens emitted by the verification of a tree: 1 and, for each node, the probability
    that the accepted path goes through it.

    Args:
        parents: of each node; -1: a child of the root. A parent stands before its children.
        accept: the probability that the path goes on to the node, if it has reached its parent. For
            children chosen by a fixed rule that is the target's probability of the token; those of
            one parent add up to 1 at most.

    Raises:
        ValueError: a node stands before its parent.
    """
    reach: list[float] = []
    for node, (parent, probability) in enumerate(zip(parents, accept, strict=True)):
        if not -1 <= parent < node:
            raise ValueError(f"parents: expected node {node}'s in [-1, {node}), given {parent}")
        reach.append(probability * (reach[parent] if parent >= 0 else 1.0))
    return 1 + sum(reach)


def cascade_improvement(
    acceptance: float, inner: float, rounds: int, tokens: int, cost: float, inner_cost: float
) -> float:
    """Cascade Speculative Drafting (Chen et al. 2023) with a fixed number of inner rounds: expected
    improvement of wall time ``(1 - a phi(a)^n) / ((1-a)(1 + n c1 + n k c2))``, with ``phi(x) = 1 +
    (x-1)(1 - a'^{k+1} x^{k+1})/(1 - a' x)``.

    Args:
        acceptance: a, of M_1 for M_2's tokens, < 1.
        inner: a', of M_2 for M_3's.
        rounds: n, of M_2 per round of M_1.
        tokens: k, of M_3 per round of M_2.
        cost, inner_cost: c1 = T_2 / T_1, c2 = T_3 / T_1.
    """
    a, b, k = acceptance, inner, tokens
    phi = 1 + (a - 1) * (1 - (a * b) ** (k + 1)) / (1 - a * b)
    return (1 - a * phi**rounds) / ((1 - a) * (1 + rounds * cost + rounds * k * inner_cost))


def lemma_seconds(
    tokens: float, lengths: Sequence[float], seconds: Sequence[float], beta: float
) -> float:
    """Lemma 3.1, ``sum_{i<n} (N / L_i) T_i + beta (N / L_{n-1}) T_n``."""
    verifying = sum(tokens / length * cost for length, cost in zip(lengths, seconds, strict=False))
    return verifying + beta * tokens / lengths[-1] * seconds[-1]
