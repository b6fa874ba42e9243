"""``benchmarks overhead``: the parts, the rest, and the report."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

import polyspec_ext as ps
from benchmarks import __main__ as cli
from benchmarks import overhead
from polyspec_ext.ops import verification
from polyspec_ext.runtime.engine import Engine


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["overhead", "--json", "--levels", "2,3", "--batch", "1,3", "--turns", "1"]
    assert cli.main(arguments) == 0
    out = capsys.readouterr()
    report = json.loads(out.out)
    assert [(row["levels"], row["batch"]) for row in report["cases"]] == [
        (2, 1), (2, 3), (3, 1), (3, 3)
    ]  # fmt: skip
    for row in report["cases"]:
        assert row["rounds"] >= overhead.PER_TURN
        for name in ("ours_us", "operators_us", "forwards_us"):
            times = row[name]
            assert 0 < times["q25"] <= times["median"] <= times["q75"]
        assert 0.4 < row["draft_acceptance_rate"][-1] < 0.9
    assert [one["name"] for one in report["calls"]] == list(overhead.CALLS)
    text = overhead.markdown(report)
    assert text.count("\n| 2 | 4 |") == 2
    assert f"{report['machine']['threads']} threads" in text


@pytest.mark.parametrize("part", ["forward", "operator", "chain"])
def test_time_is_booked_where_it_is_spent(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Book a pause of 3 ms in one part only."""

    def slower(call: Any) -> Any:
        def slow(*args: Any, **options: Any) -> Any:
            time.sleep(0.003)
            return call(*args, **options)

        return slow

    owner, name = {
        "forward": (overhead.InstantLevel, "forward"),
        "operator": (verification, "_verify"),
        "chain": (Engine, "round"),
    }[part]
    monkeypatch.setattr(owner, name, slower(getattr(owner, name)))
    (case,) = overhead.measure([2], [1], 1)
    spent = case.seconds
    slow = {
        "forward": min(spent["forwards"]),
        "operator": min(spent["operators"]),
        "chain": min(spent["ours"]),
    }
    assert {kind for kind, seconds in slow.items() if seconds > 0.003} == {part}


# Calls of the package's functions, and the files entered, per round of the target. Lower these with
# every step, never raise them.
@pytest.mark.parametrize(
    ("name", "budget", "files"),
    [
        ("plain decoding", 38, 9),
        ("plain decoding, packed", 26, 9),
        ("three levels", 166, 11),
        ("three levels, packed", 134, 11),
        ("three levels, 8 prompts", 360, 13),
        ("EAGLE tree", 260, 20),
    ],
)
def test_python_calls_per_round_keep_their_budget(name: str, budget: int, files: int) -> None:
    found = overhead.calls_of(name)
    assert 0 < found["calls"] <= budget, found
    assert 0 < found["files"] <= files, found


def test_calls_are_counted_of_the_package_alone() -> None:
    found = overhead.counted(lambda: [ps.row_seeds(0, 2) for _ in range(3)])
    assert found["sampling.py"] >= 3
    assert all((Path(ps.__file__).parent / name).is_file() for name in found)
