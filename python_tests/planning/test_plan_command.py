"""``python -m polyspec_ext plan``, on a chain of untrained models behind POLYSPEC_TINY."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polyspec_ext import cli
from polyspec_ext.bench import chains

pytestmark = pytest.mark.usefixtures("tiny_untrained")

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


def test_models_of_ones_own(capsys: pytest.CaptureFixture[str], untrained: Path) -> None:
    models = ("--target", str(untrained / "target"), "--draft", str(untrained / "drafter"))
    assert cli.main(["plan", "3 + 4 =", *models, *FEW, "--theorem", "--batch", "2"]) == 0
    out = capsys.readouterr().out
    assert "temperature 0, batch 2;" in out
    assert out.startswith(("recommended: target, drafter", "do not speculate: target alone"))
    assert "target alone" in out


def test_theorem_on_the_grown_target(
    capsys: pytest.CaptureFixture[str], untrained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parts are those of `bench chains`, which has tests of its own: here stand small ones."""
    asked: list[tuple[int, Path | None]] = []

    def parts_of(args: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        asked.append((args.times, args.w4))
        return {"target": untrained / "target", "middle": untrained / "middle"}, {}

    monkeypatch.setattr(chains, "parts_of", parts_of)
    words = ("--grown", "4", "--w4", str(untrained / "w4"), "--theorem", "--json")
    assert cli.main(["plan", "How many?", *FEW, *words]) == 0
    assert asked == [(4, untrained / "w4")]
    levels = [one["levels"] for one in json.loads(capsys.readouterr().out)["candidates"]]
    assert sorted(levels) == [["target"], ["target", "middle"]]


def test_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--draft", "prompt-lookup"]) == 2
    assert capsys.readouterr().err == "error: --draft: expected a --target as well, given none\n"
    assert cli.main(["plan", "--target", "x", "--grown", "4"]) == 2
    assert "--grown: expected no --target beside it, given x" in capsys.readouterr().err
    assert cli.main(["plan", "--w4", "x"]) == 2
    assert "--w4: expected --grown as well, given none" in capsys.readouterr().err
    assert cli.main(["plan", "--max-new-tokens", "1"]) == 2
    assert "expected an integer >= 2, given '1'" in capsys.readouterr().err
