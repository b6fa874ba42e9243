"""The papers' tables from saved runs (`record`) as Markdown and JSON.

Tables are per run, but Table 3, which has a row for each target.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from . import output, record
from .measuring import verdict
from .questions import OTHER, OVERALL, TASK_NAMES, TASKS

SAMPLES, SEED, TAIL = 2000, 0, 0.025  # of the bootstrap; TAIL: share beyond each bound
_SAME_TURN = ["question_id", "turn"]
_FIXED = ("chain", "eagle", "planned", "cascade")  # kinds of methods with fixed windows
# Titles, notes and columns of tables; the numbers that the papers print.
_TABLES, PAPERS = (
    json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    for name in ("tables.json", "papers.json")
)
# By target and system, and task: speedup over plain decoding, accepted tokens per pass.
SPEEDUPS = {(target, system): by_task for target, system, by_task in PAPERS["speedups"]}
POLYBASIC, FOUR_LEVELS, EAGLE_2 = "polybasic", "four levels", "EAGLE-2"
LARGER = ("Vicuna-13B", "LLaMA2-70B")  # Table 3
Record = dict[str, Any]


def bootstrap(key: str, rows: pd.DataFrame, columns: Sequence[str]) -> Record:
    """Return a ratio of sums and its 95 % interval, under `key`, `key`_low and `key`_high. Each
    question is drawn with all its turns; one question has no interval.

    Args:
        rows: turns; rows without a number in any of `columns` are left out.
        columns: a, b, of which the sums' a / b is computed; or a, b, c, d: of (a / b) / (c / d).
    """
    result: Record = dict.fromkeys((key, f"{key}_low", f"{key}_high"))
    rows = rows.dropna(subset=columns)
    if rows.empty:
        return result
    sums = rows.groupby("question_id", sort=False)[list(columns)].sum().to_numpy(float)
    count, drawn = len(sums), np.ones((1, len(sums)))
    if count > 1:
        # Counts of draws by question; the same for the same number of questions.
        random = np.random.default_rng(SEED)
        draws = random.multinomial(count, np.full(count, 1 / count), size=SAMPLES)
        drawn = np.concatenate([drawn, draws])
    with np.errstate(divide="ignore", invalid="ignore"):
        totals = drawn @ sums
        rates = totals[:, ::2] / totals[:, 1::2]
        value, *samples = rates[:, 0] / rates[:, 1:].prod(1)
    bounds = np.nanquantile(samples, [TAIL, 1 - TAIL]).tolist() if samples else []
    return result | dict(zip(result, [float(value), *bounds], strict=False))


def _rates(turns: pd.DataFrame, key: str, by: str = "seconds") -> Record:
    return bootstrap(key, turns, ["new_tokens", by, "new_tokens_base", f"{by}_base"])


# ---- what the papers print -----------------------------------------------------------------------


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def target_of(model: Mapping[str, Any]) -> str | None:
    """Return the paper's name of a model, by its path, id or name, or None."""
    name = str(model.get("place") or model["name"]).rstrip("/").rpartition("/")[2]
    plain = _letters(name).removeprefix("meta")
    return next((target for target, _ in SPEEDUPS if plain.startswith(_letters(target))), None)


def system_of(method: Mapping[str, Any]) -> str | None:
    """Return the papers' system that equals a method of ``run.json``, or None."""
    if method["kind"] not in ("chain", "eagle") or not method.get("tree"):
        return None
    _, *middle, last = (str(name).lower() for name in method["levels"])
    if _letters(last) not in ("eagle", "eagle2"):
        return None
    named = not middle or any("w4" in name for name in middle)
    return {0: EAGLE_2, 1: POLYBASIC, 2: FOUR_LEVELS}.get(len(middle)) if named else None


def speedup_of(target: str | None, system: str | None, task: str) -> dict[str, float | None]:
    """Return the paper's speedup and mean accepted length, each None if not printed."""
    printed = SPEEDUPS.get((target or "", system or ""), {}).get(task, (None, None))
    return dict(zip(("paper_speedup", "paper_length"), printed, strict=True))


# ---- runs ----------------------------------------------------------------------------------------


class Run:
    """A saved run; `label` is its name beside other runs."""

    def __init__(self, label: str, folder: Path) -> None:
        self.label, self.facts = label, record.read_facts(folder)
        self.lines = pd.DataFrame(record.read_turns(folder))
        if self.lines.empty:
            raise ValueError(f"RUN: expected a run with turns, given {folder} without any")
        self.methods: dict[str, Record] = {row["name"]: row for row in self.facts["methods"]}
        self.labels = {name: str(method["label"]) for name, method in self.methods.items()}
        baselines = [name for name, method in self.methods.items() if method["baseline"]]
        if len(baselines) != 1:
            expected = "expected one method that is the baseline"
            raise ValueError(f"{label}: {expected}, given {len(baselines)}")
        (self.baseline,) = baselines
        # Successful turns, with the tokens that the target emitted in its verifications.
        self.turns = turns = self.lines[self.lines.status == record.OK].copy()
        numbers = ["prompt_tokens", "new_tokens", "seconds", "prefill_seconds"]
        turns[numbers] = turns[numbers].astype(float)
        turns["decode_seconds"] = turns.seconds - turns.prefill_seconds
        turns["accepted"] = [levels[0]["accepted"] if levels else [] for levels in turns.levels]
        turns["emitted"], turns["verified"] = turns.accepted.map(sum), turns.accepted.map(len)
        self.levels = _level_sums(turns)
        self.tasks = [task for task in (*TASKS, OTHER) if task in set(self.lines.task)]
        # Models may have a prefix before the name ("eager target").
        name = self.methods[self.baseline]["levels"][0]
        models = {model["name"].split(" ")[-1]: model for model in reversed(self.facts["models"])}
        self.target: Record = models[name]
        self.paper = target_of(self.target)  # the papers' name
        self.target_name = str(self.target["place"] or self.target["name"])
        self.temperature = float(self.facts["settings"]["temperature"])
        self.sampling = "sampled" if self.temperature > 0 else "greedy"
        self.variances = PAPERS["variances"][self.sampling]  # the paper's, mostly

    def levels_of(self, method: str) -> list[Any]:
        """Return the sums of each level, target first; empty for other engines."""
        chosen = self.levels.index.get_level_values("method") == method
        return list(self.levels[chosen].itertuples())

    def turns_of(self, method: str, task: str = OVERALL) -> pd.DataFrame:
        """Return a method's successful turns of a task."""
        turns = self.turns[self.turns.method == method]
        return turns if task == OVERALL else turns[turns.task == task]

    def common(self, method: str, base: str | None = None, task: str = OVERALL) -> pd.DataFrame:
        """Return turns that succeeded with both methods; `base`: default the baseline."""
        columns = [*_SAME_TURN, "new_tokens", "seconds", "decode_seconds"]
        bases = self.turns_of(base or self.baseline)[columns]
        return self.turns_of(method, task).merge(bases, on=_SAME_TURN, suffixes=("", "_base"))

    def speedup(self, method: str, key: str = "speedup", base: str | None = None) -> Record:
        """Return the rate of a method over the rate of `base`, over the same turns, under `key`."""
        return _rates(self.common(method, base), key)

    def compared(self, method: str, task: str = OVERALL) -> Record:
        """Return speedup and mean accepted length, measured and printed in the paper."""
        turns = self.common(method, task=task)
        verified = turns[turns.verified > 0]
        return {
            **_rates(turns, "speedup"),
            **bootstrap("length", verified, ["emitted", "verified"]),
            **speedup_of(self.paper, system_of(self.methods[method]), task),
            "turns": len(turns),
        }

    def fastest(self, names: Collection[str]) -> str | None:
        """Return the fastest of `names`; None: no rates."""
        speeds = {name: speed for name in names if (speed := self.speedup(name)["speedup"])}
        return max(speeds, key=speeds.__getitem__, default=None)

    def rate(self, method: str, by: str = "seconds") -> float:
        """Return new tokens per second; NaN without turns."""
        sums = self.turns_of(method).dropna(subset=[by])[["new_tokens", by]].sum()
        return float(sums.new_tokens / sums[by]) if sums[by] else math.nan

    def labelled(self, rows: Any) -> pd.DataFrame:
        """Return rows of methods with labels, in the order of the methods."""
        names = pd.DataFrame(self.labels.items(), columns=["method", "label"])
        return names.merge(pd.DataFrame(rows, columns=None if len(rows) else ["method"]))


def _level_sums(turns: pd.DataFrame) -> pd.DataFrame:
    rows = [
        {**level, "method": turn.method, "level": number, "emitted": sum(level["accepted"]),
         "verified": len(level["accepted"])}
        for turn in turns.itertuples() for number, level in enumerate(turn.levels, 1)
    ]  # fmt: skip
    numbers = dict.fromkeys(("passes", "seconds", "emitted", "verified"), "sum")
    frame = pd.DataFrame(rows, columns=["method", "level", "name", *numbers])
    sums = frame.groupby(["method", "level"]).agg({"name": "first", **numbers})
    return sums.assign(length=sums.emitted / sums.verified, ms=1e3 * sums.seconds / sums.passes)


# ---- tables --------------------------------------------------------------------------------------


class Table:
    """Rows of numbers. `tables.json` has the title, note and columns: by heading, "key format"; no
    format for words, "%" for a share in per cent.

    Args:
        rows: records or a frame; in `records`, for JSON, NaN and infinities become None.
        more: columns at "...", or the last.
        words: of the title and note.
    """

    def __init__(self, key: str, rows: Any, more: Record | None = None, **words: Any) -> None:
        self.key, about = key, _TABLES[key]
        self.title, self.note = (about[n].format(**words).rstrip() for n in ("title", "note"))
        frame = pd.DataFrame(rows).astype(object).replace([math.inf, -math.inf], None)
        self.records: list[Record] = frame.where(frame.notna(), None).to_dict("records")
        self._shown: dict[str, tuple[str, str, str]] = {}
        for head, spec in {**about["columns"], "...": ""}.items():
            added = {head: spec} if spec else more or {}
            self._shown |= {name: form.partition(" ") for name, form in added.items()}

    def lines(self) -> list[str]:
        """Return the lines of Markdown."""
        shown = self._shown.values()
        numbers = [at for at, (_, _, form) in enumerate(shown) if form]
        rows = [
            [_cell(row, key, form).replace("|", "\\|") for key, _, form in shown]
            for row in self.records
        ]
        return output.table(list(self._shown), rows, numbers)

    def markdown(self) -> list[str]:
        """Return heading, note and table."""
        return [f"### {self.title}", "", self.note, "", *self.lines(), ""]


def _cell(row: Record, key: str, form: str) -> str:
    value, low, paper = row.get(key), row.get(f"{key}_low"), row.get(f"paper_{key}")
    measured = isinstance(value, int | float)
    words = f"{value:{form}}".rstrip("%") if measured else value or "-"
    if low is not None:
        words += f" [{low:{form}}, {row[f'{key}_high']:{form}}]"
    return words if paper is None else f"{words} (paper {paper:.2f})"


def windows_of(method: Mapping[str, Any]) -> str:
    """Return windows, tail, tree and policy of a method in words."""
    tree = ", ".join(f"{name} {value}" for name, value in (method.get("tree") or {}).items())
    parts = (
        ", ".join(map(str, method.get("windows") or ())),
        f"tail {method['tail']}" if method.get("tail") else "",
        f"tree {tree}" if tree else "",
        method.get("policy"),
    )
    return "; ".join(word for word in parts if word)


def overall(run: Run) -> Table:
    """Return the table of every method over all tasks (Figure 2)."""
    lengths = {name: len(method["levels"]) for name, method in run.methods.items()}
    peers = [k for k, method in run.methods.items() if method["kind"] in ("assisted", "engine")]
    best = run.fastest([name for name, n in lengths.items() if n == 2 and name not in peers])
    failed = run.lines[run.lines.status != record.OK].method.value_counts()
    records = [
        {
            "method": name,
            "windows": windows_of(method),
            "tokens_per_second": run.rate(name),
            **(run.speedup(name, "over", best) if best and lengths[name] > 2 else {"over": None}),
            **run.compared(name),
            "failed": int(failed.get(name, 0)),
            **_lossless(run, name),
        }
        for name, method in run.methods.items()
    ]
    losing = sum((row["speedup"] or 1) < 1 for row in records)
    lossless = "Tied: texts that part where the target's largest logits are a tie of rounding."
    if run.temperature > 0:
        count = sum(row.get("p_value") is not None for row in records)
        lossless = (
            f"Lossless: {count} p-values of the texts' likelihood under the target; by chance one "
            f"is below {0.05 / max(count, 1):.2g} in 5 of 100 such tables."
        )
    words = {"baseline": run.labels[run.baseline], "lossless": lossless, "losing": losing}
    words["best"] = f" The best two levels: {run.labels[best]}." if best else ""
    chains = [name for name in run.methods if name not in peers]
    for name in chains:
        if run.methods[name]["kind"] == "planned" and (fastest := run.fastest(chains)):
            regret = run.rate(fastest) / run.rate(name) - 1
            words["best"] += (
                f" The plan's choice takes {regret:.1%} more time than the fastest, "
                f"{run.labels[fastest]}."
                if regret
                else " The plan's choice is the fastest."
            )
    return Table("overall", run.labelled(records), others=len(records) - 1, **words)


def _lossless(run: Run, name: str) -> Record:
    """Compare texts with the baseline's, or their likelihood with its mean."""
    turns = run.turns_of(name)
    known, greedy = list(turns.lossless.dropna()), run.temperature == 0
    if not known or (greedy and name == run.baseline):
        return {"lossless": "not compared" if greedy and name != run.baseline else "-"}
    unknown, found = len(turns) - len(known), verdict(known, run.target["dtype"])
    found["lossless"] += f", {unknown} not compared" * (greedy and unknown > 0)
    return {**found, "unknown": unknown}


def by_task(run: Run) -> Table:
    """Return speedup and mean accepted length per task and overall (Table 2)."""
    tasks = (*run.tasks, OVERALL)
    records = []
    for name in run.methods:
        row: Record = {"method": name}
        for task in tasks:
            numbers = run.compared(name, task)
            paper = numbers["paper_speedup"]
            row |= {f"{task}_{key}": value for key, value in numbers.items()}
            words = _cell({**numbers, "paper_speedup": None}, "speedup", ".2f")
            words += f" / {output.number(numbers['length'], '.2f')}"
            if paper is not None:
                words += f" (paper {paper:.2f} / {numbers['paper_length']:.2f})"
            row[task] = words
        records.append(row)
    columns = {TASK_NAMES[task]: f"{task} .2f" for task in tasks}
    return Table("table2", run.labelled(records), columns)


def levels(run: Run) -> Table:
    """Return L_i, F_i and T_i of every level of every method."""
    sums = run.turns.groupby("method")[["new_tokens", "decode_seconds"]].sum()
    frame = run.labelled(run.levels.join(sums).reset_index())
    copy = run.facts["copy_bandwidth_bytes_per_second"]
    bandwidth = 1e3 * frame.name.map(run.facts["weight_bytes"]) / frame.ms
    frame = frame.assign(
        passes_per_token=frame.passes / frame.new_tokens,
        share=frame.seconds / frame.decode_seconds,
        gbs=1e-9 * bandwidth,
        of_copy=bandwidth / copy,
    )
    return Table("levels", frame, copy=1e-9 * copy)


def decoding(run: Run) -> Table:
    """Return prefill and decoding separately, and predictions."""
    known = run.turns.dropna(subset=["prefill_seconds"]).groupby("method")
    columns = ["prefill_seconds", "prompt_tokens", "seconds", "decode_seconds", "new_tokens"]
    sums = known[columns].sum().reindex(list(run.methods))
    inside = run.levels.groupby("method").seconds.sum().reindex(sums.index)
    forecasts = {name: rate["tokens_per_second"] for name, rate in run.facts["prediction"].items()}
    measured = [run.rate(name, "decode_seconds") for name in sums.index]
    predicted = sums.index.map(forecasts)
    frame = pd.DataFrame(
        {
            "turns": run.turns.groupby("method").size().reindex(sums.index),
            "prefill_ms": 1e3 * sums.prefill_seconds / known.size(),
            "prefill_tokens_per_second": sums.prompt_tokens / sums.prefill_seconds,
            "prefill_share": sums.prefill_seconds / sums.seconds,
            "decode_tokens_per_second": measured,
            "engine_share": 1 - inside / sums.decode_seconds,
            "predicted_tokens_per_second": predicted,
            "predicted_over_measured": predicted / measured,
            "lemma_ms": [_lemma(run.levels_of(name)) for name in sums.index],
            "passes_ms": 1e3 * inside / sums.new_tokens,
            "decode_ms": 1e3 * sums.decode_seconds / sums.new_tokens,
        },
        sums.index,
    )
    speedups = [_rates(run.common(name), "decode_speedup", "decode_seconds") for name in sums.index]
    frame = frame.join(pd.DataFrame(speedups, index=sums.index)).rename_axis("method").reset_index()
    return Table("decoding", run.labelled(frame))


def _lemma(by_level: Sequence[Any]) -> float:
    # sum_{i<n} T_i / L_i + beta T_n / L_{n-1}, ms per token
    *verifying, last = by_level or [None]
    if not verifying or not all(level.verified for level in verifying):
        return math.nan
    drafting = 1e3 * last.seconds / verifying[-1].emitted if last.passes else 0.0
    return float(sum(level.ms / level.length for level in verifying) + drafting)


def insertions(run: Run) -> Table:
    """Return the insertion test with the run's T and L, then the paper's (Table 1)."""
    rows = []
    kinds = [name for name, method in run.methods.items() if method["kind"] in ("chain", "eagle")]
    for after, before in itertools.product(kinds, kinds):
        longer, shorter = run.methods[after]["levels"], run.methods[before]["levels"]
        for at in range(1, len(longer) - 1):
            if [*longer[:at], *longer[at + 1 :]] == shorter:
                rows += _inserted(run, before, after, at)
    theirs = [row | {"source": "paper"} for row in PAPERS["insertions"]]
    frame = pd.DataFrame(rows + theirs if rows else ())
    if rows:
        words = {True: "helps", False: "does not"}.get
        frame["ratio_above"] = frame.t_new / frame.t_i
        frame["bound_above"] = frame.new_length * (1 / frame.length - 1 / frame.length_of_new)
        frame["condition_1"] = (frame.ratio_above < frame.bound_above).map(words)
        frame["exact"] = (
            (frame.t_new < frame.exact_bound).map(words).where(frame.exact_bound.notna())
        )
    return Table("table1", frame)


def _inserted(run: Run, before: str, after: str, at: int) -> list[Record]:
    """Return a row of Table 1; empty if a level never ran."""
    old, new = run.levels_of(before)[at - 1 :], run.levels_of(after)[at - 1 :]
    if len(old) < 2 or len(new) < 3:
        return []
    (above, below, *_), (upper, middle, *lower) = old, new
    if not all((upper.verified, middle.verified, above.verified, middle.passes, above.passes)):
        return []
    # Maximum ms of a pass of M_new without a longer time per token of M_i, over M_i and all levels
    # below: Lemma 3.1 with counted passes instead of N / L.
    allowed = sum(level.seconds for level in old) * upper.emitted / above.emitted
    most = 1e3 * (allowed - sum(level.seconds for level in (upper, *lower))) / middle.passes
    row = {
        "case": f"{run.labels[after]} (without: {run.labels[before]})", "source": "measured",
        "t_i": above.ms, "length_of_new": upper.length, "t_new": middle.ms,
        "new_length": middle.length, "t_below": below.ms if below.passes else 0.0,
        "length": above.length, "exact_bound": most,
        "before": run.speedup(before)["speedup"], "after": run.speedup(after)["speedup"],
    }  # fmt: skip
    return [row | run.speedup(after, "gain", before)]


def adaptation(run: Run) -> Table:
    """Return the table of every policy and the best fixed windows of its levels."""
    records = []
    for name, method in run.methods.items():
        speedup = run.speedup(name)
        if method["kind"] != "adaptive" or speedup["speedup"] is None:
            continue
        alike = (k for k, other in run.methods.items() if other["levels"] == method["levels"])
        best = run.fastest([k for k in alike if run.methods[k]["kind"] in _FIXED])
        gains = PAPERS["gains"]
        paper = f"{1 + gains['window']:.3f} ({gains['window_speedup']:.2f} over plain decoding)"
        gain = gains["eagle"].get(run.paper)
        if gain is not None and "eagle" in method["levels"][-1].lower():
            paper = f"{1 + gain:.3f} (EAGLE-2, MT-bench)"
        row = {"method": name, "policy": method["policy"], **speedup}
        if best is not None:
            speed = run.speedup(best)["speedup"]
            row |= {"best_fixed": run.labels[best], "best_fixed_speedup": speed}
            row |= run.speedup(name, "gain", best)
        records.append({**row, "paper": paper})
    return Table("adaptation", run.labelled(records))


def variances(run: Run) -> Table:
    """Return the variance of the acceptance length by query (Figure 4)."""
    verified = run.turns[run.turns.verified > 0].explode("accepted")
    by_query = verified.groupby(["question_id", "method"]).accepted
    frame = by_query.agg(lambda counts: statistics.pvariance(counts.tolist())).unstack()
    names = [n for n, method in run.methods.items() if len(method["levels"]) > 1 and n in frame]
    tasks = dict(zip(run.lines.question_id, run.lines.task, strict=True))
    frame = frame[names].dropna(how="all").reindex([key for key in tasks if key in frame.index])
    frame.insert(0, "task", frame.index.map(tasks).map(TASK_NAMES))
    low, high = run.variances
    columns = {run.labels[name]: f"{name} .1f" for name in names}
    words = {"sampling": run.sampling, "low": low, "high": high}
    rows = frame.rename_axis("question_id").reset_index() if names else ()
    return Table("figure4", rows, columns, **words)


def failures(run: Run) -> Table:
    """Return numbers of failed turns by error."""
    failed = run.lines[run.lines.status != record.OK]
    counts = failed.groupby(["method", "error"], sort=False).size().rename("turns").reset_index()
    return Table("failures", run.labelled(counts))


def tables_of(run: Run) -> list[Table]:
    """Return the nonempty tables of a run."""
    every = (overall, by_task, levels, decoding, insertions, adaptation, variances, failures)
    return [table for make in every if (table := make(run)).records]


def larger_targets(runs: Sequence[Run]) -> Table:
    """Return EAGLE-2 and longer chains by target, smallest first (Table 3)."""
    records = [
        {"target": run.target_name, "millions": 1e-6 * run.target["parameters"], "run": run.label}
        | {"temperature": run.temperature, "label": method["label"], **run.compared(name)}
        for run in sorted(runs, key=lambda run: run.target["parameters"])
        for name, method in run.methods.items()
        if method["kind"] == "eagle" or len(method["levels"]) > 2
    ]
    seen = {run.paper for run in runs}
    records += [
        {"target": target, "run": "paper", "label": system, "turns": 0}
        | speedup_of(target, system, OVERALL)
        for target in LARGER
        for system in (EAGLE_2, POLYBASIC)
        if target not in seen
    ]
    return Table("table3", records)


# ---- files ---------------------------------------------------------------------------------------


def load(folders: Sequence[Path]) -> list[Run]:
    """Load runs, labelled by folder names, with the parent's name where names are equal."""
    paths = [folder.resolve() for folder in folders]
    if len(set(paths)) != len(paths):
        raise ValueError(f"RUN: expected different folders, given {', '.join(map(str, folders))}")
    names = [path.name for path in paths]
    labels = (
        n if names.count(n) == 1 else f"{path.parent.name}/{n}"
        for n, path in zip(names, paths, strict=True)
    )
    return list(map(Run, labels, paths))


def write(runs: Sequence[Run], folder: Path) -> None:
    """Write report.md, and report.json with full numbers."""
    title = "Benchmark report: " + ", ".join(dict.fromkeys(run.target_name for run in runs))
    lines = [f"# {title}", "", "What is slower than plain decoding is shown like the rest.", ""]
    lines += [f"Of the papers' numbers: {' '.join(PAPERS['inconsistencies'])}", ""]

    def section(label: str, note: str, tables: Sequence[Table]) -> dict[str, Any]:
        lines.extend([f"## {label}", "", note, ""])
        lines.extend(line for table in tables for line in table.markdown())
        return {t.key: {n: getattr(t, n) for n in ("title", "note", "records")} for t in tables}

    shown = [
        {"label": run.label, **run.facts, "tables": section(run.label, summary(run), tables)}
        for run, tables in ((run, tables_of(run)) for run in runs)
    ]
    between = [table for table in (larger_targets(runs),) if table.records]
    several = section("Between runs", "Targets beside each other.", between)
    whole = {"schema": 2, "command": "bench report", "runs": shown, "several": several}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.md").write_text("\n".join(lines), encoding="utf-8")
    text = json.dumps(whole, indent=1, allow_nan=False) + "\n"
    (folder / "report.json").write_text(text, encoding="utf-8")


def summary(run: Run) -> str:
    """Return a text about models, machine, settings and finished turns."""
    facts, target = run.facts, run.target
    where, settings = facts["machine"], facts["settings"]
    done, failed = len(run.lines), len(run.lines) - len(run.turns)
    batch = settings.get("batch", 1)  # missing in the first runs
    expected = settings["turns"] * len(run.methods)
    text = (
        f"Target: {run.target_name}, {target['parameters'] / 1e6:.0f} million parameters, "
        f"{target['dtype']}. {where['device_name']}, threads: {where['threads']} on "
        f"{where['cores']} cores, torch {facts['versions']['torch']}. "
        f"{run.lines.question_id.nunique()} questions of {settings['questions']}, "
        f"temperature {run.temperature:g}, up to {settings['max_new_tokens']} new tokens"
        + (f", {batch} of them in a call" if batch > 1 else "")
        + f"; {done - failed} turns measured, {failed} failed. Begun {facts['created']}, commit "
        f"{facts['commit']}" + (" with local changes." if facts.get("dirty") else ".")
    )
    return text + (f" NOT FINISHED: {done} of {expected} turns." if done < expected else "")
