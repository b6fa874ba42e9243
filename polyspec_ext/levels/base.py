"""The contract of a level, a model of a chain and its cache: as users write it (`Level`), as the
engine calls it (`BatchedLevel`), and from the one to the other (`batched`)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from .. import validate as returned
from ..tensors import RowCounts


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
    `IdMap` with the ids that it draws, and has logits of; the target may not have
    one).
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
        that every pass writes anew: a chain copies what it needs for longer. Two levels must not
        share such a buffer. The chain does not change them. Where they depend on a computation
        still queued, it is on the current stream."""
        ...

    def rollback(self, lengths: Sequence[int]) -> Sequence[int] | None:
        """Keep the first ``lengths[b]`` tokens of sequence b; never more than were appended.
        Returns how many are kept where that is fewer, as where a recurrent state goes back to a
        checkpoint: the missing ones are read again with the next pass. None: as many as asked for.
        """
        ...


def device_of(level: Level) -> torch.device:
    """Return where a level takes its tokens and leaves its logits."""
    return torch.device(getattr(level, "device", "cpu"))


class IdMap:
    """Map ids of a chain's text, which are the target's, to those of one of its models and back.

    The identity by default. A model may read fewer ids than the text has, and draw only some of
    those that it reads.

    Args:
        vocab_size: ids that the model reads are below it.
        drawn: ``[Vd]`` int64, strictly increasing, below `vocab_size`: the id that each entry of
            the model's rows of logits stands for. None: entry i stands for id i.
        text_size: ids of the text are below it; None: below `vocab_size`.

    Attributes:
        reads_all: `to_below` changes nothing.
    """

    def __init__(
        self, vocab_size: int, drawn: torch.Tensor | None = None, text_size: int | None = None
    ) -> None:
        self.vocab_size, self.drawn = vocab_size, drawn
        self.reads_all = text_size is None or text_size <= vocab_size
        if drawn is None:
            return
        if drawn.dim() != 1 or drawn.dtype != torch.int64 or not len(drawn):
            raise ValueError(
                f"drawn: expected int64 [Vd], Vd >= 1, given {drawn.dtype} {list(drawn.shape)}"
            )
        self._known: list[int] = drawn.tolist()  # every draft asks the host
        if not all(a < b for a, b in pairwise((-1, *self._known, vocab_size))):
            raise ValueError(f"drawn: expected increasing ids in [0, {vocab_size}), given others")
        # With one entry more, for entry -1: a token that could not be drawn stays -1.
        self._table = torch.cat([drawn, drawn.new_tensor([-1])])

    def of_text(self, text_size: int) -> IdMap:
        """Return the same map for a text whose ids are below `text_size`."""
        return IdMap(self.vocab_size, self.drawn, text_size)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All of its memory, for the keys of captured graphs."""
        return [] if self.drawn is None else [self._table]

    def to_below(self, ids: torch.Tensor) -> torch.Tensor:
        """Map ids of the text to ids that the model reads: 0 for those that it does not have. That
        costs a draft some accuracy and no exactness: the distribution that is handed up is still
        the one that was sampled from."""
        return ids if self.reads_all else ids.masked_fill(ids >= self.vocab_size, 0)

    def to_above(self, entries: torch.Tensor) -> torch.Tensor:
        """Map entries of a row of logits to ids of the text; -1 stays -1."""
        return entries if self.drawn is None else self._table[entries]

    def entries_below(self, vocab_size: int) -> int:
        """Count the entries of a row, its first, that stand for ids below `vocab_size`."""
        if self.drawn is None:
            return min(self.vocab_size, vocab_size)
        return bisect_left(self._known, vocab_size)

    def spread(self, rows: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Spread rows of logits, ``[..., at most Vd]``, over all ids below `vocab_size`: -inf for
        ids that the model does not draw."""
        ids = self.to_above(torch.arange(rows.shape[-1], device=rows.device))
        full = rows.new_full((*rows.shape[:-1], vocab_size), -float("inf"))
        return full.index_copy_(full.dim() - 1, ids, rows)

    def gather(self, rows: torch.Tensor, entries: int) -> torch.Tensor:
        """Gather the first `entries` entries of the model's rows out of rows over all ids."""
        if self.drawn is None:
            return rows[..., :entries]
        return rows.index_select(-1, self.drawn[:entries])

    def target_to_draft(self, vocab_size: int) -> torch.Tensor | None:
        """Return ``[vocab_size]`` int32: the entry of each id of the level above, -1 where it has
        none. None: entry i is id i, as far as a row goes."""
        if self.drawn is None:
            return None
        known = self.drawn[: self.entries_below(vocab_size)]
        entries = torch.full((vocab_size,), -1, dtype=torch.int32, device=known.device)
        entries[known] = torch.arange(len(known), dtype=torch.int32, device=known.device)
        return entries


# ---- as the engine calls it ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LevelCapabilities:
    """State what a level can do beside reading one sequence.

    Attributes:
        batches: several rows, each of its own length.
        device_lengths: the host need not know `InputBlock.counts`, `first` and the lengths of
            `rollback` in the batch at hand.
        reads_apart: its prefill touches nothing that another level reads or writes, so both may run
            at once.
        hidden_states: it can return hidden states.
        trees: it can read a block whose tokens have parents.
        keeps_lengths: its lengths can stay on the device for a whole round, with the right cache
            (`device_lengths`): it has the methods of `DeviceLengths`.
        admits: rows can join the batch at hand: it has the methods of `Admitting`.
        reads_together: several sequences can be read from their first token on in padded passes,
            by `Admitting.extend_together`.
        saves_rows: `Admitting.save` copies a row from its first token alone, and only where the
            level has a copy of its state.
        replays: tokens behind a checkpoint that it reads again within a pass at most; the host has
            it read more in a pass of their own. 0: all.
        continues: a batch can begin behind copies of what was read before: it has the methods of
            `Admitting`, with `rows` None unless it `admits`. Then its logits depend on the text
            alone, up to rounding, and not on the passes that have read it.
        sharded: several processes have shards of the level and must make the same passes: no
            decision of theirs may follow a clock.
        checked: outputs have the form that the contract says and are not checked again.
        id_map: which ids it draws, where it reads others as well; None: all.
        hidden_size: width of its hidden states; None: unknown.
        num_layers: decoder layers, whose states these are; None: unknown.
    """

    batches: bool = False
    device_lengths: bool = False
    reads_apart: bool = False
    hidden_states: bool = False
    trees: bool = False
    keeps_lengths: bool = False
    admits: bool = False
    reads_together: bool = False
    saves_rows: bool = False
    replays: int = 0
    continues: bool = False
    sharded: bool = False
    checked: bool = False
    id_map: IdMap | None = None
    hidden_size: int | None = None
    num_layers: int | None = None


Ints = Sequence[int]
Layers = tuple[int, ...]  # whose hidden states are wanted
# States of a pass, ``[B, T, H]`` by layer. Layer k is the state after k decoder layers, 0 that of
# the embeddings, and -1 the last one behind the final norm. States of padding mean nothing.
Hidden = Mapping[int, torch.Tensor]


class EncodedInput(NamedTuple):
    """The input of the encoders of a chain of encoder-decoder models.

    Attributes:
        tokens: ``[B, S]`` int64, on any device.
        mask: ``[B, S]``, 1 where a token is none of padding; None: everywhere.
        states: ``[B, S, H]``, the target's encoder's output, where it is known; else None.
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
    """

    tokens: torch.Tensor
    counts: Sequence[int] | None = None
    capacity: int = 0
    hidden_layers: tuple[int, ...] = ()
    encoded: EncodedInput | None = None


@dataclass(slots=True)
class InputBlock:
    """The input of one forward pass. The tensors by row are the step's: the next step may write
    over them.

    Attributes:
        tokens: ``[B, T]`` int64, T >= 1, on the level's device.
        keep: rows of logits per sequence, 1 <= keep <= T.
        counts: row b appends its first ``counts[b]`` in [0, T] tokens; None: all of them.
        first: row [b, j] of the logits stands behind token ``first[b] + j`` of this pass; rows at
            or past ``counts[b]`` mean nothing. None: behind the last `keep` of T.
        parents: ``[B, T]`` int64, index of each token's parent in this pass, below its own, -1 for
            the tokens that follow the cache. None: each follows the one before it. A row's tokens
            are then those of a tree, behind a chain of tokens that the level has not read yet; they
            stay in the cache as they are until `keep_path`. A tree that takes several passes has
            ``[B, M]``, M >= T: of the last M tokens, of which this pass has T. It is a drafter's,
            and a row reads all T of a pass or none.
        hidden_layers: layers whose hidden states are wanted (`Hidden`).
        depth: with `parents`, no path among these tokens is longer; None: as many.
    """

    tokens: torch.Tensor
    keep: int
    counts: RowCounts | None = None
    first: RowCounts | None = None
    parents: torch.Tensor | None = None
    hidden_layers: tuple[int, ...] = ()
    depth: int | None = None


class LevelOutput(NamedTuple):
    """The output of one forward pass.

    Attributes:
        logits: ``[B, keep, V]`` float32, bfloat16 or float16, unit stride along V, unchanged until
            the level's next forward pass, which may write them again.
        hidden: ``[B, T, H]`` by layer, as asked for; or None. No later pass writes them.
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
        """Forget everything, and read the prompts. The batch may have other rows than the one
        before. Returns hidden states where `prompts` asks for them, and no logits."""
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
        checkpoint. The missing ones are read again with the next block."""
        ...

    def keep_path(self, begin: RowCounts, path: torch.Tensor, lengths: RowCounts) -> Sequence[int]:
        """Roll back behind a pass over a tree (`LevelCapabilities.trees`): of the tokens from
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


class Admitting(Protocol):
    """The methods of a level or drafter whose batch rows can join (`LevelCapabilities.admits`), or
    begin behind copies (`continues`). The text of a row is read beside the batch first, into a
    *sequence*: whatever the level keeps of one row. A level that keeps nothing of its own has
    sequences that are None."""

    def open(self, capacity: int) -> Any:
        """Return an empty sequence, for about `capacity` tokens."""
        ...

    def extend(self, sequence: Any, tokens: torch.Tensor, layers: Layers) -> Hidden | None:
        """Append tokens ``[1, T]`` to a sequence. Returns hidden states where `layers` asks for
        them."""
        ...

    def extend_together(
        self, sequences: Sequence[Any], tokens: torch.Tensor, counts: Ints, layers: Layers
    ) -> Hidden | None:
        """Append ``counts[b]`` of `tokens`, ``[B, T]``, to sequence b, which is empty, as `extend`
        does; of a level that `reads_together`. Behind an error the sequences are empty."""
        ...

    def admit(
        self, sequences: Sequence[Any], lengths: Ints, capacity: int, rows: Ints | None
    ) -> None:
        """Have sequences become rows of the batch.

        Args:
            lengths: tokens of each.
            capacity: the longest row that the batch will have.
            rows: their numbers, in increasing order: of rows that are replaced, then of new ones
                behind the last. None: a batch of these rows alone begins.
        """
        ...

    def save(self, row: int, begin: int, end: int) -> Any:
        """Return a copy of what is kept of the tokens [begin, end) of a row of the batch; None:
        nothing that is worth a copy."""
        ...

    def restore(self, sequence: Any, saved: Any, count: int) -> None:
        """Append the first `count` tokens of a copy of `save` to a sequence, behind the tokens in
        front of it; of a level that `saves_rows` all of them."""
        ...


class DeviceLengths(Protocol):
    """The methods of a level or drafter whose lengths can stay on the device for a whole round
    (`LevelCapabilities.keeps_lengths`)."""

    def reserve_span(self, tokens: int) -> Hashable | None:
        """Begin a round in which no row gets longer than `tokens`; `note_lengths` ends it. Returns
        what its passes depend on beside their inputs, addresses and shapes; None: they cannot be
        captured, since the cache must be made or grow first."""
        ...

    def note_lengths(self, lengths: Sequence[int]) -> None:
        """Set the lengths of the rows, which the host could not see change."""
        ...


def input_vocab_size(part: Any) -> int:
    """Return the size below which are the ids that a level or drafter reads. Its `vocab_size`,
    below which are those that it draws, may be smaller: then it has an attribute of this name."""
    return int(getattr(part, "input_vocab_size", part.vocab_size))


def id_map_of(part: Any) -> IdMap:
    """Return the map of a level or drafter as the engine calls it."""
    return part.capabilities.id_map or IdMap(input_vocab_size(part))


def reading(tokens: torch.Tensor, counts: Sequence[int]) -> InputBlock:
    """Return a pass that appends ``counts[b]`` of `tokens` to row b, whose logits nobody wants."""
    known = RowCounts.of(counts)
    if known.all(tokens.shape[1]):
        return InputBlock(tokens, 1)
    return InputBlock(tokens, 1, known, known.less(1))


# ---- users' levels -------------------------------------------------------------------------------


def batched(level: Any, name: str | None = None) -> BatchedLevel:
    """Return a level as the engine calls it.

    Args:
        level: a `Level` or a `BatchedLevel`.
        name: for messages; None: the level's.
    """
    if not isinstance(level, BatchedLevel):
        return LevelAdapter(level, name)
    return level if level.capabilities.checked else CheckedLevel(level, name)


def forwarded(method: str, returns: bool = True) -> Callable[..., Any]:
    """Return a method that calls the level's, which `returns` something or has to return None."""

    def call(self: Any, *given: Any) -> Any:
        if not returns:
            return returned.call(self.name, self.level, method, *given)
        return getattr(self.level, method)(*given)

    return call


class _Wrapper:
    """Wrap a user's level and check what it returns."""

    capabilities: Any
    _lacks = ""
    select = forwarded("select", returns=False)

    def __init__(self, level: Any, name: str | None = None) -> None:
        self.level = level
        self.name = name or str(getattr(level, "name", type(level).__name__))
        self.max_length: int | None = getattr(level, "max_length", None)
        self.device = device_of(level)
        self.vocab_size = int(level.vocab_size)
        self._width = id_map_of(self).entries_below(self.vocab_size)  # of rows of logits

    @property
    def one_at_a_time(self) -> str:
        """Why the level takes no batches."""
        lacks = self._lacks.format("batches")
        reason = f"{type(self.level).__name__} has {lacks} and serves one at a time"
        return getattr(self.level, "one_at_a_time", None) or reason

    @property
    def no_trees(self) -> str:
        """Why the level reads no trees."""
        reason = f"{type(self.level).__name__} has {self._lacks.format('trees')}"
        return getattr(self.level, "no_trees", None) or reason

    def _require_logits(self, block: InputBlock, logits: Any) -> None:
        batch, keep = block.tokens.shape[0], block.keep
        returned.require_logits(self.name, logits, batch, keep, self._width, self.device)

    def _kept(self, kept: Any, asked: RowCounts) -> Sequence[int]:
        if kept is None or kept is asked or asked.host is None:
            return asked
        return returned.require_kept(self.name, kept, asked.host)


class LevelAdapter(_Wrapper):
    """A user's `Level`, of four methods, as a `BatchedLevel`."""

    capabilities: LevelCapabilities
    _lacks = "no `supports_{}`"

    def __init__(self, level: Level, name: str | None = None) -> None:
        batches = bool(getattr(level, "supports_batches", False))
        id_map = getattr(level, "id_map", None)
        self.capabilities = LevelCapabilities(batches=batches, checked=True, id_map=id_map)
        super().__init__(level, name)

    def prefill(self, prompts: PromptBatch) -> None:
        reserve = getattr(self.level, "reserve", None)
        if reserve is not None:
            reserve(prompts.capacity)
        counts = () if prompts.counts is None else (prompts.counts,)
        returned.call(self.name, self.level, "prefill", prompts.tokens, *counts)

    def forward(self, block: InputBlock) -> LevelOutput:
        if block.counts is None and block.first is None:
            logits = self.level.forward(block.tokens, block.keep)
        else:
            by_row = (None if x is None else list(x) for x in (block.counts, block.first))
            logits = self.level.forward(block.tokens, block.keep, *by_row)
        self._require_logits(block, logits)
        return LevelOutput(logits)

    def read(self, tokens: torch.Tensor, counts: Sequence[int]) -> None:
        self.forward(reading(tokens, counts))

    def rollback(self, lengths: RowCounts) -> Sequence[int]:
        known = lengths if lengths.host is None else lengths.host
        return self._kept(self.level.rollback(list(known)), lengths)

    def keep_path(self, begin: RowCounts, path: torch.Tensor, lengths: RowCounts) -> Sequence[int]:
        raise ValueError(f"{self.name}: expected no tree to have been read: {self.no_trees}")


class CheckedLevel(_Wrapper):
    """A user's `BatchedLevel`, with its outputs checked."""

    _lacks = "capabilities without `{}`"
    open = forwarded("open")
    save = forwarded("save")
    reserve_span = forwarded("reserve_span")
    note_lengths = forwarded("note_lengths")
    admit = forwarded("admit", returns=False)
    restore = forwarded("restore", returns=False)
    read = forwarded("read", returns=False)

    @property
    def capabilities(self) -> LevelCapabilities:
        stated: LevelCapabilities = self.level.capabilities
        return stated

    def prefill(self, prompts: PromptBatch) -> Hidden | None:
        return self._states(self.level.prefill(prompts), prompts)

    def extend(self, sequence: Any, tokens: torch.Tensor, layers: Layers) -> Hidden | None:
        asked = PromptBatch(tokens, hidden_layers=layers)
        return self._states(self.level.extend(sequence, tokens, layers), asked)

    def extend_together(
        self, sequences: Sequence[Any], tokens: torch.Tensor, counts: Ints, layers: Layers
    ) -> Hidden | None:
        asked = PromptBatch(tokens, counts, hidden_layers=layers)
        return self._states(self.level.extend_together(sequences, tokens, counts, layers), asked)

    def _states(self, hidden: Hidden | None, asked: PromptBatch | InputBlock) -> Hidden | None:
        if asked.hidden_layers:
            shape = asked.tokens.shape
            returned.require_hidden(self.name, hidden, asked.hidden_layers, shape)
            return hidden
        return None  # an empty dict would count as states

    def forward(self, block: InputBlock) -> LevelOutput:
        out = self.level.forward(block)
        if type(out) is not LevelOutput:
            returned.require_output(self.name, out)
            out = LevelOutput(*out)
        self._require_logits(block, out.logits)
        hidden = self._states(out.hidden, block)
        return out if out.hidden is hidden else out._replace(hidden=hidden)

    def rollback(self, lengths: RowCounts) -> Sequence[int]:
        return self._kept(self.level.rollback(lengths), lengths)

    def keep_path(self, begin: RowCounts, path: torch.Tensor, lengths: RowCounts) -> Sequence[int]:
        return self._kept(self.level.keep_path(begin, path, lengths), lengths)


# ---- vocabularies --------------------------------------------------------------------------------

# Vocabularies that are padded differ by less: ids, or this fraction of the target's.
_PADDING, _FRACTION = 1024, 10


def require_same_vocabulary(names: list[str], levels: list[Any]) -> None:
    """Refuse levels whose ids do not mean the text that those of the target, ``levels[0]``, do.

    The verification compares distributions id by id. With another tokenizer the chain would still
    emit the target's distribution, but every draft would be nonsense.

    Known tokenizers must give the same id to the same token wherever both levels have that id.
    Unknown ones can only be compared by size: a draft vocabulary larger than the target's is
    refused, and one smaller by more than padding explains. Vocabularies padded to different sizes
    are fine, and so is a smaller one of a draft whose tokenizer is known.
    """
    # A tokenizer takes a second to load, and copies of the target have the target's.
    first = _model_path(levels[0])
    others = [
        (name, level)
        for name, level in zip(names[1:], levels[1:], strict=True)
        if first is None or _model_path(level) != first
    ]
    if not others:
        return
    target, size = _vocabulary(levels[0]), levels[0].vocab_size
    for name, level in others:
        draft = _vocabulary(level)
        if target is None or draft is None:
            expected = why = ""
            if level.vocab_size > size:
                expected, why = "at most", "the rest is padding"
            elif size - level.vocab_size > max(_PADDING, size // _FRACTION):
                expected = "about"
                why = "their tokens are the same; check_vocabulary=False if you know that they are"
            if expected:
                raise ValueError(
                    f"vocabulary of {name}: expected {expected} the {size} ids of the target "
                    f"{names[0]}, given {level.vocab_size}, and no tokenizers that would show that "
                    f"{why}"
                )
        elif draft != target:
            common = min(size, level.vocab_size)
            wanted, drafts = ({i: text for text, i in ids.items()} for ids in (target, draft))
            both = sorted(i for i in wanted.keys() & drafts.keys() if i < common)
            differ = [i for i in both if wanted[i] != drafts[i]]
            if differ:
                i = differ[0]
                raise ValueError(
                    f"tokenizer of {name}: expected that of the target {names[0]}, given one that "
                    f"differs in {len(differ)} of {common} ids (first: id {i} is {drafts[i]!r} and "
                    f'not {wanted[i]!r}); "translated:MODEL" draws the tokens that both have'
                )


def _vocabulary(level: Any) -> dict[str, int] | None:
    find = getattr(level, "tokenizer", None)
    tokenizer = find() if callable(find) else None
    return None if tokenizer is None else dict(tokenizer.get_vocab())


def _model_path(level: Any) -> str | None:
    return getattr(getattr(level, "model", None), "name_or_path", None) or None
