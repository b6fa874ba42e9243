"""CUDA graphs of a chain's steps, captured when one comes up a second time, then replayed; streams
beside the current ones; and the time that work on a device takes.

A step reads and writes memory that stays where it is. Its first call runs as it is, which warms up
what libraries set up lazily; its second is captured and replayed; every later one is replayed. What
the host keeps beside the device (how long a cache is by now) is for the caller to book, since no
Python runs in a replay.

A graph reads and writes the addresses that it was captured with, whatever lies there by now. So its
key names every one of them (`Place`), and a graph goes when what it was captured for goes.
"""

from __future__ import annotations

import itertools
import time
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from .. import progress as reporting
from ..tensors import Place

Outputs = tuple[torch.Tensor | None, ...]
Step = Callable[[], Outputs]
_FAILURES = 2  # captures of one kind of step that fail, before none is tried again


class Recorder(Protocol):
    """How a step becomes a graph. Replaced in tests, which have no device to capture on."""

    def capture(self, step: Step) -> tuple[Callable[[], None], Outputs]:
        """Runs `step` for its effects on the host alone, and returns what does it on the device,
        and the outputs that this writes.

        Raises:
            RuntimeError: the step cannot be captured. Nothing was done on the device.
        """
        ...


class CudaRecorder:
    """`torch.cuda.CUDAGraph`, all in one memory pool.

    Args:
        device: that steps run on.
        cuda: `torch.cuda`, or what stands in for it.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._pool = cuda.graph_pool_handle()

    def __reduce__(self) -> tuple[Any, ...]:
        """For `copy` and `pickle`: a copy has a memory pool of its own."""
        return type(self), (self._device,)

    def capture(self, step: Step) -> tuple[Callable[[], None], Outputs]:
        cuda = self._cuda
        graph = cuda.CUDAGraph()
        with cuda.device(self._device):
            current = cuda.current_stream(self._device)
            try:
                cuda.synchronize(self._device)
                with cuda.graph(graph, pool=self._pool):
                    outputs = step()
            except BaseException:
                # Where ending the capture fails, torch leaves the capture's stream the current one;
                # and the pool may be open still, which the next capture would not get then.
                cuda.set_stream(current)
                self._pool = cuda.graph_pool_handle()
                raise
        return graph.replay, outputs


class Graphs:
    """Graphs by step and by the memory they use.

    A step that cannot be captured is run as it is from then on, after a warning for each kind. No
    more of a kind are captured after two that could not be.

    Args:
        recorder: makes them.
        limit: graphs kept; the one longest unused goes first. Each holds its intermediate tensors,
            so this bounds memory.
        progress: a line per capture on standard error, where that is a terminal.
    """

    def __init__(self, recorder: Recorder, *, limit: int = 64, progress: bool = True) -> None:
        if limit < 1:
            raise ValueError(f"limit: expected >= 1, given {limit}")
        self._recorder, self._limit, self._progress = recorder, limit, progress
        # None: cannot be captured.
        self._graphs: OrderedDict[_Key, _Graph | None] = OrderedDict()
        self._seen: OrderedDict[_Key, None] = OrderedDict()
        self._owners: dict[int, weakref.ref[object]] = {}
        self._failures: dict[str, int] = {}  # captures that failed, by kind
        self.num_captures = 0
        self.num_replays = 0

    def __getstate__(self) -> dict[str, Any]:
        """For `copy` and `pickle`: a copy has captured nothing."""
        empty: dict[str, Any] = {"_graphs": OrderedDict(), "_seen": OrderedDict()}
        empty |= {"_owners": {}, "_failures": {}, "num_captures": 0, "num_replays": 0}
        return {**self.__dict__, **empty}

    def __len__(self) -> int:
        """Graphs at hand."""
        return sum(graph is not None for graph in self._graphs.values())

    def clear(self) -> None:
        """Forget all graphs and give their memory back."""
        self._graphs.clear()
        self._seen.clear()
        self._failures.clear()

    def run(self, kind: str, key: Sequence[Hashable], step: Step) -> Outputs:
        """``step()``, by a graph where there is one.

        Args:
            kind: of the step, for a message.
            key: everything that `step` depends on: which step it is, what it has closed over, and a
                `Place` for all memory that it uses. A graph is forgotten when the owner of one of
                its places goes.

        Returns:
            The outputs, valid until the next call.
        """
        full = (kind, *key)
        if full not in self._graphs:
            if self._failures.get(kind, 0) == _FAILURES:
                return step()
            if full not in self._seen:
                self._watch(full)
                outputs = step()
                self._seen[full] = None  # now that it was run
                if len(self._seen) > 4 * self._limit:
                    self._seen.popitem(last=False)
                return outputs
            del self._seen[full]
            self._graphs[full] = self._capture(kind, step)
            if len(self._graphs) > self._limit:
                self._graphs.popitem(last=False)
        else:
            self._graphs.move_to_end(full)
            self.num_replays += self._graphs[full] is not None
        graph = self._graphs[full]
        if graph is None:
            return step()
        # Capturing ran `step` once for the host; this is the same call on the device.
        graph.replay()
        return graph.outputs

    def _capture(self, kind: str, step: Step) -> _Graph | None:
        try:
            graph = _Graph(*self._recorder.capture(step))
        except RuntimeError as error:
            self._failures[kind] = self._failures.get(kind, 0) + 1
            if self._failures[kind] == 1:
                warnings.warn(
                    f"{kind} cannot be captured as a CUDA graph and is run without, which is "
                    f"slower: {_cause(error)}",
                    RuntimeWarning,
                    stacklevel=3,
                )
            return None
        self.num_captures += 1
        if self._progress:
            reporting.note(f"polyspec_ext: captured CUDA graph {self.num_captures}")
        return graph

    def _watch(self, key: _Key) -> None:
        """Has what is kept for `key` go with the owners of its places."""
        this = weakref.ref(self)

        def gone(_: object) -> None:
            graphs = this()
            if graphs is not None:
                graphs._forget()

        for place in _places(key):
            owner = place.owner()
            if owner is not None and id(owner) not in self._owners:
                self._owners[id(owner)] = weakref.ref(owner, gone)

    def _forget(self) -> None:
        """Drops what was kept for owners that are gone."""
        for key in [*self._seen, *self._graphs]:
            if any(place.owner() is None for place in _places(key)):
                self._seen.pop(key, None)
                self._graphs.pop(key, None)
        for number, owner in list(self._owners.items()):
            if owner() is None:
                self._owners.pop(number, None)


_Key = tuple[Hashable, ...]


def _places(key: _Key) -> list[Place]:
    return [part for part in key if isinstance(part, Place)]


def _cause(error: BaseException) -> BaseException:
    """What went wrong first: ending a capture that has failed fails as well."""
    while isinstance(error.__context__, RuntimeError):
        error = error.__context__
    return error


class _Graph(NamedTuple):
    replay: Callable[[], None]
    outputs: Outputs


# ---- streams and clocks --------------------------------------------------------------------------


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
