"""Every number of a report, beside an independent count of the run's JSON lines."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_runs as runs
import pytest
from scipy.stats import norm

from benchmarks.__main__ import main
from benchmarks.paper import report

Tables = dict[str, list[dict[str, Any]]]


def tables_of(folder: Path) -> Tables:
    """Records of every table, as report.json has them."""
    whole = json.loads(json.dumps(report.report_of(report.load([folder]))))
    (run,) = whole["runs"]
    return {key: table["records"] for key, table in run["tables"].items()}


def measured(folder: Path) -> Path:
    """A run of the shipped models over five questions."""
    questions = folder / "question.jsonl"
    rows = [
        {"question_id": 81, "category": "math", "turns": ["3 bags of 8 apples?", "And 2 more?"]},
        {"question_id": 161, "category": "translation", "turns": ["Translate: drei."]},
        {"question_id": 241, "category": "summarization", "turns": ["Sum up: " + "a b. " * 9]},
        {"question_id": 321, "category": "qa", "turns": ["who has 12 eggs"]},
        {"question_id": 401, "category": "math_reasoning", "turns": ["$6 a week. 10 weeks?"]},
    ]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["paper", "--output", str(folder), "--questions", str(questions)]
    command += ["--max-new-tokens", "8", "--plan-seconds", "0", "--no-compile", "--repeats", "2"]
    methods = "plain,generate,drafter,middle+drafter,online:drafter"
    assert main([*command, "--methods", methods]) == 0
    return folder


@pytest.fixture(scope="module", params=["greedy", "sampled", "measured"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    if request.param == "measured":
        return measured(folder)
    about = runs.facts(float(request.param == "sampled"), place="lmsys/vicuna-7b-v1.3")
    return runs.save(folder, about, runs.lines(about, seed=3))


@pytest.fixture(scope="module")
def about(saved: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((saved / "run.json").read_text())
    return found


@pytest.fixture(scope="module")
def found(saved: Path) -> Tables:
    return tables_of(saved)


def wall(line: dict[str, Any]) -> float:
    return float(line["seconds"])


def decode(line: dict[str, Any]) -> float:
    return float(line["seconds"] - line["prefill_seconds"])


def ratio(
    lines: list[dict[str, Any]],
    ours: str,
    theirs: str,
    task: str = "overall",
    seconds: Callable[[dict[str, Any]], float] = wall,
) -> float | None:
    a, b = runs.ok(lines, ours, task), runs.ok(lines, theirs, task)
    both = sorted(set(a) & set(b))
    if seconds is decode:
        both = [k for k in both if None not in (a[k]["prefill_seconds"], b[k]["prefill_seconds"])]
    each = []
    for repeat in sorted({key[2] for key in both}):
        keys = [key for key in both if key[2] == repeat]
        rates = [
            sum(x[k]["new_tokens"] for k in keys) / sum(seconds(x[k]) for k in keys) for x in (a, b)
        ]
        each.append(rates[0] / rates[1])
    return statistics.median(each) if each else None


def per_second(turns: dict[Any, dict[str, Any]], seconds: Callable[[Any], float]) -> float:
    each = []
    for repeat in {key[2] for key in turns}:
        own = [line for key, line in turns.items() if key[2] == repeat]
        each.append(sum(x["new_tokens"] for x in own) / sum(seconds(x) for x in own))
    return statistics.median(each)


def mean_accepted(lines: list[dict[str, Any]], name: str, task: str) -> float | None:
    own, base = runs.ok(lines, name, task), runs.ok(lines, "plain", task)
    counts = [n for k in set(own) & set(base) if own[k]["levels"]
              for n in own[k]["levels"][0]["accepted"]]  # fmt: skip
    return statistics.fmean(counts) if counts else None


def names_of(about: dict[str, Any], levels: int, *kinds: str) -> list[str]:
    """Methods of so many levels, of some kinds or of any."""
    return [
        m["name"]
        for m in about["methods"]
        if len(m["levels"]) == levels and (not kinds or m["kind"] in kinds)
    ]


def test_overall(saved: Path, about: dict[str, Any], found: Tables) -> None:
    lines = runs.read(saved)
    assert [row["method"] for row in found["overall"]] == [m["name"] for m in about["methods"]]
    best = max(names_of(about, 2), key=lambda m: ratio(lines, m, "plain") or 0)
    for row in found["overall"]:
        name = row["method"]
        own, base = runs.ok(lines, name), runs.ok(lines, "plain")
        assert row["speedup"] == pytest.approx(ratio(lines, name, "plain"))
        assert row["speedup_low"] <= row["speedup"] <= row["speedup_high"]
        assert row["length"] == pytest.approx(mean_accepted(lines, name, "overall"))
        assert row["turns"] == len(set(own) & set(base))
        assert row["tokens_per_second"] == pytest.approx(per_second(own, wall))
        assert row["failed"] == sum(
            line["method"] == name and line["status"] == "failed" for line in lines
        )
        if name in names_of(about, 3):
            assert row["over_two_levels"] == pytest.approx(ratio(lines, name, best))
        else:
            assert row["over_two_levels"] is None
    by_name = {row["method"]: row for row in found["overall"]}
    assert by_name["plain"]["speedup"] == by_name["plain"]["speedup_high"] == 1
    if "eagle-2" not in by_name:
        assert all(row["paper_speedup"] is None for row in found["overall"])
        return
    assert by_name["three"]["paper_speedup"] == 3.48
    assert by_name["three"]["paper_length"] == 9.88
    assert by_name["eagle-2"]["paper_speedup"] == 2.61
    assert by_name["slow"]["paper_speedup"] is None
    assert sum(row["failed"] for row in found["overall"]) > 0


def test_by_task(saved: Path, found: Tables) -> None:
    lines = runs.read(saved)
    for row in found["table2"]:
        for task in {"overall", *(line["task"] for line in lines)}:
            assert row[f"{task}_speedup"] == pytest.approx(
                ratio(lines, row["method"], "plain", task)
            )
            assert row[f"{task}_length"] == pytest.approx(mean_accepted(lines, row["method"], task))
    for three in (row for row in found["table2"] if row["method"] == "three"):
        assert (three["math_paper_speedup"], three["math_paper_length"]) == (4.43, 10.28)
        assert (three["rag_paper_speedup"], three["rag_paper_length"]) == (2.98, 10.30)


def test_lossless_column(saved: Path, about: dict[str, Any], found: Tables) -> None:
    lines = runs.read(saved)
    sampled = about["settings"]["temperature"] > 0
    for row in found["overall"]:
        own = runs.ok(lines, row["method"])
        if not sampled:
            if row["method"] == "plain":
                assert row["identical"] is None
                continue
            told = [x["lossless"] for x in own.values() if x["lossless"] is not None]
            parted = [x["gap"] for x in told if not x["identical"]]
            assert row["identical"] == sum(x["identical"] for x in told)
            assert row["tied"] == sum(gap <= 1e-4 for gap in parted)
            assert row["other"] == sum(gap > 1e-4 for gap in parted)
            assert row["gap"] == max(parted, default=None)
            assert row["unknown"] == len(own) - len(told)
            assert row["z"] is None
            continue
        told = [line["lossless"] for line in own.values()]
        total = sum(x["surprise"] for x in told)
        z = total / math.sqrt(sum(x["variance"] for x in told))
        assert row["texts"] == len(told)
        assert row["z"] == pytest.approx(z)
        assert row["p_value"] == pytest.approx(2 * norm.sf(abs(z)))
        assert row["identical"] is None


def test_levels(saved: Path, about: dict[str, Any], found: Tables) -> None:
    lines = runs.read(saved)
    there = {m["name"] for m in about["methods"] if m["kind"] != "generate"}
    assert {row["method"] for row in found["levels"]} == there
    copy = about["copy_bandwidth_bytes_per_second"]
    for row in found["levels"]:
        own = list(runs.ok(lines, row["method"]).values())
        parts = [line["levels"][row["level"] - 1] for line in own]
        counts = [n for part in parts for n in part["accepted"]]
        seconds, passes = sum(p["seconds"] for p in parts), sum(p["passes"] for p in parts)
        tokens = sum(line["new_tokens"] for line in own)
        assert {part["name"] for part in parts} == {row["name"]}
        assert row["length"] == (pytest.approx(statistics.fmean(counts)) if counts else None)
        assert row["passes_per_token"] == pytest.approx(passes / tokens)
        # (A policy may never draft.)
        assert row["ms"] == (pytest.approx(1e3 * seconds / passes) if passes else None)
        assert row["share"] == pytest.approx(seconds / sum(map(decode, own)))
        size = about["weight_bytes"].get(row["name"])
        if size is None or not passes:
            assert row["gbs"] is None
            continue
        assert row["gbs"] == pytest.approx(size * passes / seconds / 1e9)
        assert row["of_copy"] == pytest.approx(size * passes / seconds / copy)


def test_times_and_predictions(saved: Path, about: dict[str, Any], found: Tables) -> None:
    lines = runs.read(saved)
    for row in found["times"]:
        own = runs.ok(lines, row["method"])
        assert row["turns"] == len(own)
        if row["method"] in names_of(about, 1, "generate"):
            assert row["prefill_ms"] is row["decode_speedup"] is row["engine_share"] is None
            continue
        prefill = sum(x["prefill_seconds"] for x in own.values())
        inside = sum(level["seconds"] for x in own.values() for level in x["levels"])
        assert row["prefill_ms"] == pytest.approx(1e3 * prefill / len(own))
        assert row["prefill_share"] == pytest.approx(prefill / sum(map(wall, own.values())))
        read = sum(x["prompt_tokens"] for x in own.values())
        assert row["prefill_tokens_per_second"] == pytest.approx(read / prefill)
        assert row["decode_tokens_per_second"] == pytest.approx(per_second(own, decode))
        expected = ratio(lines, row["method"], "plain", seconds=decode)
        assert row["decode_speedup"] == pytest.approx(expected)
        assert row["engine_share"] == pytest.approx(1 - inside / sum(map(decode, own.values())))
    names = {row["method"] for row in found["predictions"]}
    assert names == {*names_of(about, 2), *names_of(about, 3), *about["prediction"]}
    for row in found["predictions"]:
        own = list(runs.ok(lines, row["method"]).values())
        tokens = sum(line["new_tokens"] for line in own)
        depth = len(own[0]["levels"])
        passes = [sum(x["levels"][i]["passes"] for x in own) for i in range(depth)]
        seconds = [sum(x["levels"][i]["seconds"] for x in own) for i in range(depth)]
        if depth == 1:
            assert row["lemma_ms"] is None
            continue
        counts = [[n for x in own for n in x["levels"][i]["accepted"]] for i in range(depth)]
        lengths = [sum(c) / len(c) for c in counts[:-1]]
        lemma = sum(s / p / length for s, p, length in zip(seconds, passes, lengths, strict=False))
        lemma += seconds[-1] / len(counts[-2]) / lengths[-1]
        assert row["lemma_ms"] == pytest.approx(1e3 * lemma)
        assert row["passes_ms"] == pytest.approx(1e3 * sum(seconds) / tokens)
        assert row["decode_ms"] == pytest.approx(1e3 * sum(map(decode, own)) / tokens)
        measured = per_second(runs.ok(lines, row["method"]), decode)
        assert row["decode_tokens_per_second"] == pytest.approx(measured)
        forecast = about["prediction"].get(row["method"], {}).get("tokens_per_second")
        assert row["predicted_tokens_per_second"] == forecast
        if forecast is not None:
            assert row["predicted_over_measured"] == pytest.approx(forecast / measured)


def test_insertion_test(saved: Path, about: dict[str, Any], found: Tables) -> None:
    lines = runs.read(saved)
    rows = [row for row in found["table1"] if row["source"] == "measured"]
    (three,) = names_of(about, 3)
    last = next(m["levels"][-1] for m in about["methods"] if m["name"] == three)
    without = [
        m["name"]
        for m in about["methods"]
        if m["kind"] in ("chain", "eagle") and m["levels"] == ["target", last]
    ]
    assert len(rows) == len(without) > 0

    def level(name: str, place: int) -> tuple[float, float, int, int]:
        """T in ms, L, passes and verifications."""
        parts = [x["levels"][place] for x in runs.ok(lines, name).values()]
        counts = [n for part in parts for n in part["accepted"]]
        passes = sum(part["passes"] for part in parts)
        seconds = sum(part["seconds"] for part in parts)
        return 1e3 * seconds / passes, statistics.fmean(counts or [0]), passes, len(counts)

    def own(name: str) -> tuple[list[float], list[int], int]:
        """Milliseconds and passes by level, and the target's tokens."""
        turns = [x["levels"] for x in runs.ok(lines, name).values()]
        by_level = list(zip(*turns, strict=True))
        times = [1e3 * sum(part["seconds"] for part in parts) for parts in by_level]
        tokens = sum(n for part in by_level[0] for n in part["accepted"])
        return times, [sum(part["passes"] for part in parts) for parts in by_level], tokens

    for row, before in zip(rows, without, strict=True):
        (t_i, l_i, _, _), (t_below, _, _, _) = level(before, 0), level(before, 1)
        (_, l_i_new, _, _), (t_new, l_new, _, _) = level(three, 0), level(three, 1)
        bound = l_new * (1 / l_i - 1 / l_i_new)
        (old_times, _, old_tokens), (times, passes, tokens) = own(before), own(three)
        exact = (sum(old_times) / old_tokens - (times[0] + times[2]) / tokens) * tokens / passes[1]
        names = ("t_i", "length_of_new", "t_new", "new_length", "t_below", "length")
        assert [row[n] for n in names] == pytest.approx([t_i, l_i_new, t_new, l_new, t_below, l_i])
        assert row["ratio_above"] == pytest.approx(t_new / t_i)
        assert row["bound_above"] == pytest.approx(bound)
        assert row["condition_1"] == ("helps" if t_new / t_i < bound else "does not")
        assert row["exact_bound"] == pytest.approx(exact)
        assert row["exact"] == ("helps" if t_new < exact else "does not")
        faster = sum(times) / tokens < sum(old_times) / old_tokens
        assert row["exact"] == ("helps" if faster else "does not")
        assert row["before"] == pytest.approx(ratio(lines, before, "plain"))
        assert row["after"] == pytest.approx(ratio(lines, three, "plain"))
        assert row["gain"] == pytest.approx(ratio(lines, three, before))
    printed = [row for row in found["table1"] if row["source"] == "paper"]
    bounds, ratios = ([row[n] for row in printed] for n in ("bound_above", "ratio_above"))
    assert bounds == pytest.approx([-0.116, 0.330, 0.461], abs=1e-3)
    assert ratios == pytest.approx([0.80, 0.318, 0.403], abs=1e-3)
    assert [row["condition_1"] for row in printed] == ["does not", "helps", "helps"]


def test_adaptation(saved: Path, about: dict[str, Any], found: Tables) -> None:
    lines = runs.read(saved)
    (row,) = found["adaptation"]
    (online,) = names_of(about, 2, "adaptive")
    levels = next(m["levels"] for m in about["methods"] if m["name"] == online)
    fixed = [m["name"] for m in about["methods"] if m["levels"] == levels]
    best = max((n for n in fixed if n != online), key=lambda name: ratio(lines, name, "plain") or 0)
    assert row["method"] == online
    assert row["best_fixed_speedup"] == pytest.approx(ratio(lines, best, "plain"))
    assert row["gain"] == pytest.approx(ratio(lines, online, best))
    assert row["paper"].startswith("1.077" if online == "online:drafter" else "1.071")


def test_variance_by_query(saved: Path, about: dict[str, Any], found: Tables) -> None:
    lines = runs.read(saved)
    assert len(found["figure4"]) == len({line["question_id"] for line in lines})
    for row in found["figure4"]:
        for name in names_of(about, 2) + names_of(about, 3):
            counts = [
                n
                for (question, _, _), line in runs.ok(lines, name).items()
                if question == row["question_id"]
                for n in line["levels"][0]["accepted"]
            ]
            expected = statistics.pvariance(counts) if counts else None
            assert row[name] == (None if expected is None else pytest.approx(expected))


def test_passes_and_failures(saved: Path, about: dict[str, Any], found: Tables) -> None:
    assert [row["name"] for row in found["passes"]] == list(about["pass_seconds"])
    copy = about["copy_bandwidth_bytes_per_second"]
    for row in found["passes"]:
        times, size = about["pass_seconds"][row["name"]], about["weight_bytes"][row["name"]]
        for width, seconds in times.items():
            assert row[f"ms_{width}"] == pytest.approx(1e3 * seconds)
        assert row["gbs"] == pytest.approx(size / times["1"] / 1e9)
        assert row["of_copy"] == pytest.approx(size / times["1"] / copy)
        assert row["overlap"] == about["overlap"].get(row["name"])
    lines = runs.read(saved)
    counted: dict[tuple[str, str], int] = {}
    for line in lines:
        if line["status"] == "failed":
            key = (line["method"], line["error"])
            counted[key] = counted.get(key, 0) + 1
    rows = found.get("failures", [])
    assert {(r["method"], r["error"]): r["turns"] for r in rows} == counted


def test_a_failed_turn_is_left_out_of_both_sides(tmp_path: Path) -> None:
    about = runs.facts()
    lines = runs.lines(about, seed=5)
    kept = [
        line for line in lines if (line["method"] in ("plain", "two")) and line["status"] == "ok"
    ]
    lost = {("plain", 82, 0, 1), ("two", 83, 0, 0)}
    changed = [
        runs.failed(line, "error")
        if (line["method"], line["question_id"], line["turn"], line["repeat"]) in lost
        else line
        for line in kept
    ]
    gone = {key[1:] for key in lost}
    without = [
        line for line in kept if (line["question_id"], line["turn"], line["repeat"]) not in gone
    ]
    tables = tables_of(runs.save(tmp_path / "a", about, changed))
    others = tables_of(runs.save(tmp_path / "b", about, without))
    (row,) = (row for row in tables["overall"] if row["method"] == "two")
    (other,) = (row for row in others["overall"] if row["method"] == "two")
    assert row["failed"] == 1
    assert other["failed"] == 0
    same = ("speedup", "speedup_low", "speedup_high", "length", "turns")
    assert [row[key] for key in same] == [other[key] for key in same]


def test_a_method_with_fewer_questions_is_compared_over_those(tmp_path: Path) -> None:
    about = runs.facts()
    few = [
        line
        for line in runs.lines(about, seed=6)
        if line["method"] != "three" or line["question_id"] in (80, 81, 85)
    ]
    folder = runs.save(tmp_path, about, few)
    rows = {row["method"]: row for row in tables_of(folder)["overall"]}
    lines = [line for line in runs.read(folder) if line["question_id"] in (80, 81, 85)]
    assert rows["three"]["speedup"] == pytest.approx(ratio(lines, "three", "plain"))
    assert rows["three"]["turns"] < rows["two"]["turns"]
    assert rows["three"]["length"] == pytest.approx(mean_accepted(lines, "three", "overall"))


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    about = runs.facts()
    only = [line for line in runs.lines(about, seed=1) if line["method"] == "two"][:2]
    rows = {row["method"]: row for row in tables_of(runs.save(tmp_path, about, only))["overall"]}
    assert rows["two"]["speedup"] is None
    assert rows["two"]["length"] is None
    assert rows["plain"]["speedup"] is None


def test_runs_stand_side_by_side(tmp_path: Path) -> None:
    about = runs.facts()
    other = runs.facts(0.0, place="lmsys/vicuna-13b-v1.3")
    folders = [
        runs.save(tmp_path / "monday", about, runs.lines(about, seed=1)),
        runs.save(tmp_path / "tuesday", about, runs.lines(about, seed=2)),
        runs.save(tmp_path / "large", other, runs.lines(other, seed=3)),
    ]
    whole = report.report_of(report.load(folders))
    assert [run["label"] for run in whole["runs"]] == ["monday", "tuesday", "large"]
    assert set(whole["several"]) == {"runs1", "table3", "printed"}
    for row in whole["several"]["runs1"]["records"]:
        for at, folder in enumerate(folders[:2], 1):
            expected = ratio(runs.read(folder), row["method"], "plain")
            assert row[f"run_{at}"] == pytest.approx(expected)
        assert "run_3" not in row
    by_target = whole["several"]["table3"]["records"]
    large = [row for row in by_target if row["run"] == "large"]
    assert {row["label"] for row in large} == {"EAGLE-2", "target <- W4 <- eagle"}
    assert {row["paper_speedup"] for row in large} == {2.30, 2.69}
    expected = ratio(runs.read(folders[2]), "three", "plain")
    assert large[-1]["speedup"] == pytest.approx(expected)
    assert {row["target"] for row in by_target if row["run"] == "paper"} == {"LLaMA2-70B"}


def test_other_settings_are_another_table(tmp_path: Path) -> None:
    one, two = runs.facts(), runs.facts()
    two["settings"]["max_new_tokens"] = 65
    folders = [
        runs.save(tmp_path / "a", one, runs.lines(one)),
        runs.save(tmp_path / "b", two, runs.lines(two)),
    ]
    assert "runs1" not in report.report_of(report.load(folders))["several"]
