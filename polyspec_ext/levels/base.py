"""The contract of a level, one model of a chain and its cache: as users write it (`Level`) and as
the engine calls it (`BatchedLevel`)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from ..tensors import RowCounts
from .id_map import IdMap


@runtime_checkable
class Level(Protocol):
    """One model of a chain and its cache.

    A level holds the keys and values of one batch of sequences. `prefill` starts a batch,
    `forward` appends to it, `rollback` cuts it. The four names below do for one sequence, B = 1. A
    level with `supports_batches = True` takes more, as `HuggingFaceLevel` does::

        prefill(tokens [B, T], counts=None)     row b reads its first counts[b] tokens
        forward(tokens [B, T], keep, counts=None, first=None)
        select(rows)                            keep these rows, in that order

    Optional attributes: `name` (for messages), `device` (of tokens and logits; default the CPU),
    `max_length` (longest context, None: no limit), `eos_token_ids`, `tokenizer()`,
    `reserve(tokens)` (before `prefill`: the longest row that the batch will have), `id_map` (an
    `IdMap` with the part of the ids that it draws, and has logits of; only the chain's last level
    may have one).
    """

    @property
    def vocab_size(self) -> int:
        """Width of the logits; ids the level reads are below it."""
        ...

    def prefill(self, tokens: torch.Tensor) -> None:
        """Forget everything and read `tokens`, ``[B, T]`` int64, T >= 0. No logits are wanted."""
        ...

    def forward(self, tokens: torch.Tensor, keep: int) -> torch.Tensor:
        """Append `tokens`, ``[B, T]`` int64, T >= 1, and return the next-token logits behind the
        last `keep` <= T of them: ``[B, keep, vocab_size]``, float32, bfloat16 or float16, unit
        stride along the vocabulary, on the level's device.

        The logits must keep their values until the next `forward` or `prefill` of this level; a
        `rollback` and a ``select`` in between must leave them. So they may be a view of a buffer
        that every pass writes anew (of a captured graph, of an engine's outputs): a chain copies
        what it needs for longer. Two levels must not share such a buffer. They are not changed,
        and where they depend on a computation still queued, it is on the current stream."""
        ...

    def rollback(self, lengths: Sequence[int]) -> Sequence[int] | None:
        """Keep the first ``lengths[b]`` tokens of sequence b; never more than were appended.
        Returns how many are kept where that is fewer, as where a recurrent state goes back to a
        checkpoint: what is missing is read again with the next pass. None: as many as asked for."""
        ...


def device_of(level: Level) -> torch.device:
    """Where a level takes its tokens and leaves its logits."""
    return torch.device(getattr(level, "device", "cpu"))


@dataclass(frozen=True, slots=True)
class LevelCapabilities:
    """What a level can do beside reading one sequence.

    Attributes:
        batches: several rows, each of its own length.
        device_lengths: the host need not know `InputBlock.counts`, `first` and the lengths of
            `rollback` in the batch at hand.
        reads_apart: its prefill touches nothing that another level reads or writes, so both may run
            at once.
        hidden_states: it can return hidden states.
        trees: it can read a block whose tokens have parents.
        keeps_lengths: its lengths can stay on the device for a whole round, given the right cache
            (`device_lengths`): it has the methods of `DeviceLengths`.
        admits: prompts can join the batch at hand: it has the method of `Admitting`.
        continues: the batch at hand can go on with other prompts, behind what both have in common
            (`PromptBatch.held`): it has the attribute of `Continuing`. Then its logits depend on
            the text alone, up to rounding, and not on the passes that have read it.
        sharded: it is one of several processes' parts of a level, which must make the same passes:
            nothing that they decide may follow a clock.
        checked: what it returns has the form that the contract says, so nobody looks again.
        id_map: which ids it draws, where they are a part of those that it reads; None: all.
        hidden_size: width of its hidden states; None: not told.
        num_layers: decoder layers, whose states these are; None: not told.
    """

    batches: bool = False
    device_lengths: bool = False
    reads_apart: bool = False
    hidden_states: bool = False
    trees: bool = False
    keeps_lengths: bool = False
    admits: bool = False
    continues: bool = False
    sharded: bool = False
    checked: bool = False
    id_map: IdMap | None = None
    hidden_size: int | None = None
    num_layers: int | None = None


# States of a pass, ``[B, T, H]`` by layer. Layer k is the state after k decoder layers, 0 that of
# the embeddings, and -1 the last one behind the final norm. States of padding mean nothing.
Hidden = Mapping[int, torch.Tensor]


class EncodedInput(NamedTuple):
    """What the encoders of a chain of encoder-decoder models read.

    Attributes:
        tokens: ``[B, S]`` int64, on any device.
        mask: ``[B, S]``, 1 where a token is none of padding; None: everywhere.
        states: ``[B, S, H]``, what the target's encoder has made of it already; None: nothing.
    """

    tokens: torch.Tensor
    mask: torch.Tensor | None = None
    states: torch.Tensor | None = None


class PromptBatch(NamedTuple):
    """The prompts of a batch that begins.

    Attributes:
        tokens: ``[B, T]`` int64, T >= 0, on the level's device.
        counts: row b is its first ``counts[b]`` tokens; None: all of them.
        capacity: the longest row that the batch will have, prompts included; 0: not known.
        hidden_layers: layers whose hidden states are wanted (`Hidden`).
        encoded: for the encoders of encoder-decoder models; other levels leave it alone.
        held: tokens that each row of the batch at hand has, and keeps in front of `tokens`. None:
            none, everything is forgotten, and the batch may have other rows than the one before.
            Only of levels whose capabilities have `continues`.
    """

    tokens: torch.Tensor
    counts: Sequence[int] | None = None
    capacity: int = 0
    hidden_layers: tuple[int, ...] = ()
    encoded: EncodedInput | None = None
    held: Sequence[int] | None = None


@dataclass(slots=True)
class InputBlock:
    """What one forward pass reads. The tensors by row are the step's: the next one may write over
    them.

    Attributes:
        tokens: ``[B, T]`` int64, T >= 1, on the level's device.
        keep: rows of logits per sequence, 1 <= keep <= T.
        counts: row b appends its first ``counts[b]`` in [0, T] tokens; None: all of them.
        first: row [b, j] of the logits stands behind token ``first[b] + j`` of this pass; rows at
            or past ``counts[b]`` mean nothing. None: behind the last `keep` of T.
        parents: ``[B, T]`` int64, index of each token's parent in this pass, below its own, -1 for
            the tokens that follow the cache. None: each follows the one before it. A row's tokens
            are then those of a tree, behind a chain of what it has not read yet; they stay in the
            cache as they are until `keep_path`.
        hidden_layers: layers whose hidden states are wanted (`Hidden`).
        depth: with `parents`, no path among the tokens of a row is longer; None: T.
    """

    tokens: torch.Tensor
    keep: int
    counts: RowCounts | None = None
    first: RowCounts | None = None
    parents: torch.Tensor | None = None
    hidden_layers: tuple[int, ...] = ()
    depth: int | None = None


class LevelOutput(NamedTuple):
    """What one forward pass gives.

    Attributes:
        logits: ``[B, keep, V]`` float32, bfloat16 or float16, unit stride along V. They must stand
            until the level's next forward pass: it may write them again then.
        hidden: ``[B, T, H]`` by layer, as asked for; or None. They are the
            caller's: no later pass writes them.
        skipped: ``[B]`` int64, leading tokens of each row that the pass did not read, since a level
            above, in the same cache, has: their states are that level's, and mean nothing here;
            None: of none.
    """

    logits: torch.Tensor
    hidden: Hidden | None = None
    skipped: torch.Tensor | None = None


@runtime_checkable
class BatchedLevel(Protocol):
    """A level as the engine calls it.

    Attributes:
        name: for messages and statistics.
        vocab_size: width of the logits; ids that the level reads are below it.
        max_length: longest context; None: no limit.
        device: of tokens and logits.
        capabilities: stated, not probed by the caller.
    """

    name: str
    max_length: int | None
    device: torch.device

    @property
    def vocab_size(self) -> int: ...

    @property
    def capabilities(self) -> LevelCapabilities: ...

    def prefill(self, prompts: PromptBatch) -> Hidden | None:
        """Forget everything, but for what `prompts` says is held, and read them. No logits are
        wanted; hidden states where `prompts` says so."""
        ...

    def forward(self, block: InputBlock) -> LevelOutput:
        """Append the block's tokens to the rows."""
        ...

    def read(self, tokens: torch.Tensor, counts: Sequence[int]) -> None:
        """Append ``counts[b]`` tokens to row b, of which no logits are wanted."""
        ...

    def rollback(self, lengths: RowCounts) -> Sequence[int]:
        """Keep the first ``lengths[b]`` tokens of row b; never more than it has. Returns how many
        are kept: no more than asked for, and fewer where a recurrent state goes back to a
        checkpoint. What is missing is read again with the next block."""
        ...

    def keep_path(self, begin: RowCounts, path: torch.Tensor, lengths: RowCounts) -> Sequence[int]:
        """`rollback` behind a pass over a tree (`LevelCapabilities.trees`): of the tokens from
        ``begin[b]`` on, row b keeps the nodes ``path[b]``, in text order.

        Args:
            begin: ``[B]``, tokens in front of node 0 of the tree.
            path: ``[B, D]`` int64, nodes in strictly increasing order, then -1.
            lengths: ``[B]``, tokens kept in all, of which at most as many behind ``begin[b]`` as
                the path has nodes. Where fewer than ``begin[b]`` are kept the path does not matter.
        """
        ...

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in that order."""
        ...


def input_vocab_size(part: Any) -> int:
    """Ids that a level or drafter reads are below this. Its `vocab_size`, below which are those
    that it draws, may be smaller: then it says so by an attribute of this name."""
    return int(getattr(part, "input_vocab_size", part.vocab_size))


def id_map_of(part: Any) -> IdMap:
    """Of a level or drafter as the engine calls it."""
    return part.capabilities.id_map or IdMap(input_vocab_size(part))


class Admitting(Protocol):
    """What a level has beside, to whose batch prompts can join (`LevelCapabilities.admits`)."""

    def admit(self, slots: Sequence[int], prompts: PromptBatch) -> Hidden | None:
        """The rows ``slots[i]`` of the batch at hand forget everything and read row i of `prompts`;
        no other row changes. `prefill` is the case where all slots are new. Returns hidden states
        ``[len(slots), T, H]`` where `prompts` says so.

        Args:
            slots: different rows of the batch, one for each prompt.
        """
        ...


class Continuing(Protocol):
    """What a level or drafter has beside, whose batch can go on with other prompts
    (`LevelCapabilities.continues`).

    Attributes:
        revision: another number after every call that may have changed what it holds, whoever made
            it.
    """

    @property
    def revision(self) -> int: ...


class DeviceLengths(Protocol):
    """What a level or drafter has beside, whose lengths can stay on the device for a whole round
    (`LevelCapabilities.keeps_lengths`)."""

    def reserve_span(self, tokens: int) -> Hashable | None:
        """A round begins in which no row gets longer than `tokens`; `note_lengths` ends it. Returns
        what its passes depend on beside their inputs, addresses and shapes; None: they cannot be
        captured, since the cache must be made or grow first."""
        ...

    def note_lengths(self, lengths: Sequence[int]) -> None:
        """The rows hold so many tokens now: what the host could not see happen."""
        ...
