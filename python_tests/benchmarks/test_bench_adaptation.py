"""`benchmarks adaptation`: a replay repeats the chain, and the report is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import polyspec_ext as ps
from benchmarks import __main__ as cli
from benchmarks import adaptation
from benchmarks.adaptation import (
    HELD_OUT,
    TUNING,
    Trace,
    Traces,
    costs_of,
    record,
)  # fmt: skip
from polyspec_ext import tiny

PROMPTS = [[0, 45, 300, 17, 5, 99], [0, 800, 12]]
CHAINS = [
    (("target", "drafter"), [4]),
    (("target", "middle"), [3]),
    (tiny.LEVELS, [6, 2]),
    (tiny.LEVELS, [3, 0]),
]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Traces:
    made = Traces(record({"ours": PROMPTS}, 40), SECONDS)
    place = tmp_path_factory.mktemp("traces") / "traces.json"
    made.save(place)
    assert Traces.read(place) == made
    return made


SECONDS = {
    "target": {1: 9.0, 33: 9.0},
    "middle": {1: 3.0, 33: 3.0},
    "drafter": {1: 1.0, 33: 1.0},
}


@pytest.mark.parametrize(("levels", "windows"), CHAINS, ids=str)
def test_replay_is_the_chain(traces: Traces, levels: tuple[str, ...], windows: list[int]) -> None:
    """Verifications and accepted tokens of every level, text by text."""
    parts: list[Any] = [tiny.path(name) for name in levels]
    chain = ps.Chain(parts, windows, dtype=torch.float32)
    costs = costs_of([SECONDS[name] for name in levels])
    for text in traces.sets["ours"]:
        out = chain.generate([text.prompt], len(text.tokens))
        assert out.sequences[0, len(text.prompt) :].tolist() == text.tokens
        trace, at = Trace(text, levels), 0
        verified, accepted = [0] * len(levels), [0] * len(levels)
        while at < trace.size:
            committed, steps = trace.round(at, windows, costs)
            at += committed
            for step in steps:
                verified[step.level - 1] += step.tokens
                accepted[step.level - 1] += step.accepted
        for number, level in enumerate(out.stats.levels[:-1]):
            assert accepted[number] == level.num_accepted_tokens
            assert verified[number] == level.num_draft_tokens


def test_halves_have_no_text_in_common(traces: Traces) -> None:
    tuning, held_out = traces.half(TUNING)["ours"], traces.half(HELD_OUT)["ours"]
    prompts = [[tuple(text.prompt) for text in half] for half in (tuning, held_out)]
    assert prompts == [[tuple(PROMPTS[0])], [tuple(PROMPTS[1])]]


def test_the_command(
    traces: Traces,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adaptation, "LIMITS", {2: [5], 3: [6, 2]})
    monkeypatch.setattr(adaptation, "CHAINS", (("target", "drafter"), tiny.LEVELS))
    file = tmp_path / "traces.json"
    ours = traces.sets["ours"]
    Traces({"ours": ours * 2, "others": ours[::-1] * 2}, traces.seconds).save(file)
    words = ["adaptation", "--traces", str(file), "--json-file", str(tmp_path / "report.json")]
    assert cli.main(words) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    json.dumps(report, allow_nan=False)  # JSON has no NaN
    assert report["half"] == HELD_OUT
    names = {"ours", "others", "mixed", "changing half-way", "nothing accepted"}
    for sets in report["chains"].values():
        assert names < set(sets)
        for own in sets.values():
            speeds = {name: row["speed"] for name, row in own["policies"].items()}
            assert speeds["oracle"] >= speeds[adaptation.BEST] >= speeds[adaptation.FOUND]
            assert speeds[adaptation.HALVES] >= speeds[adaptation.BEST] * (1 - 1e-9)
    text = capsys.readouterr().out
    assert "## target, middle, drafter" in text
    assert text.count("\n| joint |") == 1 + 2 * 2
