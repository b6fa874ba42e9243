"""``python -m polyspec_ext plan``, on a chain of untrained models behind POLYSPEC_TINY."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import polyspec_ext as ps
from polyspec_ext import cli
from polyspec_ext.bench import chains
from polyspec_ext.planning import planner
from polyspec_ext.planning.considered import considered

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
    assert cli.main(["plan", "3 + 4 =", *models, *FEW, "--only", "--theorem", "--batch", "2"]) == 0
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


def test_what_nobody_named_is_considered(
    capsys: pytest.CaptureFixture[str], untrained: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Also by `generate --auto`, whose plan is kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    draft = str(untrained / "drafter")
    models = ["--target", str(untrained / "target"), "--pack", "off"]
    words = [*models, "--draft", draft, *FEW, "--seconds", "8"]
    assert cli.main(["plan", "3 + 4 =", *words, "--json"]) == 0
    levels = {
        name for one in json.loads(capsys.readouterr().out)["candidates"] for name in one["levels"]
    }
    assert {"target", "drafter", "w4", f"w4:{draft}", "prompt lookup", "suffix match"} == levels
    # Nothing is begun once the time for making it is over.
    made = ps.plan([untrained / "target"], [[1, 2, 3]], 4, pack=False, seconds=0, consider=True)
    assert [part.name for part in made.parts] == ["target"]
    asked: list[Any] = []
    measured = planner.measure
    monkeypatch.setattr(planner, "measure", lambda *a, **k: asked.append(a) or measured(*a, **k))
    auto = ["generate", "3 + 4 =", *models, "--auto", "--max-new-tokens", "4", "--raw"]
    answers = []
    for _ in range(2):
        assert cli.main(auto) == 0
        answers.append(capsys.readouterr().out)
    assert len(asked) == 1
    assert answers[0] == answers[1]
    assert cli.main(["generate", "x", "--auto"]) == 2
    assert "--auto: expected a --target beside it" in capsys.readouterr().err
    assert cli.main([*auto, "--window", "4"]) == 2
    assert "--auto: expected no --window beside it" in capsys.readouterr().err


def test_drafts_with_many_ids_are_considered_with_fewer(tmp_path: Path) -> None:
    for name, size in (("large", 64000), ("small", 500)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"vocab_size": size}))
    large, small = str(tmp_path / "large"), str(tmp_path / "small")
    found = considered(["T", large, small, "suffix", "an/id"])
    copies = [f"w4:{large}", f"trim:16000:{large}", f"w4:{small}"]
    assert found == ["prompt-lookup", "w4", *copies]
    assert considered(["T", f"w4:{large}"])[3:] == [f"trim:16000:w4:{large}"]


def test_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--draft", "prompt-lookup"]) == 2
    assert capsys.readouterr().err == "error: --draft: expected a --target as well, given none\n"
    assert cli.main(["plan", "--target", "x", "--grown", "4"]) == 2
    assert "--grown: expected no --target beside it, given x" in capsys.readouterr().err
    assert cli.main(["plan", "--w4", "x"]) == 2
    assert "--w4: expected --grown as well, given none" in capsys.readouterr().err
    assert cli.main(["plan", "--target", "nowhere/at/all"]) == 2
    assert capsys.readouterr().err.startswith("error: --target: expected a model id, the di")
    assert cli.main(["plan", "--max-new-tokens", "1"]) == 2
    assert "expected an integer >= 2, given '1'" in capsys.readouterr().err
