"""``bench model``: its arithmetic, and that its counts are those that tests hold."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from polyspec_ext.bench import model
from polyspec_ext.cli import main

ROOT = Path(__file__).resolve().parents[2]
DEVICE = model.Device(
    "round numbers",
    multiprocessors=128,
    gigahertz=1.0,
    lanes=100,
    issue=1.0,
    terabytes=1.0,
    gigabytes=100.0,
    launch=2.0,
    latency=0.5,
    barrier=0.25,
    candidates=3.0,
)
PLAIN, FILTERED = model.FILTERS


def test_rows_that_a_request_reads() -> None:
    assert model.mean_rows(2, 0.5) == pytest.approx(1.75)
    assert model.longest_rows(1, 2, 0.5) == pytest.approx(1.75)
    # Of two: all have one row, 1 - (1/2)^2 a second one, 1 - (3/4)^2 a third.
    assert model.longest_rows(2, 2, 0.5) == pytest.approx(1 + 0.75 + 0.4375)
    assert model.longest_rows(10**6, 2, 0.5) == pytest.approx(3)


def test_row_bound_by_instructions() -> None:
    # 1000 logits a multiprocessor: .8 and 15.8 instructions each, 100 a cycle of a nanosecond.
    time = model.row_microseconds(PLAIN, 8, 1, 8000, DEVICE)
    assert time == pytest.approx(0.0200 + 0.158 + 2 * 0.5 + 2 * 0.25)  # the maximum by its loads


def test_row_bound_by_memory() -> None:
    slow = replace(DEVICE, terabytes=0.001)
    time = model.row_microseconds(FILTERED, 1, 4, 8000, slow)
    assert time == pytest.approx(2 * (64.0 + 0.5) + 3.0)  # one CTA has no barriers of a cluster


def test_call_of_several_waves() -> None:
    row = model.row_microseconds(PLAIN, 1, 128, 8000, DEVICE)
    rows = 2 * 1.75 + (model.longest_rows(256, 2, 0.5) - 1.75)
    time = model.walk_microseconds(256, PLAIN, 8000, 2, 0.5, DEVICE)
    assert time == pytest.approx(2.0 + rows * row + 2 * 0.5)


def test_rows_that_are_shared_out() -> None:
    """By hand: rows take 1, verifying .25, a ticket .125."""

    def through(ends: list[int], rows: int, groups: int) -> float:
        return model.shared_out(ends, rows, groups, 1.0, 0.25, 0.125)

    assert through([0], 3, 3) == 1.25  # all at once: the others' rows are read in vain
    assert through([2], 3, 3) == 1.25
    # One group: the first row of each, then what is left of the second; two tickets pass over.
    assert through([0, 1], 2, 1) == 1.25 + 1.125 + 0.125 + 1.125 + 0.25
    # Two groups: the one that does not verify passes over a row, and reads the last one.
    assert through([0, 1], 2, 2) == 1.0 + 2 * 0.125 + 1.0 + 0.25


def test_what_is_shared_out_is_sooner_than_a_walk() -> None:
    for batch in (1, 8, 64, 256):
        given = (batch, PLAIN, 128256, 10, 0.7, model.DEVICES[0])
        shared = model.shared_microseconds(*given)
        assert shared is not None
        assert shared < model.walk_microseconds(*given)
    assert model.shared_microseconds(300, PLAIN, 128256, 10, 0.7, model.DEVICES[0]) is None


def test_groups_are_those_of_the_launcher() -> None:
    header = (ROOT / "csrc/src/cuda/launch_shape.hpp").read_text(encoding="utf-8")
    assert f"#define POLYSPEC_CLUSTER_CTAS {model.CLUSTER_CTAS}\n" in header
    assert f"kLeastTokens = {model.TOKENS_PER_CTA};" in header
    assert f"kMarkedRows = {model.MARKED_ROWS};" in header
    assert f"kMostRecords = {model.MOST_RECORDS};" in header
    test = (ROOT / "csrc/tests/gpu/launch_shape_test.cpp").read_text(encoding="utf-8")
    calls = re.findall(r"check\((\d+), (\d+), (\d+), (\d+), (\d+), 132\);", test)
    assert len(calls) >= 8
    for groups, ctas, *call in calls:
        found = model.row_groups(*map(int, call), 132)
        assert found == (int(groups), int(ctas))
    batches = (1, 8, 9, 17, 64, 67, 256)
    assert [model.ctas_per_group(b, 128256, 132) for b in batches] == [8, 8, 8, 4, 2, 1, 1]
    assert model.ctas_per_group(1, 8192, 132) == 2


def test_barriers_are_those_of_the_budget() -> None:
    test = ROOT / "csrc/tests/cuda_on_cpu/barrier_budget_test.cpp"
    lines = re.findall(r'\{"([^"]+)", [^}]*, (\d+), \d+\}', test.read_text(encoding="utf-8"))
    budget = {name: int(barriers) for name, barriers in lines}
    assert {filters.name: filters.barriers for filters in model.FILTERS}.items() <= budget.items()
    assert f"kLaunch = {model.LAUNCH_BARRIERS};" in test.read_text(encoding="utf-8")
    text = test.read_text(encoding="utf-8")
    assert f"kChildren = {model.TREE_BARRIERS};" in text
    parents, ticket = (
        int(re.findall(rf"{name} = (\d+);", text)[0]) for name in ("kParents", "kTicket")
    )
    assert parents + ticket == model.TREE_LAUNCH_BARRIERS


def test_tree() -> None:
    tree = model.Tree(nodes=15, depth=4, accepted=2.0)
    # 16 rows find 8 multiprocessors each at once; a walk takes three, one after the other.
    row = model.row_microseconds(PLAIN, 8, 16, 64000, DEVICE) + 0.5 + 3 * 0.25
    at_once = model.tree_microseconds(1, tree, 64000, DEVICE, at_once=True)
    assert at_once == pytest.approx(2.0 + row + 0.5 + 4 * 0.25)
    row = model.row_microseconds(PLAIN, 8, 1, 64000, DEVICE) + 0.5 + 3 * 0.25
    walk = model.tree_microseconds(1, tree, 64000, DEVICE, at_once=False)
    assert walk == pytest.approx(2.0 + 3 * row + 0.5 + 4 * 0.25)
    # 32 trees of 16 rows are four waves of single multiprocessors.
    row = model.row_microseconds(PLAIN, 1, 128, 64000, DEVICE) + 0.5
    waves = model.tree_microseconds(32, tree, 64000, DEVICE, at_once=True)
    assert waves == pytest.approx(2.0 + 4 * row + 0.5)


def test_what_is_chosen_for_trees_is_what_the_launcher_chooses() -> None:
    test = (ROOT / "csrc/tests/gpu/launch_shape_test.cpp").read_text(encoding="utf-8")
    calls = re.findall(
        r"CHECK\((!?)tree_rows_at_once\((\d+), (\d+), (\d+), (\d+), 132, true\)", test
    )
    assert len(calls) >= 8
    for no, batch, rows, depth, vocab in calls:
        tree = model.Tree(nodes=int(rows) - 1, depth=int(depth))
        assert model.tree_rows_at_once(int(batch), tree, int(vocab), 132) == (no == "")


def test_command_calls_it_an_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "model", "--batch", "1,8"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Estimate, not measured")
    assert "batch 8" in text
    assert re.search(r"H200 \| tree of 60 nodes, a walk \| \d+ \| \d+ \(chosen\) \|", text)
    assert re.search(r"H200 \| tree of 60 nodes, rows at once \| \d+ \(chosen\) \| \d+ \|", text)
    assert main(["bench", "model", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["estimate"] is True
    assert report["instructions_per_logit"] == model.INSTRUCTIONS
    assert main(["bench", "model", "--acceptance", "1.5"]) == 2
    assert "--acceptance: expected a number in [0, 1]" in capsys.readouterr().err
