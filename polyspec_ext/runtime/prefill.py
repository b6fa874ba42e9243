"""The committed tokens in the caches of a chain: prefilling and catching up; prompts that begin
with saved prefixes, or are read outside a batch and join it.

A level reads all committed tokens but the last, which its next pass reads for the logits. Levels on
several devices read concurrently, and so do levels on one CUDA device, as far as it has room: each
level below the target has a stream (`SideStreams`), unless it shares a cache with another level.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from .. import rooms
from ..drafters.base import levels_of
from ..errors import named
from ..levels.base import Admitting, Hidden, PromptBatch
from ..stats import StatsRecorder
from ..tensors import RowCounts, padded
from .plan import ChainConfig, Member, RoundPlan, round_plan
from .rows import Row, Rows, StateRows

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


class SideStreams:
    """Side streams for work that may overlap with the current streams.

    Work in a side stream follows everything queued before `open`, and work queued after `open`
    follows all side streams; side streams are not ordered with each other. Memory allocated in a
    side stream is reused in that stream only, so never while work queued before the next `open`
    still uses it."""

    def __init__(self, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._streams: dict[tuple[torch.device, int], Any] = {}
        self._begun: dict[torch.device, Any] = {}
        self._used: list[tuple[torch.device, Any]] = []

    @contextmanager
    def open(self, devices: Sequence[torch.device]) -> Iterator[None]:
        """Allow streams on `devices` in the context."""
        self._used = []
        gpus = {device for device in devices if device.type == "cuda"}
        self._begun = {gpu: self._cuda.current_stream(gpu).record_event() for gpu in gpus}
        try:
            yield
        finally:
            for device, stream in self._used:
                self._cuda.current_stream(device).wait_stream(stream)

    @contextmanager
    def stream(self, device: torch.device, number: int) -> Iterator[None]:
        """Use stream `number` of `device` in the context, if `device` is a CUDA device."""
        if device.type != "cuda":
            yield
            return
        if (device, number) not in self._streams:
            self._streams[device, number] = self._cuda.Stream(device)
        stream = self._streams[device, number]
        stream.wait_event(self._begun[device])
        self._used.append((device, stream))
        with self._cuda.stream(stream):
            yield


class Caches:
    """The caches of a chain's levels and drafter (`parts`, target first)."""

    def __init__(
        self, config: ChainConfig, parts: Sequence[Member], hidden_layers: tuple[int, ...]
    ) -> None:
        self._config, self._parts, self._layers = config, parts, hidden_layers
        self.streams = SideStreams()
        self._count = len(config.windows) + 1  # 2 for a target alone, with window 0
        self.begin()

    def begin(self) -> None:
        """Begin a batch with empty caches."""
        self._more, self._begun = 0, [False] * self._count

    # ---- rows that join a batch ------------------------------------------------------------------

    @property
    def can_join(self) -> bool:
        """Return whether readings can join the current batch: the target has begun it, and so has a
        drafter that reads hidden states of every token."""
        return all(self._begun[: len(self._parts)]) if self._layers else self._begun[0]

    @property
    def admits(self) -> bool:
        """Return whether texts can be read outside the batch: every level can add rows to it."""
        return all(level.capabilities.admits for level in self._parts)

    @property
    def kept_by_tokens(self) -> list[int]:
        """Return the levels of the batch with rows to copy; others have rows of an earlier batch,
        or none."""
        return [number for number in self.can_begin() if self._begun[number - 1]]

    @property
    def kept_by_rows(self) -> list[int]:
        """Return the levels of the batch that copy whole rows (`LevelCapabilities.saves_rows`)."""
        levels = [(n, level.capabilities) for n, level in enumerate(self._parts, 1)]
        return [n for n, can in levels if can.saves_rows and self._begun[n - 1]]

    @property
    def ahead(self) -> dict[int, int]:
        """Return by level another level that has read one more token when a batch begins: for the
        target a drafter that reads its hidden states."""
        return {1: self._count} if self._layers else {}

    def stamp(self) -> object:
        """Return the stamps of all levels, for comparison; copies of other models are void."""
        levels = [level for part in self._parts for level in levels_of(part)]
        return [level.stamp() for level in levels if hasattr(level, "stamp")]

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

    def open(self, row: Row, found: Mapping[int, rooms.Copies], plain: bool) -> Reading:
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
            begun = self._begun[number - 1]
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
            self._begun[number - 1] = True
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

    def save(self, slot: int, number: int, begin: int, end: int) -> Any:
        """Return a copy of level `number` for tokens [begin, end) of a row (`Admitting.save`)."""
        return cast(Admitting, self._parts[number - 1]).save(slot, begin, end)

    # ---- a batch ---------------------------------------------------------------------------------

    def cut(
        self, lengths: Mapping[int, int], slots: Sequence[Row], state: StateRows, more: int
    ) -> None:
        """Cut every cache to at most ``lengths[slot]`` tokens per row. From now on the first step
        of a level may read `more` additional tokens instead of a separate pass."""
        self._more = more
        for number, level in enumerate(self._parts, 1):
            if self._begun[number - 1]:
                cached = state.cached(number)
                sizes = [min(n, lengths.get(slot, n)) for slot, n in enumerate(cached)]
                with named(self._config.names, number - 1, slots):
                    left = level.rollback(RowCounts(sizes))
                state.set_cached(number, list(map(min, sizes, left)))

    def prepare(
        self,
        plan: RoundPlan,
        nodes: int,
        slots: Sequence[Row],
        active: Sequence[Row],
        rows: Rows,
        recorder: StatsRecorder,
    ) -> None:
        """Read the committed tokens of the requests `slots` with every level of the round, up to
        the few tokens that its first step reads. `active`: requests that are not complete; `nodes`:
        nodes of a tree."""
        state = rows.state
        fresh = [number for number in plan.asked if not self._begun[number - 1]]
        if fresh:
            states = self.prefill(fresh, slots, state, plan.ahead + nodes, recorder)
            if states is not None and rows.hidden is not None:
                counts = torch.tensor(state.cached(1))
                rows.hidden.add(states, torch.zeros_like(counts), counts)
            for number in fresh:
                self._begun[number - 1] = True
        for number in plan.asked:
            cached = state.cached(number)
            lag = plan.lag(number) + self._more + self._parts[number - 1].capabilities.replays
            lagging = [row for row in active if row.committed - cached[row.slot] > lag]
            if any(self._asks(number, state, row) for row in lagging):
                # A drafter that reads the target's hidden states keeps those of all rows.
                reading = [r for r in active if self._layers or self._asks(number, state, r)]
                began = time.perf_counter()
                with named(self._config.names, number - 1, slots):
                    state.set_cached(number, self._read_rest(number, slots, reading, cached))
                recorder.spent(number - 1, time.perf_counter() - began, 1)

    def prefill(
        self,
        numbers: Sequence[int],
        slots: Sequence[Row],
        state: StateRows,
        ahead: int,
        recorder: StatsRecorder,
    ) -> Hidden | None:
        """Begin a batch with the levels `numbers` (from 1) and read the texts of the rows that ask
        them, or of all rows if the drafter reads hidden states. Texts may grow to `ahead` tokens
        beyond the committed tokens. Returns the target's hidden states, if the drafter reads them.
        """
        states: Hidden | None = None
        capacity = max(row.committed + row.room for row in slots) + ahead
        chosen = [(number, self._parts[number - 1]) for number in numbers]
        devices = {level.device for _, level in chosen}
        encoded = slots[0].request.encoded  # levels with an encoder take one row
        below = None if encoded is None else encoded._replace(states=None)
        with self.streams.open(list(devices)):
            for number, level in chosen:
                began = time.perf_counter()
                # The target keeps its stream, where a sharded target has its collectives.
                apart = number > 1 and level.capabilities.reads_apart
                stream = self.streams.stream(level.device, number) if apart else nullcontext()
                texts = self._texts(number, state, slots)
                with named(self._config.names, number - 1, slots), stream:
                    tokens, counts = padded(texts, level.device)
                    counted = None if min(counts) == tokens.shape[1] else counts
                    tokens = self._config.id_maps[number - 1].to_below(tokens)
                    layers = self._layers if number == 1 else ()
                    known = encoded if number == 1 else below
                    hidden = level.prefill(PromptBatch(tokens, counted, capacity, layers, known))
                    if layers and isinstance(hidden, Mapping):
                        states = hidden
                state.set_cached(number, counts)
                recorder.prefilled(number - 1, time.perf_counter() - began)
        began = time.perf_counter()
        for device in devices:
            if device.type == "cuda":  # to time prefill and decoding separately
                torch.cuda.synchronize(device)
        recorder.prefilled(0, time.perf_counter() - began)
        return states

    def _texts(self, number: int, state: StateRows, slots: Sequence[Row]) -> list[list[int]]:
        # The texts without their last tokens; empty for rows that do not ask the level.
        asks = [self._layers or self._asks(number, state, row) for row in slots]
        return [row.tokens[:-1] if asking else [] for row, asking in zip(slots, asks, strict=True)]

    def _asks(self, number: int, state: StateRows, row: Row) -> bool:
        sizes, count = state.windows[row.slot], len(self._config.windows)
        levels = round_plan(sizes[:count], sizes[count:], self._config.tail).asked
        return not row.paused and number in levels

    def _read_rest(
        self, number: int, slots: Sequence[Row], reading: Sequence[Row], cached: Sequence[int]
    ) -> list[int]:
        level, id_map = self._parts[number - 1], self._config.id_maps[number - 1]
        unread: list[list[int]] = [[] for _ in slots]
        for row in reading:
            unread[row.slot] = row.tokens[cached[row.slot] : -1]
        tokens, counts = padded(unread, level.device)
        level.read(id_map.to_below(tokens), counts)
        return [length + count for length, count in zip(cached, counts, strict=True)]

    def select(self, keep: Sequence[int], staying: Sequence[Row]) -> None:
        """Keep the rows `keep`, the requests `staying`, in every cache."""
        for number, level in enumerate(self._parts, 1):
            if self._begun[number - 1]:
                with named(self._config.names, number - 1, staying):
                    level.select(keep)
