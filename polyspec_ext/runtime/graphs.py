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
from ..drafters.base import LONGEST, TreeSize
from ..drafters.base import Outputs as Outputs
from ..levels.base import BatchedLevel, DeviceLengths, InputBlock, LevelOutput
from ..ops.schedule import Plan
from ..tensors import Place, RowCounts
from .plan import ChainConfig, Member, RoundPlan, size_of
from .rows import PlannedStep, Row, Rows, Step

Run = Callable[[], Outputs]
_FAILURES = 2  # captures of one kind of step that fail in a row, before none is tried again


class Recorder(Protocol):
    """Makes graphs of steps. Tests have one without a device."""

    def capture(self, step: Run) -> tuple[Callable[[], None], Outputs]:
        """Run `step` for its effects on the host alone; return what does it on the device, and the
        outputs that this writes. RuntimeError: it cannot be captured, and nothing was done there.
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

    def capture(self, step: Run) -> tuple[Callable[[], None], Outputs]:
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

    def run(self, kind: str, key: Sequence[Hashable], step: Run) -> Outputs:
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

    def _capture(self, kind: str, step: Run) -> _Graph | None:
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

        for owner in (place.owner() for place in _places(key)):
            if owner is not None and id(owner) not in self._owners:
                self._owners[id(owner)] = weakref.ref(owner, gone)

    def _forget(self) -> None:
        for key in [*self._seen, *self._graphs]:
            if any(place.owner() is None for place in _places(key)):
                self._seen.pop(key, None)
                self._graphs.pop(key, None)
        self._owners = {n: owner for n, owner in self._owners.items() if owner() is not None}


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
    """Runs the steps of rounds whose order is known before the tokens are: by graphs, or, without
    these, as they are. The drafter is told the hidden states of the levels `gives_hidden`."""

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
        self._spans = {}
        for level in plan.asked:
            nodes = size.read if level == plan.levels else size.nodes
            self._spans[level] = self._lengths(level).reserve_span(limit + nodes)
        rows.state.queue = iter(plan.queue())

    def run(self, step: PlannedStep, rows: Rows, run: Run) -> Outputs:
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


# ---- passes that the host follows ----------------------------------------------------------------

# Where the host follows each step, a step's tokens and numbers reach the device in one upload, and
# its result comes back in one read. A pass in between is one replay: its inputs lie at fixed
# addresses, and the level keeps its lengths on the device meanwhile, so a text of any length has a
# graph for every size and span alone.


class Read(NamedTuple):
    """The result of a verification on the host, with the names and shapes of `VerifyResult`."""

    tokens: torch.Tensor
    num_accepted: torch.Tensor
    status: torch.Tensor
    logprobs: torch.Tensor


def uploaded(step: Step, device: torch.device, width: int) -> Step:
    """Return a step on `device`, with at least `width` tokens a row, in one upload. The host knows
    its numbers still."""
    rows, batch = step.table.shape
    ids = torch.nn.functional.pad(step.input_ids, (0, max(0, width - step.input_ids.shape[1])))
    both = torch.cat([step.table.flatten(), ids.flatten()])
    if device.type == "cuda":
        both = both.pin_memory()
    both = both.to(device, non_blocking=True)
    table, ids = both[: rows * batch].view(rows, batch), both[rows * batch :].view(batch, -1)
    return step._replace(input_ids=ids, table=table, plan=Plan._make(table.unbind()))


class Passes:
    """Runs the passes of levels by graphs. Usually so many draft tokens can be pending for level 1
    ... n-1 with the chain's windows."""

    def __init__(self, graphs: Graphs, usual: Sequence[int]) -> None:
        self._graphs, self._usual = graphs, usual
        # Of each size the tokens of a pass, with counts and the first token whose logits are kept.
        self._inputs: dict[Hashable, torch.Tensor] = {}
        self._cached: list[int] = []
        self._limit = 0

    def __getstate__(self) -> dict[str, object]:
        """Copy and pickle without the memory of graphs."""
        return {**self.__dict__, "_inputs": {}}

    def serves(self, part: Member) -> bool:
        """Return whether passes of a level or drafter can be captured, in the batch at hand."""
        can = part.capabilities
        return can.keeps_lengths and can.device_lengths

    def begin(
        self, step: Step, device: torch.device, cached: Sequence[int], limit: int, lag: int
    ) -> Step:
        """Begin the passes of a step, and return the step on the `device` of its level, which has
        `cached` tokens by row; none gets longer than `limit`. Rows read `lag` tokens in front of
        the draft tokens, as a rule."""
        self._cached, self._limit = list(cached), limit
        verifies, lag = step.level <= len(self._usual), max(step.lag, lag)
        most = size_of(step.most, self._usual[step.level - 1]) if verifies else 0
        return uploaded(step, device, lag + most)._replace(lag=lag, most=most)

    def read(self, result: object) -> Read:
        """Read a verification's result in one copy. Waits for the device."""
        tokens, accepted, status, logprobs = (getattr(result, name) for name in Read._fields)
        numbers = torch.stack([accepted.to(torch.int64), status.to(torch.int64)], 1)
        bits = logprobs.view(torch.int32).to(torch.int64)
        table, width = torch.cat([numbers, tokens, bits], 1).cpu(), tokens.shape[1]
        return Read(
            table[:, 2 : 2 + width],
            table[:, 0],
            table[:, 1].to(torch.int32),
            table[:, 2 + width :].to(torch.int32).view(torch.float32),
        )

    def forward(self, level: BatchedLevel, block: InputBlock) -> LevelOutput:
        """Return the output of ``level.forward``, by a graph unless it reads a later part of a
        tree, or many tokens. Logits are valid until the level's next pass."""
        width, layers = block.tokens.shape[1], block.hidden_layers
        tree = block.parents is not None
        counts = [width] * len(self._cached) if block.counts is None else block.counts.host
        assert counts is not None, "the host follows these passes"
        self._cached = list(map(int.__add__, self._cached, counts))
        if width > LONGEST or (block.parents is not None and block.parents.shape[1] != width):
            return level.forward(block)
        lengths = cast(DeviceLengths, level)
        span, inputs = lengths.reserve_span(self._limit), self._written(id(level), block)

        def run() -> tuple[torch.Tensor | None, ...]:
            known = RowCounts(None, inputs[0]), RowCounts(None, inputs[1])
            tokens, parents = inputs[2 : 2 + width].t(), inputs[2 + width :].t() if tree else None
            own = InputBlock(tokens, block.keep, *known, parents, layers, block.depth)
            out = level.forward(own)
            states = [] if out.hidden is None else [out.hidden[layer] for layer in layers]
            return out.logits, out.skipped, *states

        key = (width, block.keep, layers, tree, block.depth, Place(self, [inputs]), span)
        kind = f"a pass of {level.name}"
        made = run() if span is None else self._graphs.run(kind, key, run)
        lengths.note_lengths(self._cached)
        logits, skipped, *states = made
        assert logits is not None
        # A later pass writes states again before the drafter has read them.
        hidden = {at: x.clone() for at, x in zip(layers, states, strict=False) if x is not None}
        return LevelOutput(logits, hidden or None, None if skipped is None else skipped.clone())

    def call(
        self,
        kind: str,
        form: Hashable,
        reserve: Callable[[int], Hashable | None],
        inputs: Sequence[torch.Tensor],
        run: Callable[..., Outputs],
    ) -> Outputs:
        """Return ``run(*inputs)`` (`CapturedPasses.call`)."""
        kept = [self._kept((kind, number), x) for number, x in enumerate(inputs)]
        span = reserve(self._limit)
        if span is None:
            return run(*kept)
        return self._graphs.run(kind, (form, Place(self, kept), span), lambda: run(*kept))

    def _kept(self, name: Hashable, x: torch.Tensor) -> torch.Tensor:
        """Return `x` at a fixed address, at few widths."""
        batch, *more = x.shape
        if more and more[0] > 1:
            more[0] = max(8, 1 << (more[0] - 1).bit_length())
        size = name, batch, *more
        if size not in self._inputs:
            self._inputs[size] = x.new_zeros(batch, *more)
        whole = self._inputs[size]
        (whole[:, : x.shape[1]] if more else whole).copy_(x)
        return whole

    def _written(self, level: int, block: InputBlock) -> torch.Tensor:
        """Return ``[2 + T, B]``, counts, first and the tokens of a block, or ``[2 + 2T, B]`` with
        the parents behind them, at a fixed address."""
        (batch, width), device = block.tokens.shape, block.tokens.device
        ids = [block.tokens] if block.parents is None else [block.tokens, block.parents]
        size = level, batch, width, block.keep, len(ids)
        if size not in self._inputs:
            self._inputs[size] = block.tokens.new_zeros(2 + len(ids) * width, batch)
        inputs = self._inputs[size]
        counts = (block.counts, width), (block.first, width - block.keep)
        for row, (known, number) in zip(inputs, counts, strict=False):
            if known is None:
                row.fill_(number)
            else:
                row.copy_(known.on(device))
        for at, values in enumerate(ids):
            inputs[2 + at * width :][:width].copy_(values.t())
        return inputs


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
        gpus = {device for device in devices if device.type == "cuda"}
        self._begun = {gpu: self._cuda.current_stream(gpu).record_event() for gpu in gpus}
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
        if (device, number) not in self._streams:
            self._streams[device, number] = self._cuda.Stream(device)
        stream = self._streams[device, number]
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
