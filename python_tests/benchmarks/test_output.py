"""What benchmarks put out alike: tables, reports, an error where a device is not here."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks import __main__ as cli
from benchmarks import output
from benchmarks.timing import rotated
from polyspec_ext import ops


def test_a_table() -> None:
    rows = [["a", "1", ""], ["b", "20", "x"]]
    assert output.table(["", "n", "note"], rows, [1]) == [
        "| | n | note |",
        "|---|---:|---|",
        "| a | 1 | |",
        "| b | 20 | x |",
    ]
    assert output.table(["n"], []) == ["| n |", "|---|"]


def test_cells() -> None:
    assert [output.number(value, ".1f") for value in (0.0, 2.25, None)] == ["0.0", "2.2", "-"]
    assert [output.token_count(count) for count in (1, 2)] == ["1 token", "2 tokens"]


@pytest.mark.parametrize("as_json", [False, True])
def test_a_report(as_json: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, parser = tmp_path / "report.json", argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, nargs="+")
    output.add_report(
        parser,
        lambda args: {"rows": args.rows},
        lambda report: f"# {report['rows']}",
        lambda report: len(report["rows"]),
    )
    words = ["--rows", "1", "2", "--json-file", str(file), *["--json"] * as_json]
    args = parser.parse_args(words)
    assert args.run(args) == 2
    out, report = capsys.readouterr().out, {"rows": [1, 2]}
    assert (json.loads(out) == report) if as_json else (out == "# [1, 2]\n")
    assert json.loads(file.read_text()) == report


@pytest.mark.parametrize("terminal", [False, True])
def test_a_terminal_gets_the_report_in_its_columns(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    heads = [f"number {n}" for n in range(20)]
    markdown = "\n".join(output.table(["", *heads], [["row", *map(str, range(20))]]))
    output.show(markdown)
    out = capsys.readouterr().out
    assert (out == f"{markdown}\n") == (not terminal)
    assert (max(map(len, out.splitlines())) <= 80) == terminal


def test_everybody_has_every_place_once() -> None:
    assert [rotated("abc", turn) for turn in range(4)] == [
        ["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]
    ]  # fmt: skip
    assert rotated([], 3) == []


@pytest.mark.parametrize("kind", ["kernels", "overhead"])
def test_a_device_that_is_not_here(
    kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "has_cuda", lambda: False)
    assert cli.main([kind, "--device", "cuda"]) == 2
    assert capsys.readouterr().err == (
        "error: --device cuda: no CUDA device, or a build without CUDA kernels\n"
    )
