"""Formulas of `planning` and `formulas` against printed numbers and enumerations."""

from __future__ import annotations

import itertools
import math

import formulas
import numpy as np
import pytest

from polyspec_ext import planning as theory

# Wang et al.: T_i, L_{i-new}, T_new, L_new, T_{i+1}, L_i; T_new/T_i and the right side of (1) (the
# first is printed as -0.117); speedup before and after as measured there.
CASES = [
    (22, 3.83, 17.61, 3.77, 4, 4.34, 0.80, -0.116, 2.61, 1.08),
    (22, 6.26, 7.00, 4.67, 4, 4.34, 0.318, 0.330, 2.61, 3.48),
    (47.52, 3.50, 19.16, 3.02, 12.42, 2.28, 0.403, 0.461, 3.19, 3.88),
]


@pytest.mark.parametrize("case", CASES)
def test_the_printed_insertions(case: tuple[float, ...]) -> None:
    above, of_new, new, new_length, below, length, ratio, bound, before, after = case
    test = theory.insertion_test(above, new, below, length, of_new, new_length, beta=1)
    assert test.ratio_above == pytest.approx(ratio, abs=1e-3)
    assert test.bound_above == pytest.approx(bound, abs=1e-3)
    assert test.bound_above == new_length * (1 / length - 1 / of_new)
    assert test.above == (after > before)


@pytest.mark.parametrize("beta", [0.0, 1.0, 6.0])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("without", [None, (21.0, 5.0)])
def test_the_exact_condition_is_lemma_3_1_twice(case, beta, without) -> None:
    above, of_new, new, new_length, below, length = case[:6]
    test = theory.insertion_test(above, new, below, length, of_new, new_length, beta, without)
    above_before, beta_before = without or (above, beta)
    two = formulas.lemma_seconds(100, [length], [above_before, below], beta_before)
    three = formulas.lemma_seconds(100, [of_new, new_length], [above, new, below], beta)
    saved = (test.exact_bound - test.exact_seconds) / new_length * 100
    assert two - three == pytest.approx(saved)
    assert test.exact == (three < two)
    if beta == 0 and without is None:
        assert test.exact == test.above


def test_the_printed_conditions_do_not_suffice() -> None:
    # (1) holds, but M_new accepts less from M_{i+1} than M_i did: more drafts than before.
    test = theory.insertion_test(20, 2, 4, 4, 6, 2, beta=5)
    assert test.above
    assert not test.exact
    # (2) holds, but M_i accepts less from M_new than it did from M_{i+1}.
    test = theory.insertion_test(20, 1, 4, 4, 3.9, 8, beta=1)
    assert test.below
    assert test.exact  # which it may be
    test = theory.insertion_test(20, 1, 4, 4, 2.0, 8, beta=1)
    assert test.below
    assert test.printed
    assert not test.exact


def test_lemma_3_1() -> None:
    # EAGLE-2 on Vicuna-7B: 22 ms, six passes of 1 ms, 4.34 tokens: 3.4 times plain decoding.
    seconds = formulas.lemma_seconds(1000, [4.34], [22, 1], beta=6)
    assert 22 * 1000 / seconds == pytest.approx(22 * 4.34 / 28)


def test_theorem_3_3_and_its_erratum() -> None:
    for a, n in itertools.product((0.0, 0.1, 0.5, 0.9, 0.999), (1, 2, 3, 5, 12)):
        chances = [a ** (k - 1) * (1 - a) for k in range(1, n)] + [a ** (n - 1)]
        mean = sum(k * p for k, p in enumerate(chances, 1))
        variance = sum((k - mean) ** 2 * p for k, p in enumerate(chances, 1))
        assert formulas.length_mean(a, n) == pytest.approx(mean)
        assert formulas.length_variance(a, n) == pytest.approx(variance, abs=1e-8)
        own = formulas.accepted_distribution([a] * (n - 1))
        assert own == pytest.approx(chances)
    assert formulas.length_mean(1.0, 4) == 4
    assert formulas.length_variance(1.0, 4) == 0
    # The counter-examples: nonzero where N is always 1; a negative variance.
    assert formulas.length_variance(0.9, 1) == pytest.approx(0, abs=1e-12)
    assert formulas.length_variance_as_printed(0.9, 1) == pytest.approx(0.9 / 0.01)
    assert formulas.length_variance_as_printed(0.9, 12) < 0 < formulas.length_variance(0.9, 12)
    # What remains of the theorem.
    relative = [math.sqrt(formulas.length_variance(a, 8)) / formulas.length_mean(a, 8)
                for a in (0.9, 0.99, 0.999, 0.9999)]  # fmt: skip
    assert relative == sorted(relative, reverse=True)
    assert relative[-1] < 0.02


def drafts(p: list[list[float]], q: list[list[float]]) -> tuple[list[list[float]], list[float]]:
    """Ratios along every draft of independent tokens, and its probability under q."""
    ratios, weights = [], []
    for block in itertools.product(range(len(p[0])), repeat=len(p)):
        ratios.append([p[i][y] / q[i][y] for i, y in enumerate(block)])
        weights.append(math.prod(q[i][y] for i, y in enumerate(block)))
    return ratios, weights


def block_rule_length(p: list[list[float]], q: list[list[float]]) -> float:
    """By the rule itself (papers: h_i, from the last token back), draft by draft."""
    total, count = 0.0, len(p)
    for block in itertools.product(range(len(p[0])), repeat=count):
        reach = [1.0]
        for i, y in enumerate(block):
            reach.append(min(1.0, reach[i] * p[i][y] / q[i][y]))
        weight = math.prod(q[i][y] for i, y in enumerate(block))
        for i in range(count, -1, -1):
            accept = reach[i]
            if i < count:
                rest = sum(max(reach[i] * a - b, 0) for a, b in zip(p[i], q[i], strict=True))
                accept = rest / (rest + 1 - reach[i]) if rest + 1 - reach[i] > 0 else 1.0
            accept = 1.0 if i == 0 else accept
            total += weight * accept * (i + 1)
            weight *= 1 - accept
    return total


def test_token_and_block_lengths() -> None:
    rng = np.random.default_rng(3)
    for _ in range(5):
        p, q = (rng.dirichlet(np.ones(3), size=4).tolist() for _ in range(2))
        ratios, weights = drafts(p, q)
        overlaps = [sum(map(min, a, b)) for a, b in zip(p, q, strict=True)]
        by_token = 1 + sum(math.prod(overlaps[: i + 1]) for i in range(4))
        assert formulas.token_length(ratios, weights) == pytest.approx(by_token)
        assert formulas.block_length(ratios, weights) == pytest.approx(block_rule_length(p, q))
        assert formulas.block_length(ratios, weights) >= by_token
    with pytest.raises(ValueError, match=r"ratios: expected \[N, m\]"):
        formulas.block_length([1.0], [1.0])


def test_tree_lengths() -> None:
    chain = formulas.tree_length([-1, 0, 1], [0.5, 0.5, 0.5])
    assert chain == formulas.length_mean(0.5, 4)
    # Two children of the root, and one below each: the paths exclude each other.
    assert formulas.tree_length([-1, -1, 0, 1], [0.6, 0.3, 0.5, 1.0]) == pytest.approx(
        0.1 * 1 + 0.6 * (0.5 * 2 + 0.5 * 3) + 0.3 * 3
    )
    assert formulas.tree_length([], []) == 1
    with pytest.raises(ValueError, match="parents: expected node 1's"):
        formulas.tree_length([-1, 1], [0.5, 0.5])


# With the paper's times, T_1 = 22 and T_2 = 7 ms, six draft passes of 1 ms per round of M_2, which
# emits 4.3 tokens on average: by a21, the best window and the speedup over plain decoding.
PAPER_WINDOWS = {0.90: (6, 2.89), 0.93: (8, 3.29), 0.95: (11, 3.66), 0.97: (15, 4.21)}


def three_models(acceptance: float, window: int) -> float:
    low, high = 0.0, 1.0
    while high - low > 1e-12:
        inner = (low + high) / 2
        low, high = (inner, high) if formulas.length_mean(inner, 7) < 4.3 else (low, inner)
    rates = theory.Acceptance.constant(acceptance, low)
    found = theory.expectation([window, 6], [0], rates, theory.ConstantSeconds([22, 7, 1]))
    assert found.emitted(2) == pytest.approx(4.3)
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


def test_cascade_speculative_drafting() -> None:
    for a, b in itertools.product((0.3, 0.8, 0.95), (0.2, 0.6)):
        for n, k in itertools.product((1, 2, 4), (1, 3)):
            closed = formulas.cascade_improvement(a, b, n, k, 0.3, 0.05)
            # A window that only n full blocks fill: there always are n.
            chain = theory.expectation(
                [n * (k + 1), k],
                [n],
                theory.Acceptance.constant(a, b),
                theory.ConstantSeconds([1, 0.3, 0.05]),
            )
            fixed = chain.tokens_per_second
            assert fixed == pytest.approx(closed)
