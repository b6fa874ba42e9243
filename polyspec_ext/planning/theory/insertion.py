"""Whether another model belongs into a chain: Lemma 3.1 and Theorem 3.2 of Wang et al., *Polybasic
Speculative Decoding Through a Theoretical Perspective* (ICML 2025).

Numbers of tokens L are mean lengths per verification, the correction or bonus included, as the
paper's tables have them. Seconds may be in any unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


def lemma_seconds(
    tokens: float, lengths: Sequence[float], seconds: Sequence[float], beta: float
) -> float:
    """Lemma 3.1: ``T = sum_{i<n} (N / L_i) T_i + beta (N / L_{n-1}) T_n``.

    It leaves out what M_2 emits and M_1 rejects; `renewal` has that.

    Args:
        tokens: N.
        lengths: L_1 ... L_{n-1}.
        seconds: T_1 ... T_n of one pass.
        beta: passes of M_n per verification by M_{n-1}.

    Raises:
        ValueError: not one length fewer than seconds, or none.
    """
    if not lengths or len(seconds) != len(lengths) + 1:
        raise ValueError(
            "seconds: expected one more than lengths, of which there is at least one, given "
            f"{len(seconds)} and {len(lengths)}"
        )
    verifying = sum(tokens / length * cost for length, cost in zip(lengths, seconds, strict=False))
    return verifying + beta * tokens / lengths[-1] * seconds[-1]


class InsertionTest(NamedTuple):
    """Both sides of Theorem 3.2's conditions for M_new between M_i and M_{i+1}, and the exact one.

    Attributes:
        ratio_above, bound_above: condition (1), ``T_new/T_i < L_new (1/L_i - 1/L_{i-new})``.
        ratio_below, bound_below: condition (2), ``T_new/T_{i+1} < beta (L_new/L_i - 1)``.
        exact_seconds, exact_bound: ``T_new < L_new [T_i (1/L_i - 1/L_{i-new}) + beta T_{i+1}
            (1/L_i - 1/L_new)]``, which is Lemma 3.1 before against after where M_{i+1} is the last
            model. Where T_i and beta are others without M_new, these are over L_i.
    """

    ratio_above: float
    bound_above: float
    ratio_below: float
    bound_below: float
    exact_seconds: float
    exact_bound: float

    @property
    def above(self) -> bool:
        """Condition (1). Sufficient only where L_new >= L_i, if M_{i+1} is the last model."""
        return self.ratio_above < self.bound_above

    @property
    def below(self) -> bool:
        """Condition (2). Sufficient only where L_{i-new} >= L_i."""
        return self.ratio_below < self.bound_below

    @property
    def printed(self) -> bool:
        """The theorem as printed: (1) or (2)."""
        return self.above or self.below

    @property
    def exact(self) -> bool:
        """Whether Lemma 3.1 gives fewer seconds with M_new, if M_{i+1} is the last model."""
        return self.exact_seconds < self.exact_bound


def insertion_bound(length: float, length_of_new: float, new_length: float) -> float:
    """The right side of Theorem 3.2 (1), ``L_new (1/L_i - 1/L_{i-new})``.

    Args:
        length: L_i, of M_i with M_{i+1} below it.
        length_of_new: L_{i-new}, of M_i with M_new below it.
        new_length: L_new, of M_new with M_{i+1} below it.
    """
    return new_length * (1 / length - 1 / length_of_new)


def insertion_test(
    seconds: float,
    new_seconds: float,
    seconds_below: float,
    length: float,
    length_of_new: float,
    new_length: float,
    beta: float,
    without: tuple[float, float] | None = None,
) -> InsertionTest:
    """Theorem 3.2 for M_new between M_i and M_{i+1}.

    Args:
        seconds, new_seconds, seconds_below: T_i, T_new and T_{i+1} of one pass.
        length, length_of_new, new_length: as `insertion_bound` has them.
        beta: passes of M_{i+1} per verification above it.
        without: T_i and beta without M_new; None: the same, which the printed conditions assume.
    """
    bound = insertion_bound(length, length_of_new, new_length)
    seconds_before, beta_before = (seconds, beta) if without is None else without
    saved = seconds_before / length - seconds / length_of_new
    saved += seconds_below * (beta_before / length - beta / new_length)
    return InsertionTest(
        new_seconds / seconds,
        bound,
        new_seconds / seconds_below if seconds_below else float("inf"),
        beta * (new_length / length - 1),
        new_seconds,
        new_length * saved,
    )
