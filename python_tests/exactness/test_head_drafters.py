"""Heads in chains of toy levels keep the target's law, by enumeration; a mistake shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import any_head
import pytest
import toy
from device_rounds import counted
from toy_trees import StayingTrees, TreeEnumerator

import polyspec_ext as ps

PROMPT, VOCAB = [0, 1], 2
TREES = {"dynamic": ps.DynamicTree(2, 4), "static": ps.StaticTree([[0], [1], [0, 0]])}
SYNC = pytest.mark.parametrize("sync", [None, False], ids=["step by step", "at once"])


def distance(
    kind: str, place: Path, window: Sequence[int], sync: bool | None, length: int = 3, **more: Any
) -> float:
    """Total variation of a chain's text to the target's."""
    chance = TreeEnumerator()
    drafter = any_head.head_of(kind, VOCAB, place, TREES, draw=chance.draw)
    levels = [StayingTrees(VOCAB, 11 + i, size=any_head.SIZE) for i in range(len(window))]
    options = {"operators": chance.operators, "sync_each_step": sync, **more}
    chain = ps.Chain([*levels, drafter], window, **options)

    # The first text finds no cache allocated, and its logits are rounded otherwise.
    chance.only(-1)
    chain.generate(PROMPT, length, temperature=1.0, eos_token_id=[])
    chance.only(None)
    with counted() as rounds:
        found = toy.chain_gap(chance, chain, levels[0].table, PROMPT, length)
    assert bool(rounds) == (sync is False)
    return found


CASES: list[tuple[str, list[int], bool | None, dict[str, Any]]] = [
    *((kind, window, sync, {}) for kind in any_head.KINDS for window in ([2], [2, 1])
      for sync in (None, False)),
    *(("eagle", [1, 1], sync, {"rule": rule, "tail": 1}) for rule in ("token", "block")
      for sync in (None, False)),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "window", "sync", "more"), CASES)
def test_the_distribution_is_the_targets(kind, window, sync, more, tmp_path) -> None:
    """With tails as well."""
    assert distance(kind, tmp_path, window, sync, **more) < 1e-12


@SYNC
@pytest.mark.parametrize("kind", ["eagle", "dspark"])
def test_rows_of_other_tokens_are_seen(kind, sync, tmp_path, monkeypatch) -> None:
    """What a head hands up is not what it drew from."""
    head = ps.Eagle if kind == "eagle" else ps.DFlash
    draft = head.draft

    def wrong(self: Any, inputs: Any) -> Any:
        block = draft(self, inputs)
        assert block.rows is not None
        block.rows = block.rows._replace(logits=block.rows.logits.roll(1, 2), statistics=None)
        return block

    monkeypatch.setattr(head, "draft", wrong)
    assert distance(kind, tmp_path, [2], sync) > 1e-3
