"""Compare every window policy with the best fixed windows and an oracle, in simulated time.

Traces of the shipped models on several prompt sets are recorded once. At temperature 0 the target's
text does not depend on the chain (contract C5). So a round is determined, at each position, by
whether the middle's argmax is the target's and whether the drafter's is the middle's, and after a
token of the middle that the target rejects, by the middle's continuation.

Numbers are about the texts at odd positions of a set, the held-out half. Policies' defaults and the
fixed windows of earlier searches come from the other half (`--half tuning`).
"""

from __future__ import annotations

import argparse
import functools
import json
import operator
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import output, questions
from polyspec_ext import progress, tiny
from polyspec_ext._C import PolicyKind, Scheduler
from polyspec_ext.chain import Chain
from polyspec_ext.levels import load_model
from polyspec_ext.planning.measure import pass_seconds
from polyspec_ext.policies import (
    Adaptive,
    CachedFsm,
    Fixed,
    Joint,
    Online,
    RoundReport,
    StepReport,
    WindowPolicy,
)
from polyspec_ext.runtime.plan import default_rounds

LENGTH = 128  # new tokens of a recorded text
PROMPTS = 24  # of each set
BRANCH = 24  # recorded tokens after a rejected token
TUNING, HELD_OUT = "tuning", "held-out"
_WIDEST = 64  # tokens of a pass, at most
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


# ---- traces --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """A greedy text, by position of its new tokens."""

    prompt: list[int]
    tokens: list[int]  # new tokens
    drafter: list[bool]  # whether the drafter's argmax is the token
    middle: list[bool]  # whether the middle's argmax is the token
    inner: list[bool]  # whether the drafter's argmax is the middle's
    # Where the middle's argmax is not the token: whether the drafter's is the middle's at each of
    # the next `BRANCH` positions of the middle's continuation.
    branches: dict[int, list[bool]]


@dataclass(frozen=True)
class Traces:
    """Texts by prompt set, and seconds of a pass by level and number of tokens."""

    sets: dict[str, list[Text]]
    seconds: dict[str, dict[int, float]]

    def half(self, name: str) -> dict[str, list[Text]]:
        """Return the half `TUNING` or `HELD_OUT` of every set."""
        return {key: texts[name == HELD_OUT :: 2] for key, texts in self.sets.items()}

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Traces:
        """Read a file of `save`, with numeric keys as integers."""

        def numbered(items: dict[str, Any]) -> dict[Any, Any]:
            return {int(key) if key.isdigit() else key: value for key, value in items.items()}

        saved = json.loads(path.read_text(), object_hook=numbered)
        sets = {name: [Text(**fields) for fields in texts] for name, texts in saved["sets"].items()}
        return cls(sets, saved["seconds"])


def prompt_sets(count: int = PROMPTS) -> dict[str, list[list[int]]]:
    """Return ids of `count` prompts of each set with a file beside the repository, and of random
    prompts."""
    data = questions.GSM8K.parent
    texts: dict[str, list[str]] = {}
    if questions.GSM8K.exists():
        texts["gsm8k"] = [
            tiny.prompt_of(row.turns[0]) for row in questions.read(questions.GSM8K)[:count]
        ]
    if (plays := data / "tinyshakespeare.txt").exists():
        speeches = plays.read_text(encoding="utf-8").split("\n\n")
        step = max(1, len(speeches) // (count + 1))
        texts["shakespeare"] = ["\n\n".join(speeches[i * step :][:2]) for i in range(1, count + 1)]
    if questions.SPEC_BENCH.exists():
        rows = questions.read(questions.SPEC_BENCH)
        texts["spec-bench"] = [row.turns[0] for row in rows[:: max(1, len(rows) // count)][:count]]
    if not texts:
        raise ValueError(f"expected a folder with the prompt sets, given {data}")
    tokenizer, chance = tiny.tokenizer(), random.Random(0)
    sets = {name: [ids[:160] for ids in tokenizer(raw)["input_ids"]] for name, raw in texts.items()}
    sets["random"] = [
        [0, *(chance.randrange(2, len(tokenizer)) for _ in range(60))] for _ in range(count)
    ]
    return sets


@torch.inference_mode()
def record(sets: dict[str, list[list[int]]], length: int) -> dict[str, list[Text]]:
    """Record texts of at most `length` new tokens."""
    with progress.loading(shown=False):
        models = {name: load_model(tiny.path(name), torch.float32) for name in tiny.LEVELS}
    return {
        name: [_text(models, prompt, length) for prompt in prompts]
        for name, prompts in sets.items()
    }


def measured_seconds() -> dict[str, dict[int, float]]:
    """Measure passes of 1 ... 33 tokens of the shipped levels on this processor."""
    widths = [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 17, 21, 25, 33]
    levels = tiny.levels(pack=True)
    times = pass_seconds(list(levels.values()), widths, repeats=12, limit=4.0)
    # A pass could be padded, so a longer time than of a wider pass is a disturbance.
    least = np.minimum.accumulate([[seconds[n] for n in widths[::-1]] for seconds in times], axis=1)
    rows = (dict(zip(widths, row[::-1].tolist(), strict=True)) for row in least)
    return dict(zip(levels, rows, strict=True))


def _text(models: dict[str, Any], prompt: list[int], length: int) -> Text:
    def argmax(name: str, row: list[int], first: int) -> list[int]:
        logits = models[name](input_ids=torch.tensor([row])).logits
        ids: list[int] = logits[0, first - 1 : -1].argmax(-1).tolist()
        return ids

    new = Chain([models["target"]]).generate(prompt, length).sequences[0, len(prompt) :].tolist()
    row, first = [*prompt, *new], len(prompt)
    middle, drafter = (argmax(name, row, first) for name in ("middle", "drafter"))
    wrong = [i for i, token in enumerate(new) if middle[i] != token]
    branches = {}
    if wrong:
        begins = [[*row[: first + i], middle[i]] for i in wrong]
        out = Chain([models["middle"]]).generate(begins, BRANCH, eos_token_id=[])
        for i, begin, going in zip(wrong, begins, out.sequences.tolist(), strict=True):
            going = going[: len(begin) + BRANCH]
            seen = argmax("drafter", going, len(begin))
            branches[i] = [a == b for a, b in zip(seen, going[len(begin) :], strict=True)]
    pairs = ((drafter, new), (middle, new), (drafter, middle))
    below, between, inner = ([a == b for a, b in zip(*pair, strict=True)] for pair in pairs)
    return Text(prompt, new, below, between, inner, branches)


# ---- replays -------------------------------------------------------------------------------------


Costs = list[list[float]]  # [level][n]: seconds of a pass over n tokens


def costs_of(levels: Sequence[dict[int, float]]) -> Costs:
    """Return the seconds of the passes of a chain, linearly interpolated between measurements."""
    widths = range(_WIDEST + 1)
    return [np.interp(widths, list(seconds), list(seconds.values())).tolist() for seconds in levels]


class Trace:
    """A text in a chain of two levels (the target and a level below) or of all three."""

    def __init__(self, text: Text, levels: Sequence[str]) -> None:
        self.text, self.size, self.levels = text, len(text.tokens), len(levels)
        # [p]: accepted tokens of an endless block from p.
        self.runs = [0] * (self.size + 1)
        accepts = text.middle if "middle" in levels else text.drafter
        for p in reversed(range(self.size)):
            self.runs[p] = self.runs[p + 1] + 1 if accepts[p] else 0

    def round(self, at: int, windows: Sequence[int], costs: Costs) -> tuple[int, list[StepReport]]:
        """Return the number of tokens that a round from `at` commits, and its steps."""
        scheduler = _scheduler(tuple(windows))
        scheduler.start(self.size - at)
        steps: list[StepReport] = []
        while scheduler.committed == 0:
            step = scheduler.next()
            level, count, accepted = step.level, step.count, 0
            drafted = level == self.levels
            if level == 1:
                accepted = min(count, self.runs[at])
            elif not drafted:
                accepted = self._inner(at, scheduler.pending(1), count)
            # A pass for each draft token; a verification reads the token before as well.
            seconds = count * costs[-1][1] if drafted else costs[level - 1][count + 1]
            steps.append(StepReport(level, count, accepted, count, 1, seconds))
            scheduler.report(level, count if drafted else accepted + 1)
        return scheduler.committed, steps

    def _inner(self, at: int, offset: int, count: int) -> int:
        """Return the number of tokens that the middle accepts of `count` after `offset` pending."""
        wrong = at + self.runs[at]  # where the middle leaves the text
        for j in range(count):
            p = at + offset + j
            if p <= wrong:
                fits = self.text.inner[p]
            else:
                branch = self.text.branches[wrong]
                fits = branch[(p - wrong - 1) % len(branch)]
            if not fits:
                return j
        return count


@functools.lru_cache(maxsize=4096)
def _scheduler(windows: tuple[int, ...]) -> Scheduler:
    return Scheduler(windows, [*default_rounds(windows), 0])


def replay(
    traces: Sequence[Trace], costs: Costs, policy: WindowPolicy | None, windows: Sequence[int]
) -> float:
    """Return tokens per second of a replay of all texts one after another. policy None: constant
    windows."""
    seconds = 0.0
    for trace in traces:
        at, committed, now = 0, 0, list(windows)
        steps: list[StepReport] = []
        while at < trace.size:
            if policy is not None:
                text = [*trace.text.prompt, *trace.text.tokens[:at]]
                now = list(policy.next(RoundReport(0, now, text, committed, steps)))
            committed, steps = trace.round(at, now, costs)
            at += committed
            seconds += sum(step.seconds for step in steps)
    return sum(trace.size for trace in traces) / seconds


def oracle(traces: Sequence[Trace], costs: Costs, choices: Sequence[Sequence[int]]) -> float:
    """Return tokens per second with the fastest windows, chosen round by round with knowledge of
    the texts."""
    seconds = 0.0
    for trace in traces:
        best = [0.0] * (trace.size + 1)
        for at in reversed(range(trace.size)):
            rounds = (trace.round(at, windows, costs) for windows in choices)
            best[at] = min(
                sum(step.seconds for step in steps) + best[at + committed]
                for committed, steps in rounds
            )
        seconds += best[0]
    return sum(trace.size for trace in traces) / seconds


def all_windows(levels: int) -> list[list[int]]:
    """Return the windows of the search: multiples of whole blocks from below, and 0."""
    if levels == 2:
        return [[k] for k in range(LIMITS[2][0] + 1)]
    most, inner = LIMITS[3]
    return [[0, 0]] + [
        [r * (k + 1), k] for k in range(inner + 1) for r in range(1, most // (k + 1) + 1)
    ]


def prompt_orders(sets: dict[str, list[Text]]) -> dict[str, list[Text]]:
    """Return the sets; `MIXED`, a text of each set in turns; `CHANGING`, half of the language set
    with the highest acceptance of the drafter, then half of the set with the lowest; and texts with
    levels that never agree, as by an adversary, from the beginning or half-way."""

    def share(name: str) -> float:
        return sum(sum(t.drafter) for t in sets[name]) / sum(len(t.tokens) for t in sets[name])

    def rejected(text: Text) -> Text:
        no = [False] * len(text.tokens)
        branches = {at: [False] * BRANCH for at in range(len(no))}
        return replace(text, drafter=no, middle=no, inner=no, branches=branches)

    first = next(iter(sets.values()))
    never, half = [rejected(text) for text in first], len(first) // 2
    mixed = [text for group in zip(*sets.values(), strict=False) for text in group]
    spoken = [name for name in sets if name != "random"]
    best, worst = max(spoken, key=share), min(spoken, key=share)
    middle = len(sets[best]) // 2
    return {
        **sets,
        MIXED: mixed[: max(len(first), len(sets))],
        CHANGING: [*sets[best][:middle], *sets[worst][:middle]],
        NOTHING: never,
        TURNING: [*first[:half], *never[half:]],
    }


def compared(traces: list[Trace], others: list[Trace], costs: Costs, start: list[int]) -> Any:
    """Return the simulated tokens per second of every policy on a set; `others`: the other half of
    the set."""
    levels, middle = traces[0].levels, len(traces) // 2
    choices = all_windows(levels)

    def fastest(subset: list[Trace]) -> tuple[float, list[int]]:
        rates = [(replay(subset, costs, None, windows), windows) for windows in choices]
        return max(rates, key=operator.itemgetter(0))

    halves = [(half, fastest(half)[0]) for half in (traces[:middle], traces[middle:]) if half]
    sizes = [sum(trace.size for trace in half) for half, _ in halves]
    seconds = sum(size / rate for size, (_, rate) in zip(sizes, halves, strict=True))
    (_, best), (_, tuned) = fastest(traces), fastest(others)
    fixed = {PLAIN: [0] * (levels - 1), SHIPPED: start, FOUND: tuned, BEST: best}
    rows: dict[str, Any] = {
        name: {"speed": replay(traces, costs, None, windows), "windows": windows}
        for name, windows in fixed.items()
    }
    rows[HALVES] = {"speed": sum(sizes) / seconds}
    for name in POLICIES:
        policy = POLICIES[name](max_windows=LIMITS[levels], guard=True)
        speed = replay(traces, costs, policy, start)
        rows["as shipped, guarded" if name == "fixed" else name] = {"speed": speed}
    rows["oracle"] = {"speed": oracle(traces, costs, choices)}
    return rows


def overhead(levels: int) -> dict[str, float]:
    """Return microseconds of `next` per round, by policy: the minimum of 20 turns."""
    microseconds = {}
    # With these times speculation pays; otherwise policies fall back without a choice.
    steps = [
        StepReport(n, 3, 2 if n < levels else 0, 3, 1, 1e-2 / n**2) for n in range(levels, 0, -1)
    ]
    text = list(range(600))
    windows = [4 * 2**i for i in reversed(range(levels - 1))]
    report = RoundReport(0, windows, text, 4, steps)
    plain = report._replace(committed=1, steps=[StepReport(1, 0, 0, 0, 1, 1e-2)])
    for name in POLICIES:
        policy = POLICIES[name](max_windows=LIMITS.get(levels))
        policy.next(RoundReport(0, windows, text, 0))
        times = []
        for _ in range(20):
            policy.next(plain)  # or a guard would choose a plain round
            began = time.perf_counter()
            for _ in range(TIMED // 20):
                policy.next(report)
            times.append((time.perf_counter() - began) / (TIMED // 20))
        microseconds[name] = 1e6 * min(times)
    return microseconds


def report_of(args: argparse.Namespace) -> dict[str, Any]:
    """Measure; return the JSON report."""
    report = output.header("adaptation", 3)
    report["overhead_us"] = {str(n): overhead(n) for n in (2, 3, 4)}
    if args.traces and args.traces.exists():
        traces = Traces.read(args.traces)
    else:
        progress.note("recording the traces, which takes a few minutes")
        traces = Traces(record(prompt_sets(), LENGTH), measured_seconds())
        if args.traces:
            traces.save(args.traces)
    other = TUNING if args.half == HELD_OUT else HELD_OUT
    sets, other_sets = (prompt_orders(traces.half(name)) for name in (args.half, other))
    chains: dict[str, Any] = {}
    for chain in CHAINS:
        costs = costs_of([traces.seconds[name] for name in chain])
        start = list(tiny.WINDOWS[tuple(chain)])
        results = chains[", ".join(chain)] = {}
        for name, texts in sets.items():
            mine, theirs = ([Trace(t, chain) for t in half] for half in (texts, other_sets[name]))
            tokens = sum(trace.size for trace in mine)
            results[name] = {"tokens": tokens, "policies": compared(mine, theirs, costs, start)}
    return {**report, "chains": chains, "half": args.half, "seconds": traces.seconds}


def markdown(report: dict[str, Any]) -> str:
    """Return the report as tables."""
    overheads = report["overhead_us"]
    lines = [f"# Window policies, {report['machine']['cpu']}", ""]
    lines += [f"{output.conditions(report)}.", "", "Microseconds per round:", ""]
    lines += output.table(
        ["policy", *(f"{n} levels" for n in overheads)],
        ([name, *(f"{us[name]:.1f}" for us in overheads.values())] for name in POLICIES),
    )
    for chain, sets in report["chains"].items():
        half = f"Simulated time, the {report['half']} half of the prompts"
        lines += ["", f"## {chain}", "", f"{half}; tokens per second over plain decoding.", ""]
        cols = [results["policies"] for results in sets.values()]
        over_plain, over_best = (
            [[row, *(f"{a[row]['speed'] / a[base]['speed']:.3f}" for a in cols)] for row in cols[0]]
            for base in (PLAIN, BEST)
        )
        lines += output.table(["", *sets], over_plain)
        lines += ["", "Over the best fixed windows:", "", *output.table(["", *sets], over_best)]
    return "\n".join(lines)


OPTIONS = (
    ("--half", (HELD_OUT, TUNING), HELD_OUT, None, "chosen by looking at numbers: on tuning"),
    ("--traces", Path, None, "FILE", "read the traces from FILE, or record them there"),
)
