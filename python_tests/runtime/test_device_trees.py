"""Rounds of heads and trees without host synchronisation, on the CPU, and their captures."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from any_head import head_for
from captured_chains import PROMPTS, level
from device_rounds import counted, same, watched
from recorder import OnADevice, WatchedGraphs

import polyspec_ext as ps

SHARP: dict[str, Any] = {"initializer_range": 0.2}  # logits depend on earlier tokens
DYNAMIC = ps.DynamicTree(3, 9)
STATIC = ps.StaticTree([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])


# From the target to a drafter that was not trained.
Heads = Callable[[Any], Any]


def some(*kinds: str) -> Any:
    return pytest.mark.parametrize("heads", kinds, indirect=True)


@pytest.fixture(
    params=["first tree", "third tree", "first chain", "third chain", "medusa", "hydra"]
)
def heads(request: pytest.FixtureRequest, tmp_path: Path) -> Heads:
    name, _, form = str(request.param).partition(" ")
    kind = {"first": "eagle", "third": "eagle 3"}.get(name, name)
    tree = None if form == "chain" else STATIC if name == "hydra" else DYNAMIC
    return lambda target: head_for(target, kind, tmp_path, tree)


def chain_of(heads, window, shared=False, captured=None, sync=False, **options):
    """`shared`: levels are 4-bit copies in the target's cache."""
    levels: list[Any] = [level(0, 3, "level 0", captured is not None, **SHARP)]
    for i in range(1, len(window)):
        if shared:
            copy = ps.quantize_w4(levels[0].model, 32)
            levels.append(ps.HuggingFaceLevel(copy, name="W4", shares_cache_with=levels[0]))
        else:
            levels.append(level(i, 3, f"level {i}", captured is not None, **SHARP))
    drafter = heads(levels[0])
    if captured is not None:
        options["graphs"] = captured
    return ps.Chain([*levels, drafter], window, sync_each_step=sync, **options)


def test_one_synchronisation_per_round(heads: Heads) -> None:
    alone = chain_of(heads, [6, 3])
    with watched(alone) as seen:
        batch = alone.batch(PROMPTS, 20, temperature=1.0, seed=1, eos_token_id=[])
        batch.complete()
    assert seen.synchronisations == 0
    assert seen.reads >= batch.stats.levels[0].num_forward_passes - 2 > 3


def test_its_steps_are_captured(heads: Heads, monkeypatch: pytest.MonkeyPatch) -> None:
    captured_texts(heads, monkeypatch, shared=False)


@some("first tree", "medusa")
def test_a_tree_below_a_4_bit_copy_is_captured(heads, monkeypatch) -> None:
    """The paper's chain: a target, its 4-bit copy, EAGLE-2's tree. Every step of its rounds."""
    graphs = captured_texts(heads, monkeypatch, shared=True)
    assert {key[0] for key in +graphs.keys} == {1, 2, 3}


def captured_texts(heads: Heads, monkeypatch: pytest.MonkeyPatch, shared: bool) -> WatchedGraphs:
    """Compare texts of captured rounds with texts of rounds that the host follows."""

    monkeypatch.setattr("polyspec_ext.drafters.features.RollbackCache", OnADevice)
    followed = chain_of(heads, [6, 3], shared=shared, sync=None)
    graphs = WatchedGraphs()
    captured = chain_of(heads, [6, 3], shared=shared, captured=graphs)
    for count, temperature in ((3, 1.0), (1, 0.0), (3, 0.7)):
        options: dict[str, Any] = {"temperature": temperature, "seed": 4, "eos_token_id": []}
        got = captured.generate(PROMPTS[:count], 50, **options)
        same(got, followed.generate(PROMPTS[:count], 50, **options))
    assert graphs.num_replays > 4 * graphs.num_captures > 0
    graphs.require_named(floats=True)  # weights, states and logits
    return graphs


@pytest.mark.parametrize("window", [[6, 3], [6]], ids=str)
@some("first tree", "third chain", "medusa")
def test_rounds_that_the_host_follows_in_between(heads, window, monkeypatch) -> None:
    """With windows by row; states not passed on yet go to the host and come back."""
    texts = []
    for sync, graphs in ((None, None), (False, None), (False, WatchedGraphs())):
        if graphs is not None:
            monkeypatch.setattr("polyspec_ext.drafters.features.RollbackCache", OnADevice)
        chain = chain_of(heads, window, sync=sync, captured=graphs)
        batch = chain.batch(PROMPTS, 60, temperature=1.0, seed=6, eos_token_id=[])
        with counted() as rounds:
            for number in range(12):
                if number in (4, 8):
                    with torch.inference_mode():
                        windows = window if number == 8 else [3, 2][: len(window)]
                        chain.engine.set_windows(batch.rows[1], windows)
                batch.advance()
        if sync is False:
            assert len(rounds) in (7, 8) or graphs is not None
        # (With any drafts the tokens are the target's; the number accepted differs.)
        levels = [(own.num_draft_tokens, own.num_accepted_tokens) for own in batch.stats.levels]
        texts.append(([row.tokens for row in batch.rows], levels))
    assert texts[0] == texts[1] == texts[2]
