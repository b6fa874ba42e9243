"""Shipped EAGLE heads for the grown target."""

from __future__ import annotations

from pathlib import Path

import pytest

import polyspec_ext as ps
from polyspec_ext import tiny
from polyspec_ext.outputs import Output

PROMPT = [0, 5, 6, 7, 8, 9]


def require_same(wanted: Output, found: Output) -> None:
    assert found.sequences.equal(wanted.sequences)
    ours, theirs = (out.stats.levels[0].acceptance_histogram for out in (found, wanted))
    assert ours == theirs


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("name", tiny.HEADS)
def test_a_grown_head_drafts_what_the_shipped_one_does(
    name: str, times: int, tmp_path: Path
) -> None:
    """The same drafts, so the same tokens accepted at the same places, for sampled texts too."""
    target, grown = tiny.grown(1), tiny.grown(times)
    place = tiny.grown_head(name, times, tmp_path)
    own = ps.Chain([target, ps.Eagle.from_pretrained(tiny.path(name), target)], [4])
    wide = ps.Chain([grown, ps.Eagle.from_pretrained(place, grown)], [4])
    for temperature in (0.0, 1.0):
        require_same(*(c.generate(PROMPT, 40, temperature, seed=3) for c in (own, wide)))
    tree = ps.DynamicTree(3, 8)
    heads = [
        ps.Eagle.from_pretrained(where, model, tree=tree)
        for where, model in ((tiny.path(name), target), (place, grown))
    ]
    pairs = zip((target, grown), heads, strict=True)
    require_same(*(ps.Chain([model, head], [3]).generate(PROMPT, 24) for model, head in pairs))


def test_grown_states_are_read(tmp_path: Path) -> None:
    """A head for twice the width is refused by the shipped target."""
    place = tiny.grown_head("eagle3", 2, tmp_path)
    with pytest.raises(ValueError, match="expected a target with hidden states of 512"):
        ps.Eagle.from_pretrained(place, tiny.grown(1))
    with pytest.raises(ValueError, match="name: expected one of eagle2, eagle3"):
        tiny.grown_head("drafter", 2, tmp_path)
