"""Compare every window policy with the best fixed windows and an oracle, in simulated time.

Traces of the shipped models on several prompt sets are recorded once. Numbers are about held-out
texts (`replay`): policies' defaults and the fixed windows of earlier searches come from the other
half, which `--half tuning` shows.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import output
from benchmarks.replay import (
    BRANCH,
    HELD_OUT,
    TUNING,
    Costs,
    Run,
    Text,
    Trace,
    Traces,
    oracle,
    prompt_sets,
    record,
    replay,
)
from polyspec_ext import progress, tiny
from polyspec_ext._C import PolicyKind
from polyspec_ext.cli import options
from polyspec_ext.policies import Adaptive, CachedFsm, Fixed, Joint, Online, RoundReport, StepReport

LENGTH = 128  # new tokens of a recorded text
CHAINS = (("target", "drafter"), ("target", "middle"), tiny.LEVELS)
MIXED, CHANGING = "mixed", "changing half-way"
NOTHING, TURNING = "nothing accepted", "then nothing accepted"
PLAIN, SHIPPED, BEST = "plain decoding", "windows as shipped", "best fixed windows"
FOUND = "fixed windows found on the other half"
HALVES = "best fixed windows of either half of a set"
LIMITS = {2: [12], 3: [24, 8]}  # largest windows of the search and of every policy
TIMED = 400  # rounds of a measurement of a policy's overhead


# Policies of Liu, Park and Shen (ACL 2025) that lose on every set of prompts: for the comparison.


@dataclass(eq=False)
class Fsm(Adaptive):
    """A state machine per level: the window grows by 1 after a fully accepted block, and shrinks by
    1 after a block of which less than half was accepted."""

    name, _kind = "fsm", PolicyKind.FSM


@dataclass(eq=False)
class QLearning(Adaptive):
    """Tabular Q-learning of window changes +1, 0 or -1 per level; the reward is tokens per second
    over their running mean."""

    name, _kind = "q-learning", PolicyKind.Q_LEARNING
    learning_rate: float = 0.2  # step size, in (0, 1]
    discount: float = 0.5  # in [0, 1)
    exploration: float = 0.1  # share of random actions, in [0, 1]
    seed: int = 0  # of the random actions


POLICIES: dict[str, type[Adaptive]] = {
    kind.name: kind for kind in (Fixed, Online, Fsm, CachedFsm, QLearning, Joint)
}


def all_windows(levels: int) -> list[list[int]]:
    """Return the windows of the search: multiples of whole blocks from below, and 0."""
    if levels == 2:
        return [[k] for k in range(LIMITS[2][0] + 1)]
    most, inner = LIMITS[3]
    return [[0, 0]] + [
        [r * (k + 1), k] for k in range(inner + 1) for r in range(1, most // (k + 1) + 1)
    ]


def policy_of(name: str, levels: int, **options: Any) -> Adaptive:
    return POLICIES[name](max_windows=LIMITS[levels], **options)


def changing(sets: dict[str, list[Text]]) -> list[Text]:
    """Return half of the language set with the highest acceptance of the drafter, then half of the
    set with the lowest."""

    def share(name: str) -> float:
        return sum(sum(t.drafter) for t in sets[name]) / sum(len(t.tokens) for t in sets[name])

    spoken = [name for name in sets if name != "random"]
    best, worst = max(spoken, key=share), min(spoken, key=share)
    half = len(sets[best]) // 2
    return [*sets[best][:half], *sets[worst][:half]]


def rejected(texts: list[Text]) -> list[Text]:
    """Return the same texts with levels that never agree, as by an adversary."""
    never = []
    for text in texts:
        no = [False] * len(text.tokens)
        branches = {at: [False] * BRANCH for at in range(len(no))}
        never.append(replace(text, drafter=no, middle=no, inner=no, branches=branches))
    return never


def prompt_orders(sets: dict[str, list[Text]]) -> dict[str, list[Text]]:
    """Return the sets; `MIXED`, a text of each set in turns; `CHANGING`; and texts with levels that
    never agree, from the beginning or half-way."""
    first = next(iter(sets.values()))
    never, half = rejected(first), len(first) // 2
    mixed = [text for some in zip(*sets.values(), strict=False) for text in some]
    return {
        **sets,
        MIXED: mixed[: max(len(first), len(sets))],
        CHANGING: changing(sets),
        NOTHING: never,
        TURNING: [*first[:half], *never[half:]],
    }


def fastest(traces: Sequence[Trace], costs: Costs) -> tuple[list[int], Run]:
    """Return the fixed windows with the most tokens per second, and their replay."""
    choices = all_windows(traces[0].levels)
    runs = [(windows, replay(traces, costs, None, windows)) for windows in choices]
    return max(runs, key=lambda pair: pair[1].speed)


def compared(traces: list[Trace], others: list[Trace], costs: Costs, start: list[int]) -> Any:
    """Return the simulated tokens per second of every policy on a set; `others`: the other half of
    the set."""
    levels, middle = traces[0].levels, len(traces) // 2
    (best, _), (found, _) = fastest(traces, costs), fastest(others, costs)
    halves = [fastest(part, costs)[1] for part in (traces[:middle], traces[middle:]) if part]
    fixed = {PLAIN: [0] * (levels - 1), SHIPPED: start, FOUND: found, BEST: best}
    rows: dict[str, Any] = {
        name: {"speed": replay(traces, costs, None, windows).speed, "windows": windows}
        for name, windows in fixed.items()
    }
    rows[HALVES] = {"speed": sum(r.tokens for r in halves) / sum(r.seconds for r in halves)}
    for name in POLICIES:
        run = replay(traces, costs, policy_of(name, levels, guard=True), start)
        rows["as shipped, guarded" if name == "fixed" else name] = {"speed": run.speed}
    rows["oracle"] = {"speed": oracle(traces, costs, all_windows(levels)).speed}
    return rows


def overhead(levels: int) -> dict[str, float]:
    """Return microseconds of `next` per round, by policy: the minimum of 20 turns."""
    found = {}
    # With these times speculation pays; otherwise policies fall back without a choice.
    steps = [
        StepReport(n, 3, 2 if n < levels else 0, 3, 1, 1e-2 / n**2) for n in range(levels, 0, -1)
    ]
    text = list(range(600))
    windows = [4 * 2**i for i in reversed(range(levels - 1))]
    report = RoundReport(0, windows, text, 4, steps)
    plain = report._replace(committed=1, steps=[StepReport(1, 0, 0, 0, 1, 1e-2)])
    for name in POLICIES:
        policy = policy_of(name, levels) if levels in LIMITS else POLICIES[name]()
        policy.next(RoundReport(0, windows, text, 0))
        times = []
        for _ in range(20):
            policy.next(plain)  # or a guard would choose a plain round
            began = time.perf_counter()
            for _ in range(TIMED // 20):
                policy.next(report)
            times.append((time.perf_counter() - began) / (TIMED // 20))
        found[name] = 1e6 * min(times)
    return found


def report_of(args: argparse.Namespace) -> dict[str, Any]:
    """Measure; return the JSON report."""
    report = output.header("adaptation", 3)
    report["overhead_us"] = {str(n): overhead(n) for n in (2, 3, 4)}
    traces, half = _traces(args), args.half
    other = TUNING if half == HELD_OUT else HELD_OUT
    sets, others = (prompt_orders(traces.half(name)) for name in (half, other))
    chains: dict[str, Any] = {}
    for chain in CHAINS:
        costs = Costs([traces.seconds[name] for name in chain])
        start = list(tiny.WINDOWS[tuple(chain)])
        own = chains[", ".join(chain)] = {}
        for name, texts in sets.items():
            mine, theirs = ([Trace(t, chain) for t in some] for some in (texts, others[name]))
            tokens = sum(trace.size for trace in mine)
            own[name] = {"tokens": tokens, "policies": compared(mine, theirs, costs, start)}
    return {**report, "chains": chains, "half": half, "seconds": traces.seconds}


def _traces(args: argparse.Namespace) -> Traces:
    if args.traces and args.traces.exists():
        return Traces.read(args.traces)
    progress.note("recording the traces, which takes a few minutes")
    traces = record(prompt_sets(2 * args.prompts), LENGTH)
    if args.traces:
        traces.save(args.traces)
    return traces


def markdown(report: dict[str, Any]) -> str:
    """Return the report as tables."""
    where, overheads = report["machine"], report["overhead_us"]
    lines = [f"# Window policies, {where['cpu']}", ""]
    lines += [f"{where['threads']} threads of {where['cores']} cores, torch {where['torch']}.", ""]
    lines += ["Microseconds per round:", ""]
    lines += output.table(
        ["policy", *(f"{n} levels" for n in overheads)],
        ([name, *(f"{us[name]:.1f}" for us in overheads.values())] for name in POLICIES),
    )
    for chain, sets in report["chains"].items():
        half = f"Simulated time, the {report['half']} half of the prompts"
        lines += ["", f"## {chain}", "", f"{half}; tokens per second over plain decoding.", ""]
        lines += _over(sets, PLAIN)
        lines += ["", "Over the best fixed windows:", "", *_over(sets, BEST)]
    return "\n".join(lines)


def _over(sets: dict[str, Any], base: str) -> list[str]:
    policies = [results["policies"] for results in sets.values()]
    return output.table(
        ["", *sets],
        (
            [row, *(f"{each[row]['speed'] / each[base]['speed']:.3f}" for each in policies)]
            for row in policies[0]
        ),
    )


def add_command(kinds: Any) -> None:
    """Add ``adaptation`` to the kinds of benchmarks."""
    sub = output.add_command(kinds, "adaptation", __doc__, report_of, markdown)
    options.add_count(sub, "--prompts", 12, "of each set, in either half")
    what = "whatever is chosen by looking at numbers is chosen on the one for tuning"
    sub.add_argument("--half", choices=(HELD_OUT, TUNING), default=HELD_OUT, help=what)
    what = "read the traces from FILE, or record them there if there is none"
    sub.add_argument("--traces", type=Path, metavar="FILE", help=what)
