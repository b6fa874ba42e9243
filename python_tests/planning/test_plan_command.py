"""``python -m polyspec_ext plan``, on a chain of untrained models of POLYSPEC_TINY."""

import dataclasses
import json
import os
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import polyspec_ext as ps
from polyspec_ext import cli
from polyspec_ext.planning import planner
from polyspec_ext.planning.measure import considered

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
    assert cli.main(["plan", "3 + 4 =", *models, *FEW, "--only", "--batch", "2", "--verbose"]) == 0
    out = capsys.readouterr().out
    assert "temperature 0, batch 2;" in " ".join(out.split())
    assert out.startswith(("recommended: target, drafter", "do not speculate: target alone"))
    assert "target alone" in out


@pytest.mark.parametrize(("load", "busy"), [(0.0, False), (9.25, True)])
def test_a_plan_says_what_the_load_does(capsys, monkeypatch, load, busy) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    words = ["plan", "x", "--max-new-tokens", "24", "--seconds", "0"]
    assert cli.main(words) == 0
    shown = " ".join(capsys.readouterr().out.split())
    threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    assert f"load average {load:.1f} beside {threads} threads on {cores} cores" in shown
    assert ("times may be too long, and ratios uncertain" in shown) == busy
    assert cli.main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["load"] == {"before": load}


def test_what_nobody_named_is_considered(capsys, untrained, tmp_path, monkeypatch) -> None:
    """Also by `generate --auto`, which keeps the plan."""
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

    def watched(*given: Any, limit: float) -> Any:
        asked.append(given)
        return measured(*given, limit=min(limit, 1.0))

    monkeypatch.setattr(planner, "measure", watched)
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


@pytest.fixture(scope="module")
def planned(untrained: Path) -> ps.Plan:
    """Compare every kind of element that has a path or a word."""
    middle, drafter = (str(untrained / name) for name in ("middle", "drafter"))
    levels = [untrained / "target", "w4", f"w4:{middle}", drafter, "suffix"]
    return ps.plan(levels, [[1, 2, 3], [4, 5]], 8, seconds=0, trials=0)


def test_a_saved_chain_is_the_planned_one(planned: ps.Plan, tmp_path: Path) -> None:
    file = tmp_path / "chain.json"
    for number, one in enumerate(planned.candidates):
        some = replace(one, rule="block") if number % 2 else one
        replace(planned, recommended=some).save(file)
        chain, expected = ps.Chain.from_plan(file), planned.chain(some)
        assert repr(chain) == repr(expected)
        for own, other in zip(chain.levels, expected.levels, strict=True):
            assert (own.pack, own.model.dtype) == (other.pack, other.model.dtype)
        assert chain.prediction == (one.predicted_tokens_per_second, one.uncertainty, 1)
        out = chain.generate([1, 2, 3], 6)
        assert out.sequences.tolist() == expected.generate([1, 2, 3], 6).sequences.tolist()


@pytest.mark.builds
@pytest.mark.skipif(torch.cuda.is_available(), reason="the plan's device is here")
def test_a_chain_keeps_its_device(planned: ps.Plan, tmp_path: Path) -> None:
    file = tmp_path / "chain.json"
    planned.save(file)
    data = json.loads(file.read_text())
    assert {one["device"] for one in data["elements"]} == {None}
    assert ps.Chain.from_plan(file).levels[0].device.type == "cpu"
    data["elements"][0]["device"] = "cuda:0"
    file.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"device: expected .*, given cuda:0"):
        ps.Chain.from_plan(file)


def test_a_python_object_cannot_be_saved(untrained: Path, tmp_path: Path) -> None:
    level = ps.Level(untrained / "target", dtype="float32")
    plan = ps.plan([level], [[1, 2, 3]], 4, seconds=0)
    with pytest.raises(ValueError, match=r"^target: expected .*, given HuggingFaceLevel, which"):
        plan.save(tmp_path / "chain.json")
    assert not (tmp_path / "chain.json").exists()


WRONG: dict[str, Any] = {
    "no such file": None,
    "it has no format": [1],
    "format: expected 'polyspec chain', given 'other'": {"format": "other"},
    "elements: expected a list": {"elements": {}},
    "it has no source": {"elements": [{"dtype": None}]},
    "pack: expected true or false": {"elements": [{"source": "x", "dtype": None, "pack": 1}]},
    "unexpected keyword argument 'kind'": {
        "elements": [{"source": "x", "dtype": None, "pack": False, "device": None, "kind": 1}]
    },
    "window: expected a list": {"window": 4},
    "tail: expected a number": {"tail": "1"},
    "prediction: expected three numbers": {"prediction": [1, 2]},
    "unexpected keyword argument 'more'": {"more": 1},
}


@pytest.mark.parametrize("reason", WRONG)
def test_a_file_of_another_form_is_refused(planned, tmp_path, reason, capsys) -> None:
    file = tmp_path / "chain.json"
    planned.save(file)
    change = WRONG[reason]
    if change is None:
        file.unlink()
    else:
        data = json.loads(file.read_text())
        file.write_text(json.dumps({**data, **change} if isinstance(change, dict) else change))
    expected = f"expected a chain that `plan --save` wrote, given {str(file)!r}: "
    with pytest.raises(ValueError, match=f"^path: {re.escape(expected)}") as caught:
        ps.Chain.from_plan(file)
    assert reason.lower() in str(caught.value).lower()
    assert cli.main(["generate", "x", "--chain", str(file)]) == 2
    assert capsys.readouterr().err.startswith(f"error: --chain: {expected}")


@pytest.mark.parametrize("save", [True, False])
@pytest.mark.parametrize("own", [True, False])
def test_a_plan_ends_with_a_command_that_runs(capsys, untrained, tmp_path, save, own) -> None:
    file = tmp_path / "a chain.json"
    models = ["--target", str(untrained / "target"), "--draft", str(untrained / "drafter")]
    words = [*(models if own else []), *(["--save", str(file)] if save else [])]
    assert cli.main(["plan", "3 + 4 =", *words, *FEW, "--temperature", "0.5", "--only"]) == 0
    report, _, command = capsys.readouterr().out.partition("python -m polyspec_ext ")
    assert max(map(len, report.splitlines())) <= 80
    words = shlex.split(command.replace("\\\n", ""))
    assert ("--chain" in words) == save
    assert words[-2:] == ["--temperature", "0.5"]
    assert cli.main([*words, "--seed", "1"]) == 0
    if not save:
        return
    assert cli.main(["generate", "x", "--chain", str(file), "--window", "3"]) == 2
    assert "--window: expected none beside --chain, given [3]" in capsys.readouterr().err
    assert cli.main(["generate", "x", "--auto", "--chain", str(file)]) == 2
    assert "--auto: expected no --chain beside it" in capsys.readouterr().err


def test_the_whole_report_fits_a_terminal(planned: ps.Plan) -> None:
    assert "per step outside the levels" in " ".join(planned.report(verbose=True).split())
    assert str(planned) == planned.report(verbose=True)
    assert max(map(len, str(planned).splitlines())) <= 80


def test_a_short_report_has_the_best_of_each_number_of_levels(planned: ps.Plan) -> None:
    fastest = planned.candidates[0]
    alike = [dataclasses.replace(fastest) for _ in range(12)]
    slow = dataclasses.replace(fastest, parts=(0,), windows=())
    long = dataclasses.replace(fastest, parts=(0, 1, 1, 1, 1))
    many = dataclasses.replace(planned, candidates=[*alike, slow, dataclasses.replace(slow), long])
    assert repr(many) == many.report()
    table = repr(many).partition("over plain\n")[2].splitlines()
    assert len(table) == 12  # ten, and the other two numbers of levels
    assert max(map(len, repr(many).splitlines())) <= 80
    assert many._repr_html_().count("<tr>") == 13


def test_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--draft", "prompt-lookup"]) == 2
    assert capsys.readouterr().err == "error: --draft: expected a --target as well, given none\n"
    assert cli.main(["plan", "--target", "nowhere/at/all"]) == 2
    assert capsys.readouterr().err.startswith("error: --target: expected a model id, the di")
    assert cli.main(["plan", "--max-new-tokens", "1"]) == 2
    assert "expected an integer >= 2, given '1'" in capsys.readouterr().err
