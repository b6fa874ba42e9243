"""The committed tokens in the caches of a chain: prefilling, catching up, and reusing a prefix;
prompts that are read beside a batch, and join it.

A level reads all committed tokens but the last, whose logits are wanted. Levels on several devices
read at the same time, and so do those of one CUDA device, as far as it has room: each level below
the target has a stream there (`SideStreams`), unless it shares a cache with another.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from ..errors import named
from ..levels.base import Admitting, Continuing, Hidden, PromptBatch
from ..stats import StatsRecorder
from ..tensors import RowCounts, common_prefix, padded
from .graphs import SideStreams
from .plan import RoundPlan, round_plan
from .requirements import ChainConfig, Member
from .rows import Row, Rows, StateRows

_AHEAD = 512  # new tokens that a row which joins is given room for at once
REVISION = operator.attrgetter("revision")


def prefill(
    parts: Sequence[Member],
    numbers: Sequence[int],
    config: ChainConfig,
    slots: Sequence[Row],
    ahead: int,
    streams: SideStreams,
    recorder: StatsRecorder,
    hidden_layers: tuple[int, ...] = (),
    reused: Mapping[int, Sequence[int]] | None = None,
) -> Hidden | None:
    """Have the levels `numbers` (from 1) begin a batch and read `slots`.

    Args:
        ahead: tokens by which a text may run ahead of the committed ones.
        reused: by level, the cached lengths with which it continues; it reads the tokens behind.

    Returns:
        The target's hidden states of the tokens that it has read, if they are wanted.
    """
    states: Hidden | None = None
    capacity = max(row.committed + row.room for row in slots) + ahead
    chosen = [(number, parts[number - 1]) for number in numbers]
    devices = {part.device for _, part in chosen}
    with streams.open(list(devices)):
        for number, part in chosen:
            began = time.perf_counter()
            # The target stays where its collectives may be, if it is sharded.
            apart = number > 1 and part.capabilities.reads_apart
            stream = streams.stream(part.device, number) if apart else nullcontext()
            with named(config.names, number - 1, slots), stream:
                lengths = None if reused is None else reused.get(number)
                begin = [0] * len(slots) if lengths is None else lengths
                # Paused rows are read when they go on; not without the states of their tokens.
                rest = [
                    [] if row.paused and not hidden_layers else row.tokens[n:-1]
                    for row, n in zip(slots, begin, strict=True)
                ]
                tokens, counts = padded(rest, part.device)
                even = min(counts) == tokens.shape[1]
                tokens = config.id_maps[number - 1].to_below(tokens)
                layers = hidden_layers if number == 1 else ()
                encoded = slots[0].encoded  # levels with an encoder take one row
                if encoded is not None and number > 1:
                    encoded = encoded._replace(states=None)
                counted = None if even else counts
                prompts = PromptBatch(tokens, counted, capacity, layers, encoded, lengths)
                hidden = part.prefill(prompts)
                if layers and isinstance(hidden, Mapping):
                    states = hidden
            recorder.prefilled(number - 1, time.perf_counter() - began)
    began = time.perf_counter()
    for device in devices:
        if device.type == "cuda":  # so that prefill and decoding are timed apart
            torch.cuda.synchronize(device)
    recorder.prefilled(0, time.perf_counter() - began)
    return states


@dataclass(slots=True)
class Reading:
    """A text that is read beside a batch, which its request will join.

    Attributes:
        row: the request.
        sequences: of each level, by number (`levels.base.Admitting`).
        lengths: tokens that each level has read of the text but for its last token.
        asked: the levels that read it.
        hidden: the target's states of these tokens, by pass, where the drafter reads them.
    """

    row: Row
    sequences: dict[int, Any]
    lengths: dict[int, int]
    asked: Sequence[int]
    hidden: list[Hidden] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Return how many tokens some level has yet to read."""
        return self.row.committed - 1 - min(self.lengths[number] for number in self.asked)


class Caches:
    """The caches of a chain's levels and drafter (`parts`, target first).

    Attributes:
        continuing: levels and drafter that can continue with another batch.
        settled: their revisions behind the latest round of the target. None where it was not
            completed: it is not known what the caches hold then.
    """

    def __init__(
        self, config: ChainConfig, parts: Sequence[Member], hidden_layers: tuple[int, ...]
    ) -> None:
        self._config, self._parts, self._layers = config, parts, hidden_layers
        self._streams = SideStreams()
        self._count = len(config.windows) + 1  # 2 of a target alone, whose window is 0
        self._begun = [False] * self._count
        self._reused: dict[int, list[int]] = {}
        self._more = 0
        self.continuing: list[Continuing] = []
        self.settled: list[int] | None = None

    def begin(self, reused: Mapping[int, list[int]]) -> None:
        """Begin a batch with these cached lengths by level (`reuse_prefix`)."""
        self.settled, self._reused, self._more = None, dict(reused), 0
        self._begun = [False] * self._count

    # ---- rows that join a batch ------------------------------------------------------------------

    @property
    def can_join(self) -> bool:
        """Return whether readings can join the batch as it is: the target has begun it, and the
        drafter where it reads hidden states of every token."""
        return all(self._begun[: len(self._parts)]) if self._layers else self._begun[0]

    @property
    def admits(self) -> bool:
        """Return whether texts can be read beside the batch: every level and the drafter can have
        rows join."""
        return all(part.capabilities.admits for part in self._parts)

    @property
    def saves_rows(self) -> list[int]:
        """Return the levels whose copies are of whole rows (`LevelCapabilities.saves_rows`)."""
        levels = enumerate(self._parts, 1)
        return [number for number, part in levels if part.capabilities.saves_rows]

    def open(
        self,
        row: Row,
        saved: Mapping[int, Sequence[Any]],
        tokens: int,
        whole: Mapping[int, tuple[int, Any]],
    ) -> Reading:
        """Return the reading of a request's text.

        Args:
            saved: copies of `save` by level, each of so many `tokens`, from the first token on. Not
                used where the drafter reads the target's hidden states, of which there is no copy.
            whole: one copy of the text's beginning, with its tokens, of levels that save rows.
        """
        parts = [cast(Admitting, part) for part in self._parts]
        sequences = {number: part.open(row.committed) for number, part in enumerate(parts, 1)}
        # A target that decodes alone needs no level below it.
        asked = [1] if row.window_bound == 0 else list(sequences)
        reading = Reading(row, sequences, dict.fromkeys(sequences, 0), asked)
        if self._layers:
            return reading
        for number, part in zip(asked, parts, strict=False):
            if number in whole:
                reading.lengths[number], copy = whole[number]
                part.restore(sequences[number], copy)
            # A level without sequences of its own has read what the target has.
            own = 1 if sequences[number] is None else number
            for copy in saved.get(own, ()):
                if own == number and copy is None:
                    break
                if own == number:
                    part.restore(sequences[number], copy)
                reading.lengths[number] += tokens
        return reading

    def extend(self, reading: Reading, most: int, recorder: StatsRecorder) -> None:
        """Have every level read the text as far as `most` tokens behind the level that has read the
        least."""
        row, lengths = reading.row, reading.lengths
        end = row.committed - 1 - max(0, reading.left - most)
        for number in reading.asked:
            begin = lengths[number]
            if begin >= end:
                continue
            part, began = self._parts[number - 1], time.perf_counter()
            layers = self._layers if number == 1 else ()
            with named(self._config.names, number - 1, [row]):
                tokens = torch.tensor([row.tokens[begin:end]]).to(part.device)
                tokens = self._config.id_maps[number - 1].to_below(tokens)
                sequence = reading.sequences[number]
                hidden = cast(Admitting, part).extend(sequence, tokens, layers)
            lengths[number] = end
            if layers and hidden is not None:
                reading.hidden.append(hidden)
            recorder.read_beside(row.stats, number - 1, time.perf_counter() - began)

    def join(self, readings: Sequence[Reading], slots: Sequence[Row], rows: Rows) -> None:
        """Have the requests of these readings join the batch, `slots` and `rows` with them. Levels
        that have not begun it have read nothing of the other rows. Where the drafter reads the
        target's hidden states, both must have (`can_join`)."""
        joined = [one.row.slot for one in readings]
        capacity = max(row.committed + min(row.room, _AHEAD) for row in slots)
        for number, part in enumerate(map(_admitting, self._parts), 1):
            lengths = {one.row.slot: one.lengths[number] for one in readings}
            sequences = {one.row.slot: one.sequences[number] for one in readings}
            cached = rows.state.cached(number)
            if self._begun[number - 1]:
                numbers = joined
            else:
                numbers = None
                for slot in range(len(slots)):
                    if slot not in sequences:
                        sequences[slot], lengths[slot] = part.open(capacity), 0
            order = sorted(sequences)
            with named(self._config.names, number - 1, [one.row for one in readings]):
                part.admit(
                    [sequences[slot] for slot in order],
                    [lengths[slot] for slot in order],
                    capacity,
                    numbers,
                )
            for slot, length in lengths.items():
                cached[slot] = length
            rows.state.set_cached(number, cached)
        self._begun = [True] * self._count
        if self._layers:
            self._join_hidden(readings, len(slots), rows)

    def _join_hidden(self, readings: Sequence[Reading], batch: int, rows: Rows) -> None:
        counts = [0] * batch
        for reading in readings:
            counts[reading.row.slot] = reading.lengths[1]
        if not max(counts):
            return
        states: dict[int, torch.Tensor] = {}
        for reading in readings:
            slot = reading.row.slot
            for layer in self._layers if reading.hidden else ():
                of_row = torch.cat([one[layer] for one in reading.hidden], 1)
                if layer not in states:
                    shape = batch, max(counts), of_row.shape[2]
                    states[layer] = of_row.new_zeros(shape)
                states[layer][slot, : of_row.shape[1]] = of_row[0]
        begin = torch.zeros(batch, dtype=torch.int64)
        rows.hidden.add(states, begin, torch.tensor(counts))

    def save(self, number: int, slot: int, begin: int, end: int) -> Any:
        """Return a copy of what level `number` keeps of tokens of a row (`Admitting.save`)."""
        return cast(Admitting, self._parts[number - 1]).save(slot, begin, end)

    # ---- a batch ---------------------------------------------------------------------------------

    def reuse_prefix(
        self, before: Sequence[Row], kept: Rows, rows: Sequence[Row]
    ) -> dict[int, list[int]]:
        """Truncate every cache to the longest common prefix of `before` and `rows`, row by row.

        Args:
            before: requests of the batch in the caches; kept: their rows.

        Returns:
            Cached lengths by level; levels without begin anew. Empty: nothing can be reused.
        """
        settled, self.settled = self.settled, None
        if (
            settled is None
            or settled != list(map(REVISION, self.continuing))
            or any(row.encoded is not None for row in (*before, *rows))
            or len(before) != len(rows)
        ):
            return {}
        pairs = zip(before, rows, strict=True)
        common = [common_prefix(was.tokens, row.tokens[:-1]) for was, row in pairs]
        numbers, last = self._able_to_continue(), self._count
        lengths = {number: kept.state.cached(number) for number in numbers}
        if self._layers and 1 in lengths:
            # The drafter is told the states that the target's passes give from now on. What it
            # makes of one takes the next token as well, so the last common one is read again.
            told, drafted = kept.hidden.begin.tolist(), lengths[last]
            both = [max(0, n - 1) for n in map(min, common, lengths[1], drafted)]
            lengths[1] = list(map(min, both, told))
            lengths[last] = [n + 1 for n in lengths[1]]
        reused: dict[int, list[int]] = {}
        for number in numbers:
            wanted = RowCounts(list(map(min, lengths[number], common)))
            with named(self._config.names, number - 1, before):
                reused[number] = list(self._parts[number - 1].rollback(wanted))
        return reused if any(map(any, reused.values())) else {}

    def cut(
        self, lengths: Mapping[int, int], slots: Sequence[Row], state: StateRows, more: int
    ) -> None:
        """Cut every cache to at most ``lengths[slot]`` tokens of these rows. From now on first
        steps read `more` tokens than planned, as passes of their own would."""
        self.settled, self._reused, self._more = None, {}, more
        for number, part in enumerate(self._parts, 1):
            if self._begun[number - 1]:
                cached = state.cached(number)
                wanted = [min(n, lengths.get(slot, n)) for slot, n in enumerate(cached)]
                with named(self._config.names, number - 1, slots):
                    left = part.rollback(RowCounts(wanted))
                state.set_cached(number, list(map(min, wanted, left)))

    def _able_to_continue(self) -> list[int]:
        count = self._count
        able = {
            number
            for number, part in enumerate(self._parts, 1)
            if self._begun[number - 1] and part.capabilities.continues
        }
        if self._layers and not {1, count} <= able:
            able -= {1, count}  # the target must read the states that the drafter is told
        # A level that begins anew may do so in the cache of another.
        apart = {n for n, part in enumerate(self._parts, 1) if part.capabilities.reads_apart}
        others = set(range(1, count + 1)) - able
        return [] if able - apart and others - apart else sorted(able)

    def prepare(
        self,
        plan: RoundPlan,
        nodes: int,
        slots: Sequence[Row],
        active: Sequence[Row],
        rows: Rows,
        recorder: StatsRecorder,
    ) -> None:
        """Have every level of the round read the committed tokens up to the few that its first step
        reads.

        Args:
            nodes: of the drafter's trees.
            slots: requests in the caches; active: those that are not complete.
            rows: for the cached lengths and the target's hidden states.
        """
        state = rows.state
        fresh = [number for number in plan.asked if not self._begun[number - 1]]
        if fresh:
            committed = [
                0 if row.paused and not self._layers else row.committed - 1 for row in slots
            ]
            states = prefill(
                self._parts,
                fresh,
                self._config,
                slots,
                plan.ahead + nodes,
                self._streams,
                recorder,
                self._layers,
                self._reused,
            )
            if states is not None:
                begin = torch.tensor(self._reused.get(1, [0] * len(slots)))
                rows.hidden.add(states, begin, torch.tensor(committed) - begin)
            for number in fresh:
                self._begun[number - 1] = True
                self._reused.pop(number, None)
                state.set_cached(number, committed)
        for number in plan.asked:
            cached = state.cached(number)
            lag = plan.lag(number) + self._more + self._parts[number - 1].capabilities.replays
            lagging = [row for row in active if row.committed - cached[row.slot] > lag]
            if any(number in self._asked(state, row) for row in lagging):
                began = time.perf_counter()
                with named(self._config.names, number - 1, slots):
                    state.set_cached(number, self._read_rest(number, slots, cached))
                recorder.spent(number - 1, time.perf_counter() - began, 1)
        self.continuing = [
            cast(Continuing, part) for part in self._parts if part.capabilities.continues
        ]

    def _asked(self, state: StateRows, row: Row) -> Sequence[int]:
        sizes, count = state.windows[row.slot], len(self._config.windows)
        return round_plan(sizes[:count], sizes[count:], self._config.tail).asked

    def _read_rest(self, number: int, slots: Sequence[Row], cached: Sequence[int]) -> list[int]:
        """Have a level read all committed tokens but the last; return its cached lengths."""
        part, id_map = self._parts[number - 1], self._config.id_maps[number - 1]
        rest = [
            row.tokens[length:-1] if row.active else []
            for row, length in zip(slots, cached, strict=True)
        ]
        tokens, counts = padded(rest, part.device)
        part.read(id_map.to_below(tokens), counts)
        return [length + count for length, count in zip(cached, counts, strict=True)]

    def select(self, keep: Sequence[int], staying: Sequence[Row]) -> None:
        """Keep the rows `keep` of every cache, which are the requests `staying`."""
        for number, part in enumerate(self._parts, 1):
            reused = self._reused.get(number)
            if self._begun[number - 1] or reused:
                with named(self._config.names, number - 1, staying):
                    part.select(keep)
            if reused:
                self._reused[number] = [reused[slot] for slot in keep]


def _admitting(part: Member) -> Admitting:
    return cast(Admitting, part)
