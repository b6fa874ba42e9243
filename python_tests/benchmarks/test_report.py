"""Reports of saved runs: the committed reports again, and every number counted independently."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_runs as runs
import pytest

pd = pytest.importorskip("pandas")

from benchmarks import record, report  # noqa: E402  (imports both)
from benchmarks.__main__ import main  # noqa: E402

RESULTS = Path(__file__).parents[2] / "docs" / "results"
COMMITTED = sorted(path.parent for path in RESULTS.rglob(record.TURNS))
Tables = dict[str, list[dict[str, Any]]]


@pytest.mark.parametrize("folder", COMMITTED, ids=lambda folder: folder.name)
def test_committed_runs_give_the_committed_tables(folder: Path) -> None:
    """Compare every cell of the tables with the same form, intervals included."""
    lines = (folder / "report.md").read_text().splitlines()
    (run,) = report.load([folder])
    tables = {table.key: table for table in report.tables_of(run)}
    assert {"overall", "table2", "levels", "decoding", "figure4"} <= set(tables)
    for name in set(tables) - {"decoding"}:
        assert [line for line in tables[name].lines() if line not in lines] == []


def test_the_plans_choice_has_a_regret() -> None:
    found = []
    for run in report.load(COMMITTED):
        table = report.overall(run)
        ours = [row for row in table.records if run.methods[row["method"]]["kind"] != "engine"]
        if planned := [row for row in ours if run.methods[row["method"]]["kind"] == "planned"]:
            ours = [row for row in ours if run.methods[row["method"]]["kind"] != "assisted"]
            best = max(row["tokens_per_second"] for row in ours)
            regret = best / planned[0]["tokens_per_second"] - 1
            words = f"takes {regret:.1%} more time" if regret else "is the fastest."
            assert f" The plan's choice {words}" in table.note
            found.append(regret)
    assert len(found) > 1


def records_of(folder: Path) -> Tables:
    (run,) = report.load([folder])
    tables = json.loads(json.dumps({one.key: one.records for one in report.tables_of(run)}))
    return dict(tables)


@pytest.fixture(scope="module", params=["greedy", "sampled"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    about = runs.facts(float(request.param == "sampled"), place="lmsys/vicuna-7b-v1.3")
    return runs.save(tmp_path_factory.mktemp("run"), about, runs.lines(about, seed=3))


@pytest.fixture(scope="module")
def found(saved: Path) -> Tables:
    return records_of(saved)


def wall(line: dict[str, Any]) -> float:
    return float(line["seconds"])


def decode(line: dict[str, Any]) -> float:
    return float(line["seconds"] - line["prefill_seconds"])


def ratio(
    lines: list[dict[str, Any]],
    ours: str,
    theirs: str = "plain",
    task: str = "overall",
    seconds: Callable[[dict[str, Any]], float] = wall,
) -> Any:
    a, b = runs.ok(lines, ours, task), runs.ok(lines, theirs, task)
    both = [key for key in a if key in b]
    if seconds is decode:
        both = [k for k in both if None not in (a[k]["prefill_seconds"], b[k]["prefill_seconds"])]
    rates = [per_second([x[key] for key in both], seconds) for x in (a, b)]
    return pytest.approx(rates[0] / rates[1]) if both else None


def per_second(lines: list[dict[str, Any]], seconds: Callable[[Any], float]) -> float:
    return sum(x["new_tokens"] for x in lines) / (sum(map(seconds, lines)) or 1)


def test_decoding(saved: Path, found: Tables) -> None:
    """Prefill, decoding and predictions, which the committed reports have in two tables."""
    lines = runs.read(saved)
    for row in found["decoding"]:
        own = list(runs.ok(lines, row["method"]).values())
        assert row["turns"] == len(own)
        if row["method"] == "hf":
            assert row["prefill_ms"] is row["decode_speedup"] is row["engine_share"] is None
            continue
        prefill, spent = sum(x["prefill_seconds"] for x in own), sum(map(decode, own))
        by_level = list(zip(*(x["levels"] for x in own), strict=True))
        seconds = [sum(x["seconds"] for x in parts) for parts in by_level]
        tokens = sum(x["new_tokens"] for x in own)
        assert row["prefill_ms"] == pytest.approx(1e3 * prefill / len(own))
        assert row["prefill_share"] == pytest.approx(prefill / sum(map(wall, own)))
        read = sum(x["prompt_tokens"] for x in own)
        assert row["prefill_tokens_per_second"] == pytest.approx(read / prefill)
        assert row["decode_speedup"] == ratio(lines, row["method"], seconds=decode)
        assert row["engine_share"] == pytest.approx(1 - sum(seconds) / spent)
        assert row["passes_ms"] == pytest.approx(1e3 * sum(seconds) / tokens)
        assert row["decode_ms"] == pytest.approx(1e3 * spent / tokens)
        assert row["decode_tokens_per_second"] == pytest.approx(per_second(own, decode))
        if row["method"] == "three":
            predicted = row["predicted_over_measured"]
            assert predicted == pytest.approx(123.0 / per_second(own, decode))
        # Lemma 3.1: passes of each level but the last once per token that it hands up.
        accepted = [sum(n for x in parts for n in x["accepted"]) for parts in by_level]
        lemma = sum(s / n for s, n in zip(seconds, accepted[:-1], strict=False))
        if len(by_level) > 1:
            lemma += seconds[-1] / accepted[-2]
            assert row["lemma_ms"] == pytest.approx(1e3 * lemma)


def test_rows_beside_the_papers(found: Tables) -> None:
    """Committed runs are of other models, so no number of a paper is shown."""
    overall, by_task = ({row["method"]: row for row in found[k]} for k in ("overall", "table2"))
    three = overall["three"]
    assert (three["paper_speedup"], three["paper_length"]) == (3.48, 9.88)
    assert overall["slow"]["paper_speedup"] is None
    assert by_task["three"]["rag"].endswith("(paper 2.98 / 10.30)")
    printed = [row for row in found["table1"] if row["source"] == "paper"]
    assert [row["bound_above"] for row in printed] == pytest.approx([-0.116, 0.33, 0.461], abs=1e-3)
    assert [row["condition_1"] for row in printed] == ["does not", "helps", "helps"]
    (row,) = found["adaptation"]
    assert row["paper"].startswith("1.071")


def test_failures(saved: Path, found: Tables) -> None:
    failed = [line for line in runs.read(saved) if line["status"] == "failed"]
    expected = {(x["method"], x["error"]) for x in failed}
    assert {(row["method"], row["error"]) for row in found["failures"]} == expected
    assert sum(row["turns"] for row in found["failures"]) == len(failed) > 0
    assert sum(row["failed"] for row in found["overall"]) == len(failed)


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    about = runs.facts()
    few = [x for x in runs.lines(about, seed=5) if (x["method"], x["status"]) == ("two", "ok")][:2]
    rows = {row["method"]: row for row in records_of(runs.save(tmp_path, about, few))["overall"]}
    assert rows["two"]["speedup"] is rows["two"]["length"] is rows["plain"]["speedup"] is None


def values(*rows: tuple[int, float, float]) -> tuple[Any, ...]:
    frame = pd.DataFrame(rows, columns=["question_id", "a", "b"])
    return tuple(report.bootstrap("x", frame, ["a", "b"]).values())


def test_interval_is_the_bootstraps() -> None:
    rows = {1: (10.0, 3.0), 2: (30.0, 4.0), 3: (20.0, 5.0)}
    every = [
        sum(rows[q][0] for q in drawn) / sum(rows[q][1] for q in drawn)
        for drawn in itertools.product(rows, repeat=3)
    ]
    found = values(*((question, *row) for question, row in rows.items()))
    # One question drawn three times has 1/27, more than a tail: the bounds are the extremes.
    assert found == pytest.approx((60 / 12, min(every), max(every)))
    # One question has no interval; no numbers, none at all.
    assert values((1, 1.0, 1.0), (1, 5.0, 2.0)) == (2.0, None, None)
    assert values((1, math.nan, 1.0)) == (None, None, None)


def test_several_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each has its tables, and a row by target."""
    about, sampled = runs.facts(), runs.facts(1.0)
    large = runs.facts(0.0, place="lmsys/vicuna-13b-v1.3")
    folders = [
        runs.save(tmp_path / name / "run", facts, runs.lines(facts, seed=seed, questions=3))
        for seed, (name, facts) in enumerate(
            [("monday", about), ("tuesday", about), ("large", large), ("sampled", sampled)]
        )
    ]
    out = tmp_path / "out"
    assert main(["report", *map(str, folders), "--output", str(out)]) == 0
    assert "plain, static cache" in capsys.readouterr().out
    whole = json.loads((out / "report.json").read_text())
    assert [run["label"] for run in whole["runs"]][:2] == ["monday/run", "tuesday/run"]
    assert set(whole["several"]) == {"table3"}
    by_target = whole["several"]["table3"]["records"]
    rows = [row for row in by_target if row["run"] == "large/run"]
    assert {row["paper_speedup"] for row in rows} == {2.30, 2.69}
    assert {row["target"] for row in by_target if row["run"] == "paper"} == {"LLaMA2-70B"}
    assert "a method \\| that <loses>" in (out / "report.md").read_text()


def test_the_summary(tmp_path: Path) -> None:
    about = runs.facts() | {"dirty": True}
    lines = runs.lines(about)
    whole, cut = (
        report.summary(*report.load([runs.save(tmp_path / name, about, some)]))
        for name, some in (("whole", lines), ("cut", lines[:-1]))
    )
    assert whole.endswith("local changes.")
    assert cut.endswith(f"changes. NOT FINISHED: {len(lines) - 1} of {len(lines)} turns.")


def test_refusals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    about = runs.facts()
    lines = runs.lines(about, questions=2)
    good, other = (str(runs.save(tmp_path / name, about, lines)) for name in ("good", "other"))
    empty = str(runs.save(tmp_path / "empty", about, []))
    broken = str(runs.save(tmp_path / "broken", {**about, "schema": 2}, lines))
    for one in about["methods"]:
        one["baseline"] = False
    without = str(runs.save(tmp_path / "without", about, lines))
    for arguments, words in (
        (["nowhere"], "expected a folder"),
        ([str(tmp_path)], "run.json"),
        ([empty], "expected a run with turns"),
        ([broken], "expected schema 1, given 2"),
        ([without], "one method that is the baseline, given 0"),
        ([good, other], "--output: expected a folder for 2 runs"),
        ([good, good, "--output", "x"], "expected different folders"),
    ):
        assert main(["report", *arguments]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert words in error
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for arguments in (["report", good], ["paper"]):  # reported before the measurement
        assert main(arguments) == 2
        assert "expected the package pandas" in capsys.readouterr().err
    assert main(["paper", "--no-report", "--methods", "none"]) == 2
    assert "given 'none'" in capsys.readouterr().err
