"""Texts that begin with saved prefixes, are read outside a batch and join it, or are replaced.

Saved are keys and values by runs of tokens in a radix tree, and states that cannot be cut, by whole
texts.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch

from ..drafters.base import levels_of
from ..errors import named
from ..levels.base import Admitting, Hidden
from ..stats import StatsRecorder
from ..tensors import RowCounts, common_prefix, padded
from .prefill import Caches
from .rows import Row, Rows, StateRows

Copies = list[tuple[Any, int]]  # in text order, each with its number of valid tokens
_Save = Callable[[int, int, int], Any]
_LONGEST = 256  # maximum tokens of a run; a run is dropped as a whole


class _Run:
    """Node of the radix tree: a run of tokens after the first `at` tokens of the run `above`.
    `saved` has, by level, the number of copied tokens, and the copy."""

    def __init__(self, above: _Run | None, at: int, tokens: Sequence[int]) -> None:
        self.above, self.at, self.tokens = above, at, list(tokens)
        self.below: dict[tuple[int, int], _Run] = {}
        self.saved: dict[int, tuple[int, Any]] = {}


class Prefixes:
    """Copies of the levels' caches by text; the least recently used copies are dropped.

    Args:
        capacity: maximum tokens of all runs.
        states: maximum whole texts of a level.
    """

    def __init__(self, capacity: int, states: int) -> None:
        self.capacity, self._most_states = capacity, states
        self._root = _Run(None, 0, ())
        # Oldest first. A run is newer than the runs below it, so that the oldest run is a leaf.
        self._by_age: OrderedDict[int, _Run] = OrderedDict()
        self._states: dict[int, OrderedDict[tuple[int, ...], Any]] = {}
        self._stamp: tuple[object] | None = None

    def forget_unless(self, stamp: object) -> object:
        """Forget all copies, unless they are of models with this `stamp` (`Caches.stamp`). Returns
        an object for these models, which is another one after any change."""
        if self._stamp is None or self._stamp[0] != stamp:
            self._stamp = (stamp,)
            self._root = _Run(None, 0, ())
            self._by_age.clear()
            self._states.clear()
        return self._stamp

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of all runs."""
        return sum(len(run.tokens) for run in self._by_age.values())

    def find(
        self, text: Sequence[int], ahead: Mapping[int, int] | None = None
    ) -> dict[int, Copies]:
        """Return by level the copies of the longest saved prefix of `text`.

        Args:
            ahead: by level another level, which must have copies of at least one token more than
                the state of the first."""
        copies: dict[int, Copies] = {}
        lengths: dict[int, int] = {}
        begin = 0
        for run, count in self._path(text):
            for level, (size, copy) in run.saved.items():
                if lengths.get(level, 0) == begin:
                    copies.setdefault(level, []).append((copy, min(size, count)))
                    lengths[level] = begin + min(size, count)
            begin += count
        for level, known in self._states.items():
            most = len(text)
            if ahead is not None and level in ahead:
                most = lengths.get(ahead[level], 0) - 1
            fitting = [x for x in known if len(x) <= most and x == tuple(text[: len(x)])]
            if fitting:
                longest = max(fitting, key=len)
                known.move_to_end(longest)
                copies[level] = [(known[longest], len(longest))]
        return copies

    def add(self, text: Sequence[int], lengths: Sequence[int], save: _Save) -> None:
        """Save the prefix of `text` in each level's cache.

        Args:
            lengths: cached lengths of level 1, 2, ...
            save: called with a level's number and the bounds of tokens without a copy.
        """
        text = text[: min(max(lengths), self.capacity)]
        path = self._path(text)
        last, at = path[-1] if path else (self._root, 0)
        begin = sum(count for _, count in path)
        for start in range(begin, len(text), _LONGEST):
            run = _Run(last, at, text[start : start + _LONGEST])
            self._by_age[id(run)] = last.below[at, run.tokens[0]] = run
            last, at = run, len(run.tokens)
            path.append((run, at))
        self._touch(path)
        begin = 0
        for run, count in path:
            for level, length in enumerate(lengths, 1):
                size = min(length - begin, count)
                if size > run.saved.get(level, (0, None))[0]:
                    copy = save(level, begin, begin + size)
                    if copy is not None:
                        run.saved[level] = size, copy
            begin += count
        excess = self.num_tokens - self.capacity
        while excess > 0:
            _, oldest = self._by_age.popitem(last=False)
            key = oldest.at, oldest.tokens[0]
            # (An interrupt may have prevented the insertion of a run.)
            if oldest.above is not None and oldest.above.below.get(key) is oldest:
                del oldest.above.below[key]
            excess -= len(oldest.tokens)

    def add_state(self, text: Sequence[int], level: int, copy: Any) -> None:
        """Save a level's copy of the state after `text`; None: save nothing."""
        if copy is None:
            return
        known = self._states.setdefault(level, OrderedDict())
        known[tuple(text)] = copy
        known.move_to_end(tuple(text))
        while len(known) > self._most_states:
            known.popitem(last=False)

    def _path(self, text: Sequence[int]) -> list[tuple[_Run, int]]:
        """Return the runs of the longest saved prefix, each with its number of common tokens."""
        path: list[tuple[_Run, int]] = []
        run, count, begin = self._root, 0, 0
        while begin < len(text) and (below := run.below.get((count, text[begin]))) is not None:
            run, count = below, common_prefix(below.tokens, text[begin:])
            path.append((run, count))
            begin += count
        self._touch(path)
        return path

    def _touch(self, path: Sequence[tuple[_Run, int]]) -> None:
        for run, _ in reversed(path):
            self._by_age[id(run)] = run
            self._by_age.move_to_end(id(run))


# ---- texts that join a batch ---------------------------------------------------------------------

_AHEAD = 512  # maximum new tokens with room in the caches when a row joins


@dataclass(slots=True)
class Reading:
    """A text that is read outside a batch, which its request will join: by level the sequence
    (`levels.base.Admitting`) and the number of tokens read of the text but for its last; `asked`,
    the levels that read; `begin`, leading tokens that the target has from copies; and the target's
    hidden states after `begin`, by pass, if the drafter reads them."""

    row: Row
    sequences: dict[int, Any]
    lengths: dict[int, int]
    asked: Sequence[int]
    begin: int = 0
    hidden: list[Hidden] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Return the maximum unread tokens of any level."""
        return self.row.committed - 1 - min(self.lengths[number] for number in self.asked)


class Readings:
    """Reader of texts outside the batch of `caches`, which then join it."""

    def __init__(self, caches: Caches) -> None:
        self._caches = caches
        self._config, self._parts = caches.config, caches.parts
        self._layers, self._count = caches.layers, caches.count

    @property
    def can_join(self) -> bool:
        """Return whether readings can join the current batch: the target has begun it, and so has a
        drafter that reads hidden states of every token."""
        return (
            all(self._caches.begun[: len(self._parts)]) if self._layers else self._caches.begun[0]
        )

    @property
    def admits(self) -> bool:
        """Return whether texts can be read outside the batch: every level can add rows to it."""
        return all(level.capabilities.admits for level in self._parts)

    def _models(self, prefixes: Prefixes) -> object:
        # Copies of models with other stamps are void.
        levels = [level for part in self._parts for level in levels_of(part)]
        stamp = [level.stamp() for level in levels if hasattr(level, "stamp")]
        return prefixes.forget_unless(stamp)

    def note_models(self, prefixes: Prefixes, rows: Sequence[Row]) -> None:
        """Note the models that read the texts of rows first, and forget copies of others."""
        models = self._models(prefixes)
        for row in rows:
            row.models = row.models or models

    def find(self, prefixes: Prefixes | None, row: Row) -> dict[int, Copies]:
        """Return by level the copies of a row's text but for its last token."""
        if prefixes is None:
            return {}
        # A drafter that reads the target's hidden states has read one more token when it begins.
        return prefixes.find(row.tokens[:-1], {1: self._count} if self._layers else {})

    def keep(
        self,
        prefixes: Prefixes,
        rows: Sequence[Row],
        cached: Callable[[Row], Sequence[int]],
        begin: bool,
    ) -> None:
        """Save copies of the levels' caches for `rows` in the batch, with lengths `cached`. With
        `begin`, levels that save whole rows copy the state after the prompt only."""
        models = self._models(prefixes)
        for row in rows:
            if row.error is None and row.kept != row.committed:
                if row.models is models:  # else changed since
                    self._keep_row(prefixes, row, cached(row), begin)
                row.kept = row.committed

    def _keep_row(self, prefixes: Prefixes, row: Row, cached: Sequence[int], begin: bool) -> None:
        lengths, can_begin = [0] * len(cached), self.can_begin()
        for number, (level, size) in enumerate(zip(self._parts, cached, strict=True), 1):
            if not self._caches.begun[number - 1]:  # has rows of an earlier batch, or none
                continue
            if level.capabilities.saves_rows:
                ends = row.stats.num_prompt_tokens - 1, size
                for end in ends[: 1 if begin else 2]:
                    copy = self._save(row.slot, number, 0, end)
                    prefixes.add_state(row.tokens[:end], number, copy)
            elif number in can_begin:
                lengths[number - 1] = size
        prefixes.add(row.tokens, lengths, partial(self._save, row.slot))

    def _save(self, slot: int, number: int, begin: int, end: int) -> Any:
        return cast(Admitting, self._parts[number - 1]).save(slot, begin, end)

    def can_begin(self) -> list[int]:
        """Return the levels that can begin a batch with copies; other levels read all texts."""
        can = [(number, level.capabilities) for number, level in enumerate(self._parts, 1)]
        able = [number for number, caps in can if caps.admits or caps.continues]
        if self._layers and not {1, self._count} <= set(able):
            # The target must compute the hidden states that the drafter reads.
            able = [number for number in able if 1 < number < self._count]
        # A level that begins without copies may overwrite a cache shared with another level.
        apart = {number for number, caps in can if caps.reads_apart}
        whole = {number for number, _ in can} - set(able)
        return [] if set(able) - apart and whole - apart else able

    def open(self, row: Row, found: Mapping[int, Copies], plain: bool) -> Reading:
        """Return the reading of a request's text, which begins with copies by level. If requests
        decode with the target alone (`plain`), lower levels read the text when they draft."""
        numbers = self.can_begin()
        parts = {number: cast(Admitting, self._parts[number - 1]) for number in numbers}
        sequences = {number: level.open(row.committed) for number, level in parts.items()}
        # A target that decodes alone needs no lower level.
        alone = row.request.window_bound == 0 or (plain and not self._layers)
        readers = numbers[:1] if alone else numbers
        lengths = dict.fromkeys(sequences, 0)
        for number in readers:
            lengths[number] = sum(count for _, count in found.get(number, ()))
            if sequences[number] is None:  # it has read as much as the levels above
                lengths[number] = min(lengths[above] for above in readers if above < number)
        if self._layers and self._count in readers and 1 in readers:
            # The drafter reads the hidden states of the target's next passes. It combines a state
            # with the next token, so the last common token is read again.
            lengths[1] = max(0, min(lengths[1], lengths[self._count] - 1))
            lengths[self._count] = min(lengths[self._count], lengths[1] + 1)
        for number in readers:
            left = lengths[number]
            for copy, count in found.get(number, ()) if sequences[number] is not None else ():
                if left > 0:
                    parts[number].restore(sequences[number], copy, min(count, left))
                left -= count
        return Reading(row, sequences, lengths, readers, lengths.get(1, 0))

    def extend(self, reading: Reading, most: int, recorder: StatsRecorder) -> None:
        """Read the text with every level, up to `most` tokens beyond the tokens that all levels
        have read."""
        end = reading.row.committed - 1 - max(0, reading.left - most)
        for number in reading.asked:
            if reading.lengths[number] < end:
                self._extend(number, [reading], end, recorder)

    def extend_all(self, readings: Sequence[Reading], recorder: StatsRecorder) -> None:
        """Read the whole texts with every level; completely unread texts in one pass, if the level
        can (`LevelCapabilities.reads_together`)."""
        for number in readings[0].sequences:
            due = [reading for reading in readings if number in reading.asked]
            fresh = [text for text in due if text.lengths[number] == 0 and text.row.committed > 1]
            if self._parts[number - 1].capabilities.reads_together and len(fresh) > 1:
                self._extend(number, fresh, max(text.row.committed for text in fresh) - 1, recorder)
            for reading in due:
                if reading.lengths[number] < reading.row.committed - 1:
                    self._extend(number, [reading], reading.row.committed - 1, recorder)

    def _extend(
        self, number: int, readings: Sequence[Reading], end: int, recorder: StatsRecorder
    ) -> None:
        """Read texts with a level up to position `end`; several texts from their first token on."""
        level, began = cast(Admitting, self._parts[number - 1]), time.perf_counter()
        layers = self._layers if number == 1 else ()
        texts = [reading.row.tokens[:-1][reading.lengths[number] : end] for reading in readings]
        sequences = [reading.sequences[number] for reading in readings]
        with named(self._config.names, number - 1, [reading.row for reading in readings]):
            tokens, counts = padded(texts, self._parts[number - 1].device)
            tokens = self._config.id_maps[number - 1].to_below(tokens)
            if len(readings) == 1:
                hidden = level.extend(sequences[0], tokens, layers)
            else:
                hidden = level.extend_together(sequences, tokens, counts, layers)
        seconds = (time.perf_counter() - began) / len(readings)
        for index, (reading, count) in enumerate(zip(readings, counts, strict=True)):
            reading.lengths[number] += count
            if layers and hidden is not None:
                states = {layer: x[index : index + 1, :count] for layer, x in hidden.items()}
                reading.hidden.append(states)
            recorder.prefilled(number - 1, seconds, reading.row.stats)

    def join(self, readings: Sequence[Reading], slots: Sequence[Row], rows: Rows) -> None:
        """Add the requests of `readings` to the batch; `slots` and `rows` include them. In levels
        that have not begun the batch the other rows are empty. If the drafter reads the target's
        hidden states, both must have begun the batch (`can_join`)."""
        joined = [reading.row.slot for reading in readings]
        capacity = max(row.committed + min(row.room, _AHEAD) for row in slots)
        for number in readings[0].sequences:
            level = cast(Admitting, self._parts[number - 1])
            lengths = {reading.row.slot: reading.lengths[number] for reading in readings}
            sequences = {reading.row.slot: reading.sequences[number] for reading in readings}
            cached = rows.state.cached(number)
            begun = self._caches.begun[number - 1]
            for slot in () if begun else range(len(slots)):
                if slot not in sequences:
                    sequences[slot], lengths[slot] = level.open(capacity), 0
            order = sorted(sequences)
            with named(self._config.names, number - 1, [reading.row for reading in readings]):
                sizes = [lengths[slot] for slot in order]
                numbers = joined if begun else None
                level.admit([sequences[slot] for slot in order], sizes, capacity, numbers)
            for slot, length in lengths.items():
                cached[slot] = length
            rows.state.set_cached(number, cached)
            self._caches.begun[number - 1] = True
        if self._layers and 1 in readings[0].sequences:
            self._join_hidden(readings, len(slots), rows)

    def _join_hidden(self, readings: Sequence[Reading], batch: int, rows: Rows) -> None:
        begin, counts = [0] * batch, [0] * batch
        states: dict[int, torch.Tensor] = {}
        longest = max(reading.lengths[1] - reading.begin for reading in readings)
        for reading in readings:
            slot = reading.row.slot
            begin[slot], counts[slot] = reading.begin, reading.lengths[1] - reading.begin
            for layer in self._layers if reading.hidden else ():
                of_row = torch.cat([hidden[layer] for hidden in reading.hidden], 1)
                if layer not in states:
                    states[layer] = of_row.new_zeros(batch, longest, of_row.shape[2])
                states[layer][slot, : of_row.shape[1]] = of_row[0]
        if longest and rows.hidden is not None:
            rows.hidden.add(states, torch.tensor(begin), torch.tensor(counts))

    def common(self, rows: Sequence[Row], texts: Sequence[Sequence[int]]) -> dict[int, int]:
        """Return by slot the length of the common prefix of the old and the new text of rows, less
        than the new text's. Refuses texts and rows as `Engine.rewind`."""
        if self._layers:
            reading = f"{self._config.names[-1]}: expected a drafter that reads tokens alone"
            raise ValueError(f"{reading}, whose texts can be replaced, given one of hidden states")
        lengths = {}
        for row, text in zip(rows, texts, strict=True):
            if not text or row.ended:
                state = "a request that has ended" if row.ended else "an empty text"
                raise ValueError(f"rewind: expected a text of a running request, given {state}")
            lengths[row.slot] = min(common_prefix(row.tokens, text), len(text) - 1)
        return lengths

    def cut(
        self, lengths: Mapping[int, int], slots: Sequence[Row], state: StateRows, more: int
    ) -> None:
        """Cut every cache to at most ``lengths[slot]`` tokens per row. From now on the first step
        of a level may read `more` additional tokens instead of a separate pass."""
        self._caches.more = more
        for number, level in enumerate(self._parts, 1):
            if self._caches.begun[number - 1]:
                cached = state.cached(number)
                sizes = [min(n, lengths.get(slot, n)) for slot, n in enumerate(cached)]
                with named(self._config.names, number - 1, slots):
                    left = level.rollback(RowCounts(sizes))
                state.set_cached(number, list(map(min, sizes, left)))
