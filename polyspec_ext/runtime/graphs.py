"""Rounds without host synchronisation: queued steps and their CUDA graphs.

The first call of a step runs eagerly, to warm up lazily initialised libraries and buffers. The
second call is captured, later calls are replayed. Steps that differ only in the span of attention
share the warm-up. A graph reads and writes the addresses of its capture, so its key has all of
them (`MemoryKey`), and the graph is dropped with their owner. A replay runs no Python: the caller
updates the state on the host.
"""

from __future__ import annotations

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch

from .. import progress as reporting
from ..drafters.base import LONGEST, TreeSize
from ..drafters.base import Outputs as Outputs
from ..levels.base import BatchedLevel, DeviceLengths, InputBlock, LevelOutput
from ..ops.schedule import Plan
from ..tensors import MemoryKey, RowCounts
from .plan import ChainConfig, Member, RoundPlan, size_of
from .rows import PlannedStep, Row, Rows, Step

Run = Callable[[], Outputs]
_FAILURES = 2  # consecutive failed captures of a kind of step before capturing stops


class Recorder(Protocol):
    """Recorder of graphs of steps. Tests use a recorder without a device."""

    def capture(self, step: Run) -> tuple[Callable[[], None], Outputs]:
        """Run `step` for its effects on the host alone. Returns a function that replays the step on
        the device, and the outputs that the replay writes. RuntimeError: the step cannot be
        captured, and the device is unchanged."""
        ...


class CudaRecorder:
    """Recorder of steps on `device` as `torch.cuda.CUDAGraph`, all in one memory pool."""

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
                # If ending the capture fails, torch leaves the capture's stream current, and the
                # pool may still be open, so that the next capture could not use it.
                cuda.set_stream(current)
                self._pool = cuda.graph_pool_handle()
                raise
        return graph.replay, outputs


class Graphs:
    """Graphs by step and memory of the step.

    A step runs eagerly if its capture fails. After two consecutive failures no step of the kind is
    captured any more, with a warning.

    Args:
        recorder: captures the steps.
        limit: maximum graphs; the least recently used is dropped first. Each graph keeps its
            intermediate tensors, so this bounds memory.
        progress: whether to write a line per capture to standard error, if that is a terminal.
    """

    def __init__(self, recorder: Recorder, *, limit: int = 64, progress: bool = True) -> None:
        if limit < 1:
            raise ValueError(f"limit: expected >= 1, given {limit}")
        self._recorder, self._limit, self._progress = recorder, limit, progress
        self._graphs: OrderedDict[_Key, _Graph] = OrderedDict()
        self._seen: OrderedDict[_Key, None] = OrderedDict()  # keys without spans, of steps run
        self._owners: dict[int, weakref.ref[object]] = {}
        self._failures: dict[str, int] = {}  # consecutive failed captures, by kind
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
        """Drop all graphs and free their memory."""
        self._graphs.clear()
        self._seen.clear()
        self._failures.clear()

    def run(self, kind: str, key: Sequence[Hashable], step: Run) -> Outputs:
        """Return the outputs of ``step()``, by a graph if available, valid until the next call.

        Args:
            kind: kind of the step, for a message.
            key: all dependencies of `step`: the step, the values in its closure, and a `MemoryKey`
                of all memory that it uses.
        """
        full = (kind, *key)
        graph = self._graphs.get(full)
        if graph is None:
            if self._failures.get(kind, 0) == _FAILURES:
                return step()
            seen = tuple(
                item.of_any_span() if isinstance(item, MemoryKey) else item for item in full
            )
            if seen not in self._seen:
                self._watch(full)
                outputs = step()
                self._seen[seen] = None  # after the warm-up
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
        # A capture ran `step` on the host only; this replay is the same call on the device.
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
        """Drop the graph of `key` when an owner of memory in the key is freed."""
        reference = weakref.ref(self)

        def gone(_: object) -> None:
            graphs = reference()
            if graphs is not None:
                graphs._forget()

        for owner in (memory.owner() for memory in _memory_keys(key)):
            if owner is not None and id(owner) not in self._owners:
                self._owners[id(owner)] = weakref.ref(owner, gone)

    def _forget(self) -> None:
        for key in [*self._seen, *self._graphs]:
            if any(memory.owner() is None for memory in _memory_keys(key)):
                self._seen.pop(key, None)
                self._graphs.pop(key, None)
        self._owners = {n: owner for n, owner in self._owners.items() if owner() is not None}


_Key = tuple[Hashable, ...]


def _memory_keys(key: _Key) -> list[MemoryKey]:
    return [item for item in key if isinstance(item, MemoryKey)]


def _cause(error: BaseException) -> BaseException:
    while isinstance(error.__context__, RuntimeError):
        error = error.__context__
    return error


class _Graph(NamedTuple):
    replay: Callable[[], None]
    outputs: Outputs


# ---- queued rounds -------------------------------------------------------------------------------


class Queue:
    """Runner of rounds with an order of steps known before the tokens, by graphs if available, else
    eagerly. The levels `gives_hidden` output hidden states for the drafter."""

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
        """Queue the steps of a round, and reserve room in the caches for trees of `size`."""
        limit = max(row.committed + (0 if row.ended else plan.ahead) for row in slots)
        self._spans = {}
        for level in plan.asked:
            nodes = size.read if level == plan.levels else size.nodes
            self._spans[level] = self._lengths(level).reserve_span(limit + nodes)
        rows.state.queue = iter(plan.queue())

    def run(self, step: PlannedStep, rows: Rows, run: Run) -> Outputs:
        """Return the outputs of `run`, which performs `step`, by its graph if available."""
        level, count = step.level, rows.state.shape.levels
        draft = level == count
        if draft:
            rows.pending.begin_draft(level - 1, step.most)
        if self._graphs is None or any(span is None for span in self._spans.values()):
            return run()
        # A step also cuts the caches of lower levels, so the graph depends on their addresses, but
        # not on the span of their passes.
        touched = {
            at: span.of_any_span() if at > level and isinstance(span, MemoryKey) else span
            for at, span in self._spans.items()
            if at >= level
        }
        kind = "a draft" if draft else f"the verification of {self._config.names[level - 1]}"
        key: list[Hashable] = [level, step.most, step.tail, step.width, self._config.rule]
        if not rows.parameters.greedy and (step.tail or 1 < level < count):
            key.append(rows.pending.padding(1 if draft else level - 1))
        memory = rows.memory_key(level, step.tail, level in self._gives_hidden)
        return self._graphs.run(kind, [*key, memory, tuple(touched), *touched.values()], run)

    def end(self, plan: RoundPlan, rows: Rows) -> None:
        """Set the cached lengths on the host after a round that the host did not follow."""
        for level in plan.asked:
            self._lengths(level).note_lengths(rows.state.cached(level))

    def _lengths(self, level: int) -> DeviceLengths:
        return cast(DeviceLengths, self._parts[level - 1])


# ---- passes that the host follows ----------------------------------------------------------------

# If the host reads each step, a step's tokens and numbers reach the device in one upload, and its
# result comes back in one read. Each pass is one replay: its inputs have fixed addresses, and the
# level keeps its lengths on the device during the pass, so there is one graph per size and span,
# for texts of any length.


class Read(NamedTuple):
    """Result of a verification on the host, with the names and shapes of `VerifyResult`."""

    tokens: torch.Tensor
    num_accepted: torch.Tensor
    status: torch.Tensor
    logprobs: torch.Tensor


def uploaded(step: Step, device: torch.device, width: int) -> Step:
    """Return a step on `device`, with at least `width` tokens per row, in one upload. The step
    keeps its host values."""
    rows, batch = step.table.shape
    ids = torch.nn.functional.pad(step.input_ids, (0, max(0, width - step.input_ids.shape[1])))
    joined = torch.cat([step.table.flatten(), ids.flatten()])
    if device.type == "cuda":
        joined = joined.pin_memory()
    joined = joined.to(device, non_blocking=True)
    table, ids = joined[: rows * batch].view(rows, batch), joined[rows * batch :].view(batch, -1)
    return step._replace(input_ids=ids, table=table, plan=Plan._make(table.unbind()))


class Passes:
    """Runner of the passes of levels by graphs. `usual`: maximum pending draft tokens of level 1
    ... n-1 with the chain's windows."""

    def __init__(self, graphs: Graphs, usual: Sequence[int]) -> None:
        self._graphs, self._usual = graphs, usual
        # By size: counts, index of the first token with kept logits, and tokens of a pass.
        self._inputs: dict[Hashable, torch.Tensor] = {}
        self._cached: list[int] = []
        self._limit = 0

    def __getstate__(self) -> dict[str, object]:
        """Copy and pickle without the memory of graphs."""
        return {**self.__dict__, "_inputs": {}}

    def serves(self, part: Member) -> bool:
        """Return whether passes of a level or drafter can be captured, in the current batch."""
        can = part.capabilities
        return can.keeps_lengths and can.device_lengths

    def begin(
        self, step: Step, device: torch.device, cached: Sequence[int], limit: int, lag: int
    ) -> Step:
        """Begin the passes of a step, and return the step on the `device` of its level. `cached`
        are the level's cached lengths by row, `limit` bounds all lengths to come, and `lag` is the
        usual maximum of tokens read before the draft tokens."""
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
        """Return the output of ``level.forward``, by a graph unless the block has later nodes of a
        tree, or more than `LONGEST` tokens. Logits are valid until the level's next pass."""
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
            captured = InputBlock(tokens, block.keep, *known, parents, layers, block.depth)
            out = level.forward(captured)
            states = [] if out.hidden is None else [out.hidden[layer] for layer in layers]
            return out.logits, out.skipped, *states

        key = (width, block.keep, layers, tree, block.depth, MemoryKey(self, [inputs]), span)
        kind = f"a pass of {level.name}"
        outputs = run() if span is None else self._graphs.run(kind, key, run)
        lengths.note_lengths(self._cached)
        logits, skipped, *states = outputs
        assert logits is not None
        # A later pass overwrites the states before the drafter has read them.
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
        """Return ``run(*inputs)``, valid until the next call of the kind.

        Args:
            kind: for messages.
            form: further dependencies of `run`, for example numbers in its closure.
            reserve: as `DeviceLengths.reserve_span`; its argument is the longest row in tokens.
            inputs: ``[B, ..]``, copied to a fixed address; with two or more dimensions padded to a
                standard width, with columns of zeros or of earlier calls.
        """
        fixed = [self._kept((kind, number), x) for number, x in enumerate(inputs)]
        span = reserve(self._limit)
        if span is None:
            return run(*fixed)
        return self._graphs.run(kind, (form, MemoryKey(self, fixed), span), lambda: run(*fixed))

    def _kept(self, name: Hashable, x: torch.Tensor) -> torch.Tensor:
        """Return `x` at a fixed address, at few widths."""
        batch, *rest = x.shape
        if rest and rest[0] > 1:
            rest[0] = max(8, 1 << (rest[0] - 1).bit_length())
        size = name, batch, *rest
        if size not in self._inputs:
            self._inputs[size] = x.new_zeros(batch, *rest)
        whole = self._inputs[size]
        (whole[:, : x.shape[1]] if rest else whole).copy_(x)
        return whole

    def _written(self, level: int, block: InputBlock) -> torch.Tensor:
        """Return ``[2 + T, B]``, counts, first and the tokens of a block, or ``[2 + 2T, B]`` with
        the parents after the tokens, at a fixed address."""
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
