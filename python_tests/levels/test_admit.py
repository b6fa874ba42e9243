"""Prompts join rows of a running batch: what other rows hold stays, bit for bit, and a row that
joins is as one that begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from small_models import V, make
from toy_trees import TreeLevel

import polyspec_ext as ps
from polyspec_ext.levels import (
    HuggingFaceLevel,
    InputBlock,
    LevelCapabilities,
    PromptBatch,
    batched,
)
from polyspec_ext.tensors import RowCounts

PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3]]
NEW = [[2, 7, 1, 8, 2, 8, 1], [4]]
SLOTS = [2, 0]
LAYERS = (1, -1)


class Joined(TreeLevel):
    """A toy level of a user's whose batch prompts can join."""

    @property
    def capabilities(self) -> LevelCapabilities:
        return LevelCapabilities(batches=True, hidden_states=True, admits=True)

    def admit(self, slots: Sequence[int], prompts: PromptBatch) -> Any:
        running = self.caches
        hidden = self.prefill(prompts)
        for slot, cache in zip(slots, self.caches, strict=True):
            running[slot] = cache
        self.caches = running
        return hidden


def prompts_of(rows: Sequence[Sequence[int]], layers: tuple[int, ...] = ()) -> PromptBatch:
    width = max(map(len, rows))
    tokens = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    return PromptBatch(tokens, [len(row) for row in rows], 64, layers)


def make_level(kind: str) -> Any:
    return batched(Joined(V, 1, size=4) if kind == "toy" else HuggingFaceLevel(make(kind)))


def running(level: Any) -> list[int]:
    """A batch in the middle of its way. Returns its lengths."""
    level.prefill(prompts_of(PROMPTS))
    level.forward(
        InputBlock(torch.tensor([[7, 8, 9]] * 3), 1, RowCounts([3, 1, 2]), RowCounts([2, 0, 1]))
    )
    lengths = [7, 3, 4]
    level.rollback(lengths)
    return lengths


def state(level: Any, row: int, length: int) -> list[Any]:
    """All that row `row` holds."""
    if not isinstance(level, HuggingFaceLevel):
        return [level.level.caches[row]]
    layers = level.cache.layers
    return [x[row, :, :length].clone() for layer in layers for x in (layer.keys, layer.values)]


@pytest.mark.parametrize("kind", ["toy", "llama", "gpt2"])
def test_a_prompt_joins(kind: str) -> None:
    level, other, fresh = (make_level(kind) for _ in range(3))
    lengths = running(level)
    running(other)
    assert level.capabilities.admits
    before = state(level, 1, lengths[1])
    hidden = level.admit(SLOTS, prompts_of(NEW, LAYERS))
    wanted = fresh.prefill(prompts_of(NEW, LAYERS))
    for layer in LAYERS:
        for row, text in enumerate(NEW):
            n = len(text)
            torch.testing.assert_close(hidden[layer][row, :n], wanted[layer][row, :n])
    assert all(map(_equal, state(level, 1, lengths[1]), before))
    for row, slot in enumerate(SLOTS):
        n = len(NEW[row])
        assert all(map(_equal, state(level, slot, n), state(fresh, row, n)))
    # What follows: the rows that joined as in a batch of their own, the other as without them.
    block = torch.tensor([[5, 6], [7, 8], [9, 1]])
    got = level.forward(InputBlock(block, 2)).logits
    alone = fresh.forward(InputBlock(block[SLOTS], 2)).logits
    torch.testing.assert_close(got[SLOTS], alone, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        got[1], other.forward(InputBlock(block, 2)).logits[1], rtol=1e-4, atol=1e-5
    )
    # And a rollback of all.
    level.rollback([2, 3, 8])
    fresh.rollback([8, 2])
    got = level.forward(InputBlock(block, 2)).logits
    alone = fresh.forward(InputBlock(block[SLOTS], 2)).logits
    torch.testing.assert_close(got[SLOTS], alone, rtol=1e-4, atol=1e-5)


def _equal(one: Any, other: Any) -> bool:
    return bool(one.equal(other)) if isinstance(one, torch.Tensor) else one == other


def test_nothing_of_the_row_before_is_left() -> None:
    """A NaN in a slot that the mask hides would still spread."""
    level, fresh = make_level("llama"), make_level("llama")
    running(level)
    with torch.inference_mode():
        for layer in level.cache.layers:
            layer.keys[2], layer.values[2] = float("nan"), float("nan")
    level.admit([2], prompts_of([[4, 4]]))
    fresh.prefill(prompts_of([[4, 4]]))
    got = level.forward(InputBlock(torch.tensor([[5], [6], [7]]), 1)).logits[2]
    wanted = fresh.forward(InputBlock(torch.tensor([[7]]), 1)).logits[0]
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_a_longer_prompt_than_there_is_room_for() -> None:
    level, fresh = make_level("llama"), make_level("llama")
    running(level)
    long = (torch.arange(300) % V).tolist()
    level.admit([1], prompts_of([long]))
    fresh.prefill(prompts_of([long]))
    got = level.forward(InputBlock(torch.tensor([[5], [6], [7]]), 1)).logits[1]
    wanted = fresh.forward(InputBlock(torch.tensor([[6]]), 1)).logits[0]
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_an_empty_prompt() -> None:
    level = make_level("llama")
    running(level)
    level.admit([0], prompts_of([[]]))
    assert level.cache.lengths.tolist() == [0, 3, 4]


@pytest.mark.parametrize("slots", [[3], [-1], [0, 0], [0, 1]])
def test_wrong_slots(slots: list[int]) -> None:
    level = make_level("llama")
    lengths = running(level)
    with pytest.raises(ValueError, match="slots: expected"):
        level.admit(slots, prompts_of([[1]] if len(set(slots)) < 2 else NEW[:1]))
    assert level.cache.lengths.tolist() == lengths


def test_levels_that_no_prompt_can_join() -> None:
    model = make("llama")
    owner = HuggingFaceLevel(model)
    copy = ps.Level(make("llama"), shares_cache_with=owner)
    for level in (owner, copy, ps.Level(make("llama"), streaming=32)):
        assert not level.capabilities.admits
        with pytest.raises(ValueError, match="given another to admit rows to"):
            level.admit([0], prompts_of([[1]]))
