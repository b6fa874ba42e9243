"""Output of all benchmarks: tables, reports, an error where a device is missing."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import __main__ as cli
from benchmarks import output
from polyspec_ext import ops, tiny


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


TARGET = str(tiny.path("target"))
NO_DEVICE = "--device cuda: no CUDA device, or a build without CUDA kernels"


@pytest.mark.usefixtures("tiny_untrained")
@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ("kernels --device cuda", NO_DEVICE),
        ("shapes --device cuda", NO_DEVICE),
        ("shapes --chains w5", "--chains: expected some of eagle, "),
        ("kernels --filters top_p=2", "top_p: expected a number in [0, 1], given 2"),
        ("kernels --acceptance 1.5", "--acceptance: expected a number in [0, 1]"),
        ("kernels --draft-len 0", "--draft-len: expected an integer >= 1"),
        ("int4 --shapes 32x100", "--shapes: expected inputs that 128 divides, or several"),
        ("shapes --acceptance 1:.5", "expected two numbers in (0, 1) with a colon between"),
        ("shapes --layers 99", "--layers: expected an integer in [1, 32], given 99"),
        ("shapes --shape gpt", "choose from"),
        ("serving --gguf a.gguf", "--gguf: expected one or two files and --llama-server with them"),
        ("serving --methods plain,llama.cpp", "--methods: expected some of plain, "),
        ("serving --per-client 0", "--per-client: expected an integer >= 1, given '0'"),
        ("demo --draft suffix", "--draft, --gguf: expected a --target"),
        (f"demo --target {TARGET} --prompts 25", "--prompts: expected at most 24, given 25"),
        ("demo --target nowhere/at/all", "--target: expected a model id, the directory"),
        (f"demo --target {TARGET} --gguf x.gguf", "--gguf: expected --llama PROGRAM"),
    ],
)
def test_bad_options_are_one_line(
    words: str, wrong: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "has_cuda", lambda: False)
    assert cli.main(words.split()) == 2
    assert re.search(rf"^error: .*{re.escape(wrong)}", capsys.readouterr().err, re.MULTILINE)
