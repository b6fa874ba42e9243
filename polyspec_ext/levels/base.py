"""Contracts of a level, a model of a chain with its cache: `Level` for users, `BatchedLevel` for
the engine, and `batched` to adapt a `Level`."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from .. import rooms
from ..tensors import IdMap, RowCounts


@runtime_checkable
class Level(Protocol):
    """A model of a chain and its cache.

    A level has the cache of a batch of sequences. `prefill` starts a batch, `forward` appends to
    it, `rollback` truncates it. The four members below suffice for a single sequence, B = 1. A
    level with `supports_batches = True` accepts batches, as `HuggingFaceLevel` does::

        prefill(tokens [B, T], counts=None)     row b reads its first counts[b] tokens
        forward(tokens [B, T], keep, counts=None, first=None)
        select(rows)                            keep these rows, in that order

    Optional attributes: `name` (for messages), `device` (of tokens and logits; default the CPU),
    `max_length` (maximum context, None: no limit), `eos_token_ids`, `tokenizer()`,
    `reserve(tokens)` (called before `prefill` with the maximum row length of the batch), `id_map`
    (an `IdMap` of the ids that the level draws and has logits of; not for the target).
    """

    @property
    def vocab_size(self) -> int:
        """Width of the logits; exclusive upper bound of input ids."""
        ...

    def prefill(self, tokens: torch.Tensor) -> None:
        """Clear the cache and read `tokens`, ``[B, T]`` int64, T >= 0. Logits are not needed."""
        ...

    def forward(self, tokens: torch.Tensor, keep: int) -> torch.Tensor:
        """Append `tokens`, ``[B, T]`` int64, T >= 1, and return the next-token logits after each of
        the last `keep` <= T tokens: ``[B, keep, vocab_size]``, float32, bfloat16 or float16, unit
        stride along the vocabulary, on the level's device.

        The logits must keep their values until the next `forward` or `prefill` of this level, also
        across a `rollback` or ``select``. They may be a view of a buffer that every pass
        overwrites, because a chain copies logits that it needs longer. Two levels must not share a
        buffer. The chain does not change the logits. Computations that are still queued must be on
        the current stream."""
        ...

    def rollback(self, lengths: Sequence[int]) -> Sequence[int] | None:
        """Truncate sequence b to its first ``lengths[b]`` tokens, at most its cached length.
        Returns the kept lengths if any is smaller, as when a recurrent state returns to a
        checkpoint: the next pass reads the missing tokens again. None: exactly `lengths`.
        """
        ...


def device_of(level: Level) -> torch.device:
    """Return the device of a level's tokens and logits."""
    return torch.device(getattr(level, "device", "cpu"))


# ---- as the engine calls it ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LevelCapabilities:
    """Capabilities of a level beyond reading a single sequence.

    Attributes:
        batches: reads several rows of different lengths.
        device_lengths: in the current batch, `InputBlock.counts`, `first` and the lengths of
            `rollback` may be known to the device only.
        reads_apart: `prefill` uses no data that another level reads or writes, so that both may run
            at once.
        hidden_states: can return hidden states.
        trees: can read a block of tokens with parents.
        keeps_lengths: has the methods of `DeviceLengths`: its lengths can stay on the device for a
            whole round, if the cache allows it (`device_lengths`).
        admits: has the methods of `Admitting`: rows can join the current batch.
        reads_together: `Admitting.extend_together` reads several sequences from their first token
            on, in padded passes.
        saves_rows: `Admitting.save` copies rows from their first token only, and only where the
            level has a copy of the state.
        replays: maximum tokens after a checkpoint that it reads again within a pass; more are read
            in a separate pass. 0: no limit.
        continues: has the methods of `Admitting`, with `rows` None unless it `admits`: a batch can
            begin after copies of text that was read before. Logits then depend on the text alone,
            up to rounding, and not on the passes that read it.
        sharded: several processes have shards of the level and must run the same passes: no
            decision may depend on a clock.
        checked: outputs conform to the contract and are not checked again.
        id_map: map of the ids that it draws, if it reads others as well; None: all ids.
        hidden_size: width of its hidden states; None: unknown.
        num_layers: number of decoder layers, the source of hidden states; None: unknown.
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
Layers = tuple[int, ...]  # layers of requested hidden states
# Hidden states of a pass, ``[B, T, H]`` by layer: k after k decoder layers, 0 the embeddings, -1
# after the final norm. States of padding are undefined.
Hidden = Mapping[int, torch.Tensor]


class EncodedInput(NamedTuple):
    """Input of the encoders of a chain of encoder-decoder models.

    Attributes:
        tokens: ``[B, S]`` int64, on any device.
        mask: ``[B, S]``, 1 for tokens, 0 for padding; None: no padding.
        states: ``[B, S, H]``, the output of the target's encoder; None: unknown.
    """

    tokens: torch.Tensor
    mask: torch.Tensor | None = None
    states: torch.Tensor | None = None


class PromptBatch(NamedTuple):
    """Prompts of a new batch.

    Attributes:
        tokens: ``[B, T]`` int64, T >= 0, on the level's device.
        counts: the prompt of row b is its first ``counts[b]`` tokens; None: all T.
        capacity: maximum row length of the batch, prompts included; 0: unknown.
        hidden_layers: layers of requested hidden states (`Hidden`).
        encoded: input of the encoders of encoder-decoder models; other levels ignore it.
    """

    tokens: torch.Tensor
    counts: Sequence[int] | None = None
    capacity: int = 0
    hidden_layers: tuple[int, ...] = ()
    encoded: EncodedInput | None = None


@dataclass(slots=True)
class InputBlock:
    """Input of a forward pass. Tensors by row belong to the step: the next step may overwrite them.

    Attributes:
        tokens: ``[B, T]`` int64, T >= 1, on the level's device.
        keep: rows of logits per sequence, 1 <= keep <= T.
        counts: row b appends its first ``counts[b]`` in [0, T] tokens; None: all T.
        first: row [b, j] of the logits follows token ``first[b] + j`` of this pass; rows with an
            index >= ``counts[b]`` are undefined. None: rows follow the last `keep` of T tokens.
        parents: ``[B, T]`` int64, for a tree: index of each token's parent in this pass, below the
            token's, -1 for tokens that follow the cache. None: each token follows the previous
            token. The tree may follow a chain of tokens that the level has not read yet; all tokens
            stay in the cache in this order until `keep_path`. A tree in several passes has
            ``[B, M]``, M >= T, of the last M tokens, T of them in this pass. Only drafters do so,
            and a row reads all T of a pass or none.
        hidden_layers: layers of requested hidden states (`Hidden`).
        depth: with `parents`, maximum length of a path among the tokens; None: T.
    """

    tokens: torch.Tensor
    keep: int
    counts: RowCounts | None = None
    first: RowCounts | None = None
    parents: torch.Tensor | None = None
    hidden_layers: tuple[int, ...] = ()
    depth: int | None = None


class LevelOutput(NamedTuple):
    """Output of a forward pass.

    Attributes:
        logits: ``[B, keep, V]`` float32, bfloat16 or float16, unit stride along V, unchanged until
            the level's next forward pass, which may overwrite them.
        hidden: requested states, ``[B, T, H]`` by layer, or None. No later pass overwrites them.
        skipped: ``[B]`` int64, leading tokens of each row that the pass did not read, because a
            level above has read them into the same cache: their states are that level's, and
            undefined here. None: 0.
    """

    logits: torch.Tensor
    hidden: Hidden | None = None
    skipped: torch.Tensor | None = None


@runtime_checkable
class BatchedLevel(Protocol):
    """A level with the engine's interface; the attributes are those of `Level`. Capabilities are
    stated by the level, not probed by the caller."""

    name: str
    max_length: int | None
    device: torch.device

    @property
    def vocab_size(self) -> int: ...

    @property
    def capabilities(self) -> LevelCapabilities: ...

    def prefill(self, prompts: PromptBatch) -> Hidden | None:
        """Clear the cache and read the prompts of a new batch, with any number of rows. Returns the
        hidden states that `prompts` requests, and no logits."""
        ...

    def forward(self, block: InputBlock) -> LevelOutput:
        """Append the block's tokens to the rows."""
        ...

    def read(self, tokens: torch.Tensor, counts: Sequence[int]) -> None:
        """Append ``counts[b]`` tokens to row b, without logits."""
        ...

    def rollback(self, lengths: RowCounts) -> Sequence[int]:
        """Truncate row b to its first ``lengths[b]`` tokens, at most its cached length. Returns the
        kept lengths: at most `lengths`, and fewer where a recurrent state returns to a checkpoint.
        The next block reads the missing tokens again."""
        ...

    def keep_path(self, begin: RowCounts, path: torch.Tensor, lengths: RowCounts) -> Sequence[int]:
        """Roll back after a pass over a tree (`LevelCapabilities.trees`): of the tokens from
        ``begin[b]`` on, row b keeps the nodes ``path[b]``, in text order.

        Args:
            begin: ``[B]``, number of tokens before node 0 of the tree.
            path: ``[B, D]`` int64, nodes in strictly increasing order, then -1.
            lengths: ``[B]``, total tokens to keep, at most ``begin[b]`` plus the number of nodes in
                the path. If fewer than ``begin[b]``, the path does not matter.
        """
        ...

    def select(self, rows: Sequence[int]) -> None:
        """Keep the rows `rows`, in that order."""
        ...


class Admitting(Protocol):
    """Methods of a level or drafter with rows that can join a batch (`LevelCapabilities.admits`),
    or begin after copies (`continues`). The text of a row is first read outside of the batch, into
    a *sequence*: the level's state of a single row. A level without separate state has sequences
    that are None."""

    def open(self, capacity: int) -> Any:
        """Return an empty sequence, for about `capacity` tokens."""
        ...

    def extend(self, sequence: Any, tokens: torch.Tensor, layers: Layers) -> Hidden | None:
        """Append tokens ``[1, T]`` to a sequence. Returns the hidden states of `layers`, if any."""
        ...

    def extend_together(
        self, sequences: Sequence[Any], tokens: torch.Tensor, counts: Ints, layers: Layers
    ) -> Hidden | None:
        """Append ``counts[b]`` of `tokens`, ``[B, T]``, to the empty sequence b, as `extend` does;
        for a level that `reads_together`. After an error the sequences are empty."""
        ...

    def admit(
        self, sequences: Sequence[Any], lengths: Ints, capacity: int, rows: Ints | None
    ) -> None:
        """Turn sequences into rows of the batch.

        Args:
            lengths: tokens of each sequence.
            capacity: maximum row length of the batch.
            rows: row numbers in increasing order: of replaced rows, then of new rows after the
                last. None: the sequences begin a new batch.
        """
        ...

    def save(self, row: int, begin: int, end: int) -> Any:
        """Return a copy of the state of the tokens [begin, end) of a row of the batch; None:
        nothing worth a copy."""
        ...

    def restore(self, sequence: Any, saved: Any, count: int) -> None:
        """Append the first `count` tokens of a copy of `save` to a sequence, after the tokens that
        precede them; for a level that `saves_rows` the whole copy."""
        ...


class DeviceLengths(Protocol):
    """Methods of a level or drafter with lengths that can stay on the device for a whole round
    (`LevelCapabilities.keeps_lengths`)."""

    def reserve_span(self, tokens: int) -> Hashable | None:
        """Begin a round in which no row exceeds `tokens` tokens; `note_lengths` ends it. Returns,
        for graph keys, all that its passes depend on beside their inputs, addresses and shapes;
        None: the passes cannot be captured, because the cache must be allocated or grow first."""
        ...

    def note_lengths(self, lengths: Sequence[int]) -> None:
        """Set the lengths of the rows, which have changed on the device only."""
        ...


def input_vocab_size(part: Any) -> int:
    """Return the exclusive upper bound of ids that a level or drafter reads: its
    `input_vocab_size`, else its `vocab_size`, the bound of drawn ids, which may be smaller."""
    return int(getattr(part, "input_vocab_size", part.vocab_size))


def id_map_of(part: Any) -> IdMap:
    """Return the id map of a level or drafter with the engine's interface."""
    return part.capabilities.id_map or IdMap(input_vocab_size(part))


def reading(tokens: torch.Tensor, counts: Sequence[int]) -> InputBlock:
    """Return a block that appends ``counts[b]`` of `tokens` to row b, logits unused."""
    known = RowCounts.of(counts)
    if known.all(tokens.shape[1]):
        return InputBlock(tokens, 1)
    return InputBlock(tokens, 1, known, known.less(1))


def batched(level: Any, name: str | None = None) -> BatchedLevel:
    """Return a level with the engine's interface and checked outputs.

    Args:
        level: a `Level` or a `BatchedLevel`.
        name: for messages; None: the level's.
    """
    if isinstance(level, BatchedLevel) and level.capabilities.checked:
        return level
    return rooms.users.checked_level(level, name)


# ---- vocabularies --------------------------------------------------------------------------------

# Maximum difference by padding: ids, or this fraction of the target's vocabulary.
_PADDING, _FRACTION = 1024, 10


def require_same_vocabulary(names: list[str], levels: list[Any]) -> None:
    """Refuse levels with ids of another meaning than the ids of the target, ``levels[0]``.

    The verification compares distributions id by id. With another tokenizer the chain would still
    emit the target's distribution, but every draft would be nonsense.

    Known tokenizers must have the same token at each id that both levels have. Without tokenizers
    only sizes are compared: a draft vocabulary larger than the target's is refused, and also a
    vocabulary that is smaller by more than padding explains. Vocabularies padded to different sizes
    are accepted, and so is a smaller draft vocabulary with a known tokenizer.
    """
    # A tokenizer takes a second to load; copies of the target share the target's.
    first = _model_path(levels[0])
    below = [
        (name, level)
        for name, level in zip(names[1:], levels[1:], strict=True)
        if first is None or _model_path(level) != first
    ]
    if not below:
        return
    target, size = _vocabulary(levels[0]), levels[0].vocab_size
    for name, level in below:
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
            texts, drafts = ({i: text for text, i in ids.items()} for ids in (target, draft))
            shared = sorted(i for i in texts.keys() & drafts.keys() if i < common)
            differ = [i for i in shared if texts[i] != drafts[i]]
            if differ:
                i = differ[0]
                raise ValueError(
                    f"tokenizer of {name}: expected that of the target {names[0]}, given one that "
                    f"differs in {len(differ)} of {common} ids (first: id {i} is {drafts[i]!r} and "
                    f'not {texts[i]!r}); "translated:MODEL" draws the tokens that both have'
                )


def _vocabulary(level: Any) -> dict[str, int] | None:
    find = getattr(level, "tokenizer", None)
    tokenizer = find() if callable(find) else None
    return None if tokenizer is None else dict(tokenizer.get_vocab())


def _model_path(level: Any) -> str | None:
    return getattr(getattr(level, "model", None), "name_or_path", None) or None
