"""``adaptation``: every window policy beside the best fixed windows and beside an oracle, on
recorded traces of the shipped models in simulated time, and live.

Numbers are of texts that are held out (`traces`): policies' defaults and fixed windows that were
found before come from the other half, which `--half tuning` shows.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from benchmarks import machine, output, questions
from benchmarks.policies import POLICIES
from benchmarks.replay import Costs, Run, Trace, oracle, replay
from benchmarks.traces import (
    BRANCH,
    HELD_OUT,
    TUNING,
    Text,
    Traces,
    prompt_sets,
    record,
)
from polyspec_ext import drawing, progress, tiny
from polyspec_ext.chain import Chain
from polyspec_ext.cli import options
from polyspec_ext.policies import Adaptive, RoundReport, StepReport

T = TypeVar("T")
SCHEMA = 2  # of the JSON report
LENGTH = 128  # new tokens of a recorded text
LIVE_LENGTH = 64  # and of one that is generated
CHAINS = (("target", "drafter"), ("target", "middle"), tiny.LEVELS)
MIXED, CHANGING = "mixed", "changing half-way"
NOTHING, TURNING = "nothing accepted", "then nothing accepted"
PLAIN, SHIPPED, BEST = "plain decoding", "windows as shipped", "best fixed windows"
FOUND = "fixed windows found on the other half"
HALVES = "best fixed windows of either half of a set"
LIMITS = {2: [12], 3: [24, 8]}  # largest windows of the search and of every policy
POSITIONS = 12  # of a block, whose acceptance is told
TIMED = 400  # rounds of a measurement of a policy's overhead


def all_windows(levels: int) -> list[list[int]]:
    """Those that are searched for the best fixed windows: whole blocks from below, and none."""
    if levels == 2:
        return [[k] for k in range(LIMITS[2][0] + 1)]
    most, inner = LIMITS[3]
    return [[0, 0]] + [
        [r * (k + 1), k] for k in range(inner + 1) for r in range(1, most // (k + 1) + 1)
    ]


def policy_of(name: str, levels: int, **options: Any) -> Adaptive:
    return POLICIES[name](max_windows=LIMITS[levels], **options)


def changing(sets: dict[str, list[Text]]) -> list[Text]:
    """Half of the set on which the drafter does best, then half of that on which it does worst of
    those in a language."""

    def share(name: str) -> float:
        return sum(sum(t.drafter) for t in sets[name]) / sum(len(t.tokens) for t in sets[name])

    spoken = [name for name in sets if name != "random"]
    best, worst = max(spoken, key=share), min(spoken, key=share)
    half = len(sets[best]) // 2
    return [*sets[best][:half], *sets[worst][:half]]


def rejected(texts: list[Text]) -> list[Text]:
    """The same texts from levels that never agree: the adversary's."""
    never = []
    for text in texts:
        no = [False] * len(text.tokens)
        branches = {at: [False] * BRANCH for at in range(len(no))}
        never.append(replace(text, drafter=no, middle=no, inner=no, branches=branches))
    return never


def prompt_orders(sets: dict[str, list[Text]]) -> dict[str, list[Text]]:
    """All that is replayed: the sets; mixed, one text of each in turns; changing half-way; and with
    levels that never agree, from the beginning or half-way."""
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


def searched(traces: Sequence[Trace], costs: Costs) -> dict[tuple[int, ...], Run]:
    """What every fixed choice of windows gives."""
    choices = all_windows(traces[0].levels)
    return {tuple(windows): replay(traces, costs, None, windows) for windows in choices}


def fastest(runs: dict[tuple[int, ...], Run]) -> tuple[int, ...]:
    return max(runs, key=lambda windows: runs[windows].speed)


def compared(traces: list[Trace], others: list[Trace], costs: Costs, start: list[int]) -> Any:
    """Tokens per second of every policy on one set, simulated.

    Args:
        others: the other half of the set.
    """
    levels = traces[0].levels
    fixed = searched(traces, costs)
    best, found = fastest(fixed), fastest(searched(others, costs))
    parts = [part for part in (traces[: len(traces) // 2], traces[len(traces) // 2 :]) if part]
    halves = [max(searched(part, costs).values(), key=lambda run: run.speed) for part in parts]
    rows: dict[str, Any] = {
        PLAIN: {"speed": replay(traces, costs, None, [0] * (levels - 1)).speed},
        SHIPPED: {"speed": replay(traces, costs, None, start).speed},
        FOUND: {"speed": fixed[found].speed, "windows": list(found)},
        BEST: {"speed": fixed[best].speed, "windows": list(best)},
        HALVES: {"speed": sum(r.tokens for r in halves) / sum(r.seconds for r in halves)},
    }
    for name in POLICIES:
        run = replay(traces, costs, policy_of(name, levels, guard=True), start)
        if name != "fixed":
            rows[name] = {"speed": run.speed, "windows_over_time": run.windows}
        else:
            rows["as shipped, guarded"] = {"speed": run.speed}
    rows["oracle"] = {"speed": oracle(traces, costs, all_windows(levels)).speed}
    return rows


def ablation(traces: list[Trace], costs: Costs, start: list[int]) -> Any:
    """Tokens per second of `online` by its history, and of `joint` by its forgetting."""

    def speed(name: str, **options: Any) -> float:
        policy = policy_of(name, traces[0].levels, **options)
        return replay(traces, costs, policy, start).speed

    return {
        "online, history": {h: speed("online", history=h) for h in (4, 16, 32, 64, 128, 256)},
        "joint, forgetting": {f: speed("joint", forgetting=f) for f in (0.7, 0.8, 0.9, 0.95, 1.0)},
        "without a guard": {name: speed(name, guard=False) for name in ("online", "joint")},
    }


def acceptance_by_position(traces: list[Trace]) -> list[float | None]:
    """[j]: share of the blocks that came to token j + 1 in which it was accepted, over all
    positions of the texts as beginnings, up to `POSITIONS` tokens; None where none came so far."""
    runs = [run for trace in traces for run in trace.runs[:-1]]
    reached = [sum(run >= j for run in runs) for j in range(POSITIONS + 1)]
    return [b / a if a else None for a, b in itertools.pairwise(reached)]


def overhead(levels: int) -> dict[str, float]:
    """Microseconds of `next` per round, of a chain of n levels: the least of some turns."""
    found = {}
    # Times at which speculation pays, or policies would be done before they choose.
    steps = [
        StepReport(n, 3, 2 if n < levels else 0, 3, 1, 1e-2 / n**2) for n in range(levels, 0, -1)
    ]
    text = list(range(600))
    for name in POLICIES:
        policy = policy_of(name, levels) if levels in LIMITS else POLICIES[name]()
        windows = [4 * 2**i for i in reversed(range(levels - 1))]
        policy.next(RoundReport(0, windows, text, 0))
        report = RoundReport(0, windows, text, 4, steps)
        best = math.inf
        plain = report._replace(committed=1, steps=[StepReport(1, 0, 0, 0, 1, 1e-2)])
        for _ in range(20):
            policy.next(plain)  # or a guard would want to see one
            began = time.perf_counter()
            for _ in range(TIMED // 20):
                policy.next(report)
            best = min(best, (time.perf_counter() - began) / (TIMED // 20))
        found[name] = 1e6 * best
    return found


def live(
    sets: dict[str, list[list[int]]], best: dict[str, list[int]], repeats: int
) -> dict[str, dict[str, float]]:
    """Tokens per second of decoding of the shipped three-level chain by prompt set and policy, in
    turns within one run, each at its fastest.

    Args:
        best: by set, fixed windows to set beside the policies.
    """
    levels = list(tiny.levels(pack=True).values())
    shipped = list(tiny.WINDOWS[tiny.LEVELS])
    chains: dict[str, Any] = {
        PLAIN: Chain(levels[:1]),
        SHIPPED: Chain(levels, shipped, rounds=tiny.ROUNDS[tiny.LEVELS]),
    }
    for name in POLICIES:
        if name != "fixed":
            chains[name] = Chain(levels, shipped, policy=policy_of(name, len(levels)))
    return {
        name: _generated({**chains, FOUND: Chain(levels, best[name])}, prompts, repeats)
        for name, prompts in sets.items()
    }


def _generated(chains: dict[str, Any], prompts: list[list[int]], repeats: int) -> dict[str, float]:
    spent: dict[str, list[float]] = {name: [] for name in chains}
    texts: list[list[int]] = []
    for turn in range(repeats + 1):
        for name, chain in chains.items():
            ran = [chain.generate([prompt], LIVE_LENGTH) for prompt in prompts]
            made = [out.sequences[0].tolist() for out in ran]
            if turn:
                spent[name].append(sum(out.stats.decode_seconds for out in ran))
            texts = texts or made
            if made != texts:
                raise RuntimeError(f"{name}: expected the texts of the other chains, given others")
    tokens = sum(len(a) - len(b) for a, b in zip(texts, prompts, strict=True))
    return {name: tokens / min(own) for name, own in spent.items()}


def report_of(args: argparse.Namespace) -> dict[str, Any]:
    """Measures; gives the report that the JSON holds."""
    if args.overhead and args.plots is not None:
        raise ValueError("--plots: expected no --overhead beside it, which replays nothing")
    before = machine.load_average()
    report: dict[str, Any] = {
        **machine.header("adaptation", SCHEMA, "cpu"),
        "overhead_us": {str(n): overhead(n) for n in (2, 3, 4)},
        "chains": {},
    }
    if not args.overhead:
        traces = _traces(args)
        report |= _replayed(traces, args.half)
        if args.live:
            found = report["chains"][", ".join(tiny.LEVELS)]
            sets = traces.half(args.half)
            report["live"] = live(
                {name: [text.prompt for text in sets[name][: args.live]] for name in sets},
                {name: found[name]["policies"][FOUND]["windows"] for name in sets},
                2,
            )
    report["load"] = {"before": before, "after": machine.load_average()}
    if args.plots is not None:
        draw(report, args.plots)
    # Of every round of every policy: what the pictures show, and most of the report.
    for sets in report["chains"].values():
        for own in sets.values():
            for row in own["policies"].values():
                row.pop("windows_over_time", None)
    return report


def _replayed(traces: Traces, half: str) -> dict[str, Any]:
    other = TUNING if half == HELD_OUT else HELD_OUT
    sets, others = (prompt_orders(traces.half(name)) for name in (half, other))
    chains: dict[str, dict[str, Any]] = {}
    for chain in CHAINS:
        costs = Costs([traces.seconds[name] for name in chain])
        start = list(tiny.WINDOWS[tuple(chain)])
        own = chains[", ".join(chain)] = {}
        for name, texts in sets.items():
            mine, theirs = ([Trace(t, chain) for t in some] for some in (texts, others[name]))
            own[name] = {
                "tokens": sum(trace.size for trace in mine),
                "policies": compared(mine, theirs, costs, start),
                "ablation": ablation(mine, costs, start),
                "acceptance_by_position": acceptance_by_position(mine),
            }
    return {"half": half, "chains": chains, "seconds": traces.seconds}


def _traces(args: argparse.Namespace) -> Traces:
    place: Path | None = args.traces
    if place is not None and place.exists():
        return Traces.read(place)
    progress.note("recording the traces, which takes a few minutes")
    data: Path = args.data or questions.GSM8K.parent
    sets = prompt_sets(data, 2 * args.prompts)
    if len(sets) == 1:
        raise ValueError(f"--data: expected a folder with the prompt sets, given {data}")
    traces = record(sets, LENGTH)
    if place is not None:
        traces.save(place)
    return traces


def markdown(report: dict[str, Any]) -> str:
    """The report as tables."""
    where, overheads = report["machine"], report["overhead_us"]
    lines = [f"# Window policies, {where['cpu']}", ""]
    lines += [f"{where['threads']} threads of {where['cores']} cores, torch {where['torch']}.", ""]
    lines += ["Microseconds per round:", ""]
    lines += output.table(
        ["policy", *(f"{n} levels" for n in overheads)],
        ([name, *(f"{own[name]:.1f}" for own in overheads.values())] for name in POLICIES),
    )
    for chain, sets in report["chains"].items():
        first = next(iter(sets.values()))
        half = f"Simulated time, the {report['half']} half of the prompts"
        lines += ["", f"## {chain}", "", f"{half}; tokens per second over plain decoding.", ""]
        lines += _by_set(sets, first["policies"], _over_plain)
        lines += ["", "Over the best fixed windows:", ""]
        lines += _by_set(
            sets, first["policies"], lambda own, row: _over(own, own["policies"][row]["speed"])
        )
        lines += ["", "Ablation, over the best fixed windows:", ""]
        options = [(name, value) for name, of in first["ablation"].items() for value in of]
        lines += _by_set(
            sets,
            options,
            lambda own, option: _over(own, own["ablation"][option[0]][option[1]]),
            "{0[0]} {0[1]}".format,
        )
    if "live" in report:
        live = report["live"]
        lines += ["", "## Live, three levels", "", "Tokens per second over plain decoding.", ""]
        rows = next(iter(live.values()))
        lines += _by_set(live, rows, lambda own, row: f"{own[row] / own[PLAIN]:.3f}")
    return "\n".join(lines)


def _by_set(
    sets: dict[str, Any],
    rows: Iterable[T],
    cell: Callable[[Any, T], str],
    label: Callable[[T], str] = str,
) -> list[str]:
    cells = ([label(row), *(cell(own, row) for own in sets.values())] for row in rows)
    return output.table(["", *sets], cells)


def _over_plain(results: dict[str, Any], row: str) -> str:
    found = results["policies"][row]
    windows = f" {found['windows']}" if found.get("windows") else ""
    return _over(results, found["speed"], PLAIN) + windows


def _over(results: dict[str, Any], speed: float, base: str = BEST) -> str:
    return f"{speed / results['policies'][base]['speed']:.3f}"


def draw(report: dict[str, Any], folder: Path) -> None:
    """Windows over time and acceptance by position, as PNG. ImportError without matplotlib."""
    pyplot = drawing.pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    sets = report["chains"]["target, drafter"]
    figure, axes = pyplot.subplots(len(sets), 1, squeeze=False, figsize=(9, 2 * len(sets)))
    for axis, (name, own) in zip(axes[:, 0], sets.items(), strict=True):
        for policy in ("online", "joint"):
            windows = own["policies"][policy]["windows_over_time"]
            axis.plot([w[0] for w in windows], label=policy, linewidth=0.8)
        axis.set_title(name, fontsize=8, loc="left")
    axes[0, 0].legend(fontsize=7)
    axes[-1, 0].set_xlabel("round")
    figure.tight_layout()
    drawing.save(figure, folder / "windows.png")
    figure, axis = pyplot.subplots(figsize=(6, 4))
    for name, own in sets.items():
        rates = [rate for rate in own["acceptance_by_position"] if rate is not None]
        axis.plot(range(1, len(rates) + 1), rates, marker=".", label=name)
    axis.set_xlabel("position in the block")
    axis.set_ylabel("accepted, of those reached")
    axis.legend(fontsize=7)
    figure.tight_layout()
    drawing.save(figure, folder / "acceptance.png")


def add_command(kinds: Any) -> None:
    """Adds ``adaptation`` to the kinds of benchmarks."""
    sub = kinds.add_parser(
        "adaptation",
        help="window policies beside the best fixed windows",
        description="Every window policy beside the best fixed windows, found by search, and "
        "beside an oracle: on recorded acceptance traces of the shipped models over several prompt "
        "sets, in simulated time, and live. Prints Markdown, or JSON.",
    )
    output.add_report(sub, report_of, markdown)
    options.add_count(sub, "--prompts", 12, "of each set, in either half")
    sub.add_argument(
        "--half",
        choices=(HELD_OUT, TUNING),
        default=HELD_OUT,
        help="of the prompts: whatever is chosen by looking at numbers is chosen on the one for "
        "tuning (default: %(default)s)",
    )
    sub.add_argument(
        "--data",
        type=options.folder,
        metavar="DIR",
        help="with gsm8k_test.jsonl, tinyshakespeare.txt and spec_bench_question.jsonl; what is "
        "not there is left out (default: shared/data beside the repository)",
    )
    sub.add_argument(
        "--traces",
        type=Path,
        metavar="FILE",
        help="read the traces from FILE, or record them there if there is none",
    )
    sub.add_argument(
        "--live",
        type=options.COUNT_OR_NONE,
        default=0,
        metavar="N",
        help="also generate from N prompts of each set (default: %(default)s)",
    )
    sub.add_argument(
        "--overhead", action="store_true", help="only the time that policies take themselves"
    )
    sub.add_argument("--plots", type=Path, metavar="DIR", help="draw PNGs there (matplotlib)")
