"""Timing in turns: every contender once per turn, the order rotating, so that a change in the
machine's load or clock meets all of them; then medians, quartiles and ratios with intervals.

CPU: wall time of one call (or processor time). CUDA: events around one replay of a captured graph
(around the call where it cannot be captured), with the L2 cache overwritten before; replays are
queued behind that overwriting, so launching them costs the device no time.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

WARM_UP = 3  # untimed turns
MIB = 1 << 20
T = TypeVar("T")


def rotated(things: Sequence[T], turn: int) -> list[T]:
    """The order of a turn: one further on than that of the turn before."""
    shift = turn % max(len(things), 1)
    return [*things[shift:], *things[:shift]]


@dataclass
class Contender:
    """Something measured: one call without arguments, reading the feed's buffers."""

    name: str
    call: Callable[[], Any]
    graph: bool = True  # whether a CUDA graph can capture it
    bytes: int | None = None  # that a call moves; None: as many as ours
    accepted: Callable[[Any], torch.Tensor] | None = None  # counts [B] in what the call returns


@dataclass
class Timed:
    """Seconds of every repeat, in order, and the counts of accepted tokens [repeats][B]."""

    contender: Contender
    seconds: list[float]
    accepted: list[list[int]]
    graph: bool = False


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Microseconds: median, q25, q75 and mean."""
    micro = [1e6 * value for value in seconds]
    mean = statistics.fmean(micro)
    if len(micro) < 2:
        return dict.fromkeys(("median", "q25", "q75", "mean"), mean)
    q25, median, q75 = statistics.quantiles(micro, method="inclusive")
    return {"median": median, "q25": q25, "q75": q75, "mean": mean}


def median_interval(count: int) -> tuple[int, int]:
    """Ranks (from 0) of the order statistics of `count` values that enclose the median with at
    least 95 % confidence whatever the distribution; the extremes where the values are too few."""
    tail, rank, passed = 0.025, -1, 0.0
    for i in range(count // 2):
        passed += math.comb(count, i) / 2**count
        if passed > tail:
            break
        rank = i
    rank = max(rank, 0)
    return rank, count - 1 - rank


def ratio(peer: Sequence[float], ours: Sequence[float]) -> dict[str, float]:
    """How many times longer the peer takes, each repeat against ours of the same turn: the median
    of the ratios, its 95 % interval (low, high), and the ratio of the means."""
    ratios = sorted(a / b for a, b in zip(peer, ours, strict=True))
    low, high = median_interval(len(ratios))
    return {
        "median": statistics.median(ratios),
        "low": ratios[low],
        "high": ratios[high],
        "of_means": statistics.fmean(peer) / statistics.fmean(ours),
    }


class CpuClock:
    """Wall time, or the process's own processor time, which a busy machine stretches less; with
    `cold`, a buffer larger than the caches is written before every call.

    Attributes:
        kind: what is measured, in words.
    """

    def __init__(self, cold: bool = False, processor_time: bool = False) -> None:
        self.kind = "processor time" if processor_time else "wall time"
        self._now = time.process_time_ns if processor_time else time.perf_counter_ns
        self._flush = torch.zeros(128 * MIB, dtype=torch.int8) if cold else None

    def prepare(self, contender: Contender) -> tuple[Callable[[], Any], bool]:
        """What to run for one repeat, and whether it is a graph's replay."""
        return contender.call, False

    def time(self, run: Callable[[], Any]) -> tuple[Any, Any]:
        """Runs it; gives a handle for ``seconds`` and the result."""
        if self._flush is not None:
            self._flush.add_(1)
        started = self._now()
        result = run()
        return self._now() - started, result

    def seconds(self, handle: Any) -> float:
        return float(handle) * 1e-9


class CudaClock:
    """Events around graph replays. Nothing waits for the device until ``seconds``."""

    kind = "events"

    def __init__(self, cold: bool = True) -> None:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        # Long enough that the next call is queued before the overwriting ends.
        size = max(4 * getattr(properties, "L2_cache_size", 64 * MIB), 256 * MIB)
        self._flush = torch.zeros(size, dtype=torch.int8, device="cuda") if cold else None

    def prepare(self, contender: Contender) -> tuple[Callable[[], Any], bool]:
        if not contender.graph:
            return contender.call, False
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                contender.call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                result = contender.call()
        except RuntimeError:  # it synchronises or allocates outside the pool: time the call itself
            torch.cuda.synchronize()
            return contender.call, False

        def replay() -> Any:
            graph.replay()
            return result

        return replay, True

    def time(self, run: Callable[[], Any]) -> tuple[Any, Any]:
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if self._flush is not None:
            self._flush.add_(1)
        started.record()
        result = run()
        ended.record()
        return (started, ended), result

    def seconds(self, handle: Any) -> float:
        started, ended = handle
        ended.synchronize()
        return float(started.elapsed_time(ended)) * 1e-3


Clock = CpuClock | CudaClock


def measure(
    contenders: Sequence[Contender],
    load: Callable[[int], None],
    repeats: int,
    clock: Clock,
    tick: Callable[[], object] = lambda: None,
) -> tuple[list[Timed], dict[str, str]]:
    """Times the contenders in turns.

    Returns:
        what was timed, in the given order, and for each that failed to run, the reason by name.
    """
    failures: dict[str, str] = {}
    runs: list[tuple[Timed, Callable[[], Any]]] = []
    for contender in contenders:
        try:
            load(0)
            run, graph = clock.prepare(contender)
            for turn in range(WARM_UP):
                load(turn)
                clock.seconds(clock.time(run)[0])
            runs.append((Timed(contender, [], [], graph), run))
        except Exception as error:  # a peer that fails must not end the run
            failures[contender.name] = f"{type(error).__name__}: {error}".splitlines()[0]
    handles: list[tuple[Timed, Any, Any]] = []
    for turn in range(repeats):
        load(turn)
        for timed, run in rotated(runs, turn):
            handle, result = clock.time(run)
            accepted = timed.contender.accepted
            counts = None if accepted is None else accepted(result).clone()
            handles.append((timed, handle, counts))
        tick()
    for timed, handle, counts in handles:
        timed.seconds.append(clock.seconds(handle))
        if counts is not None:
            timed.accepted.append(counts.tolist())
    return [timed for timed, _ in runs], failures


def copy_bandwidth(clock: Clock, device: str) -> float:
    """GB/s of ``copy_`` between two buffers that no cache holds, bytes read plus bytes written."""
    size = 1024 * MIB if device == "cuda" else 128 * MIB
    source = torch.ones(size, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    copy = Contender("copy", lambda: target.copy_(source))
    (timed,), _ = measure([copy], lambda turn: None, 9, clock)
    return 2 * size / statistics.median(timed.seconds) * 1e-9
