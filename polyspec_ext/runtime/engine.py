"""The engine of a chain, which runs one batch at a time in rounds of the target.

A round follows docs/architecture.md: levels read the prompt (`Caches`), `StateRows.next` returns
the next step, the drafter drafts, levels verify, caches are truncated, and the target's tokens are
committed. Two executors run the same steps, with the same rows and draws: the host reads the
result of each step before the next; or the steps are queued, and the host reads once (`Queue`).
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch

from .. import rooms
from ..drafters.base import (
    BatchedDrafter,
    DrafterCapabilities,
    DraftInput,
    HiddenStates,
    Outputs,
    RowBuffer,
)
from ..errors import ERROR_BITS, PolyspecError, RequestError, Status, name_place
from ..levels.base import BatchedLevel, Hidden, InputBlock
from ..sampling import RequestProcessors
from ..stats import StatsRecorder
from ..tensors import RowCounts, moved
from .plan import (
    ChainConfig,
    Member,
    RoundPlanner,
    check_parts,
    default_rounds,
    round_plan,
)
from .prefill import Caches
from .rows import (
    Entry,
    Record,
    Row,
    Rows,
    StateRows,
    Step,
    origins,
)

_ENDED = operator.attrgetter("ended")
# Counts of kept lengths on the host, and on the device.
_KEPT: tuple[Callable[[Any], RowCounts], ...] = (RowCounts, partial(RowCounts, None))
# Called with a row's number and the target's processed logits [e, V], of which the e committed
# tokens were drawn. The logits are valid during the call.
Observer = Callable[[int, torch.Tensor], None]
Committed = list[tuple[int, list[int]]]


class Verified(NamedTuple):
    """The pass of a verification: the step as its level has read it; the captured passes that ran
    it, if any; the nodes of a tree that it read; and its output (`LevelOutput`), with logits over
    the ids of the text."""

    sent: Step
    passes: rooms.graphs.Passes | None
    nodes: rooms.pending_trees.TreePass | None
    logits: torch.Tensor
    hidden: Hidden | None
    skipped: torch.Tensor | None


class Clock(NamedTuple):
    """Clock of a device: `tick` after all queued work, and seconds `elapsed` from the second tick
    (argument) to the first, after a wait for the work."""

    tick: Callable[[], Any]
    elapsed: Callable[[Any, Any], float] = operator.sub

    @classmethod
    def of(cls, device: torch.device) -> Clock:
        if device.type != "cuda":
            return cls(time.perf_counter)

        def event() -> Any:
            marker = torch.cuda.Event(enable_timing=True)
            marker.record()
            return marker

        return cls(event, lambda after, before: float(before.elapsed_time(after)) / 1000)


class Engine:
    """Runner of the rounds of one batch at a time, with verifying levels, target first, and a
    drafter (None: the target alone). `Batch` calls it in inference mode.

    Args:
        graphs: captures the steps of queued rounds.
        sync_each_step: whether the host reads the result of each step. None: on the CPU, at no
            cost, and where reading is required.

    Attributes:
        parts: levels and drafter, target first.
        slots: the requests in the caches.
        rows: their state.
        sync_each_step: as above, resolved.
        traces: whether to record the origins of committed tokens (`Row.origins`).

    Raises:
        ValueError: levels and drafter do not fit (`plan.check_parts`); or `sync_each_step` is
            False, and the host must read between steps.
    """

    def __init__(
        self,
        config: ChainConfig,
        levels: Sequence[BatchedLevel],
        drafter: BatchedDrafter | None,
        *,
        graphs: rooms.graphs.Graphs | None = None,
        sync_each_step: bool | None = None,
    ) -> None:
        self.config, self.graphs = config, graphs
        self._levels, self._drafter = list(levels), drafter
        self.parts: list[Member] = [*levels, *([] if drafter is None else [drafter])]
        self._count = len(config.windows) + 1  # n; 2 for a target alone, with window 0
        # Levels with hidden states for the drafter.
        self._gives_hidden = check_parts(config, levels, drafter)
        can = DrafterCapabilities() if drafter is None else drafter.capabilities
        self._can, self._layers = can, can.hidden_layers
        # Index in the drafter's rows of each id of the level above.
        self._target_to_draft: torch.Tensor | None = None
        if drafter is not None:
            entries = config.id_maps[-1].target_to_draft(config.vocab_sizes[-2])
            self._target_to_draft = None if entries is None else entries.to(levels[-1].device)
        usual = round_plan(config.windows, config.rounds, config.tail)
        synced = config.device.type == "cpu" if sync_each_step is None else sync_each_step
        if not synced:
            bounded = usual.steps is not None
            reason = rooms.graphs.needs_host(config, levels, drafter, self._gives_hidden, bounded)
            if sync_each_step is False and reason is not None:
                expected = f"sync_each_step: expected True or None, since {reason}"
                raise ValueError(f"{expected}, given False")
            synced = reason is not None
        self.sync_each_step = synced
        self._planner = RoundPlanner(config, self.parts, can, graphs is not None)
        self.caches = Caches(config, self.parts, self._layers)
        self.traces = False
        self._passes: rooms.graphs.Passes | None = (
            None  # captured passes of steps that the host reads
        )
        if graphs is not None and any(member.capabilities.keeps_lengths for member in self.parts):
            self._passes = rooms.graphs.Passes(graphs, usual.max_pending)
        self.slots: list[Row] = []
        # Current level and step (None: all rows), for messages.
        self._at_work: tuple[int, Step | None] | None = None

    # ---- a batch ---------------------------------------------------------------------------------

    def begin(
        self,
        slots: Sequence[Row],
        recorder: StatsRecorder,
        processors: RequestProcessors | None,
        observe: Observer | None,
    ) -> None:
        """Begin a batch with empty caches."""
        self.caches.begin()
        self._at_work = None
        self._recorder, self._processors, self._observe = recorder, processors, observe
        self.rows = self.empty_rows(len(slots))
        for row in slots:
            self.begin_windows(row)
        self.follow(slots)

    def empty_rows(self, batch: int) -> Rows:
        """Return rows of `batch` requests without cached tokens."""
        hidden = rooms.features.HiddenWindow(batch, torch.device("cpu")) if self._layers else None
        return Rows(StateRows(self._count, batch), hidden=hidden)

    def follow(self, slots: Sequence[Row]) -> None:
        """Continue with the requests `slots`."""
        self.slots, self._rounds_left = list(slots), 0
        self._recorder.follow([row.stats for row in slots])

    def begin_windows(self, row: Row) -> None:
        """Set the windows of a new request."""
        sizes, rounds = self.config.windows, self.config.rounds
        self.rows.state.set_windows(row.slot, (*sizes, *rounds))
        if row.request.window_bound is not None:
            self.set_windows(row, sizes)

    def begin_caches(self) -> None:
        """Have all levels read the texts again."""
        self.caches.begin()
        self._rounds_left, self._at_work = 0, None
        self.rows.hidden = self.empty_rows(self.rows.state.batch).hidden

    def restate(self) -> None:
        """Continue with copies of the state rows, of which the next round is planned anew."""
        self.rows = self.rows.select(range(len(self.slots)))
        self._rounds_left = 0

    def windows(self, row: Row) -> Sequence[int]:
        """Return the windows of one row."""
        return self.rows.state.windows[row.slot][: self._count - 1]

    def set_windows(self, row: Row, windows: Sequence[int]) -> None:
        """Set the windows of one row from the next round on; bounded rounds follow them."""
        sizes, rounds, slot = tuple(windows), self.config.rounds, row.slot
        if row.request.window_bound is not None:
            sizes = tuple(min(size, row.request.window_bound) for size in sizes)
        if sizes != self.config.windows:
            fitting = [*default_rounds(sizes), 0]
            rounds = tuple(bound and new for bound, new in zip(rounds, fitting, strict=True))
        if (*sizes, *rounds) != self.rows.state.windows[slot]:
            self.rows.state.set_windows(slot, (*sizes, *rounds))
            self._rounds_left = 0

    def end(self, row: Row) -> None:
        """End a row of this batch, which then idles in later steps; ignore other rows."""
        if any(other is row for other in self.slots):
            self.rows.state.end(row.slot)
            self._rounds_left = 0

    # ---- a round ---------------------------------------------------------------------------------

    def round(self) -> Committed:
        """Run one round of the target; return the tokens that it commits, by request."""
        try:
            if not self._rounds_left:
                self._prepare_rounds()
            self._rounds_left -= 1
            steps, ticks, record, logits = self._run_steps()
            committed = self._commit(record.entries[len(steps) - 1], record, logits)
            self._count_steps(steps, ticks, record)
        except Exception as error:
            if self._at_work is not None:
                level, step = self._at_work
                host = None if step is None else step.host
                at = range(len(self.slots)) if host is None else host.group
                name_place(error, self.config.names, level - 1, [self.slots[slot] for slot in at])
            raise
        return committed

    def _prepare_rounds(self) -> None:
        """Plan the next rounds, prefill caches, and grow caches and rows for them."""
        self.drop_complete()
        self._applied = self._processors or None  # None if no processors apply
        active = [row for row in self.slots if row.active]
        planner, rows = self._planner, self.rows
        plan = planner.plan(rows.state, active)
        nodes = planner.tree_size(plan).nodes
        self.caches.prepare(plan, nodes, self.slots, active, rows, self._recorder)
        on_host = self._on_host or plan.steps is None
        # For this round alone; the next round checks again.
        forced = not on_host and not self._queue.serves(plan, rows, active)
        rows = planner.rows(plan, on_host or forced, self.slots, rows)
        rows.pending.max_pending = plan.max_pending
        self._plan, self.rows, self._clock = plan, rows, Clock.of(rows.state.device)
        self._rounds_left = 1 if forced else planner.lasting(plan, rows, self.slots, active)

    @cached_property
    def _queue(self) -> rooms.graphs.Queue:
        drafter = self._drafter
        can = DrafterCapabilities() if drafter is None else drafter.capabilities
        return rooms.graphs.Queue(self.config, self.parts, self._gives_hidden, can, self.graphs)

    @property
    def _on_host(self) -> bool:
        return self.sync_each_step or bool(self._processors)

    @property
    def captures(self) -> bool:
        """Whether steps are captured: complete rows then keep their slots."""
        return self.graphs is not None and not (self._on_host and self._passes is None)

    def drop_complete(self) -> None:
        """Drop complete rows from the caches; the last rows move to their slots. Captured steps
        keep complete rows, so that the graphs of the batch stay valid to its end."""
        staying = [row for row in self.slots if not row.ended]
        if len(staying) == len(self.slots) or not staying or self.captures:
            return
        count = len(staying)
        last = [row for row in staying if row.slot >= count]
        staying = [row if not row.ended else last.pop() for row in self.slots[:count]]
        keep = [row.slot for row in staying]
        self.caches.select(keep, staying)
        self.rows = self.rows.select(keep)
        for slot, row in enumerate(staying):
            row.slot = slot
        self.follow(staying)

    def _run_steps(
        self,
    ) -> tuple[Sequence[Step | rooms.graphs.PlannedStep], Sequence[Any], Record, torch.Tensor]:
        """Run the steps of a round. Returns the steps, ticks before the first and after each of
        them, the round's record on the host, and the target's logits in text order."""
        rows, state, tick = self.rows, self.rows.state, self._clock.tick
        self._drafts: list[tuple[int, list[int] | None]] = []  # (passes, tree nodes) by draft
        if not rows.on_host:
            return self._run_queued(tick)
        state.log.clear()
        rows.pending.tail_has_statistics = True
        steps: list[Step] = []
        outputs: Any = ()  # of the latest step
        ticks, level = [tick()], 0
        while level != 1:  # the target's step ends the round
            step = state.next(None if rows.hidden is None else rows.hidden.begin)
            if step is None:
                raise self._stuck(next(row for row in self.slots if row.active))
            level = step.level
            outputs = self._draft(step) if level == self._count else self._verify(step)
            steps.append(step)
            ticks.append(tick())
        tokens, logprobs, logits = outputs
        return steps, ticks, Record(state.log, tokens.tolist(), logprobs.tolist()), logits

    def _run_queued(
        self, tick: Callable[[], Any]
    ) -> tuple[Sequence[rooms.graphs.PlannedStep], Sequence[Any], Record, torch.Tensor]:
        plan, rows, queue = self._plan, self.rows, self._queue
        nodes = self._planner.tree_size(plan)
        steps, ticks, table, logits = queue.run(
            plan,
            rows,
            self.slots,
            nodes,
            lambda step: self._draft(step) if step.level == self._count else self._verify(step),
            tick,
        )
        record = queue.read(table, plan, rows)  # here the host waits for the round
        for step, entries in zip(steps, record.entries, strict=False):
            self._require_distributions(step.level, entries)
        return steps, ticks, record, logits

    def _count_steps(
        self, steps: Sequence[Step | rooms.graphs.PlannedStep], ticks: Sequence[Any], record: Record
    ) -> None:
        """Add the steps of a round to the statistics, and the origins of its tokens to the rows."""
        if self.traces:
            numbers = [step.level for step in steps]
            for slot, row in enumerate(self.slots):
                row.origins += origins(len(self.parts), numbers, record.entries, slot)
        drafts, times = iter(self._drafts), map(self._clock.elapsed, ticks[1:], ticks)
        for step, entries, spent in zip(steps, record.entries, times, strict=False):
            if step.level < self._count:
                self._recorder.verified(step.level - 1, entries, spent)
                continue
            drafted = next(drafts) if isinstance(step, Step) else self._queue.drafted(step, entries)
            self._recorder.drafted(entries, spent, *drafted)

    # ---- draft -----------------------------------------------------------------------------------

    def _draft(self, step: Step) -> Outputs:
        """Draft tokens or trees with the drafter, and enter them in the rows."""
        drafter, rows, plan = self._drafter, self.rows, step.plan
        assert drafter is not None
        before = drafter.num_forward_passes
        self._at_work = self._count, step
        forced: Sequence[list[int]] = ()
        if self._applied is not None and step.host is not None:
            size = self.config.vocab_sizes[-2]
            forced = rooms.forced.forced(rows, self._applied, step.host.lengths, size)
        states = None if rows.hidden is None else rows.hidden.states()
        inputs = self._draft_input(step, drafter, states, any(forced))
        if any(forced):
            id_map = self.config.id_maps[-1]
            block, drafts = rooms.forced.draft_behind(
                drafter, inputs, forced, id_map, self._can.trees
            )
        else:
            block, drafts = drafter.draft(inputs), True
        if self._can.trees or block.parents is not None:
            block = rooms.pending_trees.append_tree(
                self.config, self._can, rows.pending, step, block
            )
        self._at_work = None
        if rows.hidden is not None and states is not None and drafts:
            rows.hidden.forget(plan.part, list(map(_ENDED, self.slots)), states.counts)
        tree = rows.pending.tree
        report = rows.state.report(
            step, block.tokens, block.counts, block.status, ends=tree is None
        )
        if report.status & ERROR_BITS:
            self._require_distributions(self._count, report.entries)
        if inputs.wants_rows:
            rows.pending.tables[self._count - 1] = block.rows
            if step.tail:
                tail = block.tokens, block.rows, report.appended, plan.of_tail
                rows.pending.append_tail(*tail, self.config.id_maps[-1])
        if rows.on_host:
            nodes = None if tree is None else tree.counts.tolist()
            self._drafts.append((drafter.num_forward_passes - before, nodes))
        return ()

    def _draft_input(
        self,
        step: Step,
        drafter: BatchedDrafter,
        states: HiddenStates | None,
        forced: bool,
    ) -> DraftInput:
        """Return the input of a draft, in captured passes if they serve the drafter."""
        rows, host, passes, sent, level = self.rows, step.host, None, step, self._count
        follows = self._passes is not None and host is not None and not forced
        if self._passes is not None and follows and self._passes.serves(drafter):
            passes, sent = self._passes, self._sent(step, drafter.device)
        ids = sent.input_ids
        if ids.device != drafter.device or not self.config.id_maps[-1].reads_all:
            ids = self._ids(ids, level)
        return DraftInput(
            ids,
            RowCounts(None if host is None else host.counts, sent.plan.counts),
            RowCounts(None if host is None else host.lengths, sent.plan.lengths),
            step.most,
            sent.plan.positions,
            sent.plan.rounds,
            level,
            rows.parameters,
            not rows.parameters.greedy,
            rows.requests,
            rows=rows.pending.tables.get(level - 1),
            eos=rows.eos,
            processors=self._applied,
            text=rows.text,
            hidden=states,
            vocab_size=self.config.vocab_sizes[-2],
            passes=passes,
        )

    def _sent(self, step: Step, device: torch.device) -> Step:
        assert self._passes is not None
        plan, cached = self._plan, self.rows.state.cached(step.level)
        limit = max(row.committed for row in self.slots) + plan.ahead
        return self._passes.begin(step, device, cached, limit, plan.lag(step.level))

    def _ids(self, input_ids: torch.Tensor, level: int) -> torch.Tensor:
        device, id_map = self.parts[level - 1].device, self.config.id_maps[level - 1]
        ids = input_ids if input_ids.device == device else input_ids.to(device)
        return ids if id_map.reads_all else id_map.to_below(ids)

    # ---- verify ----------------------------------------------------------------------------------

    def _verify(self, step: Step) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Verify the pending tokens or trees of a level, append its emitted tokens for the level
        above, and cut the caches. Returns the emitted tokens, their log-probabilities, and the
        level's logits in text order."""
        rows, number = self.rows, step.level
        self._at_work = number, step
        tree = rows.pending.tree if number == self._count - 1 and step.most else None
        read = self._read(step, tree)
        allowed = None
        if self._applied is not None:
            observed = self._observe is not None
            logits, allowed = rooms.forced.process(
                rows, self._applied, step, tree, read.logits, observed
            )
            read = read._replace(logits=logits)
        device, sent = read.logits.device, read.sent
        local = sent.plan if sent.table.device == device else sent.on(device)
        greedy = not step.most or rows.parameters.greedy
        q = None if greedy else rows.pending.take(number, device)
        shared: dict[str, Any] = {
            **rows.parameters.by_device[device],
            "position": local.positions,
            "level": number,
            "round": local.rounds,
            "rule": self.config.rule,
            "target_to_draft": None if q is None else self._entries_of_ids(number, q),
            "allowed": allowed,
        }
        paths = None
        if tree is not None:
            result, read, paths = self._verify_tree(tree, step, read, q, shared)
        else:
            draft_logits, statistics = (None, None) if q is None else q
            if draft_logits is not None and draft_logits.shape[1] > step.most:
                draft_logits = draft_logits[:, : step.most]
                statistics = None if statistics is None else statistics[:, : step.most]
            shared |= {"draft_lengths": local.lengths, "draft_statistics": statistics}
            tokens = sent.pending
            if tokens.device != device:
                tokens = moved(tokens, device)
            result = self.config.operators.verify(read.logits, tokens, draft_logits, **shared)
        self._at_work = None
        emitted = result if read.passes is None else read.passes.read(result)
        self._hand_up(step, read, emitted, result.statistics, paths)
        return emitted.tokens, emitted.logprobs, read.logits

    def _read(self, step: Step, tree: rooms.pending_trees.PendingTree | None) -> Verified:
        """Read the unread tokens and the pending tokens or trees of a step with its level."""
        number, sent, passes, nodes = step.level, step, None, None
        level = self._levels[number - 1]
        layers = self._layers if number in self._gives_hidden else ()
        if self._passes is not None and step.host is not None and self._passes.serves(level):
            passes, sent = self._passes, self._sent(step, level.device)
        ids = sent.input_ids
        if tree is not None:
            nodes = tree.read_after(step.input_ids, step.plan.counts, step.plan.lengths, sent.lag)
            ids, on_host = self._ids(nodes.tokens, number), self.rows.on_host
            block = nodes.block(ids, level.device, layers, step.most, on_host)
        else:
            counts = first = None
            if step.host is None or passes is not None or not step.host.last:
                counts, first = sent.by_row("counts"), sent.by_row("first")
            if ids.device != level.device or not self.config.id_maps[number - 1].reads_all:
                ids = self._ids(ids, number)
            block = InputBlock(ids, sent.most + 1, counts, first, None, layers)
        output = level.forward(block) if passes is None else passes.forward(level, block)
        logits = output.logits
        if passes is not None:
            sent = sent._replace(most=step.most, host=None)
            logits = logits[:, : step.most + 1] if tree is None else logits
        if nodes is not None:
            logits = nodes.by_node(logits)
        size, id_map = self.config.vocab_sizes[number - 1], self.config.id_maps[number - 1]
        if id_map.drawn is not None:
            logits = id_map.spread(logits[..., : id_map.entries_below(size)], size)
        elif logits.shape[2] > size:  # drop ids that the level may not draw
            logits = logits[..., :size]
        return Verified(sent, passes, nodes, logits, output.hidden, output.skipped)

    def _entries_of_ids(self, number: int, q: RowBuffer) -> torch.Tensor | None:
        drawn = self.config.id_maps[-1].drawn
        if number < self._count - 1 or (drawn is not None and q.logits.shape[2] > len(drawn)):
            return None  # the rows cover all ids
        return self._target_to_draft

    def _verify_tree(
        self,
        tree: rooms.pending_trees.PendingTree,
        step: Step,
        read: Verified,
        q: RowBuffer | None,
        shared: dict[str, Any],
    ) -> tuple[Any, Verified, dict[int, torch.Tensor]]:
        """Verify the trees of a step. Returns the result, the pass in text order, and by level the
        accepted path in its cache."""
        assert read.nodes is not None
        proposed = tree.proposal(q, step.most, read.logits.device)
        result, logits, hidden, path = read.nodes.verified(
            self.config.operators.verify_tree or rooms.tree_operators.verify_tree,
            proposed,
            read.logits,
            read.hidden,
            shared,
        )
        paths = {step.level: path}
        if self._can.keeps_paths:
            paths[self._count] = result.path
        return result, read._replace(logits=logits, hidden=hidden), paths

    def _hand_up(
        self,
        step: Step,
        read: Verified,
        emitted: Any,
        statistics: torch.Tensor,
        paths: Mapping[int, torch.Tensor] | None,
    ) -> None:
        """Enter a verification in the state rows, append its rows for the level above, and cut the
        caches from the step's level downwards; for a tree keep the path, by level."""
        rows, number, pending = self.rows, step.level, self.rows.pending
        report = rows.state.report(step, emitted.tokens, emitted.num_accepted, emitted.status)
        if report.status & ERROR_BITS:
            self._require_distributions(number, report.entries)
        if number > 1 and not rows.parameters.greedy:
            pending.append(number - 1, read.logits, statistics, report.appended)
        kept = _KEPT[step.host is None]
        if rows.hidden is not None:
            above = rows.state.read_by(1) if number > 1 and 1 in self._gives_hidden else None
            verifying = list(map(kept, report.kept[:-1]))
            rows.hidden.add_pass(step.plan, verifying, number, read.hidden, read.skipped, above)
        levels = self._plan.asked if report.cut is None else report.cut
        for level in levels if paths is None else sorted({*levels, *paths}):
            if level >= number:
                self._at_work = level, None
                lengths = kept(report.kept[level - 1])
                if paths is None or level not in paths:
                    left = self.parts[level - 1].rollback(lengths)
                else:
                    left = rooms.pending_trees.keep_path(
                        self.parts[level - 1], step.plan.positions, paths[level], lengths
                    )
                self._at_work = None
                if left is not lengths and lengths.host is not None:
                    self._note_cached(level, left, lengths.host)

    def _note_cached(self, level: int, left: Sequence[int], asked: Sequence[int]) -> None:
        least = [min(int(n), most) for n, most in zip(left, asked, strict=True)]
        if least != list(asked):
            self.rows.state.set_cached(level, least)
            self._rounds_left = 0

    # ---- commit ----------------------------------------------------------------------------------

    def _commit(self, entries: Sequence[Entry], record: Record, logits: torch.Tensor) -> Committed:
        """Commit the target's emitted tokens; end complete rows. Returns the tokens by row."""
        committed = []
        for slot, (row, entry) in enumerate(zip(self.slots, entries, strict=True)):
            checked, _, _, emitted, ended, _, _ = entry
            if emitted == 0 and row.active and (checked >= 0 or not self.rows.on_host):
                raise self._stuck(row)
            if checked < 0:
                continue
            new = record.tokens[slot][:emitted]
            row.tokens += new
            row.logprobs += record.logprobs[slot][:emitted]
            if self._observe is not None:
                self._observe(row.number, logits[slot, :emitted])
            if ended or len(row.logprobs) >= row.max_new_tokens:
                row.ended, self._rounds_left = True, 0
            committed.append((row.number, new))
        return committed

    def _require_distributions(self, level: int, entries: Sequence[Entry]) -> None:
        for slot, (tokens, position, accepted, emitted, _, status, _) in enumerate(entries):
            if tokens >= 0 and status & ERROR_BITS:
                at = position + (emitted if level == self._count else accepted)
                rules: dict[str, str] = {}
                if status & Status.EMPTY_ROW and self._applied is not None:
                    prefix = self.rows.state.text(slot)[:at].tolist()
                    rules = self._applied.forbidding(prefix, self.rows.requests[slot])
                raise RequestError(self.slots[slot].number, level, at, status, rules)

    def _stuck(self, row: Row) -> PolyspecError:
        windows, tail = self.rows.state.windows[row.slot], self.config.tail
        return PolyspecError(
            f"request {row.number}: expected a round of the target to commit at least one token at "
            f"position {row.committed}, given none (windows and rounds {list(windows)}, tail "
            f"{tail}); this is a mistake of polyspec_ext"
        )
