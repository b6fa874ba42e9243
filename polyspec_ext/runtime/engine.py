"""The rounds of a chain: drafting, verifying, and what is pending in between, once for all.

The state rows (`state`) say what every row does next, and one round of the target follows them from
its first draft to its verification. Two executors run the same steps:

* step by step, where the host reads what came of each before the next: on the CPU, where that costs
  nothing, and wherever the host must read something (unbounded rounds, logits processors, drafters
  on the host, levels on several devices);
* without host synchronisation, where the steps of a round are known before its tokens are
  (`plan`): the host reads what came of it once, behind the target's verification. On CUDA a draft
  is one captured graph and the verification of each level another.

Tokens do not depend on the executor: rows, draws and distributions are the same.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch

from ..drafters.base import (
    BatchedDrafter,
    DraftBlock,
    DraftInput,
    RowBuffer,
    TreeSize,
)
from ..errors import ERROR_BITS, PolyspecError, RequestError, name_place, named
from ..levels.base import (
    BatchedLevel,
    Continuing,
    DeviceLengths,
    InputBlock,
)
from ..sampling import LogitsProcessors
from ..stats import StatsRecorder
from ..tensors import RowCounts, RowParameters
from . import requirements, steps
from .buffers import Buffers
from .graphs import Clock, Graphs, SideStreams
from .hidden import HiddenWindow
from .plan import RoundPlan, default_rounds, round_plan
from .prefill import Part, prefill, read_rest
from .request import Row
from .requirements import ChainConfig
from .state import Entry, Report, StateRows, Step
from .trees import Tree, pending_tree, require_tree, tree_pass, verify_tree

# Called with a row's number and the target's logits [e, V], processed, behind which its e committed
# tokens were emitted. They stand until it returns.
Observer = Callable[[int, torch.Tensor], None]
Committed = list[tuple[int, list[int]]]
_REVISION = operator.attrgetter("revision")  # of what goes on with a batch (`Continuing`)
_CAPACITY = 256  # texts are allocated in multiples of so many tokens, doubled
_TRUSTED = 1 << 15  # new tokens; texts that get longer have their rows allocated again
_KEPT = 4  # batch sizes whose buffers stay allocated
_USEFUL = 64  # windows up to this are planned as they are to the end of a text


class _Course(NamedTuple):
    """How rounds are done.

    Attributes:
        plan: of each.
        buffers: where the state rows are.
        rounds: how many can be done so, whatever they bring, if nobody changes a row or a window.
    """

    plan: RoundPlan
    buffers: Buffers
    rounds: int


class Engine:
    """Works on one batch at a time.

    Args:
        config: of the chain.
        levels: those that verify, target first.
        drafter: None for a target alone.
        graphs: captures the steps of rounds without host synchronisation.
        sync_each_step: whether the host reads what came of each step. None: on the CPU, and where
            it must.

    Raises:
        ValueError: `sync_each_step` is False, and the host must read between steps; names why.
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
        self._parts: list[Part] = [*levels, *([] if drafter is None else [drafter])]
        self._count = len(config.windows) + 1
        can = None if drafter is None else drafter.capabilities
        self._layers = () if can is None else can.hidden_layers
        self._trees = can is not None and can.trees
        self._tree_size = None if can is None else can.tree_size
        # Which entries of the drafter's rows the ids of the level above are.
        self._target_to_draft: torch.Tensor | None = None
        requirements.require_all_ids(levels)
        for part in self._parts:
            requirements.require_stated(part)
        if drafter is not None:
            common = config.id_maps[-1].entries_below(config.vocab_sizes[-2])
            requirements.require_common_ids(config.names, common)
            entries = config.id_maps[-1].target_to_draft(config.vocab_sizes[-2])
            self._target_to_draft = None if entries is None else entries.to(levels[-1].device)
        self._gives_hidden: set[int] = set()  # levels whose hidden states the drafter is told
        if drafter is not None:
            self._gives_hidden = requirements.levels_with_hidden(levels, drafter)
            requirements.require_trees(levels, drafter, config.tail)
        reason = requirements.needs_host(config, levels, drafter, self._gives_hidden)
        if sync_each_step is False and reason is not None:
            raise ValueError(f"sync_each_step: expected True or None, since {reason}, given False")
        on_cpu = config.device.type == "cpu"
        wanted = on_cpu if sync_each_step is None else sync_each_step
        self._sync_each_step = reason is not None or wanted
        self._streams = SideStreams()
        self._kept: dict[Hashable, Buffers] = {}
        self._slots: list[Row] = []
        self._course: _Course | None = None
        self._rounds = 0  # left of it
        # What levels and drafter say of what they hold, behind the latest round of the target; None
        # where it was not completed: nobody knows what they hold then.
        self._settled: list[int] | None = None
        self._revised: list[Continuing] = []  # those of them that say so
        # Which part is at work, and in which step (None: for all rows), for messages.
        self._at_work: tuple[int, Step | None] | None = None

    @property
    def _must_sync(self) -> bool:
        """Whether the host reads what came of each step in every round of the batch."""
        return self._sync_each_step or self._processors is not None

    # ---- a batch ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def keep(self, rows: Sequence[Row]) -> dict[int, list[int]]:
        """Roll the caches back to what the latest batch has in common with the prompts of `rows`,
        row by row, which `begin` then has to be given.

        Returns:
            By the numbers of the levels that go on so, the tokens of each row that they hold. The
            others begin anew; all of them where there are other rows or where nobody knows what the
            caches hold.
        """
        settled, self._settled = self._settled, None
        before = self._slots
        encoded = any(row.encoded is not None for row in (*before, *rows))
        if (
            settled is None
            or settled != list(map(_REVISION, self._revised))
            or encoded
            or len(before) != len(rows)
        ):
            return {}
        pairs = zip(before, rows, strict=True)
        common = [_common(was.tokens, row.tokens[:-1]) for was, row in pairs]
        numbers = self._continuing()
        have = {number: self._state.cached(number) for number in numbers}
        if self._layers and 1 in have:
            # The drafter is told the states that the target's passes give from now on. What it
            # makes of one takes the next token as well, so the last one in common is read again.
            self._forget_buffers()
            told, drafted = self._hidden_window.begin.tolist(), have[self._count]
            both = [max(0, n - 1) for n in map(min, common, have[1], drafted)]
            have[1] = list(map(min, both, told))
            have[self._count] = [n + 1 for n in have[1]]
        held: dict[int, list[int]] = {}
        for number in numbers:
            wanted = list(map(min, have[number], common))
            with named(self.config.names, number - 1, before):
                held[number] = list(self._parts[number - 1].rollback(RowCounts(wanted)))
        return held if any(map(any, held.values())) else {}

    def _continuing(self) -> list[int]:
        """The levels that can go on with the batch at hand."""
        able = {
            number
            for number, part in enumerate(self._parts, 1)
            if self._begun[number - 1] and part.capabilities.continues
        }
        if self._layers and not {1, self._count} <= able:
            able -= {1, self._count}  # states that the one must be told the other must read
        # One that begins anew may do so in the cache of another.
        apart = {n for n, part in enumerate(self._parts, 1) if part.capabilities.reads_apart}
        others = set(range(1, self._count + 1)) - able
        return [] if able - apart and others - apart else sorted(able)

    def begin(
        self,
        slots: Sequence[Row],
        recorder: StatsRecorder,
        processors: LogitsProcessors | None,
        observe: Observer | None,
        held: Mapping[int, list[int]],
    ) -> None:
        """The caches belong to these rows from now on.

        Args:
            held: as `keep` has given it for these rows; empty: nothing.
        """
        self._settled, self._held = None, dict(held)
        for row, own in zip(slots, held.get(1, ()), strict=False):
            row.stats.num_cached_tokens = own
        self._recorder = recorder
        self._processors, self._observe = processors, observe
        self._state = StateRows(self._count, len(slots))
        for slot in range(len(slots)):
            self._state.set_windows(slot, (*self.config.windows, *self.config.rounds))
        self._begun = [False] * self._count
        # Hidden states since the last draft, where the host reads what came of each step.
        self._hidden_window = HiddenWindow(len(slots), torch.device("cpu"))
        self._buffers: Buffers | None = None
        self._at_work = None
        self._note_slots(slots)

    def _note_slots(self, slots: Sequence[Row]) -> None:
        """The rows in the caches from now on, and what operators and drafter are told of them."""
        self._slots, self._rounds = list(slots), 0
        self._recorder.follow([row.stats for row in slots])
        self._requests, self._eos = [row.number for row in slots], [row.eos for row in slots]

    def windows(self, slot: int) -> Sequence[int]:
        """Windows of one row."""
        return self._state.windows[slot][: self._count - 1]

    def set_windows(self, slot: int, windows: Sequence[int]) -> None:
        """Windows of one row from the next round on; rounds that are bounded follow them."""
        given, rounds = tuple(windows), self.config.rounds
        if given != self.config.windows:
            fitting = [*default_rounds(given), 0]
            rounds = tuple(bound and new for bound, new in zip(rounds, fitting, strict=True))
        if (*given, *rounds) != self._state.windows[slot]:
            self._state.set_windows(slot, (*given, *rounds))
            self._rounds = 0

    @torch.inference_mode()
    def end(self, row: Row) -> None:
        """The row takes no part from now on, if it is one of this batch."""
        if any(own is row for own in self._slots):
            self._state.end(row.slot)
            self._rounds = 0

    def leave(self) -> None:
        """Rows that are complete leave the caches once they are a quarter of them: what stays is
        copied then. Where steps are captured they stay, with nothing to do, so that the graphs of
        the batch serve to its end."""
        slots = self._slots
        self._settled = None
        staying = [row for row in slots if not row.ended]
        if len(staying) == len(slots) or not staying or len(staying) * 4 > len(slots) * 3:
            return
        if self.graphs is not None and not self._must_sync:
            return
        keep = [row.slot for row in staying]
        self._forget_buffers()
        for number, part in enumerate(self._parts, 1):
            held = self._held.get(number)
            if self._begun[number - 1] or held:
                with named(self.config.names, number - 1, staying):
                    part.select(keep)
            if held:
                self._held[number] = [held[slot] for slot in keep]
        self._state = self._state.select(keep)
        self._hidden_window.select(keep)
        for slot, row in enumerate(staying):
            row.slot = slot
        self._note_slots(staying)

    @property
    def parts(self) -> Sequence[Part]:
        """Levels and drafter, target first."""
        return self._parts

    @property
    def slots(self) -> Sequence[Row]:
        """The rows in the caches."""
        return self._slots

    # ---- a round of the target -------------------------------------------------------------------

    def round(self) -> Committed:
        """One round of the target: the tokens that it commits, by the number of their row."""
        self._settled = None
        try:
            if not self._rounds:
                self._course = self._chart()
                self._rounds = self._course.rounds
            self._rounds -= 1
            assert self._course is not None
            plan, buffers, _ = self._course
            committed = (
                self._step_by_step(buffers)
                if buffers.sync_each_step
                else self._at_once(plan, buffers)
            )
            self._settled = list(map(_REVISION, self._revised))
            return committed
        except Exception as error:
            if self._at_work is not None:
                number, step = self._at_work
                rows = self._slots if step is None else self._rows_of(step)
                name_place(error, self.config.names, number - 1, rows)
            raise

    def _chart(self) -> _Course:
        """The course of the next rounds: caches and buffers are ready for it."""
        active = [row for row in self._slots if not row.ended]
        plan = self._plan(active)
        sync = self._must_sync or plan.steps is None
        self._prepare_caches(plan, active)
        self._revised = [
            cast(Continuing, part) for part in self._parts if part.capabilities.continues
        ]
        chosen = sync
        sync = sync or not self._can_stay(plan, active) or not self._has_hidden_room(plan, active)
        buffers = self._prepare_buffers(plan, sync)
        now = self._state.windows
        # Where rows differ, or draft in some rounds only, caches come to lag in ways of their own;
        # and what the host does in this round alone is asked anew in the next.
        steady = len({now[row.slot] for row in active}) == 1 and sync == chosen
        if not steady or (min(plan.windows) == 0 and len(plan.asked) > 1):
            return _Course(plan, buffers, 1)
        # A round begins with room for all that can be pending, in the texts, the rows and the
        # contexts; windows that are planned no longer than a text has room for follow it.
        longest = max(row.committed for row in self._slots)
        room = min(row.room for row in active)
        limits = [self._parts[number - 1].max_length for number in plan.asked]
        ends = [buffers.state.shape.capacity - 1, *[limit for limit in limits if limit is not None]]
        left = min(room, min(ends) - longest) - plan.ahead
        left = 0 if max(plan.windows) > _USEFUL else left
        return _Course(plan, buffers, 1 + max(0, left // (plan.max_pending[0] + 1)))

    def _plan(self, active: Sequence[Row]) -> RoundPlan:
        """Of the largest windows of all rows."""
        now = self._state.windows
        largest = tuple(map(max, zip(*{now[row.slot] for row in active}, strict=True)))
        windows, rounds = largest[: self._count - 1], largest[self._count - 1 :]
        room = max(row.room for row in active)
        # The last token of a text needs no draft, and no window is filled past the end of all
        # texts: in powers of two, so that few plans differ.
        useful = max(_USEFUL, 1 << room.bit_length()) if room > 1 else 0
        if max(windows, default=0) > useful:
            windows = tuple(min(window, useful) for window in windows)
        return round_plan(windows, rounds, self.config.tail)

    def _prepare_caches(self, plan: RoundPlan, active: Sequence[Row]) -> None:
        """Every level of the round has read the rows up to the few tokens that its first step
        reads."""
        slots, state = self._slots, self._state
        fresh = [number for number in plan.asked if not self._begun[number - 1]]
        if fresh:
            hidden = prefill(
                self._parts,
                fresh,
                self.config,
                slots,
                plan.ahead + self._size(plan).nodes,
                self._streams,
                self._recorder,
                self._layers,
                self._held,
            )
            if hidden is not None:
                begin = torch.tensor(self._held.get(1, [0] * len(slots)))
                read = torch.tensor([row.committed - 1 for row in slots])
                self._hidden_window.add(hidden, begin, read - begin)
            for number in fresh:
                self._begun[number - 1] = True
                self._held.pop(number, None)
                state.set_cached(number, [row.committed - 1 for row in slots])
        for number in plan.asked:
            held = state.cached(number)
            if max(row.committed - held[row.slot] for row in active) > plan.lag(number):
                began = time.perf_counter()
                self._at_work = number, None
                part, id_map = self._parts[number - 1], self.config.id_maps[number - 1]
                state.set_cached(number, read_rest(part, id_map, slots, held))
                self._at_work = None
                self._recorder.spent(number - 1, time.perf_counter() - began, 1)

    def _can_stay(self, plan: RoundPlan, active: Sequence[Row]) -> bool:
        """Whether no level needs the host in this round. A text may run ahead of its end then, for
        which its context must have room."""
        longest = max(row.committed for row in active) + plan.ahead
        parts = [self._parts[number - 1] for number in plan.asked]
        return all(
            part.capabilities.device_lengths
            and (part.max_length is None or longest <= part.max_length)
            for part in parts
        )

    def _size(self, plan: RoundPlan) -> TreeSize:
        """Of the trees of a round."""
        size = self._tree_size
        return TreeSize(0, 0) if size is None or not plan.drafts else size(plan.drafts)

    def _hidden_width(self, plan: RoundPlan) -> int:
        """Tokens of a row whose states can wait for the drafter, where every row drafts in every
        round that has room for it: what can be pending, behind what the level that lags most has to
        read, and the rounds at the end of a text, too short for a token of every level."""
        return 2 * (self._count - 1) + max(plan.max_pending)

    def _has_hidden_room(self, plan: RoundPlan, active: Sequence[Row]) -> bool:
        """Whether the states that the drafter waits for have room without the host."""
        if not self._layers:
            return True
        now = self._state.windows
        each = {now[row.slot][: self._count - 1] for row in active}
        if min(plan.windows) == 0 or len(each) > 1:
            return False  # of rows that do not draft they would be more and more
        if self._buffers is not None and not self._buffers.sync_each_step:
            return True
        return self._hidden_window.fits([row.slot for row in active], self._hidden_width(plan))

    def _prepare_buffers(self, plan: RoundPlan, sync: bool) -> Buffers:
        """The state rows, where this round's steps are."""
        slots, now = self._slots, self._buffers
        count = 1 if sync else len(plan.steps or ())
        longest = max(row.committed for row in slots)
        least = longest + plan.ahead + 1
        width = self._hidden_width(plan) if self._layers and not sync else 0
        # (The batch and its EOS ids are as they were.)
        if (
            now is not None
            and now.sync_each_step == sync
            and now.state.fits(count, least)
            and (now.hidden_window is None or now.hidden_window.width >= width)
        ):
            now.plan = plan
            return now
        # The whole text as far as is known, up to a size that is asked for on trust only.
        capacity = longest + min(max(row.room for row in slots), _TRUSTED) + plan.ahead
        eos = max(1, *[len(own) for own in self._eos])
        self._forget_buffers()
        sampling, seeds = [row.sampling for row in slots], [row.seed for row in slots]
        key = (sync, len(slots), count, eos, all(own.greedy for own in sampling))
        made = self._kept.pop(key, None)
        if made is None or not made.state.fits(count, capacity):
            room = _CAPACITY
            while room < capacity:
                room *= 2
            device = torch.device("cpu") if sync else self.config.device
            state = StateRows(self._count, len(slots), count, room, eos, device)
            made = Buffers(state, sync, plan, RowParameters(len(slots), device))
        self._kept[key] = made
        while len(self._kept) > _KEPT:
            del self._kept[next(iter(self._kept))]
        made.state.write(slots, self._state, self.config.tail)
        made.parameters.write(sampling, seeds)
        if width:
            own = made.hidden_window
            if own is None or own.width < width:
                own = made.hidden_window = HiddenWindow(len(slots), self.config.device, width)
            own.write(self._hidden_window)
            self._hidden_window = HiddenWindow(len(slots), torch.device("cpu"))
        self._state, made.plan = made.state, plan
        self._buffers = made
        return made

    def _forget_buffers(self) -> None:
        """The steps to come have others; where the levels stand remains (`StateRows.head`)."""
        if self._buffers is not None and self._buffers.hidden_window is not None:
            self._hidden_window.write(self._buffers.hidden_window)
        self._buffers = None

    # ---- step by step ----------------------------------------------------------------------------

    def _step_by_step(self, buffers: Buffers) -> Committed:
        buffers.known = True
        drafter, recorder, clock = self._drafter, self._recorder, time.perf_counter
        while True:
            unread = self._hidden_window.begin if self._layers else None
            if (step := buffers.state.next(unread)) is None:
                break
            began = clock()
            if drafter is not None and step.level == self._count:
                before = drafter.num_forward_passes
                entries = self._draft(buffers, step).entries
                trees = None if buffers.tree is None else buffers.tree.counts.tolist()
                passes = drafter.num_forward_passes - before
                recorder.drafted(entries, clock() - began, passes, trees)
                continue
            entries, logits, r = self._verify(buffers, step)
            if step.level > 1:
                recorder.verified(step.level - 1, entries, clock() - began)
                continue
            committed = self._commit(entries, r.tokens.tolist(), r.logprobs.tolist(), logits)
            recorder.verified(0, entries, clock() - began)
            return committed
        raise self._stuck(next(row for row in self._slots if not row.ended))

    # ---- without host synchronisation ------------------------------------------------------------

    def _at_once(self, plan: RoundPlan, buffers: Buffers) -> Committed:
        assert plan.steps is not None
        slots, config = self._slots, self.config
        limit = max(row.committed + (0 if row.ended else plan.ahead) for row in slots)
        size = self._size(plan)
        spans: dict[int, Hashable | None] = {}
        for number in plan.asked:
            more = size.read if number == self._count else size.nodes
            spans[number] = self._on_device(number).reserve_span(limit + more)
        graphs = None if any(span is None for span in spans.values()) else self.graphs
        clock = Clock(config.device)
        outputs: tuple[torch.Tensor | None, ...] = ()
        for place, number in enumerate(plan.steps):
            draft = number == self._count
            most = plan.drafts_at(place) if draft else plan.max_pending[number - 1]
            # A first draft is no row's tail; a later one may be, where a window is full early.
            tail = draft and plan.tail > 0 and place > 0
            width = plan.width_at(place)
            step = partial(self._step, buffers, number, most, width, tail)
            if draft:
                buffers.begin_draft(most)
            if graphs is None:
                outputs = step()
            else:
                # The levels below are cut as well, so the graph depends on where they are.
                touched = {at: span for at, span in spans.items() if at >= number}
                kind = "a draft" if draft else f"the verification of {config.names[number - 1]}"
                key: list[Hashable] = [number, most, tail, width, config.rule]
                if tail or 1 < number < self._count:
                    key.append(buffers.padding(1 if draft else number - 1))
                own = buffers.place(number, tail, number in self._gives_hidden)
                key += [own, tuple(touched), *touched.values()]
                outputs = graphs.run(kind, key, step)
            clock.tick()
        packed, logits = outputs
        assert packed is not None
        assert logits is not None
        return self._read(plan, buffers, packed, logits, clock)

    def _step(
        self, buffers: Buffers, number: int, most: int, width: int, tail: bool
    ) -> tuple[torch.Tensor | None, ...]:
        state, window = buffers.state, buffers.hidden_window
        if number < self._count:
            _, logits, r = self._verify(buffers, state.step(number, most, width))
            return (state.record(r.tokens, r.logprobs), logits) if number == 1 else ()
        if window is None:
            step = state.step(number, most, width, tail)
        else:
            # From the first token on whose state is told, and the one that was emitted last.
            with state.read_again(number, window.begin):
                step = state.step(number, most, max(width, window.width + 1), tail)
        self._draft(buffers, step)
        return ()

    def _read(
        self,
        plan: RoundPlan,
        buffers: Buffers,
        packed: torch.Tensor,
        logits: torch.Tensor,
        clock: Clock,
    ) -> Committed:
        """The one place where such a round waits for the device."""
        assert plan.steps is not None
        record, seconds = buffers.state.read(packed), clock.seconds()
        size, recorder = self._tree_size, self._recorder
        entries: list[Entry] = []
        for place, number in enumerate(plan.steps):
            entries = [own[place] for own in record.entries]
            self._require_rows(number, entries)
            if number < self._count:
                recorder.verified(number - 1, entries, seconds[place])
                continue
            trees = None if size is None else [size(max(own[0], 0)).nodes for own in entries]
            recorder.drafted(entries, seconds[place], plan.drafts_at(place), trees)
        for number in plan.asked:
            self._on_device(number).note_lengths(buffers.state.cached(number))
        for row, entry in zip(self._slots, entries, strict=True):
            if not row.ended and entry[0] < 0:
                raise self._stuck(row)
        return self._commit(entries, record.tokens, record.logprobs, logits)

    def _on_device(self, number: int) -> DeviceLengths:
        return cast(DeviceLengths, self._parts[number - 1])

    # ---- a draft ---------------------------------------------------------------------------------

    def _draft(self, buffers: Buffers, step: Step) -> Report:
        drafter, number, state = self._drafter, self._count, buffers.state
        assert drafter is not None
        plan, host, wants = step.plan, step.host, not buffers.parameters.greedy
        window = buffers.hidden_window or self._hidden_window
        self._at_work = number, step
        block = drafter.draft(
            DraftInput(
                self._known(step.input_ids, number),
                RowCounts(host.counts if host else None, plan.counts),
                RowCounts(host.lengths if host else None, plan.lengths),
                step.most,
                plan.positions,
                plan.rounds,
                number,
                buffers.parameters,
                wants,
                self._requests if host else (),
                rows=buffers.rows.get(number - 1),
                eos=self._eos if host else None,
                processors=self._processors,
                text=state.text if host else None,
                hidden=window.states() if self._layers else None,
                vocab_size=self.config.vocab_sizes[-2],
            )
        )
        if self._trees or block.parents is not None:
            buffers.tree = self._pending_tree(buffers, block, step)
        tree, self._at_work = buffers.tree, None
        if self._layers:
            part = plan.part
            # Nobody tells anything of a text that is complete.
            window.forget(part + torch.tensor([row.ended for row in self._slots]) if host else part)
        # What the drafter has read too much goes with the verification that follows.
        if tree is None:
            padding = buffers.padding(1) if step.tail else None
            report = state.report(step, block.tokens, block.counts, block.status, padding)
        else:
            report = state.report(step, tree.longest, tree.depths, None, ends=False)
        if report.status & ERROR_BITS:
            self._require_rows(number, report.entries)
        if wants:
            buffers.rows[number - 1] = block.rows
            if step.tail:
                assert report.slots is not None
                self._hand_up_tail(buffers, block, step, report.slots)
        return report

    def _pending_tree(self, buffers: Buffers, block: DraftBlock, step: Step) -> Tree | None:
        names, vocab_sizes, trees = self.config.names, self.config.vocab_sizes, self._trees
        if trees != (block.parents is not None):
            kinds = ["a chain of tokens", "a tree"]
            raise ValueError(
                f"{names[-1]}: expected {kinds[trees]} from a drafter whose capabilities have "
                f"{'' if trees else 'no '}`trees`, given {kinds[not trees]}"
            )
        if block.parents is None:
            return None
        if step.host is None:
            tree = pending_tree(block, step.plan.lengths, step.most)
            return buffers.keep_tree(tree, block.rows, step.most)
        require_tree(names[-1], block, step.host.lengths, vocab_sizes[-2])
        on_cpu = replace(
            block,
            tokens=block.tokens.cpu(),
            parents=block.parents.cpu(),
            counts=None if block.counts is None else block.counts.cpu(),
        )
        return pending_tree(on_cpu, step.plan.lengths, step.most)

    def _hand_up_tail(
        self, buffers: Buffers, block: DraftBlock, step: Step, place: torch.Tensor
    ) -> None:
        """What a tail was drawn from is kept behind what the tokens in front of it were drawn from,
        for the target. Other drafts of the step stay where the drafter has put them.

        Args:
            place: slots of `Report`.
        """
        old = buffers.rows.get(1)
        if old is None:  # nothing is pending for the target, of any row
            return
        place = place.where(step.plan.of_tail[:, None] > 0, old.logits.shape[1] - 1)
        id_map = self.config.id_maps[-1]
        rows, known = steps.hand_up_tail(old, block.tokens, block.rows, place, id_map)
        buffers.rows[1], buffers.known = rows, buffers.known and known

    # ---- a verification --------------------------------------------------------------------------

    def _verify(self, buffers: Buffers, step: Step) -> tuple[Sequence[Entry], torch.Tensor, Any]:
        """What the step brought each row, the level's logits in text order, and `VerifyResult`."""
        number, state, greedy = step.level, buffers.state, buffers.parameters.greedy
        level, host, own = self._levels[number - 1], step.host, step.plan
        layers = self._layers if number in self._gives_hidden else ()
        tree = buffers.tree if number == self._count - 1 and step.most else None
        self._at_work = number, step
        if tree is None:
            counts = first = None
            if host is None or not host.last:
                counts = RowCounts(host.counts if host else None, own.counts)
                first = RowCounts(host.first if host else None, own.first)
            given = self._known(step.input_ids, number)
            block = InputBlock(given, step.most + 1, counts, first, None, layers)
        else:
            read = tree_pass(step.input_ids, own.counts, own.lengths, tree, step.lag)
            block = InputBlock(
                self._known(read.tokens, number),
                tree.tokens.shape[1] + 1,
                RowCounts.read(read.counts, host is not None),
                RowCounts.read(read.first, host is not None),
                read.parents.to(level.device),
                layers,
                step.lag + step.most,
            )
        logits, hidden, skipped = level.forward(block)
        if logits.shape[2] > self.config.vocab_sizes[number - 1]:  # ids that it may not draw
            logits = logits[..., : self.config.vocab_sizes[number - 1]]
        if self._processors is not None:
            logits = self._processed(self._processors, logits, state, step, tree)
        drawn = None
        if not greedy and step.most:
            drawn = buffers.handed_up(number, logits.device)
        entries = self._target_to_draft if number == self._count - 1 else None
        parameters = buffers.parameters
        if tree is None:
            r = steps.verify(self.config, step, logits, drawn, parameters, entries)
        else:
            r = verify_tree(self.config, step, logits, tree, drawn, parameters, entries)
            logits, hidden = read.along(logits, hidden, r)
        self._at_work = None
        length = buffers.padding(number - 1) if number > 1 and not greedy else None
        report = state.report(step, r.tokens, r.num_accepted, r.status, length)
        if report.status & ERROR_BITS:
            self._require_rows(number, report.entries)
        if length is not None:
            assert report.slots is not None
            self._hand_up(buffers, step, RowBuffer(logits, r.statistics), report.slots, length)
        if hidden is not None:
            begin = own.positions - (own.counts - own.lengths)
            stand = RowCounts(*report.kept[number - 1]).on(begin.device) - begin
            window = buffers.hidden_window or self._hidden_window
            if number > 1 and 1 in self._gives_hidden:
                # What the target has read is told as its own.
                above = (state.read_by(1) - begin).clamp_min(0)
                skipped = above if skipped is None else above.maximum(skipped.to(above.device))
            window.add(hidden, begin, torch.where(own.part > 0, stand, 0), skipped)
        elif self._layers:  # what a level below has read may stand no more
            stand = RowCounts(*report.kept[number - 1]).on(own.part.device)
            self._hidden_window.cut(torch.where(own.part > 0, stand, torch.iinfo(stand.dtype).max))
        if report.cut is None or report.cut or tree is not None:
            self._rollback(buffers, step, report, None if tree is None else r.path)
        return report.entries, logits, r

    def _hand_up(
        self, buffers: Buffers, step: Step, rows: RowBuffer, place: torch.Tensor, length: int
    ) -> None:
        above = step.level - 1
        buffers.direct.pop(above, None)
        if step.host is not None and not (above == 1 and self.config.tail):
            group, rounds, at = step.host.group, self._state.windows, self._count - 2 + above
            once = {rounds[slot][at] for slot in group} == {1}
            if once and len(group) == [row.ended for row in self._slots].count(False):
                # The level does not run again before they are verified, and nothing else is
                # pending.
                buffers.direct[above] = rows
                return
        old, where = buffers.rows.get(above), place.to(rows.logits.device)
        buffers.rows[above] = steps.hand_up(old, rows, where, length)

    def _rollback(
        self, buffers: Buffers, step: Step, report: Report, path: torch.Tensor | None
    ) -> None:
        """Caches from the step's level downwards forget what no longer stands; of a tree that it
        has read, what is not on its path."""
        number = step.level
        asked = buffers.plan.asked if report.cut is None else report.cut
        if path is not None and number not in asked:
            asked = [number, *asked]
        for below in asked:
            if below < number:
                continue
            part, wanted = self._parts[below - 1], RowCounts(*report.kept[below - 1])
            self._at_work = below, None
            if below == number and path is not None:
                level = self._levels[below - 1]
                # Of a row without a part nothing moves.
                positions = step.plan.positions
                front = torch.minimum(positions, wanted.on(positions.device))
                begin = RowCounts.read(front, step.host is not None)
                left = level.keep_path(begin, path.to(level.device), wanted)
            else:
                left = part.rollback(wanted)
            self._at_work = None
            if wanted.host is not None and left is not wanted:
                least = [min(int(n), have) for n, have in zip(left, wanted.host, strict=True)]
                if least != list(wanted.host):
                    buffers.state.set_cached(below, least)
                    self._rounds = 0

    def _processed(
        self,
        processors: LogitsProcessors,
        logits: torch.Tensor,
        state: StateRows,
        step: Step,
        tree: Tree | None,
    ) -> torch.Tensor:
        assert step.host is not None
        changed = logits.to(torch.float32, copy=True)  # as processors give it, whatever the dtype
        for slot in step.host.group:
            text, length = state.text(slot), step.host.lengths[slot]
            texts = [(slice(0, length + 1), text)]
            if tree is not None:
                root = text[: len(text) - length]
                texts = [
                    (
                        slice(node + 1, node + 2),
                        torch.cat([root, root.new_tensor(tree.path_to(slot, node))]),
                    )
                    for node in range(-1, int(tree.counts[slot]))
                ]
            for rows, prefix in texts:
                changed[slot, rows] = processors.apply(
                    logits[slot, rows], prefix.to(logits.device), self._slots[slot].number
                )
        return changed

    # ---- both ------------------------------------------------------------------------------------

    def _known(self, input_ids: torch.Tensor, number: int) -> torch.Tensor:
        """`input_ids` where a part reads them, without ids that it does not know."""
        part = self._parts[number - 1]
        ids = input_ids if input_ids.device == part.device else input_ids.to(part.device)
        id_map = self.config.id_maps[number - 1]
        return ids if id_map.reads_all else id_map.to_below(ids)

    def _rows_of(self, step: Step) -> Sequence[Row]:
        """Those with a part, as far as the host knows."""
        slots, host = self._slots, step.host
        if host is None or len(host.group) == len(slots):
            return slots
        return [slots[slot] for slot in host.group]

    def _require_rows(self, number: int, entries: Sequence[Entry]) -> None:
        """Every row of logits of a step had a distribution."""
        for slot, (tokens, position, accepted, emitted, _, status, _) in enumerate(entries):
            if tokens >= 0 and status & ERROR_BITS:
                at = position + (emitted if number == self._count else accepted)
                raise RequestError(self._slots[slot].number, number, at, status)

    def _commit(
        self,
        entries: Sequence[Entry],
        tokens: Sequence[list[int]],
        logprobs: Sequence[list[float]],
        logits: torch.Tensor,
    ) -> Committed:
        """The target has emitted tokens: they stand for good."""
        committed = []
        for slot, (row, entry) in enumerate(zip(self._slots, entries, strict=True)):
            asked, _, _, emitted, ended, _, _ = entry
            if asked < 0:
                continue
            if emitted == 0:
                raise self._stuck(row)
            own = tokens[slot][:emitted]
            row.tokens += own
            row.logprobs += logprobs[slot][:emitted]
            if self._observe is not None:
                self._observe(row.number, logits[slot, :emitted])
            if ended or len(row.logprobs) >= row.max_new_tokens:
                row.ended, self._rounds = True, 0
            committed.append((row.number, own))
        return committed

    def _stuck(self, row: Row) -> PolyspecError:
        """A text must never end for want of tokens: the next round would bring none either."""
        windows, tail = self._state.windows[row.slot], self.config.tail
        return PolyspecError(
            f"request {row.number}: expected a round of the target to commit at least one token at "
            f"position {row.committed}, given none (windows and rounds {list(windows)}, tail "
            f"{tail}); this is a mistake of polyspec_ext"
        )


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that both begin with."""
    differ = (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))
