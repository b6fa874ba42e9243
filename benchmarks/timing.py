"""Timing in turns: every contender once per turn, in a rotating order, so that a change in the
machine's load or clock affects all of them; medians, quartiles and ratios with intervals.

CPU: wall time. CUDA: events around a replay of a captured graph (or the call, if it cannot be
captured), after overwriting the L2 cache. The replay is queued during the overwriting, so its
launch costs the device no time.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

WARM_UP = 3  # untimed turns
MIB = 1 << 20
T = TypeVar("T")
Call = Callable[[], Any]


def rotated(things: Sequence[T], turn: int, first: int = 0) -> list[T]:
    """Return `things` in the order of a turn, rotated by 1 per turn. The first `first` things come
    first in every turn, since the others are compared with them."""
    ahead, others = things[:first], things[first:]
    shift = turn % max(len(others), 1)
    return [*ahead, *others[shift:], *others[:shift]]


@dataclass
class Contender:
    """A call to be measured.

    Attributes:
        graph: try to capture the call as a CUDA graph.
        seconds: seconds of every turn.
        captured: whether replays of a graph were timed.
        error: of a contender that failed, which takes part no longer.
    """

    name: str
    call: Call
    graph: bool = True
    seconds: list[float] = field(default_factory=list)
    captured: bool = False
    error: str | None = None
    run: Call | None = None  # the call, or its replay


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Return microseconds: median, q25, q75 and mean."""
    micro = 1e6 * np.asarray(seconds)
    q25, median, q75 = np.quantile(micro, (0.25, 0.5, 0.75)).tolist()
    return {"median": median, "q25": q25, "q75": q75, "mean": float(micro.mean())}


def median_interval(count: int) -> tuple[int, int]:
    """Return the ranks, from 0, of the order statistics of `count` values that enclose the median
    with 95 % confidence for any distribution; the extremes where the values are too few."""
    below = np.cumsum([math.comb(count, n) / 2**count for n in range(count // 2)])
    rank = max(int((below <= 0.025).sum()) - 1, 0)
    return rank, count - 1 - rank


def ratio(peer: Sequence[float], ours: Sequence[float]) -> dict[str, float]:
    """Return how many times as long the peer takes, turn by turn: the median of the ratios and its
    95 % interval (low, high)."""
    ratios = sorted(a / b for a, b in zip(peer, ours, strict=True))
    low, high = median_interval(len(ratios))
    return {"median": statistics.median(ratios), "low": ratios[low], "high": ratios[high]}


class Clock:
    """Measure calls on a device, "cpu" or "cuda"; None: calls that return their seconds."""

    def __init__(self, device: str | None) -> None:
        self.device, self.kind = device, "events" if device == "cuda" else "wall time"
        self._flush: torch.Tensor | None = None
        if device == "cuda":
            properties = torch.cuda.get_device_properties(torch.cuda.current_device())
            # Long enough that the next call is queued before the overwriting ends.
            size = max(4 * getattr(properties, "L2_cache_size", 64 * MIB), 256 * MIB)
            self._flush = torch.zeros(size, dtype=torch.int8, device="cuda")

    def prepare(self, contender: Contender) -> Call:
        """Return the replay of a captured call, or the call if it cannot be captured."""
        if self._flush is None or not contender.graph:
            return contender.call
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                contender.call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                contender.call()
        except RuntimeError:  # it synchronises, or allocates outside the pool
            torch.cuda.synchronize()
            return contender.call
        contender.captured = True
        return graph.replay

    def seconds(self, run: Call) -> float:
        """Return the seconds of a call."""
        if self.device is None:
            return float(run())
        if self._flush is None:
            began = time.perf_counter()
            run()
            return time.perf_counter() - began
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.add_(1)
        started.record()
        run()
        ended.record()
        ended.synchronize()
        return float(started.elapsed_time(ended)) * 1e-3


def turns(
    contenders: Sequence[Contender],
    repeats: int,
    clock: Clock,
    load: Callable[[int], None] = lambda turn: None,
    warm_up: int = WARM_UP,
) -> Iterator[Contender]:
    """Time the contenders in turns; yield a contender after its call.

    Args:
        load: called with the number of the turn before every call.
        warm_up: uncounted calls of a contender before its first.
    """
    for turn in range(repeats):
        for one in rotated([one for one in contenders if one.error is None], turn):
            try:
                if one.run is None:
                    load(0)
                    one.run = clock.prepare(one)
                    for number in range(warm_up):
                        load(number)
                        clock.seconds(one.run)
                load(turn)
                one.seconds.append(clock.seconds(one.run))
            except Exception as error:  # a peer that fails must not end the run
                one.error = f"{type(error).__name__}: {error}".splitlines()[0]
            yield one


def copy_bandwidth(device: str) -> float:
    """Return GB/s of a copy between buffers larger than caches, bytes read and written; on CUDA of
    a kernel, since the copy engines, which ``copy_`` uses in a graph, are slower than products."""
    size = 1024 * MIB if device == "cuda" else 128 * MIB
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    call = partial(torch.neg, out=target) if device == "cuda" else target.copy_
    (copy, *_) = turns([Contender("copy", partial(call, source))], 9, Clock(device))
    return 2 * size / statistics.median(copy.seconds) * 1e-9
