"""The committed tokens in the caches of a chain: prefilling, catching up, and reusing a prefix.

A level reads all committed tokens but the last, whose logits are wanted. Levels on several devices
read at the same time, and so do those of one CUDA device, as far as it has room: each level below
the target has a stream there (`SideStreams`), unless it shares a cache with another.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import cast

import torch

from ..errors import named
from ..levels.base import Continuing, Hidden, PromptBatch
from ..stats import StatsRecorder
from ..tensors import RowCounts, padded
from .graphs import SideStreams
from .plan import RoundPlan
from .requirements import ChainConfig, Member
from .rows import Row, Rows

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
                rest = [row.tokens[n:-1] for row, n in zip(slots, begin, strict=True)]
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
        self.continuing: list[Continuing] = []
        self.settled: list[int] | None = None

    def begin(self, reused: Mapping[int, list[int]]) -> None:
        """Begin a batch with these cached lengths by level (`reuse_prefix`)."""
        self.settled, self._reused = None, dict(reused)
        self._begun = [False] * self._count

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
        common = [_common(was.tokens, row.tokens[:-1]) for was, row in pairs]
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
            committed = [row.committed - 1 for row in slots]
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
            if max(row.committed - cached[row.slot] for row in active) > plan.lag(number):
                began = time.perf_counter()
                with named(self._config.names, number - 1, slots):
                    state.set_cached(number, self._read_rest(number, slots, cached))
                recorder.spent(number - 1, time.perf_counter() - began, 1)
        self.continuing = [
            cast(Continuing, part) for part in self._parts if part.capabilities.continues
        ]

    def _read_rest(self, number: int, slots: Sequence[Row], cached: Sequence[int]) -> list[int]:
        """Have a level read all committed tokens but the last; return its cached lengths."""
        part, id_map = self._parts[number - 1], self._config.id_maps[number - 1]
        rest = [
            [] if row.ended else row.tokens[length:-1]
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


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    differ = (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))
