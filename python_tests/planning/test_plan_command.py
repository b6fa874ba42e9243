"""``python -m polyspec_ext plan``, on a chain of untrained models behind POLYSPEC_TINY."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import saved_chain

from polyspec_ext import cli


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POLYSPEC_TINY", str(saved_chain.save(tmp_path)))
    return tmp_path


FEW = ("--max-new-tokens", "24", "--seconds", "1", "--repeats", "1")


def test_json_names_every_candidate(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "How many?", *FEW, "--verify", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    levels = {tuple(one["levels"]) for one in report["candidates"]}
    assert ("target",) in levels
    assert ("target", "middle", "drafter", "prompt lookup") in levels or (
        "target", "drafter", "middle", "prompt lookup"
    ) in levels  # fmt: skip
    assert len(levels) == 8
    for one in report["candidates"]:
        assert one["predicted_tokens_per_second"] > 0
        assert len(one["windows"]) == len(one["levels"]) - 1
    assert report["recommended"]["measured_tokens_per_second"] > 0


def test_models_of_ones_own(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    models = ("--target", str(folder / "target"), "--draft", str(folder / "drafter"))
    assert cli.main(["plan", "3 + 4 =", *models, *FEW, "--theorem"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(("recommended: target, drafter", "do not speculate: target alone"))
    assert "target alone" in out


def test_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--draft", "prompt-lookup"]) == 2
    assert capsys.readouterr().err == "error: --draft: expected a --target as well, given none\n"
    assert cli.main(["plan", "--max-new-tokens", "1"]) == 2
    assert "expected an integer >= 2, given '1'" in capsys.readouterr().err
