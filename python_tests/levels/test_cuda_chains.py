"""Launches, uploads and reads of rounds on CUDA, counted with tensors without numbers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from fake_chains import chain, launches, steps_of_a_round

from polyspec_ext.runtime.graphs import Graphs, Outputs, Run


class Launches(NamedTuple):
    """Launches of the steps of the chain (target, 4-bit copy, EAGLE head) at batch 1."""

    layer: int  # of a decoder layer of the target
    copy_layer: int  # of a layer of its copy
    plain: int  # of a step of the target alone, without its layers
    # Of a verification without its layers: ends, rows, rule, and the states for the head.
    target: int
    copy: int
    draft: int  # of a draft of one token
    token: int  # of each further token


# With attention over up to 512 slots.
FUSED = Launches(9, 5, 11, 14, 14, 25, 15)
MOST = 12  # launches without the passes
CHAINS = {
    "target, draft": (["target", "draft"], [4]),
    "target, W4, draft": (["target", "W4", "draft"], [5, 3]),
    "target, EAGLE": (["target", "EAGLE"], [4]),
    "target, W4, EAGLE": (["target", "W4", "EAGLE"], [5, 3]),
    "target, EAGLE-3": (["target", "EAGLE-3"], [4]),
}
# The same of a tree: of a draft, of each of its levels but the first, and of its verification.
TREE, TREE_LEVEL, TREE_VERIFIED = 87, 14, 50
TREES = {
    "target, tree": (["target", "tree"], [4]),
    "target, deeper tree": (["target", "tree"], [6]),
    "target, W4, tree": (["target", "W4", "tree"], [5, 3]),
}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", CHAINS)
def test_a_step_is_few_launches_beside_its_passes(name: str, temperature: float, rows: int) -> None:
    """Drawing, verifying and cutting caches; waiting for the host would end the round."""
    parts, window = CHAINS[name]
    with launches():
        steps = steps_of_a_round(chain(parts, window), rows, temperature)
    assert {step.level for step in steps} == set(range(1, len(parts) + 1))
    for step in steps:
        assert not step.uploads, step
        assert step.beside.total() <= MOST, step.beside


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", TREES)
def test_a_step_of_a_tree_has_its_count(name: str, rows: int) -> None:
    """Growing the tree, laying it out, verifying it, and keeping its path."""
    parts, window = TREES[name]
    with launches():
        steps = steps_of_a_round(chain(parts, window), rows)
    assert {step.level for step in steps} == set(range(1, len(parts) + 1))
    for step in steps:
        assert not step.uploads, step
        drafts, verifies = step.level == len(parts), step.level == len(parts) - 1
        most = TREE_VERIFIED if verifies else MOST
        if drafts:
            most = TREE + TREE_LEVEL * (step.tokens - 1)
        assert step.beside.total() <= most, step.beside


@pytest.mark.filterwarnings("ignore:.*cannot be captured:RuntimeWarning")
@pytest.mark.parametrize("fuses", [False, True])
@pytest.mark.parametrize("name", [*CHAINS, *TREES])
def test_rounds_that_the_host_follows_mix_no_devices(name: str, fuses: bool) -> None:
    """Counts are on the host, and the inputs of graphs are on the device."""
    parts, window = {**CHAINS, **TREES}[name]
    with launches(fuses, zeros=True):
        made = chain(parts, window, pack=fuses, graphs=True, sync_each_step=True)
        made.batch([[3, 1, 4, 1, 5, 9], [2, 7]], 64, temperature=0.0, eos_token_id=[])
        with torch.inference_mode():
            for _ in range(3):
                made.engine.round()


class Followed(NamedTuple):
    """Numbers of a round that the host follows, by captured passes."""

    replays: int
    reads: int
    uploads: int
    launches: int  # of all else


# A pass is a replay and an upload. A verification is a read, and its result an upload to the level
# below. A copy needs the lengths of its cache's owner, and a chain of a head a read for each token.
FOLLOWED = {
    "target, lookup": (["target", "lookup"], [4], Followed(1, 1, 1, 6)),
    "target, draft, lookup": (["target", "draft", "lookup"], [5, 3], Followed(3, 3, 5, 20)),
    "target, W4, lookup": (["target", "W4", "lookup"], [5, 3], Followed(3, 3, 8, 17)),
    "target, EAGLE": (["target", "EAGLE"], [3], Followed(4, 6, 5, 26)),
    "target, tree": (["target", "tree"], [3], Followed(3, 3, 3, 13)),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_steps_that_the_host_follows_replay_their_passes(name: str) -> None:
    parts, window, wanted = FOLLOWED[name]
    replays: list[int] = []

    def capture(step: Run) -> tuple[Callable[[], None], Outputs]:
        outputs = step()
        return lambda: replays.append(1), outputs

    with launches(zeros=True) as seen:
        graphs = Graphs(SimpleNamespace(capture=capture))
        made = chain(parts, window, graphs=graphs, sync_each_step=True)
        made.batch([3, 1, 4, 1, 5, 9], 64, temperature=1.0, eos_token_id=[])
        with torch.inference_mode():
            for _ in range(5):  # the first rounds allocate and capture
                seen.counts.clear()
                for kept in (replays, seen.reads, seen.uploads):
                    kept.clear()
                made.engine.round()
    found = Followed(*map(len, (replays, seen.reads, seen.uploads)), seen.total)
    assert found == wanted, (seen.reads, seen.uploads, seen.counts)


@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_layer_of_a_head_is_nine_launches(version: int, rows: int) -> None:
    """Operators of a layer without a mask; the first reads two states after norms."""
    name = "EAGLE" if version == 1 else "EAGLE-3"
    tokens = []
    for layers in (1, 2, 5):
        drafts = []
        for window in (3, 5):
            with launches():
                made = chain(["target", name], [window], head_layers=layers)
                steps = steps_of_a_round(made, rows)
            drafts.append(next(step.launches for step in steps if step.level == 2))
        tokens.append(drafts[1] - drafts[0])
    one, two, five = (found.total() // 2 for found in tokens)
    assert (two - one, five - two) == (9, 27), tokens[1] - tokens[0]
    assert not {"masked_fill_", "where"} & set(tokens[0])
    assert one <= 22, tokens[0]


def test_the_counts_of_bench_model_are_those_of_the_passes() -> None:
    """Counted in the chain (target, W4, EAGLE)."""
    totals = []
    for layers, drafts in ((2, 3), (5, 3), (2, 5)):
        with launches():
            made = chain(["target", "W4", "EAGLE"], [6, drafts], layers)
            totals.append({step.level: step.launches.total() for step in steps_of_a_round(made)})
    with launches():
        (alone,) = steps_of_a_round(chain(["target"], []))
    few, deep, long = totals
    layer, copy_layer = ((deep[level] - few[level]) // 3 for level in (1, 2))
    token = (long[3] - few[3]) // 2
    plain = alone.launches.total() - 2 * layer
    ends = plain, few[1] - 2 * layer, few[2] - 2 * copy_layer
    assert Launches(layer, copy_layer, *ends, few[3] - 2 * token, token) == FUSED
