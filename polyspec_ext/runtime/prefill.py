"""Prefilling a batch: every level that will be asked reads what stands for good, but the last
token, whose logits are wanted.

All levels are set going before anybody waits: levels on several devices read at the same time, and
so do those of one CUDA device, as far as it has room, since each level below the target has a
stream of its own (`Lanes`), unless it shares a cache with another.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from ..drafters import DraftModel
from ..errors import named
from ..levels import device_of
from ..returned import call
from ..stats import Books
from ..tensors import feed
from .request import Row

if TYPE_CHECKING:
    from ..chain import Chain


class Lanes:
    """Streams beside the current ones, for work that may overlap.

    What is begun in a lane follows everything that was queued before `open`, and what is queued
    after it follows all lanes; between each other they are not ordered. Memory that a lane
    allocates is given out again to that lane only, hence never while something queued before the
    next `open` still uses it.

    Args:
        cuda: `torch.cuda`, or what stands in for it.
    """

    def __init__(self, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._streams: dict[tuple[torch.device, int], Any] = {}
        self._begun: dict[torch.device, Any] = {}
        self._used: list[tuple[torch.device, Any]] = []

    @contextmanager
    def open(self, devices: Sequence[torch.device]) -> Iterator[None]:
        """Lanes may be used meanwhile, on these devices."""
        self._used = []
        self._begun = {
            device: self._cuda.current_stream(device).record_event()
            for device in set(devices)
            if device.type == "cuda"
        }
        try:
            yield
        finally:
            for device, stream in self._used:
                self._cuda.current_stream(device).wait_stream(stream)

    @contextmanager
    def lane(self, device: torch.device, number: int) -> Iterator[None]:
        """Work in lane `number` of `device`; where that is no CUDA device, as it comes."""
        if device.type != "cuda":
            yield
            return
        stream = self._streams.get((device, number))
        if stream is None:
            stream = self._streams[device, number] = self._cuda.Stream(device)
        stream.wait_event(self._begun[device])
        self._used.append((device, stream))
        with self._cuda.stream(stream):
            yield


def prefill(chain: Chain, slots: Sequence[Row], books: Books) -> list[bool]:
    """Has the levels read the prompts of `slots`. Returns which of those that verify did."""
    read = [False] * len(chain.levels)
    longest = max((row.max_new_tokens for row in slots if not row.ended), default=0)
    if longest == 0:
        return read
    # The last token of a text needs no draft, and nothing below a window of 0 is asked.
    asked = 1
    while longest > 1 and asked < len(chain.names) and chain.window[asked - 1] > 0:
        asked += 1
    drafter = chain.drafter
    model = drafter if asked == len(chain.names) and isinstance(drafter, DraftModel) else None
    verifying = range(min(asked, len(chain.levels)))
    devices = [device_of(chain.levels[i]) for i in verifying] + (
        [] if model is None else [model.device]
    )
    everybody, stats = [(row, 0) for row in slots], [row.stats for row in slots]
    with chain.lanes.open(devices):
        for index in verifying:
            began = time.perf_counter()
            with named(chain.names, index, everybody), _lane(chain, index, devices[index]):
                _read(chain, index, slots)
            read[index] = True
            books.prefilled(stats, index, time.perf_counter() - began)
        if model is not None:
            began = time.perf_counter()
            lane = _lane(chain, len(chain.levels), model.device, model.level)
            with named(chain.names, -1, everybody), lane:
                _reserve(chain, model.level, slots)
                model.prefill([row.context for row in slots])
            books.prefilled(stats, -1, time.perf_counter() - began)
    began = time.perf_counter()
    for device in set(devices):
        if device.type == "cuda":  # so that prefill and decoding are timed apart
            torch.cuda.synchronize(device)
    books.prefilled(stats, 0, time.perf_counter() - began)
    return read


def _lane(
    chain: Chain, number: int, device: torch.device, level: Any = None
) -> AbstractContextManager[None]:
    """Where level `number` (from 0) reads. The target stays where its collectives may be, if it is
    sharded; a level that shares another's cache stays behind that one."""
    level = chain.levels[number] if level is None else level
    apart = number > 0 and getattr(level, "reads_apart", False)
    return chain.lanes.lane(device, number) if apart else nullcontext()


def _read(chain: Chain, index: int, slots: Sequence[Row]) -> None:
    level = chain.levels[index]
    ahead = [row.committed - 1 for row in slots]
    _reserve(chain, level, slots)
    fed, counts = feed([row.tokens[:n] for row, n in zip(slots, ahead, strict=True)], level)
    call(chain.names[index], level, "prefill", fed, *(() if counts is None else (counts,)))
    for row, n in zip(slots, ahead, strict=True):
        row.cached[index] = n


def _reserve(chain: Chain, level: Any, slots: Sequence[Row]) -> None:
    """Tells a level that wants to know how long its rows can get; a round on the device runs some
    tokens ahead of them."""
    reserve = getattr(level, "reserve", None)
    if reserve is not None:
        rounds = chain.device_rounds
        ahead = max(chain.window, default=0) + 2 if rounds is None else rounds.ahead
        reserve(max(len(row.tokens) + row.max_new_tokens for row in slots) + ahead)
