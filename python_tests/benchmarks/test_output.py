"""What benchmarks put out alike: tables, reports, an error where a device is not here."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import __main__ as cli
from benchmarks import output
from benchmarks.measuring import rotated
from polyspec_ext import ops


@pytest.mark.parametrize("as_json", [False, True])
def test_a_report(as_json: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, parser = tmp_path / "report.json", argparse.ArgumentParser()
    module = SimpleNamespace(
        OPTIONS=[("--rows", {"type": int, "nargs": "+"}, None, None, "")],
        report_of=lambda args: {"rows": args.rows},
        markdown=lambda report: f"# {report['rows']}",
        status=lambda report: len(report["rows"]),
    )
    output.add_report(parser.add_subparsers(), "rows", module)
    words = ["rows", "--rows", "1", "2", "--json-file", str(file), *["--json"] * as_json]
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


@pytest.mark.parametrize("first", [0, 1, 3])
def test_every_method_comes_at_every_position_but_the_first_ones(first: int) -> None:
    orders = ["".join(rotated("abcd", turn, first)) for turn in range(4 - first)]
    assert all(order[:first] == "abc"[:first] for order in orders)
    for column in list(zip(*orders, strict=True))[first:]:
        assert sorted(column) == sorted("abcd"[first:])
    assert rotated("abcd", 4 - first, first) == list(orders[0])
    assert rotated([], 3, first) == []


@pytest.mark.parametrize("kind", ["kernels", "overhead"])
def test_a_device_that_is_not_here(
    kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "has_cuda", lambda: False)
    assert cli.main([kind, "--device", "cuda"]) == 2
    assert capsys.readouterr().err == (
        "error: --device cuda: no CUDA device, or a build without CUDA kernels\n"
    )
