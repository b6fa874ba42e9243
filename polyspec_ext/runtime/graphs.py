"""Rounds without host synchronisation: queued steps, their CUDA graphs, streams and clocks.

The first call of a step runs as it is, which warms up what libraries and buffers set up lazily. The
next is captured, and those after it are replayed. Of steps that differ in the span of attention
alone the first one warms up for all. A graph reads and writes the addresses that it was captured
with, so its key names every one of them (`Place`), and it goes when their owner goes. No Python
runs in a replay: the caller books what the host keeps beside the device.
"""

from __future__ import annotations

import operator
import time
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, cast

import torch

from .. import progress as reporting
from ..drafters.base import Outputs as Outputs
from ..drafters.base import TreeSize
from ..levels.base import DeviceLengths
from ..tensors import Place
from .plan import RoundPlan
from .requirements import ChainConfig, Member
from .rows import PlannedStep, Row, Rows

Step = Callable[[], Outputs]
_FAILURES = 2  # captures of one kind of step that fail in a row, before none is tried again


class Recorder(Protocol):
    """Makes graphs of steps. Tests have one without a device."""

    def capture(self, step: Step) -> tuple[Callable[[], None], Outputs]:
        """Run `step` for its effects on the host alone; return what does it on the device, and the
        outputs that this writes.

        Raises:
            RuntimeError: the step cannot be captured. Nothing was done on the device.
        """
        ...


class CudaRecorder:
    """Records steps on `device` as `torch.cuda.CUDAGraph`, all in one memory pool."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._pool = cuda.graph_pool_handle()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle with another memory pool."""
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

    A step whose capture fails runs as it is. After two failures in a row none of its kind is
    captured any more, which a warning says.

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
        self._graphs: OrderedDict[_Key, _Graph] = OrderedDict()
        self._seen: OrderedDict[_Key, None] = OrderedDict()  # keys without spans, of steps run
        self._owners: dict[int, weakref.ref[object]] = {}
        self._failures: dict[str, int] = {}  # captures that failed in a row, by kind
        self.num_captures = 0
        self.num_replays = 0

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle without the captured graphs."""
        empty: dict[str, Any] = {"_graphs": OrderedDict(), "_seen": OrderedDict()}
        empty |= {"_owners": {}, "_failures": {}, "num_captures": 0, "num_replays": 0}
        return {**self.__dict__, **empty}

    def __len__(self) -> int:
        """Return the number of graphs."""
        return len(self._graphs)

    def clear(self) -> None:
        """Forget all graphs and give their memory back."""
        self._graphs.clear()
        self._seen.clear()
        self._failures.clear()

    def run(self, kind: str, key: Sequence[Hashable], step: Step) -> Outputs:
        """Return the outputs of ``step()``, by a graph where there is one, valid until the next
        call.

        Args:
            kind: of the step, for a message.
            key: everything that `step` depends on: which step it is, what it has closed over, and a
                `Place` for all memory that it uses.
        """
        full = (kind, *key)
        graph = self._graphs.get(full)
        if graph is None:
            if self._failures.get(kind, 0) == _FAILURES:
                return step()
            seen = tuple(part.of_any_span() if isinstance(part, Place) else part for part in full)
            if seen not in self._seen:
                self._watch(full)
                outputs = step()
                self._seen[seen] = None  # now that it was run
                if len(self._seen) > 4 * self._limit:
                    self._seen.popitem(last=False)
                return outputs
            graph = self._capture(kind, step)
            if graph is None:
                return step()
            self._graphs[full] = graph
            if len(self._graphs) > self._limit:
                self._graphs.popitem(last=False)
        else:
            self._graphs.move_to_end(full)
            self.num_replays += 1
        # Capturing ran `step` once for the host; this is the same call on the device.
        graph.replay()
        return graph.outputs

    def _capture(self, kind: str, step: Step) -> _Graph | None:
        try:
            graph = _Graph(*self._recorder.capture(step))
        except RuntimeError as error:
            self._failures[kind] = self._failures.get(kind, 0) + 1
            if self._failures[kind] == _FAILURES:
                warnings.warn(
                    f"{kind} cannot be captured as a CUDA graph and is run without, which is "
                    f"slower: {_cause(error)}",
                    RuntimeWarning,
                    stacklevel=3,
                )
            return None
        self._failures.pop(kind, None)
        self.num_captures += 1
        if self._progress:
            reporting.note(f"polyspec_ext: captured CUDA graph {self.num_captures}")
        return graph

    def _watch(self, key: _Key) -> None:
        """Forget the graph of `key` when the owner of one of its places goes."""
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
    while isinstance(error.__context__, RuntimeError):
        error = error.__context__
    return error


class _Graph(NamedTuple):
    replay: Callable[[], None]
    outputs: Outputs


# ---- queued rounds -------------------------------------------------------------------------------


class Queue:
    """Runs the steps of rounds whose order is known before the tokens are.

    Args:
        config: of the chain.
        parts: levels and drafter, target first.
        gives_hidden: levels whose hidden states the drafter is told.
        graphs: captures the steps; None: they run as they are.
    """

    def __init__(
        self,
        config: ChainConfig,
        parts: Sequence[Member],
        gives_hidden: Collection[int],
        graphs: Graphs | None,
    ) -> None:
        self._config, self._parts, self._gives_hidden = config, parts, gives_hidden
        self._graphs = graphs
        self._spans: dict[int, Hashable | None] = {}

    def begin(self, plan: RoundPlan, rows: Rows, slots: Sequence[Row], size: TreeSize) -> None:
        """Queue the steps of a round, and reserve room in the caches for trees of this size."""
        limit = max(row.committed + (0 if row.ended else plan.ahead) for row in slots)
        self._spans = {
            level: self._lengths(level).reserve_span(
                limit + (size.read if level == plan.levels else size.nodes)
            )
            for level in plan.asked
        }
        rows.state.queue = iter(plan.queue())

    def run(self, step: PlannedStep, rows: Rows, run: Step) -> Outputs:
        """Return the outputs of `run`, which does `step`, by its graph where there is one."""
        level, count = step.level, rows.state.shape.levels
        draft = level == count
        if draft:
            rows.pending.begin_draft(level - 1, step.most)
        if self._graphs is None or any(span is None for span in self._spans.values()):
            return run()
        # The levels below are cut as well, so the graph depends on where they are, and not on how
        # many slots their own passes read.
        touched = {
            at: span.of_any_span() if at > level and isinstance(span, Place) else span
            for at, span in self._spans.items()
            if at >= level
        }
        kind = "a draft" if draft else f"the verification of {self._config.names[level - 1]}"
        key: list[Hashable] = [level, step.most, step.tail, step.width, self._config.rule]
        if not rows.parameters.greedy and (step.tail or 1 < level < count):
            key.append(rows.pending.padding(1 if draft else level - 1))
        place = rows.place(level, step.tail, level in self._gives_hidden)
        return self._graphs.run(kind, [*key, place, tuple(touched), *touched.values()], run)

    def end(self, plan: RoundPlan, rows: Rows) -> None:
        """Tell the caches what the host could not see."""
        for level in plan.asked:
            self._lengths(level).note_lengths(rows.state.cached(level))

    def _lengths(self, level: int) -> DeviceLengths:
        return cast(DeviceLengths, self._parts[level - 1])


# ---- streams and clocks --------------------------------------------------------------------------


class SideStreams:
    """Streams beside the current ones, for work that may overlap.

    Work in one follows everything that was queued before `open`, and work queued after it follows
    all of them; between each other they are not ordered. Memory that one allocates is given out
    again to that one only, so never while work queued before the next `open` still uses it.
    """

    def __init__(self, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._streams: dict[tuple[torch.device, int], Any] = {}
        self._begun: dict[torch.device, Any] = {}
        self._used: list[tuple[torch.device, Any]] = []

    @contextmanager
    def open(self, devices: Sequence[torch.device]) -> Iterator[None]:
        """Allow streams on these devices meanwhile."""
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
        """Work in stream `number` of `device` meanwhile, if that is a CUDA device."""
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


class Clock(NamedTuple):
    """Times work on a device: `tick` behind all that is queued, and seconds `elapsed` from its
    second argument to its first, once the work has been waited for."""

    tick: Callable[[], Any]
    elapsed: Callable[[Any, Any], float] = operator.sub

    @classmethod
    def of(cls, device: torch.device) -> Clock:
        if device.type != "cuda":
            return cls(time.perf_counter)

        def event() -> Any:
            made = torch.cuda.Event(enable_timing=True)
            made.record()
            return made

        return cls(event, lambda after, before: float(before.elapsed_time(after)) / 1000)
