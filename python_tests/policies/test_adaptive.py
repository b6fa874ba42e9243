"""The policies: the distribution stays the target's, and choices follow the papers."""

import copy
import itertools
import math
import pickle
from typing import Any

import pytest
import toy
from toy_policies import POLICIES, Fsm

import polyspec_ext as ps
from polyspec_ext import _C, policies
from polyspec_ext.planning import theory
from polyspec_ext.policies import RoundReport, StepReport
from polyspec_ext.runtime.plan import default_rounds

NAMES = list(POLICIES)


def rounds(policy, accept, seconds, windows, count=400) -> list[list[int]]:
    """The windows that a policy of two levels chooses under `accept`, round by round."""
    report = RoundReport(0, windows, [1, 2, 3], 0)
    chosen, text, owed = [], [1, 2, 3], 0.0
    for number in range(count):
        now = list(policy.next(report))
        chosen.append(now)
        a = accept[number % len(accept)]
        # Stratified: lengths of blocks as a geometric has them, one after another.
        owed = (owed + 0.6180339887) % 1
        run = now[0] if a == 1 else min(now[0], int(math.log(1 - owed) / math.log(a))) if a else 0
        steps = []
        if now[0]:
            steps.append(StepReport(2, now[0], 0, now[0], 1, seconds(2, now[0])))
        steps.append(StepReport(1, now[0], run, now[0], 1, seconds(1, now[0])))
        text = [*text, *[5] * (run + 1)]
        report = RoundReport(0, now, text, run + 1, steps)
    return chosen


def linear(level: int, tokens: int) -> float:
    """A target of 10 ms and 0.2 ms per token, a drafter of 1 ms per token."""
    return 1e-3 * tokens if level == 2 else 1e-2 + 2e-4 * tokens


def best_window(accept: float, seconds: Any) -> int:
    def cost(g: int) -> float:
        draft = seconds(2, g) if g else 0.0
        return (draft + seconds(1, g)) / sum(accept**i for i in range(g + 1))

    return min(range(17), key=cost)


@pytest.mark.parametrize("accept", [0.4, 0.6, 0.8, 0.9])
@pytest.mark.parametrize("kind", [policies.Online, policies.Joint])
def test_window_is_the_argmax(kind: type[policies.Adaptive], accept: float) -> None:
    options = {"history": 10**6} if kind is policies.Online else {"forgetting": 0.998}
    chosen = rounds(kind(guard=False, **options), [accept], linear, [4], 1500)
    wanted = best_window(accept, linear)
    assert abs(chosen[-1][0] - wanted) <= 1, (chosen[-20:], wanted)


def test_naive_share_would_be_biased() -> None:
    """Equation 2 is the maximum-likelihood estimate of a censored geometric."""
    policy = policies.Online(guard=False, history=1000)
    chosen = rounds(policy, [0.8], linear, [4], 800)
    naive = sum(0.8**i for i in range(1, 5)) / 4
    assert best_window(naive, linear) < chosen[-1][0] - 1


def test_times_are_a_function_of_the_window() -> None:
    """A target with passes of more than four tokens that take twice as long."""

    def steep(level: int, tokens: int) -> float:
        return 5e-4 * tokens if level == 2 else 1e-2 * (1 + (tokens > 4))

    for kind in (policies.Online, policies.Joint):
        chosen = rounds(kind(guard=False), [0.8], steep, [3], 600)
        assert max(chosen) >= [5]
        assert sum(w <= 4 for (w,) in chosen[-100:]) > 80, chosen[-100:]


@pytest.mark.parametrize("kind", [policies.Online, policies.Joint])
def test_a_single_slow_step_changes_no_window(kind: type[policies.Adaptive]) -> None:
    count = itertools.count()

    def interrupted(level: int, tokens: int) -> float:
        return linear(level, tokens) * (50 if next(count) in (800, 801) else 1)

    quiet, busy = (rounds(kind(guard=False), [0.8], x, [4], 600) for x in (linear, interrupted))
    assert quiet[400:420] == busy[400:420]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "fixed"])
def test_it_speculates_again(name: str) -> None:
    accept = [0.0] * 200 + [0.95] * 1300
    chosen = rounds(POLICIES[name](), accept, linear, [4], len(accept))
    assert sum(w > 0 for (w,) in chosen[50:200]) < 40
    if name not in ("q-learning", "cached-fsm"):
        assert all(w > 2 for (w,) in chosen[-20:])
    assert sum(w > 0 for (w,) in chosen[-200:]) > 190


def three_levels(policy, accept, windows) -> list[list[int]]:
    """The windows that a policy of three levels chooses under `accept`; 10, 3 and 1 ms a pass."""
    report, text, chosen = RoundReport(0, windows, [1, 2, 3], 0), [1, 2, 3], []
    owed = [0.0, 0.0]

    def run(level: int, tokens: int, a: float) -> int:
        owed[level] = (owed[level] + 0.6180339887) % 1
        if a in (0.0, 1.0):
            return int(a) * tokens
        return min(tokens, int(math.log(1 - owed[level]) / math.log(a)))

    for outer, inner in accept:
        now = list(policy.next(report))
        chosen.append(now)
        steps, pending = [], 0
        for _ in range(default_rounds(now)[0] if now[0] else 0):
            if pending >= now[0]:
                break
            won = run(1, now[1], inner)
            if now[1]:
                steps.append(StepReport(3, now[1], 0, now[1], 1, 1e-3 * now[1]))
            steps.append(StepReport(2, now[1], won, now[1], 1, 3e-3))
            pending += won + 1
        won = run(0, pending, outer)
        steps.append(StepReport(1, pending, won, pending, 1, 1e-2))
        text = [*text, *[5] * (won + 1)]
        report = RoundReport(0, now, text, won + 1, steps)
    return chosen


def test_an_inner_window_of_zero_grows_again() -> None:
    """Without forgetting, a level with a window of 0 would stay there."""
    rounds = [(0.95, 0.02)] * 150 + [(0.95, 0.9)] * 300
    chosen = three_levels(policies.Online(), rounds, [4, 2])
    assert sum(inner == 0 for outer, inner in chosen[100:150] if outer) > 20
    assert all(inner >= 2 for outer, inner in chosen[-50:] if outer), chosen[-50:]


def test_windows_above_are_whole_rounds_of_the_level_below() -> None:
    chosen = three_levels(policies.Online(max_windows=[12, 8]), [(0.9, 0.7)] * 200, [5, 3])
    assert all(outer % (inner + 1) == 0 for outer, inner in chosen[5:])
    # And never more than the largest, where one round brings more than that.
    small = three_levels(policies.Online(max_windows=[2, 8]), [(0.95, 0.95)] * 200, [2, 8])
    assert max(small)[0] == 2


def test_cached_state_machine_finds_what_was_there_before() -> None:
    policy = policies.CachedFsm(ngram=2, max_windows=[9])
    assert policy.next(RoundReport(0, [2], [1, 2, 9, 9, 1, 2], 0)) == [4]  # (1, 2) of the prompt

    def told(text: list[int], committed: int, tokens: int, accepted: int) -> list[int]:
        steps = [StepReport(1, tokens, accepted, tokens, 1, 0.0)]
        return list(policy.next(RoundReport(0, [tokens], text, committed, steps)))

    assert told([1, 2, 9, 9, 1, 2, 7], 1, 4, 0) == [1]  # not seen before
    assert told([1, 2, 9, 9, 1, 2, 7, 9, 9], 2, 1, 1) == [4]  # (9, 9) of the prompt, 2 doubled
    assert told([1, 2, 9, 9, 1, 2, 7, 9, 9, 1, 2], 2, 4, 1) == [1]  # after (1, 2) none was accepted


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("windows", [[0], [1], [5], [5, 3], [8, 3], [4, 0], [9, 4, 2]], ids=str)
def test_renewal_model_is_the_planners(windows: list[int], bounded: bool) -> None:
    """Two implementations: numbers per level in C++, states of the machine in Python."""
    rounds = default_rounds(windows) if bounded else [0] * (len(windows) - 1)
    for accept in (0.0, 0.3, 0.8, 0.95):
        levels = [accept, 0.6, 0.9][: len(windows)]
        tokens, passes, verified = _C.renewal_round(levels, windows, [*rounds, 0])
        theirs = theory.expectation(
            windows,
            rounds,
            theory.Acceptance.constant(*levels),
            theory.constant_seconds(*[1.0] * (len(windows) + 1)),
        )
        assert tokens == pytest.approx(theirs.length, abs=1e-9)
        assert passes == pytest.approx((theirs.steps.sum(0) / theirs.rounds.sum()).tolist())
        per_pass = [own * many for own, many in zip(verified, passes, strict=False)]
        assert per_pass == pytest.approx(theirs.verified.tolist(), abs=1e-9)


def test_names() -> None:
    made = toy.make_levels(2)
    assert isinstance(ps.Chain(made, policy="online").policy, ps.policies.Online)
    with pytest.raises(ValueError, match="max_windows"):
        ps.Chain(made, policy=policies.Joint(max_windows=[4, 4])).generate([0], 4)


def test_copies_begin_anew() -> None:
    policy = Fsm()
    policy.next(RoundReport(0, [4], [0], 0))
    for other in (copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))):
        assert list(other.next(RoundReport(0, [2], [0], 0))) == [2]
