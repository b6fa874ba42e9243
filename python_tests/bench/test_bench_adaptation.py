"""`bench adaptation`: a replay does what the chain does, and the report has what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import polyspec_ext as ps
from polyspec_ext import tiny
from polyspec_ext.bench.replay import Costs, Trace, oracle, replay
from polyspec_ext.bench.traces import Traces, record

PROMPTS = [[0, 45, 300, 17, 5, 99], [0, 800, 12]]
CHAINS = [
    (("target", "drafter"), [4]),
    (("target", "middle"), [3]),
    (tiny.LEVELS, [6, 2]),
    (tiny.LEVELS, [3, 0]),
]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Traces:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("polyspec_ext.bench.traces.measured_seconds", lambda: SECONDS)
        made = record({"ours": PROMPTS}, 40)
    place = tmp_path_factory.mktemp("traces") / "traces.json"
    made.save(place)
    assert Traces.read(place) == made
    return made


SECONDS = {"target": {1: 9.0, 33: 9.0}, "middle": {1: 3.0, 33: 3.0}, "drafter": {1: 1.0}}


@pytest.mark.parametrize(("levels", "windows"), CHAINS, ids=str)
def test_replay_is_the_chain(traces: Traces, levels: tuple[str, ...], windows: list[int]) -> None:
    """Verifications and accepted tokens of every level, text by text."""
    paths: list[Path] = [tiny.path(name) for name in levels]
    chain = ps.Chain(paths, windows, dtype=torch.float32)
    costs = Costs([SECONDS[name] for name in levels])
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


def test_oracle_is_never_slower(traces: Traces) -> None:
    own = [Trace(text, ("target", "drafter")) for text in traces.sets["ours"]]
    costs = Costs([SECONDS["target"], SECONDS["drafter"]])
    choices = [[k] for k in range(9)]
    best = max(replay(own, costs, None, windows).speed for windows in choices)
    assert oracle(own, costs, choices).speed >= best
    assert oracle(own, costs, [[2]]).speed == pytest.approx(replay(own, costs, None, [2]).speed)
