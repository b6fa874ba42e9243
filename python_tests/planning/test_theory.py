"""The paper's printed formulas and numbers, and `planning.theory`."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import pytest

from polyspec_ext.planning import theory

# Wang et al.: T_i, L_{i-new}, T_new, L_new, T_{i+1}, L_i; T_new/T_i and the right side of (1) (the
# first is printed as -0.117); speedup before and after as measured there.
CASES = [
    (22, 3.83, 17.61, 3.77, 4, 4.34, 0.80, -0.116, 2.61, 1.08),
    (22, 6.26, 7.00, 4.67, 4, 4.34, 0.318, 0.330, 2.61, 3.48),
    (47.52, 3.50, 19.16, 3.02, 12.42, 2.28, 0.403, 0.461, 3.19, 3.88),
]


def lemma_seconds(lengths: Sequence[float], seconds: Sequence[float], beta: float) -> float:
    """Lemma 3.1, of 100 tokens: ``sum_{i<n} (N / L_i) T_i + beta (N / L_{n-1}) T_n``."""
    verifying = sum(cost / length for length, cost in zip(lengths, seconds, strict=False))
    return 100 * (verifying + beta / lengths[-1] * seconds[-1])


class Insertion(NamedTuple):
    """Theorem 3.2 for M_new between M_i and M_{i+1}: T_i, L_{i-new}, T_new, L_new, T_{i+1}, L_i,
    and the passes of M_{i+1} per verification above it."""

    seconds: float
    of_new: float
    new_seconds: float
    new_length: float
    seconds_below: float
    length: float
    beta: float = 1

    @property
    def bound_above(self) -> float:
        return self.new_length * (1 / self.length - 1 / self.of_new)

    @property
    def printed(self) -> tuple[bool, bool]:
        """Conditions (1) and (2)."""
        below = self.beta * (self.new_length / self.length - 1)
        above = self.new_seconds / self.seconds < self.bound_above
        return above, self.new_seconds / self.seconds_below < below

    @property
    def exact(self) -> bool:
        """By Lemma 3.1, before against after, if M_{i+1} is the last model."""
        before = lemma_seconds([self.length], [self.seconds, self.seconds_below], self.beta)
        seconds = [self.seconds, self.new_seconds, self.seconds_below]
        return lemma_seconds([self.of_new, self.new_length], seconds, self.beta) < before


@pytest.mark.parametrize("case", CASES)
def test_the_printed_insertions(case: tuple[float, ...]) -> None:
    *sizes, ratio, bound, before, after = case
    test = Insertion(*sizes)
    assert test.new_seconds / test.seconds == pytest.approx(ratio, abs=1e-3)
    assert test.bound_above == pytest.approx(bound, abs=1e-3)
    assert test.printed[0] == (after > before)
    # Without drafts it is condition (1).
    assert test._replace(beta=0).exact == test.printed[0]


def test_the_printed_conditions_do_not_suffice() -> None:
    # (1) holds, but M_new accepts less from M_{i+1} than M_i did: more drafts than before.
    test = Insertion(20, 6, 2, 2, 4, 4, beta=5)
    assert (test.printed[0], test.exact) == (True, False)
    # (2) holds, but M_i accepts less from M_new than it did from M_{i+1}, which may be enough.
    for of_new, exact in ((3.9, True), (2.0, False)):
        test = Insertion(20, of_new, 1, 8, 4, 4)
        assert (test.printed[1], test.exact) == (True, exact)


def test_theorem_3_3_and_its_erratum() -> None:
    """Check N = min(Geometric, n): the printed variance also takes a as the chance to reject."""
    for a, n in itertools.product((0.0, 0.1, 0.5, 0.9, 0.999), (1, 2, 3, 5, 12)):
        chances = [a ** (k - 1) * (1 - a) for k in range(1, n)] + [a ** (n - 1)]
        mean = sum(k * p for k, p in enumerate(chances, 1))
        variance = sum((k - mean) ** 2 * p for k, p in enumerate(chances, 1))
        correct = a * (1 - a ** (2 * n - 1)) - (2 * n - 1) * (1 - a) * a**n
        assert mean == pytest.approx(sum(a**j for j in range(n)))
        assert correct / (1 - a) ** 2 == pytest.approx(variance, abs=1e-8)
    a, n = 0.9, 12
    assert a * (1 - (n * n - 1) * (a**n + a ** (n + 1))) < 0


# With the paper's times, T_1 = 22 and T_2 = 7 ms, six draft passes of 1 ms per round of M_2, which
# emits 4.3 tokens on average: by a21, the best window and the speedup over plain decoding.
PAPER_WINDOWS = {0.90: (6, 2.89), 0.93: (8, 3.29), 0.95: (11, 3.66), 0.97: (15, 4.21)}


def three_models(acceptance: float, window: int) -> float:
    low, high = 0.0, 1.0
    while high - low > 1e-12:
        inner = (low + high) / 2
        low, high = (inner, high) if sum(inner**j for j in range(7)) < 4.3 else (low, inner)
    rates = theory.Acceptance.constant(acceptance, low)
    found = theory.expectation([window, 6], [0], rates, theory.constant_seconds(22, 7, 1))
    return 22 * found.tokens_per_second


def test_windows_of_the_papers_times() -> None:
    for acceptance, (window, speedup) in PAPER_WINDOWS.items():
        by_window = {mu: three_models(acceptance, mu) for mu in range(window - 2, window + 3)}
        assert max(by_window, key=by_window.__getitem__) == window
        assert by_window[window] == pytest.approx(speedup, abs=0.01)
    eagle = 22 * 4.3 / (22 + 6)
    assert eagle == pytest.approx(3.38, abs=0.005)
    # Below .94 the third model loses.
    assert max(three_models(0.93, mu) for mu in (7, 8, 9)) < eagle
    assert max(three_models(0.94, mu) for mu in (8, 9, 10)) > eagle
