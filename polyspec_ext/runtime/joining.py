"""Batches that requests join and leave, and texts that are read outside a batch, begin with saved
prefixes, or are replaced."""

from __future__ import annotations

import operator
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch

from ..drafters.base import levels_of
from ..errors import named
from ..levels.base import Admitting, Hidden
from ..policies import WindowPolicy
from ..stats import LevelStats, Stats
from ..tensors import RowCounts, common_prefix, padded
from .batch import Batch, CacheOwner
from .engine import Committed, Engine, Observer
from .prefixes import Copies, Prefixes
from .rows import Row, Rows

_ENDED = operator.attrgetter("ended")

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


class OpenBatch(Batch):
    """A batch that requests join and leave.

    Args:
        engine, owner, rows, options: as of `Batch`.
        prefixes: saved prefixes, which texts begin with and are added to.
        isolates: whether an error in a round ends only the request at fault (`Row.error`), and the
            batch goes on without end; else the error is raised, and ends the batch.
        traces: whether to record the level that proposed each token (`Row.origins`).
    """

    def __init__(
        self,
        engine: Engine,
        owner: CacheOwner,
        rows: Sequence[Row],
        *,
        prefixes: Prefixes | None = None,
        isolates: bool = False,
        traces: bool = False,
        **options: Any,
    ) -> None:
        self._prefixes, self._traces, self._isolates = prefixes, traces, isolates
        self._config, self._parts = engine.config, engine.parts
        self._layers, self._last = engine.caches.layers, engine.caches.count
        if isolates:  # counts by verification would grow without end
            names = engine.config.names
            levels = [LevelStats(name, emitted_per_verification=None) for name in names]
            options["stats"] = Stats(levels, num_requests=0)
        super().__init__(engine, owner, rows, **options)

    def _begin(self, observe: Observer | None) -> None:
        # Whether rows decode plainly, as policies begin.
        self._plain = self._policy is not None
        super()._begin(observe)
        self._engine.traces = self._traces
        if self._prefixes is not None:
            self._note_models(self.rows)
            self._begin_with_copies()

    def abandon(self) -> None:
        self._keep(self.rows)

    @property
    def admits(self) -> bool:
        """Return whether texts can be read outside the batch: every level can add rows to it."""
        return all(level.capabilities.admits for level in self._parts)

    # ---- requests that join and leave ------------------------------------------------------------

    def open(self, row: Row) -> Reading:
        """Return the reading of the text of a request that will `join`, which begins with the saved
        copies of its prefix."""
        with torch.inference_mode(), self._owner.work(self):
            self._note_models([row])
            return self._open(row, self._find(row))

    def _open(self, row: Row, found: Mapping[int, Copies]) -> Reading:
        """Return the reading of a request's text, which begins with copies by level. If requests
        decode with the target alone (`_plain`), lower levels read the text when they draft."""
        numbers = self._can_begin()
        parts = {number: cast(Admitting, self._parts[number - 1]) for number in numbers}
        sequences = {number: level.open(row.committed) for number, level in parts.items()}
        # A target that decodes alone needs no lower level.
        alone = row.request.window_bound == 0 or (self._plain and not self._layers)
        readers = numbers[:1] if alone else numbers
        lengths = dict.fromkeys(sequences, 0)
        for number in readers:
            lengths[number] = sum(count for _, count in found.get(number, ()))
            if sequences[number] is None:  # it has read as much as the levels above
                lengths[number] = min(lengths[above] for above in readers if above < number)
        if self._layers and self._last in readers and 1 in readers:
            # The drafter reads the hidden states of the target's next passes. It combines a state
            # with the next token, so the last common token is read again.
            lengths[1] = max(0, min(lengths[1], lengths[self._last] - 1))
            lengths[self._last] = min(lengths[self._last], lengths[1] + 1)
        for number in readers:
            left = lengths[number]
            for copy, count in found.get(number, ()) if sequences[number] is not None else ():
                if left > 0:
                    parts[number].restore(sequences[number], copy, min(count, left))
                left -= count
        begin = lengths.get(1, 0)
        for stats in {id(counts): counts for counts in (row.stats, self.stats)}.values():
            stats.num_cached_tokens += begin
        return Reading(row, sequences, lengths, readers, begin)

    def _begin_with_copies(self) -> None:
        levels, saved = self._can_begin(), list(map(self._find, self.rows))
        if not any(level in copies for copies in saved for level in levels):
            return
        readings = list(map(self._open, self.rows, saved))
        self._extend_all(readings)
        self._admit(readings, self._engine.slots, self._engine.rows)

    def read(self, reading: Reading, most: int) -> None:
        """Read a text with every level, up to `most` tokens beyond the tokens that all levels have
        read."""
        end = reading.row.committed - 1 - max(0, reading.left - most)
        with torch.inference_mode(), self._owner.work(self):
            for number in reading.asked:
                if reading.lengths[number] < end:
                    self._extend(number, [reading], end)

    def read_all(self, readings: Sequence[Reading]) -> None:
        """Read the rest of several texts with every level; completely unread texts in one pass, if
        the level can (`LevelCapabilities.reads_together`)."""
        with torch.inference_mode(), self._owner.work(self):
            self._extend_all(readings)

    def _extend_all(self, readings: Sequence[Reading]) -> None:
        for number in readings[0].sequences:
            due = [reading for reading in readings if number in reading.asked]
            fresh = [text for text in due if text.lengths[number] == 0 and text.row.committed > 1]
            if self._parts[number - 1].capabilities.reads_together and len(fresh) > 1:
                self._extend(number, fresh, max(text.row.committed for text in fresh) - 1)
            for reading in due:
                if reading.lengths[number] < reading.row.committed - 1:
                    self._extend(number, [reading], reading.row.committed - 1)

    def _extend(self, number: int, readings: Sequence[Reading], end: int) -> None:
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
            self._recorder.prefilled(number - 1, seconds, reading.row.stats)

    def join(self, rows: Sequence[Row], readings: Sequence[Reading] = ()) -> None:
        """Add requests after the rows of the batch; where steps are captured, into the slots of
        complete rows, so that the graphs stay valid. With `readings`, every level has already read
        the new texts but for the last token; without, all levels read all texts again. After an
        error the batch continues without the requests."""
        with torch.inference_mode(), self._owner.work(self):
            self._note_models(rows)
            self._join(rows, readings)
        for row in rows:
            self._processors.add(row.number, row.request.processors)
        self.rows += rows
        self._count(rows)

    def _join(self, new: Sequence[Row], readings: Sequence[Reading]) -> None:
        engine = self._engine
        engine.drop_complete()
        slots = list(engine.slots) if engine.captures or not all(map(_ENDED, engine.slots)) else []
        free = [row.slot for row in slots if row.ended] if engine.captures else []
        joined = [*free[: len(new)], *range(len(slots), len(slots) + len(new) - len(free))]
        for slot, row in zip(joined, new, strict=True):
            row.slot = slot
            slots[slot : slot + 1] = [row]
        if len(slots) > len(new):
            gone = set(joined)
            rows = engine.rows.select([None if n in gone else n for n in range(len(slots))])
        else:
            rows = engine.empty_rows(len(new))
            engine.caches.begin()
        # The target has begun a batch that readings join, and so has a drafter of hidden states.
        begun = engine.caches.begun
        can_join = all(begun[: len(self._parts)]) if self._layers else begun[0]
        together = bool(readings) and (len(slots) == len(new) or can_join)
        try:
            if together:
                self._admit(readings, slots, rows)
        except BaseException:
            engine.begin_caches()  # some caches have the new rows
            raise
        engine.rows = rows
        if not together:
            engine.begin_caches()
        for row in new:
            engine.begin_windows(row)
        engine.follow(slots)

    def _admit(self, readings: Sequence[Reading], slots: Sequence[Row], rows: Rows) -> None:
        """Add the requests of `readings` to the batch; `slots` and `rows` include them. In levels
        that have not begun the batch the other rows are empty. If the drafter reads the target's
        hidden states, both must have begun the batch."""
        joined = [reading.row.slot for reading in readings]
        capacity = max(row.committed + min(row.room, _AHEAD) for row in slots)
        for number in readings[0].sequences:
            level = cast(Admitting, self._parts[number - 1])
            lengths = {reading.row.slot: reading.lengths[number] for reading in readings}
            sequences = {reading.row.slot: reading.sequences[number] for reading in readings}
            cached = rows.state.cached(number)
            begun = self._engine.caches.begun[number - 1]
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
            self._engine.caches.begun[number - 1] = True
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

    def leave(self, row: Row) -> None:
        """Remove a row that has ended from `rows`."""
        self.rows = [other for other in self.rows if other is not row]
        self._processors.remove(row.number)
        self.steps(row)

    def pause(self, rows: Sequence[Row]) -> None:
        """Exclude the rows `rows`, and no others, from the next rounds."""
        with torch.inference_mode(), self._owner.work(self):
            self._pause(rows)

    def _pause(self, rows: Sequence[Row]) -> None:
        for row in self._engine.slots:
            row.paused = any(row is other for other in rows)
        self._engine.restate()

    def rewind(self, rows: Sequence[Row], texts: Sequence[Sequence[int]]) -> None:
        """Replace the texts of rows between two rounds; caches keep the common prefix of the old
        and the new text. New tokens are counted from the new text on. Round counts continue, so
        that no draw repeats. Refuses drafters of hidden states, empty texts and ended rows."""
        engine = self._engine
        with torch.inference_mode(), self._owner.work(self):
            lengths = self._common(rows, texts)
            engine.restate()
            try:
                # A step that the host reads also reads the token after accepted drafts.
                engine.caches.more = int(engine.sync_each_step)
                for number, level in enumerate(self._parts, 1):
                    if engine.caches.begun[number - 1]:
                        cached = engine.rows.state.cached(number)
                        sizes = [min(n, lengths.get(slot, n)) for slot, n in enumerate(cached)]
                        with named(self._config.names, number - 1, engine.slots):
                            left = level.rollback(RowCounts(sizes))
                        engine.rows.state.set_cached(number, list(map(min, sizes, left)))
            except BaseException:
                engine.begin_caches()  # some caches are cut
                raise
            # After the cuts: after an interrupt no cache has tokens that a text lacks.
            for row, text in zip(rows, texts, strict=True):
                row.num_reported += len(text) - row.committed  # unreported tokens stay unreported
                row.tokens = list(text)
                row.logprobs.clear()
                row.origins.clear()

    def _common(self, rows: Sequence[Row], texts: Sequence[Sequence[int]]) -> dict[int, int]:
        """Return by slot the length of the common prefix of the old and the new text of rows, less
        than the new text's. Refuses texts and rows as `rewind`."""
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

    def set_windows(self, row: Row, windows: Sequence[int]) -> None:
        """Set the windows of a row from the next round on."""
        with torch.inference_mode(), self._owner.work(self):
            self._engine.set_windows(row, windows)

    # ---- rounds ----------------------------------------------------------------------------------

    def _choose_windows(self, policy: WindowPolicy) -> None:
        super()._choose_windows(policy)
        engine = self._engine
        self._plain = any(row.active and engine.windows(row)[0] == 0 for row in engine.slots)

    def _round(self) -> Committed:
        committed = self._round_apart() if self._isolates else super()._round()
        if self._prefixes is not None:  # after a text's first and last round
            self._keep([row for row in self.rows if not row.kept and not row.ended], True)
            self._keep([row for row in self.rows if row.ended])
        return committed

    def _round_apart(self) -> Committed:
        """Run a round; if it fails, run it again row by row, so that only the request at fault
        ends. Draws are keyed, so that the tokens of the other rows do not change."""
        engine = self._engine
        try:
            return self._try_round()
        except Exception as error:
            failure = error
        rows = [row for row in engine.slots if row.active]
        paused = [row for row in engine.slots if row.paused]
        if len(rows) == 1:
            self._fail(rows[0], failure)
            return []
        committed: Committed = []
        for row in rows:
            self._pause([*paused, *(other for other in rows if other is not row)])
            try:
                committed += self._try_round()
            except Exception as error:
                self._fail(row, error)
        self._pause(paused)
        return committed

    def _try_round(self) -> Committed:
        """Run a round. After an error restore the state before it, to run it again with the same
        draws; all levels read the texts again."""
        engine = self._engine
        slots, counts = engine.slots, engine.rows.state.round_counts
        try:
            return engine.round()
        except Exception:
            indices = {id(row): index for index, row in enumerate(slots)}
            engine.restate()
            # Rows may have left.
            engine.rows.state.begin_again(counts[[indices[id(row)] for row in engine.slots]])
            engine.begin_caches()
            raise

    def _fail(self, row: Row, error: Exception) -> None:
        row.error = error
        self.end(row)

    def end(self, row: Row, excess: int = 0) -> None:
        if not row.ended:
            with torch.inference_mode():
                self._keep([row])
        super().end(row, excess)

    # ---- saved prefixes --------------------------------------------------------------------------

    def _models(self, prefixes: Prefixes) -> object:
        # Copies of models with other stamps are void.
        levels = [level for part in self._parts for level in levels_of(part)]
        stamp = [level.stamp() for level in levels if hasattr(level, "stamp")]
        return prefixes.forget_unless(stamp)

    def _note_models(self, rows: Sequence[Row]) -> None:
        if self._prefixes is not None:
            models = self._models(self._prefixes)
            for row in rows:
                row.models = row.models or models

    def _find(self, row: Row) -> dict[int, Copies]:
        if self._prefixes is None:
            return {}
        # A drafter that reads the target's hidden states has read one more token when it begins.
        return self._prefixes.find(row.tokens[:-1], {1: self._last} if self._layers else {})

    def _can_begin(self) -> list[int]:
        """Return the levels that can begin a batch with copies; other levels read all texts."""
        can = [(number, level.capabilities) for number, level in enumerate(self._parts, 1)]
        able = [number for number, caps in can if caps.admits or caps.continues]
        if self._layers and not {1, self._last} <= set(able):
            # The target must compute the hidden states that the drafter reads.
            able = [number for number in able if 1 < number < self._last]
        # A level that begins without copies may overwrite a cache shared with another level.
        apart = {number for number, caps in can if caps.reads_apart}
        whole = {number for number, _ in can} - set(able)
        return [] if set(able) - apart and whole - apart else able

    def _keep(self, rows: Sequence[Row], begin: bool = False) -> None:
        """Save copies of the levels' caches for `rows` in the caches. With `begin`, levels that
        save whole rows copy the state after the prompt only."""
        prefixes = self._prefixes
        if prefixes is None or not rows or self._owner.latest is not self:
            return
        here = [row for row in rows if any(row is other for other in self._engine.slots)]
        models = self._models(prefixes)
        for row in here:
            if row.error is None and row.kept != row.committed:
                if row.models is models:  # else changed since
                    self._keep_row(prefixes, row, begin)
                row.kept = row.committed

    def _keep_row(self, prefixes: Prefixes, row: Row, begin: bool) -> None:
        cached = self._cached(row)
        lengths, can_begin = [0] * len(cached), self._can_begin()
        for number, (level, size) in enumerate(zip(self._parts, cached, strict=True), 1):
            if not self._engine.caches.begun[number - 1]:  # has rows of an earlier batch, or none
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

    def _cached(self, row: Row) -> list[int]:
        # At most the committed tokens; of a drafter that reads hidden states only tokens that it
        # will not read again.
        rows, numbers = self._engine.rows, range(1, len(self._engine.parts) + 1)
        lengths = [min(rows.state.cached(number)[row.slot], row.committed) for number in numbers]
        if rows.hidden is not None:
            read = int(rows.hidden.begin[row.slot])  # states
            lengths[-1] = min(lengths[-1], read + 1 if read else 0)
        return lengths
