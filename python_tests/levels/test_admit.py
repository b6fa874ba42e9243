"""Rows join a running batch: other rows keep their bits, and a row is as one that begins."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from small_models import V, make

import polyspec_ext as ps
from polyspec_ext.levels import HuggingFaceLevel, InputBlock, PromptBatch
from polyspec_ext.tensors import RowCounts

PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3]]
NEW = [[2, 7, 1, 8, 2, 8, 1], [4]]
KINDS = ["llama", "gpt2", "gemma2, sliding window"]


def prompts_of(rows: Sequence[Sequence[int]]) -> PromptBatch:
    width = max(map(len, rows))
    tokens = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    return PromptBatch(tokens, [len(row) for row in rows], 64)


def running(kind: str) -> tuple[HuggingFaceLevel, list[int]]:
    """Return a level with a batch in the middle of its way, and the lengths of its rows."""
    level, lengths = HuggingFaceLevel(make(kind)), [7, 3, 4]
    level.prefill(prompts_of(PROMPTS))
    counts, first = RowCounts([3, 1, 2]), RowCounts([2, 0, 1])
    level.forward(InputBlock(torch.tensor([[7, 8, 9]] * 3), 1, counts, first))
    level.rollback(lengths)
    return level, lengths


def sequence_of(level: Any, text: Sequence[int], sizes: Sequence[int] = ()) -> Any:
    """Return a sequence of `text`, read in pieces of these sizes and a last one."""
    sequence, begin = level.open(len(text)), 0
    for size in (*sizes, len(text)):
        piece = text[begin : begin + size]
        if piece:
            level.extend(sequence, torch.tensor([piece]), ())
        begin += size
    return sequence


def keys_of(level: Any, row: int, length: int) -> list[torch.Tensor]:
    layers = level.cache.layers
    return [x[row, :, :length].clone() for layer in layers for x in (layer.keys, layer.values)]


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_text_without_tokens_takes_the_place_of_another() -> None:
    level, lengths = running(KINDS[0])
    level.admit([level.open(8)], [0], 64, [1])
    assert level.cache.lengths.tolist() == [lengths[0], 0, lengths[2]]


@pytest.mark.parametrize("left", [[], [0], [1, 2]])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_join_and_leave(kind: str, left: list[int]) -> None:
    """Joining rows get the memory of rows that left."""
    level, lengths = running(kind)
    other, fresh = running(kind)[0], HuggingFaceLevel(make(kind))
    staying = [row for row in range(3) if row not in left]
    level.select(staying)
    other.select(staying)
    before = [keys_of(level, row, lengths[old]) for row, old in enumerate(staying)]
    count = len(staying)
    sequences = [sequence_of(level, NEW[0], [2, 3]), sequence_of(level, NEW[1])]
    level.admit(sequences, [len(text) for text in NEW], 64, [count, count + 1])
    fresh.prefill(prompts_of(NEW))
    for row, keys in enumerate(before):
        assert all(map(torch.equal, keys_of(level, row, keys[0].shape[1]), keys))
    assert level.cache.lengths.tolist() == [*(lengths[row] for row in staying), *map(len, NEW)]
    # Joined rows go on as in a batch without the others, and the others as without joined rows.
    for _ in range(2):
        block = torch.arange(2 * (count + 2)).view(count + 2, 2)
        got = level.forward(InputBlock(block, 2)).logits
        close(got[:count], other.forward(InputBlock(block[:count], 2)).logits)
        close(got[count:], fresh.forward(InputBlock(block[count:], 2)).logits)
        kept = [1] * count
        level.rollback([*kept, 8, 2])
        other.rollback(kept)
        fresh.rollback([8, 2])


def test_a_batch_that_begins_with_sequences() -> None:
    level, _ = running("llama")
    fresh = HuggingFaceLevel(make("llama"))
    level.admit([sequence_of(level, text) for text in NEW], [7, 1], 64, None)
    fresh.prefill(prompts_of(NEW))
    block = torch.tensor([[5], [6]])
    close(level.forward(InputBlock(block, 1)).logits, fresh.forward(InputBlock(block, 1)).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_saved_tokens_are_those_that_were_read(kind: str) -> None:
    level, _ = running(kind)
    text = (torch.arange(120) % V).tolist()
    level.admit([sequence_of(level, text)], [120], 64, [3])
    sequence = level.open(10)
    level.restore(sequence, level.save(3, 0, 80), 80)
    level.restore(sequence, level.save(3, 80, 119), 30)
    level.extend(sequence, torch.tensor([text[110:]]), ())
    level.admit([sequence], [120], 64, [4])
    for one, other in zip(keys_of(level, 3, 120), keys_of(level, 4, 120), strict=True):
        assert torch.equal(one[:, :110], other[:, :110])
        close(one, other)


@pytest.mark.parametrize("leaves", [False, True])
def test_nothing_of_the_row_before_is_left(leaves: bool) -> None:
    """A NaN in a slot that the mask hides would still spread."""
    level, fresh = running("llama")[0], HuggingFaceLevel(make("llama"))
    with torch.inference_mode():
        for layer in level.cache.layers:
            layer.keys[2], layer.values[2] = float("nan"), float("nan")
    if leaves:
        level.select([0, 1])
    level.admit([sequence_of(level, [4, 4])], [2], 64, [2])
    fresh.prefill(prompts_of([[4, 4]]))
    got = level.forward(InputBlock(torch.tensor([[5], [6], [7]]), 1)).logits[2]
    close(got, fresh.forward(InputBlock(torch.tensor([[7]]), 1)).logits[0])


def test_levels_that_no_row_can_join() -> None:
    level = ps.Level(make("llama"), streaming=32)
    assert not level.capabilities.admits
    with pytest.raises(ValueError, match="given another to admit rows to"):
        level.open(8)
