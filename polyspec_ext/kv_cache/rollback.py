"""``RollbackCache``: keys and values of a batch with independent row lengths, which grow and roll
back.

A preallocated `transformers` ``Cache``. The device has one length per row; an operator appends new
keys and values after it (ragged), and a rollback changes the lengths and moves no bytes (contract
C7). Nothing here waits for the device.

    cache = RollbackCache.for_model(model, batch_size=2)
    model(ids, past_key_values=cache, **cache.inputs(ids.shape[1], counts=[5, 3]))
    cache.rollback([4, 3])

``inputs`` returns the mask and the positions of a forward pass. While all rows have the same length
it is optional, as in ``generate``, except in a streaming cache.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import Cache

from .. import arguments, rooms
from ..tensors import RowCounts
from .layers import RollbackLayer, additive, query_positions
from .lengths import RowLengths


class SequenceState:
    """The state of a batch's sequences: keys and values by position, a ring of keys and values, or
    a recurrent state with checkpoints. The passes of a model append to it.

    The attributes of a subclass state its capabilities, which require methods; a state of a single
    sequence needs `rollback` only.

    Attributes:
        batches: rows may have different lengths; requires `inputs` and `select`.
        takes_rows: rows can be inserted, and a path of a tree kept; requires `admit`, `take` and
            `keep_path`, as in `RollbackCache`.
        in_one_place: the lengths can stay on the device for a whole round; requires `reserve_span`
            and `note_lengths`, as in `RollbackCache`.
        keeps_all: a rollback may have any length; requires `save` and `restore`, as in
            `RollbackCache`.
        longest_pass: maximum tokens that a pass appends to a row.
        only_drafts: why logits depend on the split of a text into passes, so that only plain
            decoding has the model's distribution; None: they do not.
        failed: a pass raised an error, so that no new batch reuses the memory.
        past: the `past_key_values` of the model's passes; None: the state itself.
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
        """Begin an empty batch of `batch_size` rows with at most `capacity` tokens (None: unknown)
        in the existing memory. Returns False, without effect, if a new state is required."""
        return False

    def inputs(
        self,
        tokens: int,
        counts: RowCounts | None = None,
        *,
        parents: Tensor | None = None,
        depth: int | None = None,
        near: tuple[int, int] | None = None,
    ) -> dict[str, Any]:
        """Prepare a pass of ``[B, tokens]`` ids, of which row b appends the first ``counts[b]``
        (None: all). Returns keyword arguments of the model. See `RollbackCache.inputs`."""
        raise NotImplementedError

    def rollback(self, lengths: RowCounts) -> Sequence[int]:
        """Truncate row b to at most ``lengths[b]`` tokens. Returns the new lengths, at most
        `lengths`, and less where the state returns to a checkpoint."""
        raise NotImplementedError

    def select(self, rows: Sequence[int]) -> None:
        """Keep the rows `rows`, in that order."""


class CroppedState(SequenceState):
    """A cache of `transformers` with every key and value of a single sequence, which is cut exactly
    at any token."""

    def __init__(self, cache: Any) -> None:
        self.past = cache

    def rollback(self, lengths: Sequence[int]) -> Sequence[int]:
        excess = self.past.get_seq_length() - int(lengths[0])
        if excess > 0:
            # A negative count is the number of tokens to remove, in all 5.x releases.
            self.past.crop(-excess)
        return lengths

    def save(self, row: int, begin: int, end: int) -> list[tuple[Tensor, Tensor]]:
        """Save as `RollbackCache.save`."""
        return [
            (layer.keys[row, :, begin:end].clone(), layer.values[row, :, begin:end].clone())
            for layer in self.past.layers
        ]

    def restore(self, saved: Sequence[tuple[Tensor, Tensor]], count: int) -> None:
        """Restore as `RollbackCache.restore`."""
        for number, (keys, values) in enumerate(saved):
            self.past.update(keys[None, :, :count], values[None, :, :count], number)


_SMALL = 1024  # tokens of a row; a capacity up to this is never too large to reuse
_STRIP = 32  # maximum tokens of a pass with a mask cut from a strip
SINKS = 4  # first tokens that a streaming level sees by default
_FULL, _SLIDING = "full_attention", "sliding_attention"
Slots = tuple[list[Tensor], list[Tensor]]  # keys and values of some layers
_ALIKE = "alike"  # key of `RowLengths.memory`: layers that share a launch
_COUNTS = (RowCounts, type(None))
_SIZE_MAX = arguments.SIZE_MAX


def _numbers(low: int, **values: Any) -> list[int]:
    size = _SIZE_MAX
    return [arguments.integer(name, value, size, low) for name, value in values.items()]


def _layer_types(config: Any) -> list[str]:
    """Return the kind of attention of each layer with a cache."""
    types = getattr(config, "layer_types", None)
    if types is None:
        sliding = getattr(config, "sliding_window", None) is not None
        types = [_SLIDING if sliding else _FULL] * config.num_hidden_layers
    shared = getattr(config, "num_kv_shared_layers", 0) or 0
    types = list(types)[: len(types) - shared]
    other = sorted(set(types) - {_FULL, _SLIDING})
    if other:
        raise ValueError(
            f"{type(config).__name__} has layers of type {', '.join(other)}, which cannot be "
            f"rolled back; expected {_FULL} or {_SLIDING}"
        )
    return types


class RollbackCache(Cache, SequenceState):  # type: ignore[misc]
    """Preallocated cache with one length per row.

    Args:
        config: the model's configuration, with grouped-query attention, layer types and sliding
            windows.
        batch_size: rows, B.
        dtype: dtype of the model's activations and of the masks: float32, bfloat16 or float16.
        device: device of the lengths and masks. Keys of a layer are on the layer's device.
        capacity: initially allocated tokens per row.
        step: a longer row increases the capacity to a multiple of `step`, with a copy, the only
            copy of the cache.
        bucket: attention reads `bucket` slots, or twice as many, and so on
            (`RowLengths.span_of`). 1 reads no unused slot; larger values give captured graphs few
            shapes.

    Raises:
        TypeError, ValueError: an argument has another type or is out of range, or the model keeps
            another state than keys and values by position; names it.
    """

    batches = True
    # Read in every pass, so no properties as in the base class; `_survey` sets the values.
    is_sliding = is_linear = is_dummy = cast(list[bool], None)

    def __init__(
        self,
        config: Any,
        batch_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        capacity: int = 256,
        step: int = 256,
        bucket: int = 1,
    ) -> None:
        batch_size, capacity, step, bucket = _numbers(
            1, batch_size=batch_size, capacity=capacity, step=step, bucket=bucket
        )
        if not callable(getattr(config, "get_text_config", None)):
            raise TypeError(
                "config: expected the configuration of a model of transformers, given "
                f"{arguments.shown(config)}"
            )
        kind = arguments.dtype("dtype", dtype)
        if kind is None:
            raise TypeError("dtype: expected that of the model's activations, given None")
        device = arguments.supported_device("device", device)
        text = config.get_text_config(decoder=True)
        self.types = _layer_types(text)
        self.dtype = kind
        self.rows = RowLengths(batch_size, capacity, step, bucket, device)
        window = getattr(text, "sliding_window", None)
        windows = [None if kind == _FULL else window for kind in self.types]
        layers = [RollbackLayer(self.rows, i, seen) for i, seen in enumerate(windows)]
        super().__init__(layers=layers)
        self._moved: dict[tuple[int, ...], Tensor] = {}
        self._survey()
        self._positions = torch.empty(1, 0, dtype=torch.int64)
        self._strip = torch.empty(_STRIP, 0)

    @classmethod
    def for_model(cls, model: Any, batch_size: int, **options: Any) -> RollbackCache:
        """Return a cache of `batch_size` rows in `model`'s dtype, on its device.

        Args:
            options: options of the constructor.
        """
        arguments.model("model", model)
        return cls(
            model.config, batch_size, **{"dtype": model.dtype, "device": model.device, **options}
        )

    @classmethod
    def streaming(
        cls,
        model: Any,
        batch_size: int,
        *,
        window: int,
        sinks: int = SINKS,
        slack: int = 32,
        **options: Any,
    ) -> RollbackCache:
        """Return a cache of `sinks` first and `window` latest tokens for each of `batch_size` rows,
        for a drafter (`StreamingLayer`).

        Args:
            window: tokens that a query sees in addition to the sinks, itself included.
            sinks: first tokens, which are kept permanently.
            slack: maximum tokens of a rollback; a forward pass has at most slack + 1 tokens.
            options: options of the constructor.

        Raises:
            ValueError: a number is out of range; or the model's positions cannot be moved: names
                the model.
        """
        arguments.model("model", model)
        (window,) = _numbers(1, window=window)
        sinks, slack = _numbers(0, sinks=sinks, slack=slack)
        cache = cls.for_model(model, batch_size, **options)
        cache.layers = rooms.streaming.streaming_layers(
            model, cache.rows, cache.types, window, slack, sinks
        )
        cache.longest_pass = slack + 1
        cache.only_drafts = "a streaming cache places its first tokens anew with every pass"
        cache._survey()
        return cache

    def _survey(self) -> None:
        """Cache the properties of the layers that every pass reads."""
        # Layers of a type share a mask, computed by the last layer of the type.
        self._of_type: dict[str, RollbackLayer] = dict(zip(self.types, self.layers, strict=True))
        # Rows of at most `_near` tokens see all earlier tokens, in every layer.
        self._near = min(0 if layer.ring else layer.window or sys.maxsize for layer in self.layers)
        self._grown = 0  # capacity of all layers
        self.keeps_all = self.takes_rows = not any(layer.ring for layer in self.layers)
        self.is_sliding = [layer.is_sliding for layer in self.layers]
        self.is_linear = self.is_dummy = [False] * len(self.layers)

    @property
    def lengths(self) -> Tensor:
        """[B] int64, tokens of each row. On a device it changes in place; clone it to keep it. On
        the CPU it is computed on access; read the property again after the next pass."""
        return self.rows.lengths

    @property
    def status(self) -> Tensor:
        """[B] int32, status bits of appends since the last reset (`ops.decoder.CacheStatus`)."""
        return self.rows.status

    @property
    def batch_size(self) -> int:
        return self.rows.batch

    def prepare(self, tokens: int, counts: RowCounts | None = None) -> None:
        """Prepare a forward pass as `inputs`, without its mask and positions."""
        self.rows.begin(tokens, counts)
        if self.rows.capacity != self._grown:
            self._grow()

    def _grow(self) -> None:
        for layer in self.layers:
            if layer.is_initialized:
                layer.grow()
        self._grown = self.rows.capacity

    def _of_rows(self, name: str, numbers: Sequence[int] | Tensor) -> RowCounts:
        """Return a user's integers, one per row, as `RowCounts`."""
        if type(numbers) is RowCounts:
            return numbers
        if not isinstance(numbers, Tensor):
            return RowCounts(arguments.row_integers(name, numbers))
        if numbers.dtype not in arguments.INT_DTYPES or numbers.is_meta:
            raise TypeError(f"{name}: expected integers, given {arguments.shown(numbers)}")
        if numbers.shape != (self.batch_size,):
            raise ValueError(
                f"{name}: expected shape [{self.batch_size}], given {list(numbers.shape)}"
            )
        return RowCounts.of(numbers)

    def inputs(
        self,
        tokens: int,
        counts: Sequence[int] | Tensor | None = None,
        *,
        parents: Tensor | None = None,
        depth: int | None = None,
        masked: bool = True,
        near: tuple[int, int] | None = None,
    ) -> dict[str, Any]:
        """Prepare a forward pass of ``[B, tokens]`` ids, and return its attention mask and
        positions.

        Args:
            tokens: new tokens per row, padding included; T.
            counts: [B] in [0, T], new tokens of each row; later tokens are padding, are not kept,
                and have meaningless logits. The host reads a list, but not a tensor.
            parents: [B, M] or [M] int64, M >= T, nodes of a tree, the last T of them new: the index
                of the parent of each node, less than the node's; -1: a child of the last token
                before the tree. Positions follow the path to a node. Call `keep_path` after the
                last pass of the tree.
            depth: maximum tokens of a path of the tree; None: T.
            masked: False: the model itself applies the causal mask of a chain, and counts positions
                from the lengths. Both are returned for a tree, and for a window that hides more.
            near: (window, sinks): a query sees the `window` latest tokens, itself included, and the
                `sinks` first tokens, in layers without a window of their own. None: all.

        Returns:
            Keyword arguments of the model: attention_mask, ``[B or 1, 1, T, N]`` in the cache's
            dtype (a dict by layer type if layers differ), or None if the model's causal mask
            suffices; position_ids, ``[B or 1, T]`` int64, or None if the model counts."""
        if type(tokens) is not int or type(counts) not in _COUNTS or not 0 < tokens <= _SIZE_MAX:
            tokens = arguments.integer("tokens", tokens, _SIZE_MAX, 1)
            counts = None if counts is None else self._of_rows("counts", counts)
        if depth is not None and (type(depth) is not int or not 0 < depth <= tokens):
            depth = arguments.integer("depth", depth, low=1)
        rows = self.rows
        rows.begin(tokens, cast(RowCounts | None, counts))
        if rows.capacity != self._grown:
            self._grow()
        # In a first pass the causal mask also hides padding, for rows of any length.
        base = 0 if rows.first else rows.at
        shortest = self._near if near is None else min(self._near, near[0])
        if parents is not None or base is None or not rows.span == rows.bound <= shortest:
            return self._computed(tokens, parents, depth, masked | (rows.span > shortest), near)
        if self._positions.shape[1] < base + tokens:
            longest = max(rows.capacity, base + tokens)
            self._positions = torch.arange(longest, device=rows.device)[None]
        mask = None
        # A first pass is causal by itself, and a single new token sees all slots.
        if masked and base and tokens > 1 and rows.on_cpu and tokens <= _STRIP:
            if self._strip.shape[1] < base + _STRIP:
                self._extend_strip(base)
            before = self._strip.shape[1] - _STRIP - base
            mask = self._strip[:tokens].narrow(1, before, base + tokens)[None, None]
        positions = self._positions.narrow(1, base, tokens)
        return {"attention_mask": mask, "position_ids": positions}

    def _extend_strip(self, base: int) -> None:
        # The mask of _STRIP queries after `longest` tokens; views of it are masks of short passes.
        # (On other devices attention requires aligned masks.)
        longest = max(self.rows.capacity, base)
        hidden = torch.finfo(self.dtype).min
        strip = torch.full((_STRIP, longest + _STRIP), hidden, dtype=self.dtype)
        self._strip = strip.triu_(longest + 1)

    def _computed(
        self,
        tokens: int,
        parents: Tensor | None,
        depth: int | None,
        masked: bool,
        near: tuple[int, int] | None,
    ) -> dict[str, Any]:
        """Compute mask and positions of a pass that has begun from the tensors of lengths."""
        rows, tree = self.rows, None
        if parents is None and not masked:
            return {"attention_mask": None, "position_ids": None}
        if parents is None:
            positions = query_positions(rows.base, rows.counts, tokens)
        else:
            given = parents, tokens, depth, rows.base, rows.counts
            positions, tree = rooms.tree_operators.tree_positions(*given)
        by_type: dict[str, Tensor] = {}
        for name, layer in self._of_type.items():
            by_type[name] = additive(layer.visible(positions, tree, near), self.dtype)
        mask: Any = by_type[name] if len(by_type) == 1 else by_type
        return {"attention_mask": mask, "position_ids": positions}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        rows, layer = self.rows, self.layers[layer_idx]
        batch, _, new, _ = key_states.shape
        if rows.new is None or layer_idx in rows.seen:  # the model runs without `inputs`
            if layer.ring or rows.ragged:
                ring = "a ring of keys needs its own mask"
                raise ValueError(
                    f"{ring if layer.ring else 'rows have different lengths'}: pass the model "
                    "**cache.inputs(tokens) for every forward pass"
                )
            # The model masks nothing for a single new token, so the span must have no spare slots.
            rows.begin(new, None, exact=True)
            self._grow()
        if (batch, new) != (rows.batch, rows.new):
            raise ValueError(
                f"expected {rows.new} new tokens in {rows.batch} rows, as prepared; "
                f"given {new} in {batch}"
            )
        rows.seen.add(layer_idx)
        if not layer.is_initialized:
            layer.lazy_initialization(key_states, value_states)
        if rows.at is None or not layer.takes_blocks:
            states: tuple[Tensor, Tensor] = layer.update(key_states, value_states)
            return states
        # Equal row lengths: two block copies cost less than the operator with lengths.
        keys, values, span = layer.keys, layer.values, rows.span
        keys.narrow(2, rows.at, new).copy_(key_states)
        values.narrow(2, rows.at, new).copy_(value_states)
        return keys.narrow(2, 0, span), values.narrow(2, 0, span)

    def memory_of(self, layers: tuple[int, ...]) -> Slots | None:
        """Return keys and values of each of `layers`, ``[B, H, C, D]``, for a prepared pass that
        appends to all of them in one call; cached in `RowLengths.memory`. None: not all layers are
        allocated with consecutive slots per row on one device.

        The lengths and counts of `ops.decoder.append` are then ``rows.base`` and ``rows.counts``,
        and if ``rows.at`` is None, its status goes into ``rows.status``.
        """
        if layers not in self.rows.memory and self.in_one_place:
            chosen = [self.layers[number] for number in layers]
            states = [layer.keys for layer in chosen], [layer.values for layer in chosen]
            self.rows.memory[layers] = states
        known: Slots | None = self.rows.memory.get(layers)
        return known

    def rollback(self, lengths: Sequence[int] | Tensor) -> RowCounts:
        """Truncate row b to at most ``lengths[b]`` tokens, and return `lengths`. Moves no bytes.

        Args:
            lengths: [B]. The host does not read a tensor, and assumes then that nothing was cut, so
                that attention reads more slots than necessary.

        Raises:
            TypeError, ValueError: invalid lengths.
        """
        counts = lengths if type(lengths) is RowCounts else self._of_rows("lengths", lengths)
        self.rows.cut(counts)
        return counts

    def keep_path(
        self, begin: Sequence[int] | Tensor, path: Tensor, lengths: Sequence[int] | Tensor
    ) -> RowCounts:
        """Keep a path of a tree after its pass: move the nodes ``path[b]`` in place to the slots
        from ``begin[b]`` on, in text order, and truncate row b to ``lengths[b]`` tokens.

        Args:
            begin: [B], tokens before node 0; node i is in slot ``begin[b] + i``.
            path: [B, M] int64, node indices in strictly increasing order, then -1.
            lengths: [B], see `rollback`; at most ``begin[b]`` plus the nodes of the path.
        """
        rows, front = self.rows, self._of_rows("begin", begin)
        if _ALIKE not in rows.memory:
            rows.memory[_ALIKE] = rooms.tree_operators.layers_alike(self.layers, self._moved)
        for keys, values, pointers in rows.memory[_ALIKE]:
            device = pointers.device
            _, status = rooms.tree_operators.compact_tree(
                keys, values, pointers, front.on(device), path.to(device, non_blocking=True)
            )
            rows.status.bitwise_or_(status.to(rows.status.device))
        return self.rollback(lengths)

    # ---- rows that enter and leave ---------------------------------------------------------------

    def refit(self, batch_size: int, capacity: int | None = None) -> bool:
        """Begin an empty batch of `batch_size` rows in the existing memory. Returns False, without
        effect, if the memory is too small, or has more than twice the required rows or more than
        four times the tokens.

        Args:
            capacity: maximum tokens of a row; None: any capacity is accepted.
        """
        # Rings do not grow with the text.
        if capacity is not None and self.keeps_all:
            has = self.rows.capacity
            if has < capacity or has > max(4 * capacity, _SMALL):
                return False
        if self.takes_rows:
            # Rows may have left since the memory was allocated.
            if not all(batch_size <= layer.held <= 2 * batch_size for layer in self.layers):
                return False
        elif batch_size != self.rows.batch:
            return False
        self.rows.resize(batch_size)  # even if unchanged: an interrupt may have left it half done
        self.reset()
        return True

    def admit(self, rows: Sequence[int]) -> None:
        """Empty the rows `rows`, and append empty rows for numbers after the last row. Other rows
        do not change; no bytes move if there is memory for the new rows."""
        batch = self.rows.batch
        new = sum(row >= batch for row in rows)
        if new:
            self.rows.select(torch.tensor([*range(batch), *[0] * new], dtype=torch.int64))
        self.rows.clear(rows)
        for layer in self.layers:
            layer.admit(rows, new)

    def save(self, row: int, begin: int, end: int) -> list[tuple[Tensor, Tensor]]:
        """Return copies of the keys and values of the tokens [begin, end) of a row, ``[H, N, D]``
        each, by layer; H is 0 in a layer that has never been written."""
        none = torch.empty(0, end - begin, 0)
        return [
            (layer.keys[row, :, begin:end].clone(), layer.values[row, :, begin:end].clone())
            if layer.is_initialized
            else (none, none)
            for layer in self.layers
        ]

    def restore(self, saved: Sequence[tuple[Tensor, Tensor]], count: int) -> None:
        """Append keys and values of the first `count` tokens of a copy (`save`) to a cache of one
        row with a length on the host."""
        rows = self.rows
        assert rows.host is not None, "the length is on the device"
        begin = rows.host[0]
        end = begin + count
        rows.make_room(end)
        for layer, (keys, values) in zip(self.layers, saved, strict=True):
            if len(keys):
                layer.put(keys[:, :count], values[:, :count], begin)
        rows.assign(RowCounts([end]))

    def take(self, other: RollbackCache, rows: Sequence[int]) -> None:
        """Replace row ``rows[b]`` by row b of `other`, a cache of the same model.

        Args:
            other: a cache that `takes_rows`, like this cache, and with lengths on the host.
        """
        mine, theirs = self.rows, other.rows
        assert mine.host is not None, "the lengths are on the device"
        assert theirs.host is not None, "the lengths are on the device"
        lengths = list(mine.host)
        for row, length in zip(rows, theirs.host, strict=True):
            lengths[row] = length
        mine.make_room(max(lengths))
        mine.peak = max(mine.peak, *lengths)
        index = torch.tensor(list(rows))
        for layer, filled in zip(self.layers, other.layers, strict=True):
            if filled.is_initialized:
                layer.take(filled, index)
        mine.assign(RowCounts(lengths))
        mine.status.index_copy_(0, index.to(mine.status.device), theirs.status)

    def select(self, rows: Sequence[int]) -> None:
        """Keep the rows `rows`, in that order."""
        if list(rows) != list(range(self.rows.batch)):
            self.batch_select_indices(torch.tensor(list(rows), dtype=torch.int64))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`, in that order; rows may leave, move and repeat."""
        self.rows.select(indices)
        for layer in self.layers:
            layer.select(indices)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(self.rows.batch).repeat_interleave(repeats))

    # ---- captured steps --------------------------------------------------------------------------

    @property
    def in_one_place(self) -> bool:  # type: ignore[override]
        """Return whether the cache has consecutive slots per row, is allocated, and is on one
        device. (A model on several devices copies its states between them.)"""
        return all(
            type(layer) is RollbackLayer
            and layer.is_initialized
            and layer.keys.device == self.rows.status.device
            for layer in self.layers
        )

    def reserve_span(
        self, tokens: int, more: Hashable = None, tensors: Iterable[Tensor] = ()
    ) -> rooms.graphs.MemoryKey | None:
        """Begin a round in which no row exceeds `tokens` tokens; `note_lengths` ends the round.

        Args:
            more, tensors: additional dependencies and memory of the passes.

        Returns:
            All memory of the passes; None: the passes cannot be captured, because the cache must
            grow first."""
        rows = self.rows
        rows.limit = rows.bound = tokens
        states = [x for layer in self.layers for x in (layer.keys, layer.values)]
        if tokens > min(rows.capacity, *(x.shape[2] for x in states)):
            return None
        used = [rows.lengths, rows.base, rows.status, *states, *tensors]
        return rooms.graphs.MemoryKey(self, used, (rows.capacity, more), rows.span_of(tokens))

    def note_lengths(self, lengths: Sequence[int]) -> None:
        """Set the lengths on the host after a round on the device."""
        rows = self.rows
        rows.limit, rows.host, rows.at = sys.maxsize, [int(n) for n in lengths], None
        rows.bound, rows.peak = max(rows.host, default=0), rows.capacity

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens of every row, as transformers 5 counts.

        Raises:
            ValueError: `tokens_to_remove` is positive.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove: expected <= 0, given {tokens_to_remove}")
        known = self.rows.host
        if known is None:
            self.rollback(self.lengths + tokens_to_remove)
        else:
            self.rollback([max(n + tokens_to_remove, 0) for n in known])

    def reset(self) -> None:
        """Empty all rows; memory stays allocated."""
        super().reset()
        self.rows.reset()
