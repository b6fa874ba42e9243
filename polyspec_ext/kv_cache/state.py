"""What a level remembers of its sequences, behind one contract: it states what it can do, and
nobody asks what it is."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from ..tensors import RowCounts


class SequenceState:
    """The state of a batch's sequences: keys and values by position, a ring of them, a recurrent
    state with checkpoints. The passes of a model append to it.

    A class of this kind says what it can do, and has the methods for that: `rollback` alone, if it
    is of one sequence.

    Attributes:
        batches: it holds rows of different lengths, and has `inputs` and `select`.
        takes_rows: rows can be put in, and of a tree a path can stay: it has `admit`, `take` and
            `keep_path`, as `RollbackCache` has them.
        in_one_place: its lengths can stay on the device for a whole round: it has `reserve_span`
            and `note_lengths`, as `RollbackCache` has them.
        keeps_all: no rollback is too long for it; it has `save` and `restore`, as `RollbackCache`
            has them.
        longest_pass: tokens of a row that one pass may append.
        only_drafts: why logits depend on the passes that have read a text, so that none but plain
            decoding has the model's distribution; or None.
        failed: a pass over it raised an error, so that no batch begins in its memory again.
        past: what the passes of a model are given as `past_key_values`; None: the state itself.
    """

    batches: bool = False
    takes_rows: bool = False
    in_one_place: bool = False
    keeps_all: bool = True
    longest_pass: int = sys.maxsize
    only_drafts: str | None = None
    failed: bool = False
    past: Any = None

    def refit(self, batch_size: int, capacity: int | None = None) -> bool:
        """Begin an empty batch of so many rows, the longest of `capacity` tokens (None: not known),
        in the memory at hand. False, and nothing done: another state has to be made."""
        return False

    def inputs(
        self,
        tokens: int,
        counts: RowCounts | None = None,
        *,
        parents: torch.Tensor | None = None,
        depth: int | None = None,
    ) -> dict[str, Any]:
        """Prepare a pass of ``[B, tokens]`` ids, of which row b appends the first ``counts[b]``
        (None: all), and give what the model needs to be told of it. See `RollbackCache.inputs`."""
        raise NotImplementedError

    def rollback(self, lengths: RowCounts) -> Sequence[int]:
        """Keep the first ``lengths[b]`` tokens of row b; never more than it has. Returns how many
        are kept: no more than asked for, and fewer where it goes back to a checkpoint."""
        raise NotImplementedError

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in that order."""


class CroppedState(SequenceState):
    """A cache of `transformers` that keeps every key and value of one sequence.

    Args:
        cache: whose layers a count of tokens cuts exactly.
    """

    def __init__(self, cache: Any) -> None:
        self.past = cache

    def rollback(self, lengths: Sequence[int]) -> Sequence[int]:
        excess = self.past.get_seq_length() - int(lengths[0])
        if excess > 0:
            # A negative count removes that many; every 5.x release of transformers has it so.
            self.past.crop(-excess)
        return lengths

    def save(self, row: int, begin: int, end: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Save as `RollbackCache.save`."""
        return [
            (layer.keys[row, :, begin:end].clone(), layer.values[row, :, begin:end].clone())
            for layer in self.past.layers
        ]

    def restore(self, saved: Sequence[tuple[torch.Tensor, torch.Tensor]], count: int) -> None:
        """Restore as `RollbackCache.restore`."""
        for number, (keys, values) in enumerate(saved):
            self.past.update(keys[None, :, :count], values[None, :, :count], number)
