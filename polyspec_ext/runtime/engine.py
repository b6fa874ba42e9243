"""The engine of a chain, which runs one batch at a time in rounds of the target.

A round follows docs/architecture.md: levels read the prompt (`Caches`), `StateRows.next` returns
the next step, the drafter drafts, levels verify, caches are truncated, and the target's tokens are
committed. Two executors run the same steps, with the same rows and draws: the host reads the
result of each step before the next; or the steps are queued, and the host reads once (`Queue`).
"""

from __future__ import annotations

import itertools
import operator
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from ..drafters.base import BatchedDrafter, DrafterCapabilities, DraftInput, Outputs
from ..errors import ERROR_BITS, PolyspecError, RequestError, Status, name_place
from ..levels.base import BatchedLevel, InputBlock
from ..sampling import RequestProcessors, masked
from ..stats import StatsRecorder
from ..tensors import RowCounts, common_prefix
from .plan import (
    ChainConfig,
    Member,
    RoundPlanner,
    check_parts,
    default_rounds,
    needs_host,
    round_plan,
)
from .prefill import Caches, Reading
from .rows import (
    Entry,
    PlannedStep,
    Record,
    Report,
    Row,
    Rows,
    StateRows,
    Step,
    origins,
)

if TYPE_CHECKING:
    from ..drafters.features import HiddenWindow
    from .graphs import Graphs, Passes, Queue

_ENDED = operator.attrgetter("ended")
# Counts of kept lengths on the host, and on the device.
_KEPT: tuple[Callable[[Any], RowCounts], ...] = (RowCounts, partial(RowCounts, None))
# Called with a row's number and the target's processed logits [e, V], of which the e committed
# tokens were drawn. The logits are valid during the call.
Observer = Callable[[int, torch.Tensor], None]
Committed = list[tuple[int, list[int]]]


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
    drafter (None: the target alone).

    Args:
        graphs: captures the steps of queued rounds.
        sync_each_step: whether the host reads the result of each step. None: on the CPU, at no
            cost, and where reading is required.

    Attributes:
        parts: levels and drafter, target first.
        slots: the requests in the caches.
        recovers: whether to save the state for `begin_again` before each round.
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
        graphs: Graphs | None = None,
        sync_each_step: bool | None = None,
    ) -> None:
        self.config, self.graphs = config, graphs
        self._levels, self._drafter = list(levels), drafter
        self.parts: list[Member] = [*levels, *([] if drafter is None else [drafter])]
        self._count = len(config.windows) + 1  # n; 2 for a target alone, with window 0
        # Levels with hidden states for the drafter.
        self._gives_hidden = check_parts(config, levels, drafter)
        can = DrafterCapabilities() if drafter is None else drafter.capabilities
        self._layers, self._trees = can.hidden_layers, can.trees
        self._keeps_paths, self._checked = can.keeps_paths, can.checked
        # Index in the drafter's rows of each id of the level above.
        self._target_to_draft: torch.Tensor | None = None
        if drafter is not None:
            entries = config.id_maps[-1].target_to_draft(config.vocab_sizes[-2])
            self._target_to_draft = None if entries is None else entries.to(levels[-1].device)
        usual = round_plan(config.windows, config.rounds, config.tail)
        bounded = usual.steps is not None
        reason = needs_host(config, levels, drafter, self._gives_hidden, bounded)
        if sync_each_step is False and reason is not None:
            raise ValueError(f"sync_each_step: expected True or None, since {reason}, given False")
        synced = config.device.type == "cpu" if sync_each_step is None else sync_each_step
        self._sync_each_step = reason is not None or synced
        self._planner = RoundPlanner(config, self.parts, can, graphs is not None)
        self.caches = Caches(config, self.parts, self._layers)
        self.recovers = self.traces = False
        self._passes: Passes | None = None  # captured passes of steps that the host reads
        if graphs is not None and any(member.capabilities.keeps_lengths for member in self.parts):
            from .graphs import Passes

            self._passes = Passes(graphs, usual.max_pending)
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
        self._rows = self._empty_rows(len(slots))
        for row in slots:
            self._begin_windows(row)
        self._follow(slots)

    def _empty_rows(self, batch: int) -> Rows:
        return Rows(StateRows(self._count, batch), hidden=self._no_states(batch))

    def _no_states(self, batch: int) -> HiddenWindow | None:
        if not self._layers:
            return None
        from ..drafters.features import HiddenWindow

        return HiddenWindow(batch, torch.device("cpu"))

    def fill(self, readings: Sequence[Reading]) -> None:
        """Start the rows of a new batch from readings of their texts."""
        self.caches.join(readings, self.slots, self._rows)

    def _follow(self, slots: Sequence[Row]) -> None:
        self.slots, self._rounds_left = list(slots), 0
        self._recorder.follow([row.stats for row in slots])

    @torch.inference_mode()
    def join(self, new: Sequence[Row], readings: Sequence[Reading] = ()) -> None:
        """Add requests after the rows of the batch; where steps are captured, into the slots of
        complete rows, so that the graphs stay valid. With `readings`, every level has already read
        the new texts but for the last token; without, all levels read all texts again. After an
        error the batch continues without the requests."""
        self._drop_complete()
        slots = list(self.slots) if self._captures or not all(map(_ENDED, self.slots)) else []
        free = [row.slot for row in slots if row.ended] if self._captures else []
        joined = [*free[: len(new)], *range(len(slots), len(slots) + len(new) - len(free))]
        for slot, row in zip(joined, new, strict=True):
            row.slot = slot
            slots[slot : slot + 1] = [row]
        if len(slots) > len(new):
            gone = set(joined)
            keep = [None if slot in gone else slot for slot in range(len(slots))]
            rows = self._rows.select(keep)
        else:
            rows = self._empty_rows(len(new))
            self.caches.begin()
        together = bool(readings) and (len(slots) == len(new) or self.caches.can_join)
        try:
            if together:
                self.caches.join(readings, slots, rows)
        except BaseException:
            self._begin_caches()  # some caches have the new rows
            raise
        self._rows = rows
        if not together:
            self._begin_caches()
        for row in new:
            self._begin_windows(row)
        self._follow(slots)

    def _begin_windows(self, row: Row) -> None:
        sizes, rounds = self.config.windows, self.config.rounds
        self._rows.state.set_windows(row.slot, (*sizes, *rounds))
        if row.request.window_bound is not None:
            self.set_windows(row, sizes)

    def _begin_caches(self) -> None:
        self.caches.begin()
        self._rounds_left, self._at_work = 0, None
        self._rows.hidden = self._no_states(self._rows.state.batch)

    @torch.inference_mode()
    def begin_again(self) -> None:
        """Restore the state before a failed round (`recovers`), to run it again with the same
        draws. All levels read the texts again."""
        slots, counts = self._before  # rows may have left since
        indices = {id(row): index for index, row in enumerate(slots)}
        self._rows = self._rows.select(range(len(self.slots)))
        self._rows.state.begin_again(counts[[indices[id(row)] for row in self.slots]])
        self._begin_caches()

    @torch.inference_mode()
    def pause(self, paused: Collection[Row]) -> None:
        """Exclude the rows `paused`, and no others, from the next rounds."""
        for row in self.slots:
            row.paused = any(row is other for other in paused)
        self._rows = self._rows.select(range(len(self.slots)))
        self._rounds_left = 0

    @torch.inference_mode()
    def rewind(self, rows: Sequence[Row], texts: Sequence[Sequence[int]]) -> None:
        """Replace the texts of rows between two rounds; caches keep the common prefix of the old
        and the new text. New tokens are counted from the new text on. Round counts continue, so
        that no draw repeats. Refuses drafters of hidden states, empty texts and ended rows.
        """
        if self._layers:
            reading = f"{self.config.names[-1]}: expected a drafter that reads tokens alone"
            raise ValueError(f"{reading}, whose texts can be replaced, given one of hidden states")
        lengths = {}
        for row, text in zip(rows, texts, strict=True):
            if not text or row.ended:
                state = "a request that has ended" if row.ended else "an empty text"
                raise ValueError(f"rewind: expected a text of a running request, given {state}")
            lengths[row.slot] = min(common_prefix(row.tokens, text), len(text) - 1)
        self._rows = self._rows.select(range(len(self.slots)))
        self._rounds_left = 0
        try:
            # A step that the host reads also reads the token after accepted drafts.
            self.caches.cut(lengths, self.slots, self._rows.state, int(self._sync_each_step))
        except BaseException:
            self._begin_caches()  # some caches are cut
            raise
        # After the cuts: after an interrupt no cache has tokens that a text lacks.
        for row, text in zip(rows, texts, strict=True):
            row.num_reported += len(text) - row.committed  # unreported tokens stay unreported
            row.tokens = list(text)
            row.logprobs.clear()
            row.origins.clear()

    def windows(self, row: Row) -> Sequence[int]:
        """Return the windows of one row."""
        return self._rows.state.windows[row.slot][: self._count - 1]

    def cached(self, row: Row) -> list[int]:
        """Return the cached length of a row at each level, at most its committed tokens; for a
        drafter that reads hidden states only tokens that it will not read again."""
        state, numbers, hidden = self._rows.state, range(1, len(self.parts) + 1), self._rows.hidden
        lengths = [min(state.cached(number)[row.slot], row.committed) for number in numbers]
        if hidden is not None:
            read = int(hidden.begin[row.slot])  # states
            lengths[-1] = min(lengths[-1], read + 1 if read else 0)
        return lengths

    def set_windows(self, row: Row, windows: Sequence[int]) -> None:
        """Set the windows of one row from the next round on; bounded rounds follow them."""
        sizes, rounds, slot = tuple(windows), self.config.rounds, row.slot
        if row.request.window_bound is not None:
            sizes = tuple(min(size, row.request.window_bound) for size in sizes)
        if sizes != self.config.windows:
            fitting = [*default_rounds(sizes), 0]
            rounds = tuple(bound and new for bound, new in zip(rounds, fitting, strict=True))
        if (*sizes, *rounds) != self._rows.state.windows[slot]:
            self._rows.state.set_windows(slot, (*sizes, *rounds))
            self._rounds_left = 0

    @torch.inference_mode()
    def end(self, row: Row) -> None:
        """End a row of this batch, which then idles in later steps; ignore other rows."""
        if any(other is row for other in self.slots):
            self._rows.state.end(row.slot)
            self._rounds_left = 0

    # ---- a round ---------------------------------------------------------------------------------

    def round(self) -> Committed:
        """Run one round of the target; return the tokens that it commits, by request."""
        try:
            if self.recovers:
                self._before = self.slots, self._rows.state.round_counts
            if not self._rounds_left:
                self._prepare_rounds()
            self._rounds_left -= 1
            entries, record, logits = self._run_steps()
            committed = self._commit(entries, record, logits)
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
        self._drop_complete()
        self._applied = self._processors or None  # None if no processors apply
        active = [row for row in self.slots if row.active]
        planner, rows = self._planner, self._rows
        plan = planner.plan(rows.state, active)
        nodes = planner.tree_size(plan).nodes
        self.caches.prepare(plan, nodes, self.slots, active, rows, self._recorder)
        on_host = self._on_host or plan.steps is None
        # For this round alone; the next round checks again.
        forced = not on_host and not planner.can_queue(plan, rows, active)
        rows = planner.rows(plan, on_host or forced, self.slots, rows)
        rows.pending.max_pending = plan.max_pending
        self._plan, self._rows, self._clock = plan, rows, Clock.of(rows.state.device)
        self._rounds_left = 1 if forced else planner.lasting(plan, rows, self.slots, active)

    @cached_property
    def _queue(self) -> Queue:
        from .graphs import Queue  # rounds that the host follows need none

        return Queue(self.config, self.parts, self._gives_hidden, self.graphs)

    @property
    def _on_host(self) -> bool:
        return self._sync_each_step or bool(self._processors)

    @property
    def _captures(self) -> bool:
        return self.graphs is not None and not (self._on_host and self._passes is None)

    def _drop_complete(self) -> None:
        """Drop complete rows from the caches; the last rows move to their slots. Captured steps
        keep complete rows, so that the graphs of the batch stay valid to its end."""
        staying = [row for row in self.slots if not row.ended]
        if len(staying) == len(self.slots) or not staying or self._captures:
            return
        count = len(staying)
        last = [row for row in staying if row.slot >= count]
        staying = [row if not row.ended else last.pop() for row in self.slots[:count]]
        keep = [row.slot for row in staying]
        self.caches.select(keep, staying)
        self._rows = self._rows.select(keep)
        for slot, row in enumerate(staying):
            row.slot = slot
        self._follow(staying)

    def _run_steps(self) -> tuple[Sequence[Entry], Record, torch.Tensor]:
        """Run the steps of a round. Returns the target's entries, the round's record on the host,
        and the target's logits in text order."""
        rows, plan, state = self._rows, self._plan, self._rows.state
        self._drafts: list[tuple[int, list[int] | None]] = []  # (passes, tree nodes) by draft
        on_host = rows.on_host
        if on_host:
            state.log.clear()
            rows.pending.tail_has_statistics = True
        else:
            self._queue.begin(plan, rows, self.slots, self._planner.tree_size(plan))
        tick, elapsed = self._clock
        steps: list[Step | PlannedStep] = []
        outputs: Any = ()  # of the latest step
        ticks, level = [tick()], 0
        while level != 1:  # the target's step ends the round
            step = state.next(None if rows.hidden is None else rows.hidden.begin)
            if step is None:
                raise self._stuck(next(row for row in self.slots if row.active))
            level = step.level
            if isinstance(step, PlannedStep):
                outputs = self._queue.run(step, rows, partial(self._run_queued, step))
            elif level == self._count:
                outputs = self._draft(step)
            else:
                outputs = self._verify(step)
            steps.append(step)
            ticks.append(tick())
        if on_host:
            tokens, logprobs, logits = outputs
            record = Record(state.log, tokens.tolist(), logprobs.tolist())
        else:  # here the host waits for the round
            table, logits = outputs
            record = state.read(table)
        if self.traces:
            numbers = [step.level for step in steps]
            for slot, row in enumerate(self.slots):
                row.origins += origins(len(self.parts), numbers, record.entries, slot)
        drafts, entries = iter(self._drafts), record.entries[0]
        times = map(elapsed, ticks[1:], ticks)
        for step, entries, spent in zip(steps, record.entries, times, strict=False):
            if not on_host:
                self._require_distributions(step.level, entries)
            if step.level < self._count:
                self._recorder.verified(step.level - 1, entries, spent)
                continue
            passes, nodes = next(drafts) if on_host else self._planner.drafted(step, entries)
            self._recorder.drafted(entries, spent, passes, nodes)
        if not on_host:
            self._queue.end(plan, rows)
        return entries, record, logits

    def _run_queued(self, step: PlannedStep) -> Outputs:
        rows, level = self._rows, step.level
        if level == self._count:
            return self._draft(rows.fill(step))
        tokens, logprobs, logits = self._verify(rows.fill(step))
        return (rows.state.record(tokens, logprobs), logits) if level == 1 else ()

    # ---- draft -----------------------------------------------------------------------------------

    def _draft(self, step: Step) -> Outputs:
        """Draft tokens or trees with the drafter, and enter them in the rows."""
        drafter, rows, level = self._drafter, self._rows, self._count
        assert drafter is not None
        pending, plan, host, greedy = rows.pending, step.plan, step.host, rows.parameters.greedy
        before = drafter.num_forward_passes
        self._at_work = level, step
        passes, sent = None, step
        runs: Sequence[list[int]] = ()
        id_map, size = self.config.id_maps[-1], self.config.vocab_sizes[-2]
        if self._applied is not None and host is not None:
            runs = self._forced(host.lengths, size)
        follows = self._passes is not None and host is not None and not any(runs)
        if self._passes is not None and follows and self._passes.serves(drafter):
            passes, sent = self._passes, self._sent(step, drafter.device)
        window = rows.hidden
        states = None if window is None else window.states()
        inputs = DraftInput(
            self._ids(sent.input_ids, level),
            RowCounts(None if host is None else host.counts, sent.plan.counts),
            RowCounts(None if host is None else host.lengths, sent.plan.lengths),
            step.most,
            sent.plan.positions,
            sent.plan.rounds,
            level,
            rows.parameters,
            not greedy,
            rows.requests,
            rows=pending.tables.get(level - 1),
            eos=rows.eos,
            processors=self._applied,
            text=rows.text,
            hidden=states,
            vocab_size=size,
            passes=passes,
        )
        if any(runs):
            from .forced import draft_behind  # only grammars need the import

            block, drafts = draft_behind(drafter, inputs, runs, id_map, self._trees)
        else:
            block, drafts = drafter.draft(inputs), True
        if self._trees or block.parents is not None:
            if self._trees != (block.parents is not None):
                form, actual = ("a tree", "a chain of tokens")[:: 1 if self._trees else -1]
                raise ValueError(
                    f"{self.config.names[-1]}: expected {form} from a drafter whose capabilities "
                    f"have {'' if self._trees else 'no '}`trees`, given {actual}"
                )
            pending.append_tree(self.config.names[-1], block, step, size, self._checked)
        self._at_work = None
        if window is not None and states is not None and drafts:
            if window.width:
                window.forget(plan.part, states.counts)
            else:  # the drafter reads no states of complete texts
                window.forget(plan.part + rows.state.complete())
        tree = pending.tree
        if tree is None:
            padding = pending.padding(1) if step.tail and not greedy else None
            report = rows.state.report(step, block.tokens, block.counts, block.status, padding)
        else:
            report = rows.state.report(step, tree.longest, tree.depths, None, ends=False)
        if report.status & ERROR_BITS:
            self._require_distributions(level, report.entries)
        if not greedy:
            pending.tables[level - 1] = block.rows
            if step.tail:
                assert report.slots is not None
                pending.append_tail(block.tokens, block.rows, report.slots, plan.of_tail, id_map)
        if rows.on_host:
            count = drafter.num_forward_passes - before
            self._drafts.append((count, None if tree is None else tree.counts.tolist()))
        return ()

    def _forced(self, lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
        """Return the tokens forced by a grammar in each row, at most the row's draft length."""
        applied, rows = self._applied, self._rows
        runs: list[list[int]] = []
        assert applied is not None
        for slot, length in enumerate(lengths):
            number = rows.requests[slot]
            forces = length and applied.forces(number)
            known = applied.forced(rows.state.text(slot).tolist(), length, number) if forces else ()
            runs.append(list(itertools.takewhile(vocab_size.__gt__, known)))
        return runs

    def _sent(self, step: Step, device: torch.device) -> Step:
        assert self._passes is not None
        plan, cached = self._plan, self._rows.state.cached(step.level)
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
        config, rows, number, plan = self.config, self._rows, step.level, step.plan
        level, state, pending = self._levels[number - 1], rows.state, rows.pending
        parameters = rows.parameters
        lowest = number == self._count - 1
        layers = self._layers if number in self._gives_hidden else ()
        tree = pending.tree if lowest and step.most else None
        passes, sent, lag = self._passes if step.host is not None else None, step, step.lag
        if passes is not None and passes.serves(level):
            sent = self._sent(step, level.device)
            lag = sent.lag
        else:
            passes = None
        self._at_work = number, step
        if tree is None:
            counts = first = None
            if step.host is None or passes is not None or not step.host.last:
                counts, first = sent.by_row("counts"), sent.by_row("first")
            ids = self._ids(sent.input_ids, number)
            block = InputBlock(ids, sent.most + 1, counts, first, None, layers)
        else:
            read = tree.read_after(step.input_ids, plan.counts, plan.lengths, lag)
            block = InputBlock(
                self._ids(read.tokens, number),
                read.tokens.shape[1] - lag + 1,
                RowCounts.read(read.counts, rows.on_host),
                RowCounts.read(read.first, rows.on_host),
                read.parents.to(level.device),
                layers,
                lag + step.most,
            )
        if passes is None:
            logits, hidden, skipped = level.forward(block)
        else:
            logits, hidden, skipped = passes.forward(level, block)
            sent = sent._replace(most=step.most, host=None)
            logits = logits[:, : step.most + 1] if tree is None else logits
        if tree is not None and read.places is not None:
            logits = read.by_node(logits, read.places)
        size, id_map = config.vocab_sizes[number - 1], config.id_maps[number - 1]
        if id_map.drawn is not None:
            logits = id_map.spread(logits[..., : id_map.entries_below(size)], size)
        elif logits.shape[2] > size:  # drop ids that the level may not draw
            logits = logits[..., :size]
        unchanged = logits
        allowed = None
        if self._applied is not None and not self._applied.only_masks:
            logits = rows.process(self._applied, logits, step, tree)
        elif self._applied is not None:
            words = rows.allowed(self._applied, logits.shape, step, tree)
            if number > 1 or self._observe is not None:  # others read these rows
                logits = masked(logits, words)
            else:
                allowed = torch.from_numpy(words).to(logits.device)
        if number > 1 and logits is not unchanged:
            # If every id is forbidden, keep the logits: the target alone decides about dead ends.
            logits = unchanged.where(logits.isneginf().all(-1, keepdim=True), logits)
        device = logits.device
        q = pending.take(number, device) if step.most and not parameters.greedy else None
        local = sent.plan if sent.table.device == device else sent.on(device)
        entries = self._target_to_draft if lowest and q is not None else None
        drawn = config.id_maps[-1].drawn
        if q is not None and drawn is not None and q.logits.shape[2] > len(drawn):
            entries = None  # the rows cover all ids
        shared: dict[str, Any] = {
            **parameters.on(device),
            "position": local.positions,
            "level": number,
            "round": local.rounds,
            "rule": config.rule,
            "target_to_draft": entries,
            "allowed": allowed,
        }
        if tree is None:
            draft_logits, statistics = (None, None) if q is None else q
            if draft_logits is not None and draft_logits.shape[1] > step.most:
                draft_logits = draft_logits[:, : step.most]
                statistics = None if statistics is None else statistics[:, : step.most]
            shared |= {"draft_lengths": local.lengths, "draft_statistics": statistics}
            result = config.operators.verify(logits, sent.pending(device), draft_logits, **shared)
        else:
            proposed, options = tree.proposal(q, step.most, device)
            result = config.operators.verify_tree(logits, *proposed, **options, **shared)
            path = result.path if read.places is None else read.placed(result.path)
            logits, hidden = read.along(logits, hidden, result, path)
        self._at_work = None
        padding = pending.padding(number - 1) if number > 1 and not parameters.greedy else None
        emitted = result if passes is None else passes.read(result)
        report = state.report(step, emitted.tokens, emitted.num_accepted, emitted.status, padding)
        if report.status & ERROR_BITS:
            self._require_distributions(number, report.entries)
        if padding is not None:
            assert report.slots is not None
            pending.append(number - 1, logits, result.statistics, report.slots, padding)
        if rows.hidden is not None:
            above = state.read_by(1) if number > 1 and 1 in self._gives_hidden else None
            lengths = list(map(_KEPT[step.host is None], report.kept[:-1]))
            rows.hidden.add_pass(plan, lengths, number, hidden, skipped, above)
        if report.cut is None or report.cut or tree is not None:
            paths = {} if tree is None else {number: path}
            if tree is not None and self._keeps_paths:
                paths[self._count] = result.path
            self._rollback(step, report, paths)
        return emitted.tokens, emitted.logprobs, logits

    def _rollback(self, step: Step, report: Report, paths: Mapping[int, torch.Tensor]) -> None:
        """Cut the caches from the step's level downwards; for a tree keep the path, by level."""
        levels = self._plan.asked if report.cut is None else report.cut
        kept = _KEPT[step.host is None]
        for number in sorted({*levels, *paths}) if paths else levels:
            if number < step.level:
                continue
            member, lengths = self.parts[number - 1], kept(report.kept[number - 1])
            self._at_work = number, None
            path, positions = paths.get(number), step.plan.positions
            if path is not None:
                # Idle rows keep all tokens.
                front = torch.minimum(positions, lengths.on(positions.device))
                begin = RowCounts.read(front, lengths.host is not None)
                left = cast(Any, member).keep_path(begin, path.to(member.device), lengths)
            else:
                left = member.rollback(lengths)
            self._at_work = None
            if lengths.host is not None and left is not lengths:
                least = [min(int(n), most) for n, most in zip(left, lengths.host, strict=True)]
                if least != list(lengths.host):
                    self._rows.state.set_cached(number, least)
                    self._rounds_left = 0

    # ---- commit ----------------------------------------------------------------------------------

    def _commit(self, entries: Sequence[Entry], record: Record, logits: torch.Tensor) -> Committed:
        """Commit the target's emitted tokens; end complete rows. Returns the tokens by row."""
        committed = []
        for slot, (row, entry) in enumerate(zip(self.slots, entries, strict=True)):
            checked, _, _, emitted, ended, _, _ = entry
            if emitted == 0 and row.active and (checked >= 0 or not self._rows.on_host):
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
                    prefix = self._rows.state.text(slot)[:at].tolist()
                    rules = self._applied.forbidding(prefix, self._rows.requests[slot])
                raise RequestError(self.slots[slot].number, level, at, status, rules)

    def _stuck(self, row: Row) -> PolyspecError:
        windows, tail = self._rows.state.windows[row.slot], self.config.tail
        return PolyspecError(
            f"request {row.number}: expected a round of the target to commit at least one token at "
            f"position {row.committed}, given none (windows and rounds {list(windows)}, tail "
            f"{tail}); this is a mistake of polyspec_ext"
        )
