"""``python -m benchmarks demo``: untrained models of POLYSPEC_TINY, and a user's models."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import llama_program
import pytest

import polyspec_ext as ps
from benchmarks.__main__ import main
from polyspec_ext import tiny

untrained = pytest.mark.usefixtures("tiny_untrained")
DEMO = ("demo", "--prompts", "2", "--max-new-tokens", "8", "--planning", "1")
TARGET, DRAFTER = str(tiny.path("target")), str(tiny.path("drafter"))


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(arguments)
    out = capsys.readouterr()
    return status, out.out, out.err


@untrained
def test_demo_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Seconds that are over after the first repeat leave that one."""
    words = (*DEMO, "--repeats", "3", "--seconds", "0", "--json")
    status, out, _ = call(capsys, *words)
    assert status == 0
    report = json.loads(out)
    assert report["text"]
    assert {"cpu", "cores", "torch"} <= report["machine"].keys()
    (table,) = report["tables"]
    assert table["repeats"] == 1
    assert list(table["choices"]) == [*tiny.LEVELS]
    assert "parameters, float32" in table["choices"]["target"]
    rows = table["configurations"]
    assert len(rows) == 5
    assert [len(row["window"]) for row in rows[3:]] == [1, 2]
    # Ratios are over the fastest of the ways to decode plainly.
    alone = [row for row in rows if row["label"].startswith("plain decoding")]
    assert len(alone) == 3
    best = max(alone, key=lambda row: row["tokens_per_second"])
    assert table["fastest_plain"] == best["label"]
    assert max(row["ratio"] for row in alone) == best["ratio"] == 1.0
    for row in rows:
        assert row["tokens_per_second"] > 0
        assert row["lossless"]
        assert row["verdict"].startswith(("2 of 2 identical", "1 of 2 identical, 1 tied"))
        assert row["stats"] is None or row["stats"]["num_requests"] == 2


@untrained
@pytest.mark.parametrize(("load", "busy"), [(0.0, False), (9.25, True)])
def test_demo_streams_an_answer_and_prints_a_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, load: float, busy: bool
) -> None:
    """Print a line per phase, also where there is no terminal, and no bar; and how busy it was."""
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    status, out, err = call(capsys, *DEMO, "--repeats", "1")
    assert status == 0
    answer, _, table = out.partition("(three levels: ")
    assert answer.startswith("Question: A baker")
    assert len(answer.partition("\nAnswer:")[2].strip()) > 0
    assert table.count("\n| configuration |") == 1
    # The form of each level that was chosen for this processor.
    assert [table.count(f"\n- {level}: ") for level in tiny.LEVELS] == [1, 1, 1]
    *_, loading, choosing, measuring = err.splitlines()
    assert "loading" in loading
    assert "choosing" in choosing
    assert "measuring 5 configurations: 2 questions" in measuring
    assert " is the fastest" in table
    shown = " ".join(out.split())
    assert f"load average {load:.1f} before" in shown
    assert ("times may be too long, and ratios uncertain" in shown) == busy


@untrained
@pytest.mark.parametrize(("calls", "repeats"), [(8, 0), (18, 1)])
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_ctrl_c_keeps_the_repeats_that_the_demo_has_finished(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    calls: int,
    repeats: int,
) -> None:
    """Four chains answer two prompts twice, after a first call of each."""
    generate, left = ps.Chain.generate, iter(range(calls))

    def interrupted(self: ps.Chain, *args: Any, **more: Any) -> ps.Output:
        if next(left, None) is None:
            signal.raise_signal(signal.SIGINT)
        return generate(self, *args, **more)

    monkeypatch.setattr(ps.Chain, "generate", interrupted)
    status, out, _ = call(capsys, *DEMO, "--repeats", "2", *options)
    assert status == 130
    assert ("| configuration |" in out) == (repeats == 1 and not options)
    if repeats and options:
        assert [table["repeats"] for table in json.loads(out)["tables"]] == [1]
    elif repeats:
        assert "median of 1 " in out


def rows_of(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Rows by label of a demo of one question; the last one has the longest chain."""
    common = ("demo", "--repeats", "1", "--prompts", "1", "--max-new-tokens", "6", "--json")
    status, out, err = call(capsys, *common, *words)
    assert status == 0, err
    (table,) = json.loads(out)["tables"]
    assert table["fastest_plain"].startswith("plain decoding, ")
    return {row["label"]: row for row in table["configurations"]}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.usefixtures("cache")
def test_beside_llama_cpp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, *files = llama_program.write(tmp_path)
    words = ["--target", TARGET, "--draft", DRAFTER, "--llama", str(program)]
    rows = rows_of(capsys, *words, "--gguf", ",".join(map(str, files)))
    assert "two levels: target, drafter" in rows
    three = rows["three levels: target, w4, drafter"]
    assert len(three["stats"]["levels"]) == 3
    assert three["lossless"]
    # Plain decoding of other models is no baseline; texts are compared within a model.
    assert rows["llama.cpp, plain"]["verdict"] == "1 of 1 identical (its own)"
    assert rows["llama.cpp's rule with draft"]["verdict"] == "0 of 1 identical, 1 DIFFER (its own)"
    assert rows["our chain in llama.cpp"]["verdict"] == "1 of 1 identical (its own)"
    assert rows["llama.cpp, plain"]["tokens_per_second"] == pytest.approx(6 / 7.5)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("target", "draft", "labels"),
    [
        # Below a copy there is none: prompt lookup drafts below the drafter.
        (f"w4:{TARGET}", f"w4:{DRAFTER}", ["target, drafter", "target, drafter, prompt lookup"]),
        (TARGET, str(tiny.path("eagle3")), ["target, eagle3", "target, w4, eagle3"]),
        (TARGET, "suffix", ["target, suffix match", "target, w4, suffix match"]),
    ],
)
def test_models_of_ones_own(
    target: str, draft: str, labels: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of(capsys, "--target", target, "--draft", draft)
    for words, label in zip(("two levels", "three levels"), labels, strict=True):
        assert rows[f"{words}: {label}"]["lossless"]


@pytest.mark.parametrize(("names", "status"), [(("small", "large", "least"), 0), (("one",), 2)])
def test_make_takes_models_that_are_there(
    names: tuple[str, ...], status: int, tmp_path: Path
) -> None:
    """The largest is the target, the next one the draft, and none is fetched."""
    sizes = {"small": 20, "large": 30, "least": 10, "one": 1}
    for name in names:
        (tmp_path / f"{name}.gguf").write_bytes(b"x" * sizes[name])
    words = ["make", "--no-print-directory", "demo-real", f"MODELS={tmp_path}", "PY=echo"]
    words += ["PIP=true", "-o", "environment", "-o", "build/llama/program/polyspec_llama"]
    root = Path(__file__).parents[2]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True)
    assert (done.returncode == 0) == (status == 0)
    shown = done.stdout.splitlines()[-1] if status == 0 else done.stderr
    large, small = (f"{tmp_path}/{name}.gguf" for name in ("large", "small"))
    expected = f"--target w4:{large} --draft w4:{small} --gguf {large},{small}"
    assert (expected if status == 0 else "expected two GGUF files or more, given") in shown
    assert "get.py" not in shown
