"""The closed form of Cascade Speculative Drafting (Chen et al. 2023)."""

from __future__ import annotations


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
