"""The rounds of a chain: drafting, verifying, and what is pending in between, once for all.

The state rows (`state`) say what every row does next, and one round of the target follows them from
its first draft to its verification. Two executors run the same steps:

* step by step, where the host reads what came of each before the next: on the CPU, where that costs
  nothing, and wherever something must be looked at (unbounded rounds, logits processors, drafters
  on the host, levels on several devices);
* without host synchronisation, where the steps of a round are known before its tokens are
  (`plan`): the host reads what came of it once, behind the target's verification. On CUDA a draft
  is one captured graph and the verification of each level another.

Tokens do not depend on the executor: rows, draws and distributions are the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from ..drafters.base import (
    BatchedDrafter,
    DraftBlock,
    DraftInput,
    HiddenStates,
    RowBuffer,
    TreeSize,
)
from ..errors import ERROR_BITS, RequestError, named
from ..levels.base import BatchedLevel, DeviceLengths, InputBlock
from ..ops.schedule import HostStep, Plan
from ..sampling import LogitsProcessors
from ..stats import StatsRecorder
from ..tensors import FixedParameters, Parameters, Place, known_ids, moved
from . import steps
from .config import ChainConfig
from .graphs import Graphs
from .plan import RoundPlan, default_rounds, round_plan
from .prefill import Part, prefill, read_rest
from .request import Row
from .state import Entry, Progress, StateRows
from .streams import Clock, SideStreams
from .told import StatesWindow, reach_of
from .trees import Tree, TreePass, pending_tree, require_tree, tree_pass

# Called with a row's number and the target's logits [e, V], processed, behind which its e committed
# tokens were emitted. They stand until it returns.
Observer = Callable[[int, torch.Tensor], None]
Committed = list[tuple[int, list[int]]]
_CAPACITY = 256  # texts are allocated in multiples of so many tokens, doubled
_TRUSTED = 1 << 15  # new tokens; texts that get longer have their rows allocated again
_KEPT = 4  # batch sizes whose buffers stay allocated
_USEFUL = 64  # windows up to this are planned as they are to the end of a text


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
        self._layers = () if drafter is None else drafter.capabilities.hidden_layers
        # Those whose hidden states the drafter is told.
        self._telling = set() if drafter is None else self._levels_telling(drafter)
        if drafter is not None and drafter.capabilities.trees:
            self._require_trees(drafter)
            if config.tail:
                raise ValueError(
                    f"tail: expected 0 with {drafter.name}, which drafts trees, given {config.tail}"
                )
        reason = self._needs_host()
        if sync_each_step is False and reason is not None:
            raise ValueError(f"sync_each_step: expected True or None, since {reason}, given False")
        on_cpu = config.device.type == "cpu"
        wanted = on_cpu if sync_each_step is None else sync_each_step
        self._steps_apart = reason is not None or wanted
        self._streams = SideStreams()
        self._kept: dict[Hashable, _Buffers] = {}
        self._slots: list[Row] = []

    def _levels_telling(self, drafter: BatchedDrafter) -> set[int]:
        wanted = drafter.capabilities
        found = set()
        for number, level in enumerate(self._levels if wanted.hidden_layers else (), 1):
            can = level.capabilities
            if not can.hidden_states:
                raise ValueError(
                    f"{level.name}: expected a level that gives hidden states, as "
                    f"{drafter.name} wants them, given one that does not"
                )
            sizes = {wanted.hidden_size, can.hidden_size} - {None}
            if len(sizes) < 2:
                found.add(number)
            elif number == 1:
                raise ValueError(
                    f"{level.name}: expected hidden states of {wanted.hidden_size} values, as "
                    f"{drafter.name} reads them, given {can.hidden_size}"
                )
        return found

    def _layers_of(self, number: int) -> tuple[int, ...]:
        """Layers of a level whose hidden states the drafter is told."""
        return self._layers if number in self._telling else ()

    def _require_trees(self, drafter: BatchedDrafter) -> None:
        above = self._levels[-1]
        if not above.capabilities.trees:
            reason = getattr(above, "no_trees", f"{type(above).__name__} does not")
            raise ValueError(
                f"{above.name}: expected a level that reads trees, as {drafter.name} drafts them, "
                f"given one that does not: {reason}"
            )

    def _needs_host(self) -> str | None:
        """Why the host has to read what comes of each step; None: it need not."""
        devices = {part.device for part in self._parts}
        if len(devices) > 1:
            return f"levels lie on {', '.join(sorted(map(str, devices)))}"
        for part in self._parts:
            if not part.capabilities.keeps_lengths:
                return f"{part.name} keeps its lengths on the host"
        can = None if self._drafter is None else self._drafter.capabilities
        if can is not None and can.trees and can.tree_size is None:
            return f"{self.config.names[-1]} drafts trees of any size"
        if self._layers and len(self._telling) < len(self._levels):
            return f"{self.config.names[-1]} reads hidden states that not every level gives"
        if round_plan(self.config.windows, self.config.rounds).steps is None:
            return "rounds are not bounded"
        return None

    # ---- a batch ---------------------------------------------------------------------------------

    def begin(
        self,
        slots: Sequence[Row],
        recorder: StatsRecorder,
        processors: LogitsProcessors | None,
        observe: Observer | None,
    ) -> None:
        """The caches belong to these rows from now on."""
        batch = len(slots)
        self._recorder = recorder
        self._processors, self._observe = processors, observe
        config = self.config
        self._windows = [config.windows for _ in slots]
        self._rounds = [config.rounds for _ in slots]
        self._held = [[0] * batch for _ in range(self._count)]  # tokens in each cache, by row
        self._done = [[0] * batch for _ in range(self._count)]  # rounds of each level, by row
        self._begun = [False] * self._count
        self._hidden: list[HiddenStates] = []  # since the last draft
        self._buffers: _Buffers | None = None
        self._note_slots(slots)

    def _note_slots(self, slots: Sequence[Row]) -> None:
        """The rows in the caches from now on, and what operators and drafter are told of them."""
        self._slots = list(slots)
        self._parameters = Parameters([row.sampling for row in slots], [row.seed for row in slots])
        self._requests, self._eos = [row.number for row in slots], [row.eos for row in slots]

    def windows(self, slot: int) -> Sequence[int]:
        """Windows of one row."""
        return self._windows[slot]

    def set_windows(self, slot: int, windows: Sequence[int]) -> None:
        """Windows of one row from the next round on; rounds that are bounded follow them."""
        given, rounds = tuple(windows), self.config.rounds
        if given != self.config.windows:
            fitting = [*default_rounds(given), 0]
            rounds = tuple(bound and new for bound, new in zip(rounds, fitting, strict=True))
        if given == self._windows[slot] and rounds == self._rounds[slot]:
            return
        self._windows[slot], self._rounds[slot] = given, rounds
        if self._buffers is not None:
            self._buffers.state.set_windows(slot, given, rounds)

    @torch.inference_mode()
    def end(self, row: Row) -> None:
        """The row takes no part from now on, if it is one of this batch."""
        if self._buffers is not None and any(own is row for own in self._slots):
            self._buffers.state.end(row.slot)

    def leave(self) -> None:
        """Rows that are complete leave the caches once they are a quarter of them: what stays is
        copied then. Where steps are captured they stay, with nothing to do, so that the graphs of
        the batch serve to its end."""
        slots = self._slots
        staying = [row for row in slots if not row.ended]
        if len(staying) == len(slots) or not staying or len(staying) * 4 > len(slots) * 3:
            return
        apart = self._steps_apart or self._processors is not None
        if self.graphs is not None and not apart:
            return
        keep = [row.slot for row in staying]
        self._forget_buffers()
        for number, part in enumerate(self._parts, 1):
            if self._begun[number - 1]:
                with named(self.config.names, number - 1, staying):
                    part.select(keep)
        for table in (self._held, self._done):
            table[:] = [[own[slot] for slot in keep] for own in table]
        self._windows = [self._windows[slot] for slot in keep]
        self._rounds = [self._rounds[slot] for slot in keep]
        self._hidden = [told.select(keep) for told in self._hidden]
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
        active = [row for row in self._slots if not row.ended]
        plan = self._plan(active)
        apart = self._steps_apart or self._processors is not None or plan.steps is None
        self._prepare_caches(plan, active)
        apart = apart or not self._can_stay(plan, active) or not self._can_tell(plan, active)
        buffers = self._prepare_buffers(plan, apart)
        if apart:
            buffers.most = plan.most
            return self._step_by_step(buffers)
        return self._at_once(plan, buffers)

    def _plan(self, active: Sequence[Row]) -> RoundPlan:
        """Of the largest windows of all rows."""
        forms = {(self._windows[row.slot], self._rounds[row.slot]) for row in active}
        windows, rounds = map(_largest, zip(*forms, strict=True))
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
        slots, names = self._slots, self.config.names
        fresh = [number for number in plan.asked if not self._begun[number - 1]]
        if fresh:
            told = prefill(
                self._parts,
                fresh,
                names,
                slots,
                plan.ahead + self._size(plan).nodes,
                self._streams,
                self._recorder,
                self._layers,
            )
            if told is not None:
                self._hidden.append(told)
            for number in fresh:
                self._begun[number - 1] = True
                self._held[number - 1] = [row.committed - 1 for row in slots]
                self._note_held(number)
        for number in plan.asked:
            held = self._held[number - 1]
            if max(row.committed - held[row.slot] for row in active) > plan.lag(number):
                began = time.perf_counter()
                with named(names, number - 1, slots):
                    self._held[number - 1] = read_rest(self._parts[number - 1], slots, held)
                self._note_held(number)
                self._spent(slots, number, time.perf_counter() - began, 1)

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
        size = None if self._drafter is None else self._drafter.capabilities.tree_size
        return TreeSize(0, 0) if size is None or not plan.drafts else size(plan.drafts)

    def _told_width(self, plan: RoundPlan) -> int:
        """Tokens of a row whose states can wait for the drafter, where every row drafts in every
        round: what can be pending, behind what the level that lags most has to read."""
        return self._count - 1 + max(plan.most)

    def _can_tell(self, plan: RoundPlan, active: Sequence[Row]) -> bool:
        """Whether the states that the drafter waits for have room without the host."""
        if not self._layers:
            return True
        each = {self._windows[row.slot] for row in active}
        if self._count not in plan.asked or len(each) > 1:
            return False  # of rows that do not draft they would be more and more
        now = self._buffers
        if now is not None and not now.apart:
            return True
        known = all(any(own.counts[row.slot] for own in self._hidden) for row in active)
        return known and reach_of(self._hidden, len(self._slots)) <= self._told_width(plan)

    def _note_held(self, number: int) -> None:
        if self._buffers is not None:
            for slot, have in enumerate(self._held[number - 1]):
                self._buffers.state.set_cached(slot, number, have)

    def _prepare_buffers(self, plan: RoundPlan, apart: bool) -> _Buffers:
        """The state rows, where this round's steps are."""
        slots, now = self._slots, self._buffers
        count = 1 if apart else len(plan.steps or ())
        longest = max(row.committed for row in slots)
        least = longest + plan.ahead + 1
        told = self._told_width(plan) if self._layers and not apart else 0
        # (The batch and its EOS ids are as they were.)
        if (
            now is not None
            and now.apart == apart
            and now.state.fits(count, least)
            and (now.told is None or now.told.width >= told)
        ):
            return now
        # The whole text as far as is known, up to a size that is asked for on trust only.
        capacity = longest + min(max(row.room for row in slots), _TRUSTED) + plan.ahead
        eos = max(1, *[len(own) for own in self._eos])
        self._forget_buffers()
        key = (apart, len(slots), count, eos, self._parameters.greedy)
        made = self._kept.pop(key, None)
        if made is None or not made.state.fits(count, capacity):
            room = _CAPACITY
            while room < capacity:
                room *= 2
            device = torch.device("cpu") if apart else self.config.device
            state = StateRows(self._count, len(slots), count, room, eos, device)
            made = _Buffers(state, apart)
        self._kept[key] = made
        while len(self._kept) > _KEPT:
            del self._kept[next(iter(self._kept))]
        progress = [
            [Progress(held[b], done[b]) for held, done in zip(self._held, self._done, strict=True)]
            for b in range(len(slots))
        ]
        made.state.write(slots, progress, self._windows, self._rounds, self.config.tail)
        if not apart:
            made.parameters.write(self._parameters)
        if told:
            if made.told is None or made.told.width < told:
                made.told = StatesWindow(len(slots), told, self.config.device)
            made.told.write(self._hidden)
            self._hidden = []
        self._buffers = made
        return made

    def _forget_buffers(self) -> None:
        """What the state rows alone know is kept by the host; a round's record has told it all."""
        now = self._buffers
        if now is not None and now.apart:
            self._take_progress(now.state.progress())
        elif now is not None and now.told is not None:
            self._hidden = now.told.taken()
        self._buffers = None

    def _take_progress(self, progress: Sequence[Sequence[Progress]]) -> None:
        for slot, own in enumerate(progress):
            for index, (cached, done) in enumerate(own):
                self._held[index][slot], self._done[index][slot] = cached, done

    # ---- step by step ----------------------------------------------------------------------------

    def _step_by_step(self, buffers: _Buffers) -> Committed:
        state = buffers.state
        buffers.known = True
        while True:
            step = state.next()
            if step is None:
                return []
            if step.level == self._count:
                self._draft(buffers, step)
                continue
            committed = self._verify(buffers, step)
            if step.level == 1:
                return committed

    def _rows_of(self, step: HostStep) -> Sequence[Row]:
        slots = self._slots
        return slots if len(step.group) == len(slots) else [slots[slot] for slot in step.group]

    def _draft(self, buffers: _Buffers, step: HostStep) -> None:
        drafter, number, state = self._drafter, self._count, buffers.state
        assert drafter is not None
        began, passes = time.perf_counter(), drafter.num_forward_passes
        rows = self._rows_of(step)
        with named(self.config.names, -1, rows):
            block = drafter.draft(
                DraftInput(
                    self._known(torch.from_numpy(step.input_ids), drafter),
                    step.counts,
                    step.lengths,
                    step.most,
                    step.positions,
                    step.rounds,
                    number,
                    self._parameters,
                    not self._parameters.greedy,
                    self._requests,
                    rows=buffers.rows.get(number - 1),
                    eos=self._eos,
                    processors=self._processors,
                    text=state.text,
                    hidden=tuple(self._hidden),
                )
            )
            if self._hidden:
                self._note_told(step.group)
            tree = buffers.tree = self._pending_tree(block, step)
        if tree is None:
            entries, kept, place = state.enter(
                step, block.tokens, block.counts, block.status, buffers.most[0]
            )
        else:
            entries, kept, _ = state.enter(step, tree.longest, tree.depths, None, ends=False)
        self._raise_for_entries(number, entries, step.group)
        buffers.rows[number - 1] = block.rows
        buffers.pending[number - 1] = _moved(block.rows, self._parts[number - 2].device)
        if self.config.tail and any(step.of_tail) and not self._parameters.greedy:
            self._hand_up_tail(buffers, block, torch.from_numpy(step.plan), place)
        self._held[number - 1] = kept[number - 1]
        nodes = [] if tree is None else tree.counts.tolist()
        for slot, row in zip(step.group, rows, strict=True):
            drawn = entries[slot].emitted if tree is None else nodes[slot]
            self._recorder.proposed(row.stats, drawn)
        seconds = time.perf_counter() - began
        self._spent(rows, number, seconds, drafter.num_forward_passes - passes)

    def _hand_up_tail(
        self, buffers: _Buffers, block: DraftBlock, table: torch.Tensor, place: torch.Tensor
    ) -> None:
        """What a tail was drawn from is kept behind what the tokens in front of it were drawn from,
        for the target. Other drafts of the step stay where the drafter has put them.

        Args:
            table: of which `Plan` names the rows; `place`: slots of `StateRows.report`.
        """
        old = buffers.rows.get(1)
        if old is None:  # nothing is pending for the target, of any row
            return
        tail = Plan(*table.unbind()).of_tail[:, None] > 0
        place = place.where(tail, old.logits.shape[1] - 1)
        rows, known = steps.hand_up_tail(old, block.tokens, block.rows, place)
        buffers.rows[1], buffers.known = rows, buffers.known and known
        buffers.pending[1] = _moved(buffers.handed_up(1), self._parts[0].device)

    def _note_told(self, group: Sequence[int]) -> None:
        """The drafter knows all states of these rows; those of others are told again."""
        done = [*group, *(row.slot for row in self._slots if row.ended)]
        for told in self._hidden:
            for slot in done:
                told.counts[slot] = 0
        self._hidden = [told for told in self._hidden if any(told.counts)]

    def _pending_tree(self, block: DraftBlock, step: HostStep) -> Tree | None:
        if block.parents is None:
            return None
        self._require_chain(block)
        names, vocab_sizes = self.config.names, self.config.vocab_sizes
        require_tree(names[-1], block, step.lengths, vocab_sizes[-2])
        on_cpu = replace(
            block,
            tokens=block.tokens.cpu(),
            parents=block.parents.cpu(),
            counts=None if block.counts is None else block.counts.cpu(),
        )
        return pending_tree(on_cpu, torch.tensor(step.lengths), step.most)

    def _require_chain(self, block: DraftBlock) -> None:
        assert self._drafter is not None
        if block.parents is not None and not self._drafter.capabilities.trees:
            raise ValueError(
                f"{self.config.names[-1]}: expected a chain of tokens from a drafter whose "
                "capabilities have no `trees`, given a tree"
            )

    def _verify(self, buffers: _Buffers, step: HostStep) -> Committed:
        number, state = step.level, buffers.state
        began = time.perf_counter()
        counts, lengths, rows = step.counts, step.lengths, self._rows_of(step)
        tree = buffers.tree if number == self._count - 1 else None
        path: tuple[list[int], torch.Tensor] | None = None
        with named(self.config.names, number - 1, rows):
            if tree is None:
                logits, hidden, r = self._verify_chain(buffers, step)
            else:
                logits, hidden, r, path = self._verify_tree(buffers, step, tree)
                buffers.tree = None
        length = buffers.most[number - 2] if number > 1 else 0
        entries, kept, place = state.enter(step, r.tokens, r.num_accepted, r.status, length)
        self._raise_for_entries(number, entries, step.group)
        if number > 1 and not self._parameters.greedy:
            handed = self._handed_up(buffers, step, logits, r.statistics, place, length)
            buffers.pending[number - 1] = _moved(handed, self._parts[number - 2].device)
        if hidden is not None:
            self._keep_hidden(state, step, hidden, entries)
        held = self._held[number - 1]
        for slot, row in zip(step.group, rows, strict=True):
            held[slot] += counts[slot]
            _, _, accepted, emitted, _, _, of_tail = entries[slot]
            self._recorder.verified(
                row.stats, number - 1, lengths[slot], accepted, emitted, of_tail
            )
        self._rollback(state, number, kept, path)
        committed: Committed = []
        if number == 1:
            tokens, logprobs = r.tokens.tolist(), r.logprobs.tolist()
            for slot, row in zip(step.group, rows, strict=True):
                entry = entries[slot]
                own = tokens[slot][: entry.emitted]
                self._commit(row, own, logprobs[slot][: entry.emitted], logits, entry)
                committed.append((row.number, own))
        self._spent(rows, number, time.perf_counter() - began, 1)
        return committed

    def _verify_chain(
        self, buffers: _Buffers, step: HostStep
    ) -> tuple[torch.Tensor, Mapping[int, torch.Tensor] | None, Any]:
        """Logits and hidden states of a pass, and what `verify` makes of them."""
        number, most, counts, lengths = step.level, step.most, step.counts, step.lengths
        level, slots = self._levels[number - 1], self._slots
        input_ids = torch.from_numpy(step.input_ids)
        width = input_ids.shape[1]
        # Whether the logits wanted stand behind the last tokens, alike in all rows.
        begin = width - most - 1
        last = min(counts) == width and step.first.count(begin) == len(slots)
        block = InputBlock(
            self._known(input_ids, level), most + 1, hidden_layers=self._layers_of(number)
        )
        if not last:
            block.counts, block.first = counts, step.first
        logits, hidden = self._forward(number, block)
        fields = None
        if len(slots) > 1 or not last:
            fields = Plan(*moved(torch.from_numpy(step.plan), logits.device).unbind())
        if self._processors is not None:
            logits = self._processed(logits, buffers.state, step.group, lengths)
        even = lengths.count(most) == len(lengths)
        greedy = self._parameters.greedy
        r = steps.verify(
            self.config,
            number,
            logits,
            steps.pending_tokens(
                input_ids.to(logits.device), None if last or fields is None else fields.first, most
            ),
            None if greedy or most == 0 else buffers.pending.get(number),
            self._parameters,
            lengths=None if even or fields is None else fields.lengths,
            # A single row's are scalars, which cost the operator less than tensors.
            positions=step.positions[0] if fields is None else fields.positions,
            rounds=step.rounds[0] if fields is None else fields.rounds,
        )
        return logits, hidden, r

    def _verify_tree(
        self, buffers: _Buffers, step: HostStep, tree: Tree
    ) -> tuple[
        torch.Tensor,
        Mapping[int, torch.Tensor] | None,
        Any,
        tuple[list[int], torch.Tensor],
    ]:
        """The same of a tree: logits and hidden states in text order along the path that stands,
        and where the tree begins in each row's cache, and the path."""
        number, slots = step.level, self._slots
        level, held = self._levels[number - 1], self._held[number - 1]
        read, path = torch.tensor(step.counts), torch.tensor(step.lengths)
        lag = max(n - own for n, own in zip(step.counts, step.lengths, strict=True))
        given = tree_pass(torch.from_numpy(step.input_ids), read, path, tree, lag)
        block = InputBlock(
            self._known(given.tokens, level),
            tree.tokens.shape[1] + 1,
            given.counts.tolist(),
            given.first.tolist(),
            given.parents.to(level.device),
            self._layers_of(number),
            given.lag + step.most,
        )
        logits, hidden = self._forward(number, block)
        if self._processors is not None:
            logits = self._processed_tree(logits, buffers.state, step, tree)
        table = moved(torch.from_numpy(step.plan)[4:], logits.device)
        r = steps.verify_tree(
            self.config,
            number,
            logits,
            tree,
            None if self._parameters.greedy else buffers.pending.get(number),
            self._parameters,
            depth=step.most,
            positions=step.positions[0] if len(slots) == 1 else table[0],
            rounds=step.rounds[0] if len(slots) == 1 else table[1],
        )
        logits, hidden = _along(given, logits, hidden, r)
        begin = [h + lag for h, lag in zip(held, given.lags.tolist(), strict=True)]
        return logits, hidden, r, (begin, r.path)

    def _handed_up(
        self,
        buffers: _Buffers,
        step: HostStep,
        logits: torch.Tensor,
        statistics: torch.Tensor,
        place: torch.Tensor,
        length: int,
    ) -> RowBuffer | None:
        number = step.level
        active = [row.slot for row in self._slots if not row.ended]
        once = all(self._rounds[slot][number - 2] == 1 for slot in active)
        if once and len(step.group) == len(active) and not (number == 2 and self.config.tail):
            # The level does not run again before they are verified, and nothing else is pending.
            return RowBuffer(logits, statistics)
        where, old = place.to(logits.device), buffers.rows.get(number - 1)
        buffers.rows[number - 1] = steps.hand_up(old, logits, statistics, where, length)
        return buffers.handed_up(number - 1)

    def _keep_hidden(
        self,
        state: StateRows,
        step: HostStep,
        hidden: Mapping[int, torch.Tensor],
        entries: Sequence[Entry],
    ) -> None:
        """The states of a pass are told with the next draft, as far as their tokens stand then."""
        rows = [slot for slot, count in enumerate(step.counts) if count]
        for told in self._hidden:
            for slot in rows:
                # All but the last token, which is the level's own, stood before.
                left = len(state.text(slot)) - 1 - told.positions[slot]
                told.counts[slot] = max(0, min(told.counts[slot], left))
        begin, stand = [0] * len(step.counts), [0] * len(step.counts)
        for slot in rows:
            begin[slot] = self._held[step.level - 1][slot]
            stand[slot] = step.counts[slot] - step.lengths[slot] + entries[slot].accepted
        self._hidden.append(HiddenStates(step.level, dict(hidden), begin, stand))

    def _rollback(
        self,
        state: StateRows,
        number: int,
        kept: list[list[int]],
        path: tuple[list[int], torch.Tensor] | None = None,
    ) -> None:
        """Caches from level `number` downwards forget what no longer stands; of a tree that level
        `number` has read, what is not on its path."""
        for below in range(number, self._count + 1):
            held, wanted = self._held[below - 1], kept[below - 1]
            tree = path if below == number else None
            if not self._begun[below - 1] or (held == wanted and tree is None):
                continue
            with named(self.config.names, below - 1, self._slots):
                if tree is None:
                    left = self._parts[below - 1].rollback(wanted)
                else:
                    level, (begin, nodes) = self._levels[below - 1], tree
                    left = level.keep_path(begin, nodes.to(level.device), wanted)
            self._held[below - 1] = [int(n) for n in left]
            for slot, (have, want) in enumerate(zip(self._held[below - 1], wanted, strict=True)):
                if have < want:
                    state.set_cached(slot, below, have)

    def _processed(
        self, logits: torch.Tensor, state: StateRows, group: Sequence[int], lengths: Sequence[int]
    ) -> torch.Tensor:
        assert self._processors is not None
        changed = logits.to(torch.float32, copy=True)  # as processors give it, whatever the dtype
        for slot in group:
            prefix = state.text(slot).to(logits.device)
            own = logits[slot, : lengths[slot] + 1]
            number = self._slots[slot].number
            changed[slot, : lengths[slot] + 1] = self._processors.apply(own, prefix, number)
        return changed

    def _processed_tree(
        self, logits: torch.Tensor, state: StateRows, step: HostStep, tree: Tree
    ) -> torch.Tensor:
        assert self._processors is not None
        changed = logits.to(torch.float32, copy=True)
        for slot in step.group:
            text, number = state.text(slot), self._slots[slot].number
            root = text[: len(text) - step.lengths[slot]]
            for node in range(-1, int(tree.counts[slot])):
                prefix = torch.cat([root, root.new_tensor(tree.path_to(slot, node))])
                own = logits[slot, node + 1 : node + 2]
                changed[slot, node + 1 : node + 2] = self._processors.apply(
                    own, prefix.to(logits.device), number
                )
        return changed

    # ---- without host synchronisation ------------------------------------------------------------

    def _at_once(self, plan: RoundPlan, buffers: _Buffers) -> Committed:
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
            most = plan.drafts_at(place) if draft else plan.most[number - 1]
            # A first draft is no row's tail; a later one may be, where a window is full early.
            tail = draft and plan.tail > 0 and place > 0
            step = partial(self._draft_at_once, plan, buffers, most, tail)
            if not draft:
                step = partial(self._verify_at_once, plan, buffers, number)
            with named(config.names, number - 1, slots):
                if graphs is None:
                    outputs = step()
                else:
                    # The levels below are cut as well, so the graph depends on where they are.
                    touched = [span for at, span in spans.items() if at >= number]
                    kind = "a draft" if draft else f"the verification of {config.names[number - 1]}"
                    sizes = [number, plan.windows, plan.most, most, tail]
                    key = [*sizes, config.rule, buffers.place(), *touched]
                    outputs = graphs.run(kind, key, step)
            clock.tick()
        packed, logits = outputs
        assert packed is not None
        assert logits is not None
        return self._read(plan, buffers, packed, logits, clock)

    def _draft_at_once(
        self, plan: RoundPlan, buffers: _Buffers, most: int, tail: bool
    ) -> tuple[torch.Tensor | None, ...]:
        drafter, number, state = self._drafter, self._count, buffers.state
        assert drafter is not None
        width, told = plan.width(number), buffers.told
        if told is not None:
            # From the first token on whose state is told, and the one that was emitted last.
            width = max(width, told.width + 1)
            unread = torch.where(told.counts > 0, told.begin, torch.iinfo(torch.int64).max)
            with state.read_again(number, unread):
                input_ids, table = state.next_step(number, width)
        else:
            input_ids, table = state.next_step(number, width)
        fields = Plan(*table.unbind())
        wants = not buffers.parameters.greedy
        block = drafter.draft(
            DraftInput(
                self._known(input_ids, drafter),
                fields.counts,
                fields.lengths,
                most,
                fields.positions,
                fields.rounds,
                number,
                buffers.parameters,
                wants,
                (),
                rows=buffers.rows.get(number - 1),
                hidden=() if told is None else (told.told(),),
            )
        )
        if told is not None:
            told.forget(fields.part)
        # What the drafter has read too much goes with the verification that follows.
        if drafter.capabilities.tree_size is None:
            self._require_chain(block)
            assert block.status is not None
            assert block.rows is not None or not wants
            buffers.tree = None
            place, _ = state.report(
                number, table, block.tokens, block.counts, block.status, plan.most[0]
            )
        else:
            tree = buffers.keep_tree(pending_tree(block, fields.lengths, most))
            status = torch.zeros_like(tree.longest, dtype=torch.int32)
            place, _ = state.report(
                number, table, tree.longest, tree.depths, status, most, ends=False
            )
        if wants:
            buffers.rows[number - 1] = block.rows
            if tail:
                self._hand_up_tail(buffers, block, table, place)
        return ()

    def _verify_at_once(
        self, plan: RoundPlan, buffers: _Buffers, number: int
    ) -> tuple[torch.Tensor | None, ...]:
        state, most = buffers.state, plan.most[number - 1]
        input_ids, table = state.next_step(number, plan.width(number))
        fields = Plan(*table.unbind())
        level, greedy = self._levels[number - 1], buffers.parameters.greedy
        rows = None if greedy or most == 0 else buffers.handed_up(number)
        lags = fields.counts - fields.lengths
        tree = buffers.tree if number == self._count - 1 and plan.drafts else None
        if tree is None:
            given = self._known(input_ids, level)
            block = InputBlock(
                given, most + 1, fields.counts, fields.first, hidden_layers=self._layers_of(number)
            )
            logits, hidden = self._forward(number, block)
            r = steps.verify(
                self.config,
                number,
                logits,
                steps.pending_tokens(input_ids, fields.first, most),
                rows,
                buffers.parameters,
                lengths=fields.lengths,
                positions=fields.positions,
                rounds=fields.rounds,
            )
        else:
            lag = input_ids.shape[1] - most
            read = tree_pass(input_ids, fields.counts, fields.lengths, tree, lag)
            block = InputBlock(
                self._known(read.tokens, level),
                tree.tokens.shape[1] + 1,
                read.counts,
                read.first,
                read.parents,
                self._layers_of(number),
                lag + most,
            )
            logits, hidden = self._forward(number, block)
            r = steps.verify_tree(
                self.config,
                number,
                logits,
                tree,
                rows,
                buffers.parameters,
                depth=min(most, tree.tokens.shape[1]),
                positions=fields.positions,
                rounds=fields.rounds,
            )
            logits, hidden = _along(read, logits, hidden, r)
        length = plan.most[number - 2] if number > 1 else 0
        place, kept = state.report(number, table, r.tokens, r.num_accepted, r.status, length)
        for below in plan.asked:
            if below == number and tree is not None:
                level.keep_path(fields.positions, r.path, kept[below - 1])
            elif below >= number:
                self._parts[below - 1].rollback(kept[below - 1])
        if buffers.told is not None and hidden is not None:
            begin = fields.positions - lags
            stand = torch.where(fields.part > 0, kept[number - 1] - begin, 0)
            buffers.told.add(number, hidden, begin, stand)
        if number == 1:
            return state.record(r.tokens, r.logprobs), logits
        if not greedy:
            old = buffers.rows.get(number - 1)
            buffers.rows[number - 1] = steps.hand_up(old, logits, r.statistics, place, length)
        return ()

    def _read(
        self,
        plan: RoundPlan,
        buffers: _Buffers,
        packed: torch.Tensor,
        logits: torch.Tensor,
        clock: Clock,
    ) -> Committed:
        """The one place where such a round waits for the device."""
        assert plan.steps is not None
        slots = self._slots
        record, seconds = buffers.state.read(packed), clock.seconds()
        size = None if self._drafter is None else self._drafter.capabilities.tree_size
        for place, number in enumerate(plan.steps):
            entries = [own[place] for own in record.entries]
            group = [slot for slot, entry in enumerate(entries) if entry.tokens >= 0]
            self._raise_for_entries(number, entries, group)
            draft = number == self._count
            for slot in group:
                entry, stats = entries[slot], slots[slot].stats
                if draft:
                    nodes = entry.emitted if size is None else size(entry.tokens).nodes
                    self._recorder.proposed(stats, nodes)
                else:
                    self._recorder.verified(
                        stats,
                        number - 1,
                        entry.tokens,
                        entry.accepted,
                        entry.emitted,
                        entry.of_tail,
                    )
            rows = [slots[slot] for slot in group]
            self._spent(rows, number, seconds[place], plan.drafts_at(place) if draft else 1)
        self._take_progress(record.progress)
        for number in plan.asked:
            self._on_device(number).note_lengths(self._held[number - 1])
        committed = []
        for row in slots:
            entry = record.entries[row.slot][len(plan.steps) - 1]
            if entry.tokens < 0:
                continue
            tokens = record.tokens[row.slot][: entry.emitted]
            logprobs = record.logprobs[row.slot][: entry.emitted]
            self._commit(row, tokens, logprobs, logits, entry)
            committed.append((row.number, tokens))
        return committed

    def _on_device(self, number: int) -> DeviceLengths:
        return cast(DeviceLengths, self._parts[number - 1])

    # ---- both ------------------------------------------------------------------------------------

    def _known(self, input_ids: torch.Tensor, part: Part) -> torch.Tensor:
        """`input_ids` where a level reads them, without ids that it does not know."""
        ids = input_ids if input_ids.device == part.device else input_ids.to(part.device)
        fewer = part.vocab_size < self.config.vocab_sizes[0]
        return known_ids(ids, part.vocab_size) if fewer else ids

    def _forward(
        self, number: int, block: InputBlock
    ) -> tuple[torch.Tensor, Mapping[int, torch.Tensor] | None]:
        """A level's logits, without ids that it may not draw, and hidden states."""
        logits, hidden = self._levels[number - 1].forward(block)
        vocab = self.config.vocab_sizes[number - 1]
        return (logits[..., :vocab] if logits.shape[-1] > vocab else logits), hidden

    def _commit(
        self,
        row: Row,
        tokens: list[int],
        logprobs: list[float],
        logits: torch.Tensor,
        entry: Entry,
    ) -> None:
        row.tokens += tokens
        row.logprobs += logprobs
        self._recorder.committed(row.stats, len(tokens))
        if self._observe is not None:
            self._observe(row.number, logits[row.slot, : len(tokens)])
        row.ended = row.ended or bool(entry.ended) or len(row.logprobs) >= row.max_new_tokens

    def _raise_for_entries(
        self, number: int, entries: Sequence[Entry], group: Sequence[int]
    ) -> None:
        for slot in group:
            entry = entries[slot]
            if entry.status & ERROR_BITS:
                good = entry.emitted if number == self._count else entry.accepted
                at = entry.position + good
                raise RequestError(self._slots[slot].number, number, at, entry.status)

    def _spent(self, rows: Sequence[Row], number: int, seconds: float, passes: int) -> None:
        self._recorder.spent([row.stats for row in rows], number - 1, seconds, passes)


class _Buffers:
    """What one batch size keeps at its place from round to round.

    Args:
        state: the state rows.
        apart: whether the host reads them after each step.
    """

    def __init__(self, state: StateRows, apart: bool) -> None:
        self.state, self.apart = state, apart
        self.most: Sequence[int] = ()  # of the round's plan, step by step
        self.tree: Tree | None = None  # pending for the level above the drafter
        self.told: StatesWindow | None = None  # without host synchronisation
        self.parameters = FixedParameters(state.batch, state.device)
        # By the level that will verify them: what the pending tokens were drawn from, and the
        # memory to keep that in, which may be another level's own logits instead.
        self.pending: dict[int, RowBuffer | None] = {}
        self.rows: dict[int, RowBuffer | None] = {}
        # Whether the statistics of all rows that are pending for the target are known.
        self.known = True

    def handed_up(self, number: int) -> RowBuffer | None:
        """Rows of the tokens that are pending for level `number`, in the memory to keep them in."""
        rows = self.rows.get(number)
        return rows if rows is None or number > 1 or self.known else rows._replace(statistics=None)

    def keep_tree(self, tree: Tree) -> Tree:
        """`tree`, pending from now on, where the last one was if that is of its shape: captured
        steps find it there."""
        now = self.tree
        forms = [[None if one is None else one.shape for one in each] for each in (now or (), tree)]
        if now is None or forms[0] != forms[1]:
            drawn = None if tree.drawn is None else tree.drawn.clone()  # the drafter's own
            self.tree = tree._replace(drawn=drawn)
            return self.tree
        for own, new in zip(now, tree, strict=True):
            if own is not None and new is not None:
                own.copy_(new)
        return now

    def place(self) -> Place:
        """All of it that captured steps use."""
        tuples = [*self.rows.values(), self.tree]
        rows = [t for own in tuples if own is not None for t in own if t is not None]
        told = [] if self.told is None else self.told.tensors
        return Place(self, [*self.state.tensors, *self.parameters.tensors, *rows, *told])


def _along(
    read: TreePass,
    logits: torch.Tensor,
    hidden: Mapping[int, torch.Tensor] | None,
    result: Any,
) -> tuple[torch.Tensor, Mapping[int, torch.Tensor] | None]:
    """Logits and hidden states of a pass over a tree, of the path that stands, in text order."""
    drawn = result.rows.clamp_min(0)[..., None]
    logits = logits.gather(1, drawn.expand(-1, -1, logits.shape[2]))
    if hidden is not None:
        hidden = {
            layer: read.in_text_order(states, result.path.to(states.device))
            for layer, states in hidden.items()
        }
    return logits, hidden


def _largest(sizes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The largest of each place."""
    return sizes[0] if len(sizes) == 1 else tuple(map(max, zip(*sizes, strict=True)))


def _moved(rows: RowBuffer | None, device: torch.device) -> RowBuffer | None:
    """`rows` where the level that verifies them is."""
    if rows is None or rows.logits.device == device:
        return rows
    statistics = rows.statistics
    return RowBuffer(
        moved(rows.logits, device), None if statistics is None else moved(statistics, device)
    )
