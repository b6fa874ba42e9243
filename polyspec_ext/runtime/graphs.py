"""Rounds without host synchronisation: queued steps and their CUDA graphs.

The first call of a step runs eagerly, to warm up lazily initialised libraries and buffers. The
second call is captured, later calls are replayed. Steps that differ only in the span of attention
share the warm-up. A graph reads and writes the addresses of its capture, so its key has all of
them (`MemoryKey`), and the graph is dropped with their owner. A replay runs no Python: the caller
updates the state on the host.
"""

from __future__ import annotations

import copy
import itertools
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch.library import register_fake

from .. import progress, rooms
from ..drafters.base import LONGEST, BatchedDrafter, DrafterCapabilities, TreeSize
from ..drafters.base import Outputs as Outputs
from ..levels.base import BatchedLevel, DeviceLengths, InputBlock, LevelOutput
from ..tensors import Plan, RowCounts
from .plan import ChainConfig, Member, RoundPlan
from .rows import Entry, Record, Row, Rows, Step

Run = Callable[[], Outputs]
_FAILURES = 2  # consecutive failed captures of a kind of step before capturing stops


class MemoryKey:
    """A graph key for the memory that a step uses beside its inputs.

    Args:
        owner: owner of the memory, kept as a weak reference. Equal addresses of different owners
            are different keys.
        tensors: all tensors of it, kept as address, shape, strides and data type of each.
        form: other inputs of the step's operators, as sizes that the host knows.
        span: slots that attention reads. Steps that differ only in `span` share their set-up.
    """

    __slots__ = ("_hash", "form", "owner", "span", "tensors")

    def __init__(
        self,
        owner: object,
        tensors: Iterable[torch.Tensor],
        form: Hashable = None,
        span: int | None = None,
    ) -> None:
        self.owner = weakref.ref(owner)
        self.tensors = tuple((x.data_ptr(), x.shape, x.stride(), x.dtype) for x in tensors)
        self.form, self.span = form, span
        self._hash = hash((self.tensors, form, span))

    def of_any_span(self) -> MemoryKey:
        """Return the key of the same memory without the span."""
        other = copy.copy(self)
        other.span, other._hash = None, hash((self.tensors, self.form, None))
        return other

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, MemoryKey)
            and self._hash == other._hash
            and self.owner() is other.owner()
            and (self.form, self.span, self.tensors) == (other.form, other.span, other.tensors)
        )


class CudaRecorder:
    """Recorder of steps on `device` as `torch.cuda.CUDAGraph`, all in one memory pool. Tests have a
    recorder without a device."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._pool = cuda.graph_pool_handle()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle with another memory pool."""
        return type(self), (self._device,)

    def capture(self, step: Run) -> tuple[Callable[[], None], Outputs]:
        """Run `step` for its effects on the host alone. Returns a function that replays the step on
        the device, and the outputs that the replay writes. RuntimeError: the step cannot be
        captured, and the device is unchanged."""
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
    """

    def __init__(self, recorder: CudaRecorder, *, limit: int = 64) -> None:
        if limit < 1:
            raise ValueError(f"limit: expected >= 1, given {limit}")
        self._recorder, self._limit = recorder, limit
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
        replay, outputs = graph
        replay()
        return outputs

    def _capture(self, kind: str, step: Run) -> _Graph | None:
        try:
            graph = self._recorder.capture(step)
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
        progress.note(f"polyspec_ext: captured CUDA graph {self.num_captures}")
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
_Graph = tuple[Callable[[], None], Outputs]  # replay, and the outputs that it writes


def _memory_keys(key: _Key) -> list[MemoryKey]:
    return [item for item in key if isinstance(item, MemoryKey)]


def _cause(error: BaseException) -> BaseException:
    while isinstance(error.__context__, RuntimeError):
        error = error.__context__
    return error


# ---- sizes of steps ------------------------------------------------------------------------------


def size_of(most: int, usual: int) -> int:
    """Return `most` draft tokens of a pass, rounded up to few sizes: 0, 7, 15, 31, ..., or `usual`,
    the maximum with the windows of the chain."""
    if most == 0:
        return 0
    size = max(8, 1 << most.bit_length()) - 1
    return min(size, usual) if most <= usual else size


def draft_size(most: int, usual: int) -> int:
    """Return `most` tokens of a draft, one pass each, rounded up to few sizes: up to 4, 6, 8, 12,
    16, 24, ..., or `usual`."""
    step = 1 << max(0, (most - 1).bit_length() - 2)
    size = -(-most // step) * step
    return min(size, usual) if most <= usual else size


def few_sizes(plan: RoundPlan, usual: RoundPlan) -> RoundPlan:
    """Return a round with its pending tokens rounded up to few sizes, or the `usual` sizes. Rows
    keep their windows; excess tokens are padding."""
    *above, drafts = zip(plan.max_pending, usual.max_pending, strict=True)
    return plan._replace(max_pending=(*itertools.starmap(size_of, above), draft_size(*drafts)))


def width_at(plan: RoundPlan, index: int) -> int:
    """Return the maximum tokens that the level of step number `index` of a round reads: its lag,
    and its pending tokens. The tail's draft may be the drafter's first, with a window of 0 above it
    or near the end of a text; then it also reads the pending tokens of the target. Not with three
    levels, because the drafter has drafted before."""
    assert plan.steps is not None
    level = plan.steps[index]
    if level < plan.levels:
        return plan.lag(level) + plan.max_pending[level - 1]
    late = plan.tail > 0 and plan.levels > 3 and index == len(plan.steps) - 2
    return plan.lag(level) + (plan.max_pending[0] - plan.tail if late else 0)


# ---- queued rounds -------------------------------------------------------------------------------


class PlannedStep(NamedTuple):
    """A step before its tokens are known: as `Step`; a row reads at most `width` tokens."""

    level: int
    most: int
    width: int
    tail: bool


def planned(plan: RoundPlan) -> list[PlannedStep]:
    """Return the steps of a round with an order known before its tokens."""
    assert plan.steps is not None
    steps = []
    for number, level in enumerate(plan.steps):
        width = width_at(plan, number)
        if level < plan.levels:
            steps.append(PlannedStep(level, plan.max_pending[level - 1], width, False))
            continue
        last = plan.tail > 0 and number == len(plan.steps) - 2
        # The first draft is never a tail; a later draft may be, if a window is full early.
        may = plan.tail > 0 and number > 0
        steps.append(PlannedStep(level, plan.tail if last else plan.drafts, width, may))
    return steps


def needs_host(
    config: ChainConfig,
    levels: Sequence[BatchedLevel],
    drafter: BatchedDrafter | None,
    telling: Collection[int],
    bounded: bool,
) -> str | None:
    """Return why the host has to read between steps; None: no need. `telling`: result of
    `check_parts`; `bounded`: whether the order of steps is known before the tokens."""
    parts: list[Member] = [*levels, *([] if drafter is None else [drafter])]
    devices = {member.device for member in parts}
    if len(devices) > 1:
        return f"levels lie on {', '.join(sorted(map(str, devices)))}"
    for member in parts:
        if not member.capabilities.keeps_lengths:
            return f"{member.name} keeps its lengths on the host"
    if drafter is not None:
        can = drafter.capabilities
        if can.trees and can.tree_size is None:
            return f"{config.names[-1]} drafts trees of any size"
        if can.hidden_layers and len(telling) < len(levels):
            return f"{config.names[-1]} reads hidden states that not every level gives"
    return None if bounded else "rounds are not bounded"


class Queue:
    """Runner of rounds with an order of steps known before the tokens, by graphs if available, else
    eagerly. The levels `gives_hidden` output hidden states for the drafter; `can` are the drafter's
    capabilities."""

    def __init__(
        self,
        config: ChainConfig,
        parts: Sequence[Member],
        gives_hidden: Collection[int],
        can: DrafterCapabilities,
        graphs: Graphs | None,
    ) -> None:
        self._config, self._parts, self._gives_hidden = config, parts, gives_hidden
        self._tree_size, self._one_pass, self._graphs = can.tree_size, can.one_pass, graphs
        self._spans: dict[int, Hashable | None] = {}

    def serves(self, plan: RoundPlan, rows: Rows, active: Sequence[Row]) -> bool:
        """Return whether a round can be queued. A text may then run past its end, so every context
        and the window of hidden states must have room."""
        longest = max(row.committed for row in active) + plan.ahead
        for number in plan.asked:
            member = self._parts[number - 1]
            short = member.max_length is not None and longest > member.max_length
            if short or not member.capabilities.device_lengths:
                return False
        if rows.hidden is None:
            return True
        sizes = {rows.state.windows[row.slot][: plan.levels - 1] for row in active}
        if min(plan.windows) == 0 or len(sizes) > 1:
            return False  # the states of rows without drafts would accumulate
        slots = [row.slot for row in active]
        return rows.hidden.width > 0 or rows.hidden.fits(slots, plan.hidden_width)

    def drafted(self, step: PlannedStep, entries: Sequence[Entry]) -> tuple[int, list[int] | None]:
        """Return the passes of a queued draft, and the tree nodes of each row; None: a chain."""
        size = self._tree_size
        nodes = None if size is None else [size(max(entry[0], 0)).nodes for entry in entries]
        return 1 if self._one_pass else step.most, nodes

    def run(
        self,
        plan: RoundPlan,
        rows: Rows,
        slots: Sequence[Row],
        nodes: TreeSize,
        perform: Callable[[Step], Outputs],
        tick: Callable[[], Any],
    ) -> tuple[list[PlannedStep], list[Any], torch.Tensor, torch.Tensor]:
        """Queue the steps of a round, each by `perform`, with room in the caches for trees of
        `nodes`. Returns as `Engine.round` needs: the steps, ticks before the first and after each
        of them, the record for `read`, and the target's logits."""
        limit = max(row.committed + (0 if row.ended else plan.ahead) for row in slots)
        self._spans = {}
        for level in plan.asked:
            more = nodes.read if level == plan.levels else nodes.nodes
            self._spans[level] = self._lengths(level).reserve_span(limit + more)
        steps, ticks = planned(plan), [tick()]
        outputs: Outputs = ()
        for step in steps:
            outputs = self._step(step, rows, partial(_performed, step, rows, perform))
            ticks.append(tick())
        record, logits = cast("tuple[torch.Tensor, torch.Tensor]", outputs)
        return steps, ticks, record, logits

    def _step(self, step: PlannedStep, rows: Rows, run: Run) -> Outputs:
        level, count = step.level, rows.state.shape.levels
        draft = level == count
        if draft and rows.pending.trees:  # the memory of a replayed draft
            known, rows.pending.tree = rows.pending.trees.get(step.most), None
            if known is not None:
                rows.pending.tree, rows.pending.tables[level - 1] = known
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
            key.append(rows.pending.room(1 if draft else level - 1))
        memory = _memory(rows, level, step.tail, level in self._gives_hidden)
        return self._graphs.run(kind, [*key, memory, tuple(touched), *touched.values()], run)

    def read(self, record: torch.Tensor, plan: RoundPlan, rows: Rows) -> Record:
        """Return the record of a round on the host, and set the cached lengths there. Waits for
        the device."""
        state = rows.state
        state.words[:, state.shape.STEP].zero_()
        shape, table = state.shape, record.cpu()
        width = (table.shape[1] - 2 * shape.text_at) // 3
        known = _read(table[:, :-width], torch.int64)
        probabilities = _read(table[:, -width:], torch.float32)
        words: list[list[int]] = known.tolist()
        if state.device.type != "cpu":
            state.head = known.numpy()[:, : shape.log_at]
        for level in plan.asked:
            self._lengths(level).note_lengths(state.cached(level))
        begins = range(shape.log_at, shape.text_at, shape.PER_STEP)
        return Record(
            [[row[at : at + shape.PER_STEP] for row in words] for at in begins],
            [row[shape.text_at :] for row in words],
            probabilities.tolist(),
        )

    def _lengths(self, level: int) -> DeviceLengths:
        return cast(DeviceLengths, self._parts[level - 1])


def _read(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return bits.clone(memory_format=torch.contiguous_format).view(dtype)  # aligned


def _performed(planned: PlannedStep, rows: Rows, perform: Callable[[Step], Outputs]) -> Outputs:
    """Perform a step with its tokens, without host synchronisation; rows that are due for another
    step idle. Of the target return the record of the round, ``[B, N]`` int32, and the logits: the
    bits of the rows without their texts, of the tokens, and of the log-probabilities."""
    state, (level, most, width, tail), hidden = rows.state, planned, rows.hidden
    form, unread = (state.shape.levels, state.shape.steps), None
    if level == state.shape.levels and hidden is not None and hidden.width:
        # Tokens with a new hidden state, and the last emitted token.
        width, unread = max(width, hidden.width + 1), hidden.begin
    verified = most if level < state.shape.levels else 0
    ids, table, pending = next_step(state.words, *form, level, width, verified, unread)
    plan = Plan._make(table.unbind())
    outputs = perform(Step(level, most, width - most, tail, ids, table, plan, pending))
    if level > 1:
        return ()
    tokens, logprobs, logits = cast("tuple[torch.Tensor, ...]", outputs)
    words = state.words[:, : state.shape.text_at], tokens  # one operator for all
    return torch.cat([x.view(torch.int32) for x in (*words, logprobs)], 1), logits


def _memory(rows: Rows, level: int, tail: bool, hidden: bool) -> MemoryKey:
    """Return the memory of a captured step of `level`, which may draft a `tail` or output `hidden`
    states for the drafter."""
    pending, levels = rows.pending, rows.state.shape.levels
    parameters = rows.parameters.on(rows.state.device).values()
    tensors = [rows.state.words, rows.state.eos]
    tensors += [value for value in parameters if isinstance(value, torch.Tensor)]
    # Rows that the step verifies and rows that it appends; a tail's are the target's.
    for at in {level, level - 1, 1} if tail else {level, level - 1}:
        tensors += [tensor for tensor in pending.tables.get(at) or () if tensor is not None]
    if level >= levels - 1 and pending.tree is not None:
        tensors += [tensor for tensor in pending.tree if tensor is not None]
    form: tuple[int | bool, ...] = (level == 1 and not pending.tail_has_statistics,)
    if rows.hidden is not None and rows.hidden.width and (level == levels or hidden):
        tensors += cast("rooms.features.HiddenRing", rows.hidden).tensors
        form = (*form, rows.hidden.width)
    return MemoryKey(rows, tensors, form)


# ---- state rows on the device --------------------------------------------------------------------

# polyspec/round_state.hpp over torch tensors. `HostRounds` does the same for rows in the host's
# memory. Shapes and dtypes are checked where the pointers are taken.

_Two = tuple[torch.Tensor, torch.Tensor]
_Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
next_step: Callable[..., _Three] = torch.ops.polyspec.schedule_next.default
"""Return the work of the rows in a step of a level.

Args:
    state: ``[B, shape.words]`` int64, of a `RoundShape`; levels, steps: of this shape.
    level: of the step.
    width: maximum tokens that the level reads per row, T.
    most: maximum tokens that it verifies per row, W.
    unread: ``[B]`` int64, the level reads from this position or its cached length on, whichever is
        lower; None: from its cached length on.

Returns:
    input_ids ``[B, T]`` int64, left-aligned ids of each row, then 0; the table ``[7, B]`` with
    the rows of `Plan`; and the ids to verify, ``[B, W]`` int64, then 0.
"""

report: Callable[..., _Two] = torch.ops.polyspec.schedule_report.default
"""Enter the results of a step of a level into the state rows, in place.

Args:
    state, levels, steps, level: as of `next_step`.
    plan: table of the step from `next_step`.
    tokens: ``[B, W]`` int64, drafted, or emitted by a verification.
    counts: ``[B]`` int64, tokens accepted by a verification, or proposed by a draft; None: the
        requested number of draft tokens.
    status: ``[B]`` int32 of a verification, ``[B, W]`` of a draft's tokens.
    eos: ``[B, E]`` int64, ids that end a row's text, padded with -1.

Returns:
    appended ``[2, B]`` int64, how many tokens were pending for the level above (for tail tokens
    the target), and how many emitted tokens follow them; and kept ``[n, B]`` int64, the maximum
    valid length of each level's cache.
"""


def _next(state: torch.Tensor, *numbers: Any) -> _Three:
    batch, (width, most) = len(state), numbers[3:5]
    sizes = (batch, width), (len(Plan._fields), batch), (batch, most)
    return state.new_empty(sizes[0]), state.new_empty(sizes[1]), state.new_empty(sizes[2])


def _reported(*arguments: Any) -> _Two:
    state, levels, *_ = arguments
    return state.new_empty(2, state.shape[0]), state.new_empty(levels, state.shape[0])


register_fake("polyspec::schedule_next", _next)
register_fake("polyspec::schedule_report", _reported)

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
    ids = torch.nn.functional.pad(step.input_ids, (0, max(0, width - step.input_ids.shape[1])))
    apart = step.table, ids, step.pending
    joined = torch.cat([x.flatten() for x in apart])
    if device.type == "cuda":
        joined = joined.pin_memory()
    pieces = joined.to(device, non_blocking=True).split([x.numel() for x in apart])
    table, ids, pending = (x.view(y.shape) for x, y in zip(pieces, apart, strict=True))
    return step._replace(
        input_ids=ids, table=table, plan=Plan._make(table.unbind()), pending=pending
    )


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
        columns = tokens, accepted[:, None], status[:, None], logprobs
        bits = [x.view(torch.int32) for x in columns]
        apart = torch.cat(bits, 1).cpu().split([x.shape[1] for x in bits], 1)
        known = (_read(x, y.dtype) for x, y in zip(apart, columns, strict=True))
        tokens, accepted, status, logprobs = known
        return Read(tokens, accepted[:, 0], status[:, 0], logprobs)

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
