"""CUDA streams beside the current ones, and the time that work on a device takes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


class SideStreams:
    """Streams beside the current ones, for work that may overlap.

    What is begun in one follows everything that was queued before `open`, and what is queued
    after it follows all of them; between each other they are not ordered. Memory that one
    allocates is given out again to that one only, hence never while something queued before the
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
        """Streams may be used meanwhile, on these devices."""
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
    def stream(self, device: torch.device, number: int) -> Iterator[None]:
        """Work in stream `number` of `device`; where that is no CUDA device, as it comes."""
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


class Clock:
    """Seconds between ticks, by the device's own clock where it has one; reading them waits for
    nothing that has not been waited for.

    Args:
        device: whose work is timed.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._ticks: list[Any] = []
        self.tick()

    def tick(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._ticks.append(event)
        else:
            self._ticks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Between each tick and the one before. Once all of the work has been waited for."""
        pairs = itertools.pairwise(self._ticks)
        if self._cuda:
            return [before.elapsed_time(after) / 1000 for before, after in pairs]
        return [after - before for before, after in pairs]
