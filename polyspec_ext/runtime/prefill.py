"""The committed tokens in the caches of a chain: prefilling and catching up.

A level reads all committed tokens but the last, which its next pass reads for the logits. Levels on
several devices read concurrently, and so do levels on one CUDA device, as far as it has room: each
level below the target has a stream (`SideStreams`), unless it shares a cache with another level.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from ..errors import named
from ..levels.base import Hidden, PromptBatch
from ..stats import StatsRecorder
from ..tensors import padded
from .plan import ChainConfig, Member, RoundPlan, round_plan
from .rows import Row, Rows, StateRows


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
    """The caches of a chain's levels and drafter (`parts`, target first).

    Attributes:
        begun: by level whether it has begun the batch.
        more: tokens that the first step of a level may read in addition to its lag, instead of a
            separate pass.
    """

    def __init__(
        self, config: ChainConfig, parts: Sequence[Member], hidden_layers: tuple[int, ...]
    ) -> None:
        self.config, self.parts, self.layers = config, parts, hidden_layers
        self.streams = SideStreams()
        self.count = len(config.windows) + 1  # 2 for a target alone, with window 0
        self.begin()

    def begin(self) -> None:
        """Begin a batch with empty caches."""
        self.more, self.begun = 0, [False] * self.count

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
        fresh = [number for number in plan.asked if not self.begun[number - 1]]
        if fresh:
            states = self.prefill(fresh, slots, state, plan.ahead + nodes, recorder)
            if states is not None and rows.hidden is not None:
                counts = torch.tensor(state.cached(1))
                rows.hidden.add(states, torch.zeros_like(counts), counts)
            for number in fresh:
                self.begun[number - 1] = True
        for number in plan.asked:
            cached = state.cached(number)
            lag = plan.lag(number) + self.more + self.parts[number - 1].capabilities.replays
            lagging = [row for row in active if row.committed - cached[row.slot] > lag]
            if any(self._asks(number, state, row) for row in lagging):
                # A drafter that reads the target's hidden states keeps those of all rows.
                reading = [r for r in active if self.layers or self._asks(number, state, r)]
                began = time.perf_counter()
                with named(self.config.names, number - 1, slots):
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
        chosen = [(number, self.parts[number - 1]) for number in numbers]
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
                with named(self.config.names, number - 1, slots), stream:
                    tokens, counts = padded(texts, level.device)
                    counted = None if min(counts) == tokens.shape[1] else counts
                    tokens = self.config.id_maps[number - 1].to_below(tokens)
                    layers = self.layers if number == 1 else ()
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
        asks = [self.layers or self._asks(number, state, row) for row in slots]
        return [row.tokens[:-1] if asking else [] for row, asking in zip(slots, asks, strict=True)]

    def _asks(self, number: int, state: StateRows, row: Row) -> bool:
        sizes, count = state.windows[row.slot], len(self.config.windows)
        levels = round_plan(sizes[:count], sizes[count:], self.config.tail).asked
        return not row.paused and number in levels

    def _read_rest(
        self, number: int, slots: Sequence[Row], reading: Sequence[Row], cached: Sequence[int]
    ) -> list[int]:
        level, id_map = self.parts[number - 1], self.config.id_maps[number - 1]
        unread: list[list[int]] = [[] for _ in slots]
        for row in reading:
            unread[row.slot] = row.tokens[cached[row.slot] : -1]
        tokens, counts = padded(unread, level.device)
        level.read(id_map.to_below(tokens), counts)
        return [length + count for length, count in zip(cached, counts, strict=True)]

    def select(self, keep: Sequence[int], staying: Sequence[Row]) -> None:
        """Keep the rows `keep`, the requests `staying`, in every cache."""
        for number, level in enumerate(self.parts, 1):
            if self.begun[number - 1]:
                with named(self.config.names, number - 1, staying):
                    level.select(keep)
