"""The tables of one run, and those over several."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyspec_ext.planning.theory import InsertionTest, insertion_test, lemma_seconds

from . import printed, statistics
from .form import (
    NONE,
    Column,
    Record,
    Table,
    below_one,
    beside,
    interval,
    number,
    word,
)
from .saved import Saved
from .statistics import Interval, Turns

TASK_NAMES = {
    "mt_bench": "MT-bench",
    "translation": "Translation",
    "summarization": "Summarisation",
    "qa": "QA",
    "math": "Math",
    "rag": "RAG",
    printed.OVERALL: "Overall",
}
GB = 1e-9


def task_name(task: str) -> str:
    """As the papers have it."""
    return TASK_NAMES.get(task, task)


def of_run(run: Saved) -> list[Table]:
    """The tables of one run that it has something for."""
    found = [
        overall(run),
        by_task(run),
        levels(run),
        times(run),
        passes(run),
        predictions(run),
        insertions(run),
        adaptation(run),
        variances(run),
        failures(run),
    ]
    return [table for table in found if table.records]


def of_several(runs: Sequence[Saved]) -> list[Table]:
    """Repeats of a run side by side, a table for each kind; and the targets beside each other."""
    groups: dict[str, list[Saved]] = {}
    for run in runs:
        groups.setdefault(run.key, []).append(run)
    repeated = [group for group in groups.values() if len(group) > 1]
    found = [side_by_side(group, place) for place, group in enumerate(repeated, 1)]
    return [*found, larger_targets(runs)]


def _spread(key: str, value: Interval | None) -> dict[str, Any]:
    if value is None:
        return {key: None, f"{key}_low": None, f"{key}_high": None}
    return {key: value.value, f"{key}_low": value.low, f"{key}_high": value.high}


def _compared(run: Saved, name: str, task: str) -> dict[str, Any]:
    """A method's speedup and mean accepted length in a task, over the turns that neither it nor
    the baseline failed, and what the paper prints."""
    ours, theirs = run.of_task(name, task), run.of_task(run.baseline, task)
    keys = statistics.same_turns(ours, theirs)
    paper = printed.cell_of(
        printed.target_of(run.target), printed.system_of(run.methods[name]), task
    )
    return {
        **_spread("speedup", statistics.speedup(ours, theirs, keys)),
        "paper_speedup": None if paper is None else paper.speedup,
        **_spread("length", statistics.pooled_length(ours, keys)),
        "paper_length": None if paper is None else paper.length,
        "turns": len(keys),
    }


def windows_of(method: Mapping[str, Any]) -> str:
    """Of a method, in words: its windows, tree and policy."""
    parts = []
    if method.get("windows"):
        parts.append(", ".join(map(str, method["windows"])))
    if method.get("tree"):
        parts.append("tree " + ", ".join(f"{k} {v}" for k, v in method["tree"].items()))
    if method.get("policy"):
        parts.append(str(method["policy"]))
    return "; ".join(parts)


def _best_two_levels(run: Saved) -> str | None:
    """The fastest of the methods of two levels in this engine."""
    found = {}
    for name, method in run.methods.items():
        if len(method["levels"]) == 2 and method["kind"] != "assisted":
            value = statistics.speedup(run.turns[name], run.turns[run.baseline])
            if value is not None:
                found[name] = value.value
    return max(found, key=lambda name: found[name]) if found else None


def lossless(run: Saved, name: str) -> dict[str, Any]:
    """What the losslessness column is made of; None where it does not apply."""
    found: dict[str, Any] = dict.fromkeys(
        ("identical", "tied", "other", "gap", "unknown", "z", "p_value", "texts")
    )
    if name == run.baseline and run.sampling == "greedy":
        return found
    turns = run.turns[name]
    if run.sampling == "greedy":
        dtype = str(run.target.get("dtype", "")).removeprefix("torch.")
        found |= statistics.greedy_texts(turns, dtype)._asdict()
    else:
        sampled = statistics.sampled_texts(turns)
        if sampled is not None:
            found |= sampled._asdict()
    return found


def _lossless_text(record: Record) -> str:
    if record["z"] is not None:
        return f"p = {record['p_value']:.2g} (z {record['z']:+.1f}, {record['texts']} texts)"
    if record["identical"] is None:
        return NONE
    known = record["identical"] + record["tied"] + record["other"]
    if not known:
        return "not compared"
    parts = [f"{record['identical']} of {known} identical"]
    if record["tied"]:
        parts.append(f"{record['tied']} tied")
    if record["other"]:
        parts.append(f"{record['other']} DIFFER")
    if record["gap"] is not None:
        parts.append(f"gap <= {record['gap']:.1e}")
    if record["unknown"]:
        parts.append(f"{record['unknown']} not compared")
    return ", ".join(parts)


def overall(run: Saved) -> Table:
    """Every method over all tasks (Figure 2)."""
    two = _best_two_levels(run)
    records = []
    for name, method in run.methods.items():
        over_two = None
        if two is not None and len(method["levels"]) > 2:
            over_two = statistics.speedup(run.turns[name], run.turns[two])
        records.append(
            {
                "method": name,
                "label": method["label"],
                "kind": method["kind"],
                "levels": " <- ".join(method["levels"]),
                "windows": windows_of(method),
                "tokens_per_second": statistics.rate(run.turns[name]),
                **_compared(run, name, printed.OVERALL),
                **_spread("over_two_levels", over_two),
                "failed": len(run.failed[name]),
                **lossless(run, name),
            }
        )
    losing = sum(record["speedup"] is not None and record["speedup"] < 1 for record in records)
    best = "" if two is None else f" The best two levels: {run.methods[two]['label']}."
    return Table(
        "overall",
        "Overall (Figure 2)",
        f"Speedup over {run.methods[run.baseline]['label']}: new tokens per second of wall time, "
        "prefill included, over the same turns, per repeat, then the median; in brackets the 95 % "
        "bootstrap interval over questions. Mean accepted length: tokens per verification of the "
        "target, its correction or bonus included, pooled. Lossless: "
        + (
            "texts beside the baseline's of the same prompts; tied: parted where the target's two "
            "largest logits are a tie of rounding."
            if run.sampling == "greedy"
            else "p-value of the texts' likelihood being as far from its mean under the target."
        )
        + f"{best} Slower than the baseline: {losing} of {len(records) - 1}.",
        [
            Column("method", word("label"), words=True),
            Column("windows", word("windows"), words=True),
            Column("tokens/s", number("tokens_per_second", 1)),
            Column("speedup", beside(interval("speedup"), "paper_speedup"),
                   loses=below_one("speedup")),
            Column("over best two levels", interval("over_two_levels"),
                   loses=below_one("over_two_levels")),
            Column("mean accepted", beside(interval("length"), "paper_length")),
            Column("turns", number("turns", 0)),
            Column("failed", number("failed", 0)),
            Column("lossless", _lossless_text, words=True),
        ],
        records,
    )  # fmt: skip


def by_task(run: Saved) -> Table:
    """Table 2: speedup and mean accepted length per task and overall."""
    tasks = [*run.tasks, printed.OVERALL]
    records = []
    for name, method in run.methods.items():
        record: dict[str, Any] = {"method": name, "label": method["label"]}
        for task in tasks:
            found = _compared(run, name, task)
            record |= {f"{task}_{key}": value for key, value in found.items()}
        records.append(record)

    def column(task: str) -> Column:
        speed, length = f"{task}_speedup", f"{task}_length"
        paper = number(f"{task}_paper_speedup"), number(f"{task}_paper_length")

        def text(record: Record) -> str:
            shown = f"{interval(speed)(record)} / {number(length)(record)}"
            if record[f"{task}_paper_speedup"] is None:
                return shown
            return f"{shown} (paper {paper[0](record)} / {paper[1](record)})"

        return Column(task_name(task), text, loses=below_one(speed))

    return Table(
        "table2",
        "Speedup / mean accepted length by task (Table 2)",
        "As above, for each task by itself.",
        [Column("method", word("label"), words=True), *(column(task) for task in tasks)],
        records,
    )


@dataclass
class Sums:
    """Of a level, over turns; `accepted` tokens by `verified` verifications."""

    name: str
    passes: int = 0
    seconds: float = 0.0
    verified: int = 0
    accepted: int = 0

    @property
    def length(self) -> float | None:
        """L."""
        return _over(self.accepted, self.verified)

    @property
    def pass_seconds(self) -> float | None:
        """T."""
        return _over(self.seconds, self.passes)


def _sums(turns: Turns) -> tuple[int, float | None, list[Sums]]:
    """New tokens, decode seconds (None where they are not told), and the sums by level."""
    tokens, decode, known = 0, 0.0, True
    found: list[Sums] = []
    for turn in turns.values():
        tokens += turn.new_tokens or 0
        spent = statistics.decode_seconds(turn)
        if spent is None:
            known = False
        else:
            decode += spent
        for place, level in enumerate(turn.levels):
            if place == len(found):
                found.append(Sums(level.name))
            entry = found[place]
            entry.passes += level.passes
            entry.seconds += level.seconds
            entry.verified += len(level.accepted)
            entry.accepted += sum(level.accepted)
    return tokens, decode if known and turns else None, found


def _over(a: float, b: float | None) -> float | None:
    return a / b if b else None


def levels(run: Saved) -> Table:
    """L_i, F_i and T_i of every level of every method, and the bandwidth of its passes."""
    copy = run.about.get("copy_bandwidth_bytes_per_second")
    weights = run.about.get("weight_bytes") or {}
    records = []
    for name, method in run.methods.items():
        tokens, decode, found = _sums(run.turns[name])
        for place, level in enumerate(found, 1):
            seconds = level.pass_seconds
            size = weights.get(level.name)
            speed = None if not size or not seconds else size / seconds
            records.append(
                {
                    "method": name,
                    "label": method["label"],
                    "level": place,
                    "name": level.name,
                    "length": level.length,
                    "passes_per_token": _over(level.passes, tokens),
                    "ms": None if seconds is None else 1e3 * seconds,
                    "share": None if decode is None else _over(level.seconds, decode),
                    "gbs": None if speed is None else GB * speed,
                    "of_copy": None if speed is None else _over(speed, copy),
                }
            )
    bandwidth = "" if not copy else f" ({GB * copy:.1f} GB/s)"
    return Table(
        "levels",
        "Levels: L, F and T",
        "L: mean acceptance length of the level's verifications; F: its forward passes per new "
        "token; T: milliseconds of a pass; share: of the decode time. GB/s: bytes of weights read "
        "in a pass, over T, and in per cent of the copy bandwidth measured in the run"
        f"{bandwidth}, which counts bytes read and written.",
        [
            Column("method", word("label"), words=True),
            Column("i", number("level", 0)),
            Column("level", word("name"), words=True),
            Column("L", number("length")),
            Column("F", number("passes_per_token", 3)),
            Column("T, ms", number("ms")),
            Column("share, %", number("share", 0, 100)),
            Column("GB/s", number("gbs", 1)),
            Column("of copy, %", number("of_copy", 0, 100)),
        ],
        records,
    )


def times(run: Saved) -> Table:
    """Prefill and decode apart."""
    base = run.turns[run.baseline]
    records = []
    for name, method in run.methods.items():
        turns = run.turns[name]
        _, decode, found = _sums(turns)
        told = [turn for turn in turns.values() if turn.prefill_seconds is not None]
        prefill = sum(turn.prefill_seconds or 0 for turn in told)
        wall = sum(turn.seconds or 0 for turn in told)
        read = sum(turn.prompt_tokens or 0 for turn in told)
        inside = sum(level.seconds for level in found)
        records.append(
            {
                "method": name,
                "label": method["label"],
                "turns": len(turns),
                "prefill_ms": 1e3 * prefill / len(told) if told else None,
                "prefill_tokens_per_second": _over(read, prefill),
                "prefill_share": _over(prefill, wall) if told else None,
                "decode_tokens_per_second": statistics.rate(turns, statistics.decode_seconds),
                **_spread(
                    "decode_speedup",
                    statistics.speedup(turns, base, seconds=statistics.decode_seconds),
                ),
                "engine_share": 1 - inside / decode if decode and found else None,
            }
        )
    return Table(
        "times",
        "Prefill and decode apart",
        "Decode: wall time less prefill. Engine: the share of the decode time that no level's "
        "passes account for.",
        [
            Column("method", word("label"), words=True),
            Column("prefill, ms/turn", number("prefill_ms", 1)),
            Column("prompt tokens/s", number("prefill_tokens_per_second", 0)),
            Column("prefill share, %", number("prefill_share", 0, 100)),
            Column("decode tokens/s", number("decode_tokens_per_second", 1)),
            Column("decode speedup", interval("decode_speedup"), loses=below_one("decode_speedup")),
            Column("engine, %", number("engine_share", 0, 100)),
        ],
        records,
    )


def passes(run: Saved) -> Table:
    """Seconds of the models' passes by number of tokens, and how alike they are to the target."""
    found: Mapping[str, Mapping[str, float]] = run.about.get("pass_seconds") or {}
    overlap = run.about.get("overlap") or {}
    weights = run.about.get("weight_bytes") or {}
    copy = run.about.get("copy_bandwidth_bytes_per_second")
    widths = sorted({int(width) for times in found.values() for width in times})
    records = []
    for name, times_of in found.items():
        size, one = weights.get(name), times_of.get("1")
        speed = size / one if size and one else None
        records.append(
            {
                "name": name,
                **{
                    f"ms_{width}": None if (s := times_of.get(str(width))) is None else 1e3 * s
                    for width in widths
                },
                "weight_bytes": size,
                "gbs": None if speed is None else GB * speed,
                "of_copy": None if speed is None else _over(speed, copy),
                "overlap": overlap.get(name),
            }
        )
    return Table(
        "passes",
        "Passes of the models by themselves",
        "Milliseconds by number of tokens; GB/s of the weights in a pass of one token. E[1 - TV]: "
        "overlap of a model's distribution with the target's, at temperature 1.",
        [
            Column("model", word("name"), words=True),
            *(
                Column(f"{width} token{'s' * (width > 1)}", number(f"ms_{width}"))
                for width in widths
            ),
            Column("weights, MB", number("weight_bytes", 1, 1e-6)),
            Column("GB/s", number("gbs", 1)),
            Column("of copy, %", number("of_copy", 0, 100)),
            Column("E[1 - TV]", number("overlap", 3)),
        ],
        records,
    )


def _lemma(found: Sequence[Sums]) -> float | None:
    """Lemma 3.1's seconds per token, of measured L, T and beta; None where a level never ran."""
    if len(found) < 2 or any(not level.verified for level in found[:-1]):
        return None
    lengths = [level.accepted / level.verified for level in found[:-1]]
    seconds = [level.pass_seconds or 0.0 for level in found]
    return lemma_seconds(1, lengths, seconds, found[-1].passes / found[-2].verified)


def predictions(run: Saved) -> Table:
    """What was predicted, against what was measured."""
    records = []
    planned = run.about.get("prediction") or {}
    for name, method in run.methods.items():
        turns = run.turns[name]
        tokens, decode, found = _sums(turns)
        forecast = (planned.get(name) or {}).get("tokens_per_second")
        lemma = _lemma(found)
        if not tokens or (forecast is None and lemma is None):
            continue
        measured = statistics.rate(turns, statistics.decode_seconds)
        per_token = None if decode is None else 1e3 * decode / tokens
        in_passes = 1e3 * sum(level.seconds for level in found) / tokens
        records.append(
            {
                "method": name,
                "label": method["label"],
                "predicted_tokens_per_second": forecast,
                "decode_tokens_per_second": measured,
                "predicted_over_measured": None if forecast is None else _over(forecast, measured),
                "lemma_ms": None if lemma is None else 1e3 * lemma,
                "passes_ms": in_passes,
                "decode_ms": per_token,
            }
        )
    return Table(
        "predictions",
        "Predicted against measured",
        "Tokens per second: the planner's prediction from measured passes and acceptances, beside "
        "those of decoding. Milliseconds per token: Lemma 3.1 with the run's own L, T and beta "
        "(it leaves out what a middle level emits and the target rejects); what the levels' passes "
        "took, sum of F T; and all of the decode time.",
        [
            Column("method", word("label"), words=True),
            Column("planner, tokens/s", number("predicted_tokens_per_second", 1)),
            Column("measured, tokens/s", number("decode_tokens_per_second", 1)),
            Column("ratio", number("predicted_over_measured")),
            Column("Lemma 3.1, ms/token", number("lemma_ms", 3)),
            Column("sum of F T, ms/token", number("passes_ms", 3)),
            Column("decode, ms/token", number("decode_ms", 3)),
        ],
        records,
    )


_ASKED = ("chain", "eagle")  # methods whose levels were asked for
_FIXED = (*_ASKED, "planned", "cascade")  # whose windows do not change


def _pairs(run: Saved) -> Iterator[tuple[str, str, int]]:
    """Methods with and without one model between two others, and the new one's place."""
    asked = [name for name, method in run.methods.items() if method["kind"] in _ASKED]
    for after, before in itertools.product(asked, asked):
        longer, shorter = run.methods[after]["levels"], run.methods[before]["levels"]
        for place in range(1, len(longer) - 1):
            if [*longer[:place], *longer[place + 1 :]] == shorter:
                yield before, after, place


def insertions(run: Saved) -> Table:
    """Table 1: the insertion test with the run's own T and L, then the paper's."""
    records = []
    base = run.turns[run.baseline]
    for before, after, place in _pairs(run):
        old, new = _sums(run.turns[before])[2], _sums(run.turns[after])[2]
        if len(old) < place + 1 or len(new) < place + 2:
            continue
        above, below, own = old[place - 1], old[place], new[place]
        three = (above, new[place - 1], own)
        if any(not level.verified for level in three) or not (own.passes and above.passes):
            continue
        seconds, new_seconds, seconds_below = (
            1e3 * (level.pass_seconds or 0.0) for level in (above, own, below)
        )
        length, length_of_new, new_length = (level.accepted / level.verified for level in three)
        test = insertion_test(
            seconds, new_seconds, seconds_below, length, length_of_new, new_length,
            below.passes / above.verified,
        )  # fmt: skip
        ratio = statistics.speedup(run.turns[after], run.turns[before])
        speeds = [statistics.speedup(run.turns[name], base) for name in (before, after)]
        case = f"{run.methods[after]['label']} (without: {run.methods[before]['label']})"
        records.append(
            _insertion(
                case, "measured", seconds, length_of_new, new_seconds, new_length, seconds_below,
                length, test, [None if s is None else s.value for s in speeds], ratio,
            )
        )  # fmt: skip
    for row in printed.INSERTIONS if records else ():
        test = insertion_test(
            row.seconds, row.new_seconds, row.seconds_below, row.length, row.length_of_new,
            row.new_length, 1.0,
        )  # fmt: skip
        records.append(
            _insertion(row.case, "paper", *row[1:7], test, [row.before, row.after], None)
        )
    return Table(
        "table1",
        "Does the model in the middle pay? (Table 1)",
        "Theorem 3.2 with L and T as measured: condition (1) T_new/T_i < L_new (1/L_i - "
        "1/L_{i-new}), and Lemma 3.1 before against after (the exact condition where M_{i+1} is "
        "the last; the paper prints no beta, so its rows have none). L_i and T_i are those of the "
        "chain without the new model.",
        [
            Column("case", word("case"), words=True),
            Column("numbers", word("source"), words=True),
            Column("T_i, ms", number("t_i")),
            Column("L_{i-new}", number("length_of_new")),
            Column("T_new, ms", number("t_new")),
            Column("L_new", number("new_length")),
            Column("T_{i+1}, ms", number("t_below")),
            Column("L_i", number("length")),
            Column("T_new/T_i", number("ratio_above", 3)),
            Column("bound (1)", number("bound_above", 3)),
            Column("(1)", word("condition_1"), words=True),
            Column("Lemma 3.1", word("exact"), words=True),
            Column("speedup before", number("before"), loses=below_one("before")),
            Column("after", number("after"), loses=below_one("after")),
            Column("after / before", interval("gain"), loses=below_one("gain")),
        ],
        records,
    )


def _insertion(
    case: str,
    source: str,
    seconds: float,
    length_of_new: float,
    new_seconds: float,
    new_length: float,
    seconds_below: float,
    length: float,
    test: InsertionTest,
    speedups: Sequence[float | None],
    gain: Interval | None,
) -> dict[str, Any]:
    return {
        "case": case,
        "source": source,
        "t_i": seconds,
        "length_of_new": length_of_new,
        "t_new": new_seconds,
        "new_length": new_length,
        "t_below": seconds_below,
        "length": length,
        "ratio_above": test.ratio_above,
        "bound_above": test.bound_above,
        "condition_1": "helps" if test.above else "does not",
        "exact_bound": None if source == "paper" else test.exact_bound,
        "exact": None if source == "paper" else "helps" if test.exact else "does not",
        "before": speedups[0],
        "after": speedups[1],
        **_spread("gain", gain),
    }


_SELECTS = ("select", "draft", "switch")  # in the name of a policy that chooses among drafters


def adaptation(run: Saved) -> Table:
    """The adaptation paper's tables: a policy beside the best fixed windows of the same levels,
    and of any drafter where it chooses among them."""
    base = run.turns[run.baseline]
    rates = {
        name: found.value
        for name in run.methods
        if (found := statistics.speedup(run.turns[name], base)) is not None
    }
    records = []
    for name, method in run.methods.items():
        if method["kind"] != "adaptive" or name not in rates:
            continue
        selects = any(text in str(method.get("policy", "")).lower() for text in _SELECTS)
        fixed = [
            other
            for other, one in run.methods.items()
            if one["kind"] in _FIXED
            and other in rates
            and (one["levels"] == method["levels"] or (selects and len(one["levels"]) == 2))
        ]
        best = max(fixed, key=lambda other: rates[other]) if fixed else None
        gain = None if best is None else statistics.speedup(run.turns[name], run.turns[best])
        paper = _printed_gain(run, method, selects)
        records.append(
            {
                "method": name,
                "label": method["label"],
                "policy": method.get("policy"),
                "chooses": "drafter" if selects else "windows",
                **_spread("speedup", statistics.speedup(run.turns[name], base)),
                "best_fixed": None if best is None else run.methods[best]["label"],
                "best_fixed_speedup": None if best is None else rates[best],
                **_spread("gain", gain),
                "paper": paper,
            }
        )
    return Table(
        "adaptation",
        "Adaptive windows and choice of drafter",
        "Gain: tokens per second over those of the fastest fixed windows of the same levels in "
        "this run, over the same turns. The paper's gains are over its best fixed window, on its "
        "models.",
        [
            Column("method", word("label"), words=True),
            Column("policy", word("policy"), words=True),
            Column("chooses", word("chooses"), words=True),
            Column("speedup", interval("speedup"), loses=below_one("speedup")),
            Column("best fixed", word("best_fixed"), words=True),
            Column("its speedup", number("best_fixed_speedup")),
            Column("gain", interval("gain", 3), loses=below_one("gain")),
            Column("paper", word("paper"), words=True),
        ],
        records,
    )


def _printed_gain(run: Saved, method: Mapping[str, Any], selects: bool) -> str:
    if selects:
        low, high = printed.SELECTION_GAIN
        return f"{1 + low:.3f} to {1 + high:.3f}"
    own = printed.EAGLE_GAINS.get(printed.target_of(run.target) or "")
    if own is not None and "eagle" in str(method["levels"][-1]).lower():
        return f"{1 + own:.3f} (EAGLE-2, MT-bench)"
    return f"{1 + printed.WINDOW_GAIN:.3f} ({printed.WINDOW_SPEEDUP:.2f} over plain decoding)"


def variances(run: Saved) -> Table:
    """Figure 4: the variance of the acceptance length, by query."""
    found = {
        name: statistics.length_variances(run.turns[name])
        for name, method in run.methods.items()
        if len(method["levels"]) > 1
    }
    found = {name: own for name, own in found.items() if own}
    tasks = {turn.question_id: turn.task for turn in run.lines}
    questions = [q for q in tasks if any(q in own for own in found.values())]
    records = [
        {
            "question_id": question,
            "task": tasks[question],
            **{name: own.get(question) for name, own in found.items()},
        }
        for question in questions
    ]
    low, high = printed.VARIANCES[run.sampling]
    return Table(
        "figure4",
        f"Variance of the acceptance length by query, {run.sampling} (Figure 4)",
        "Over all verifications by the target of a question's turns. The paper's, of its chain of "
        f"three levels, lie mostly between {low:g} and {high:g}.",
        [
            Column("question", word("question_id"), words=True),
            Column("task", lambda record: task_name(str(record["task"])), words=True),
            *(Column(str(run.methods[name]["label"]), number(name, 1)) for name in found),
        ],
        records,
    )


def failures(run: Saved) -> Table:
    """Turns that failed, and why."""
    counted: Counter[tuple[str, str]] = Counter()
    for name in run.methods:
        for turn in run.failed[name]:
            counted[name, str(turn.error)] += 1
    return Table(
        "failures",
        "Failed turns",
        "They are in no number; what a method is compared with leaves out the same turns.",
        [
            Column("method", word("label"), words=True),
            Column("turns", number("turns", 0)),
            Column("error", word("error"), words=True),
        ],
        [
            {"method": name, "label": run.methods[name]["label"], "turns": n, "error": error}
            for (name, error), n in counted.items()
        ],
    )


def side_by_side(runs: Sequence[Saved], place: int) -> Table:
    """Runs of the same models and settings: the overall speedup of each."""
    names = dict.fromkeys(
        (name, windows_of(method)) for run in runs for name, method in run.methods.items()
    )
    records = []
    for name, windows in names:
        own = [
            run if name in run.methods and windows_of(run.methods[name]) == windows else None
            for run in runs
        ]
        label = next(run.methods[name]["label"] for run in own if run is not None)
        record: dict[str, Any] = {"method": name, "label": label, "windows": windows}
        for number_of, run in enumerate(own, 1):
            found = None
            if run is not None:
                found = statistics.speedup(run.turns[name], run.turns[run.baseline])
            record |= _spread(f"run_{number_of}", found)
        records.append(record)
    return Table(
        f"runs{place}",
        "Speedup, run by run: " + ", ".join(run.label for run in runs),
        "The same models, settings and kind of machine; every run over its own baseline.",
        [
            Column("method", word("label"), words=True),
            Column("windows", word("windows"), words=True),
            *(
                Column(run.label, interval(f"run_{at}"), loses=below_one(f"run_{at}"))
                for at, run in enumerate(runs, 1)
            ),
        ],
        records,
    )


def larger_targets(runs: Sequence[Saved]) -> Table:
    """Table 3: EAGLE-2 and the longer chains by target, the smallest first, beside the paper's."""
    records = []
    for run in sorted(runs, key=lambda one: float(one.target.get("parameters") or 0)):
        for name, method in run.methods.items():
            if method["kind"] == "eagle" or len(method["levels"]) > 2:
                records.append(
                    {
                        "run": run.label,
                        "target": run.target_name,
                        "parameters": run.target.get("parameters"),
                        "temperature": run.temperature,
                        "label": method["label"],
                        **_compared(run, name, printed.OVERALL),
                    }
                )
    seen = {printed.target_of(run.target) for run in runs}
    for target in printed.LARGER:
        for system in (printed.EAGLE_2, printed.POLYBASIC) if target not in seen else ():
            paper = printed.SPEEDUPS[target, system][printed.OVERALL]
            records.append(
                {
                    "run": "paper",
                    "target": target,
                    "parameters": None,
                    "temperature": None,
                    "label": system,
                    **_spread("speedup", None),
                    "paper_speedup": paper.speedup,
                    **_spread("length", None),
                    "paper_length": paper.length,
                    "turns": 0,
                }
            )
    return Table(
        "table3",
        "By target (Table 3)",
        "Each over the baseline of its own run.",
        [
            Column("target", word("target"), words=True),
            Column("parameters, millions", number("parameters", 0, 1e-6)),
            Column("run", word("run"), words=True),
            Column("temperature", number("temperature", 1)),
            Column("method", word("label"), words=True),
            Column("speedup", beside(interval("speedup"), "paper_speedup"),
                   loses=below_one("speedup")),
            Column("mean accepted", beside(interval("length"), "paper_length")),
            Column("turns", number("turns", 0)),
        ],
        records,
    )  # fmt: skip


def as_printed() -> Table:
    """Tables 2 and 3 as the paper has them."""
    tasks = (*printed.TASKS, printed.OVERALL)
    records = []
    for (target, system), cells in printed.SPEEDUPS.items():
        record: dict[str, Any] = {"target": target, "system": system}
        for task in tasks:
            cell = cells.get(task)
            record[f"{task}_speedup"] = None if cell is None else cell.speedup
            record[f"{task}_length"] = None if cell is None else cell.length
        records.append(record)

    def column(task: str) -> Column:
        speed, length = number(f"{task}_speedup"), number(f"{task}_length")

        def text(record: Record) -> str:
            if record[f"{task}_speedup"] is None:
                return NONE
            return f"{speed(record)} / {length(record)}"

        return Column(task_name(task), text)

    return Table(
        "printed",
        "What the papers print",
        "Speedup / mean accepted length on an A800, as printed. Known inconsistencies: "
        + " ".join(printed.INCONSISTENCIES),
        [
            Column("target", word("target"), words=True),
            Column("system", word("system"), words=True),
            *(column(task) for task in tasks),
        ],
        records,
    )
