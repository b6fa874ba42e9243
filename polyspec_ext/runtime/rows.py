"""The rows of a batch. A state row has a request's tokens and, for each level, cached length,
pending draft tokens, window and round count. Pending rows are the draft logits of these tokens.

`StateRows.next` is where the two executors differ. Either the host reads the rows between steps,
and they say which one is due, or the steps follow a plan, and the host reads one copy of a round.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..drafters.base import DraftBlock, RowBuffer
from ..levels.base import EncodedInput, IdMap
from ..ops import schedule, unchecked
from ..ops.schedule import HostRounds, HostStep, Plan, RoundShape
from ..sampling import (
    LogitsProcessors,
    RequestProcessors,
    RowProcessor,
    Sampling,
    Words,
    stacked,
)
from ..stats import Stats
from ..tensors import Place, RowCounts, RowParameters, moved, on_device
from .hidden import HiddenWindow
from .trees import Tree, pending_tree, require_tree, with_repeats

_CPU = torch.device("cpu")


@dataclass(slots=True)
class Row:
    """A request, as the host knows it.

    Attributes:
        number: its index in the batch, for messages.
        tokens: prompt and committed tokens.
        encoded: input of the encoder in a chain of encoder-decoder models.
        slot: its row in the caches, another one when neighbours leave.
        logprobs: of the committed tokens, under the target's processed distribution.
        ended: the text is complete.
        paused: the row takes no part in the rounds to come.
        origins: of the committed tokens (`trace.origins`), where they are traced.
        window_bound: no window of the row is larger; None: no bound.
        policy_number: by which a policy knows the row; numbers of rows that left are used again.
        num_reported: committed tokens that the policy has been told of.
        error: why the request has failed.
        processors: of its logits, in the order of application.
        kept: committed tokens when copies of it were kept last; 0: none were.
    """

    number: int
    tokens: list[int]
    max_new_tokens: int
    sampling: Sampling
    seed: int
    eos: frozenset[int]
    stats: Stats
    encoded: EncodedInput | None = None
    slot: int = 0
    logprobs: list[float] = field(default_factory=list)
    ended: bool = False
    paused: bool = False
    origins: list[Any] = field(default_factory=list)
    window_bound: int | None = None
    policy_number: int = 0
    num_reported: int = 0
    error: Exception | None = None
    processors: list[RowProcessor] = field(default_factory=list)
    kept: int = 0

    def __post_init__(self) -> None:
        self.slot = self.policy_number = self.number
        self.num_reported = len(self.tokens)
        self.ended = self.max_new_tokens == 0

    @property
    def committed(self) -> int:
        return len(self.tokens)

    @property
    def active(self) -> bool:
        return not self.ended and not self.paused

    @property
    def room(self) -> int:  # new tokens that are left
        return 0 if self.ended or self.paused else self.max_new_tokens - len(self.logprobs)


# ---- steps ---------------------------------------------------------------------------------------

# A step in one row (`RoundShape::Log`): tokens to draft or to verify (-1: the row took no part),
# position of the first of them, accepted, emitted, 1 if the last of these ends the text, status
# bits, tokens of a tail among the first.
Entry = Sequence[int]


class PlannedStep(NamedTuple):
    """A step before its tokens are known: as `Step`, and a row reads at most `width` tokens."""

    level: int
    most: int
    width: int
    tail: bool


class Step(NamedTuple):
    """A step of a round: the tokens that its level drafts or verifies in every row.

    Attributes:
        level: n for a draft.
        most: tokens that a row drafts or verifies at most.
        lag: no row has more tokens to read in front of these.
        tail: whether some row may draft a tail.
        input_ids: ``[B, T]`` int64, tokens to read, at the front of each row.
        table: ``[7, B]`` int64; plan: its rows. The next step may write over them.
        host: the same in lists, where the host reads the rows.
        numbers: 1, 2, ... on the rows' device, where it does not.
    """

    level: int
    most: int
    lag: int
    tail: bool
    input_ids: torch.Tensor
    table: torch.Tensor
    plan: Plan
    host: HostStep | None
    numbers: torch.Tensor | None = None

    def on(self, device: torch.device) -> Plan:
        """Return `plan` on `device`."""
        if self.table.device == device:
            return self.plan
        return Plan._make(moved(self.table, device).unbind())

    def by_row(self, name: str) -> RowCounts:
        """Return a row of `plan` by its name, with the values where the host knows them."""
        host = None if self.host is None else getattr(self.host, name)
        return RowCounts(host, getattr(self.plan, name))

    def pending(self, device: torch.device) -> torch.Tensor:
        """Return the tokens to verify among `input_ids`, ``[B, most]`` on `device`."""
        if self.host is not None:
            tokens = torch.from_numpy(self.host.pending())
            return tokens if tokens.device == device else tokens.to(device)
        input_ids = moved(self.input_ids, device)
        numbers = self.numbers
        if numbers is None or numbers.device != device:
            numbers = torch.arange(1, self.most + 1, device=device)
        reach = self.on(device).first[:, None] + numbers[: self.most]
        # Ids past a row's last token are not read, so the last column may be read again.
        return input_ids.gather(1, reach.clamp_max(input_ids.shape[1] - 1))


class Report(NamedTuple):
    """The effect of a step on the state rows.

    Attributes:
        slots: ``[B, W]`` int64, index of each emitted token among those that are pending for the
            level above; None: not asked for.
        kept: by level, arguments of `RowCounts`: the cached lengths that remain.
        entries: by row; empty where the host does not read the rows, and then `status` is 0.
        cut: the levels from the step's downwards whose cache holds more; None: any may.
    """

    slots: torch.Tensor | None
    kept: Sequence[tuple[Any, ...]]
    entries: Sequence[Entry] = ()
    cut: Sequence[int] | None = None
    status: int = 0


class Record(NamedTuple):
    """A round as the host reads it: of every step the entries by row; and by row the tokens of the
    target, as many as its entry says, with their log-probabilities."""

    entries: Sequence[Sequence[Entry]]
    tokens: list[list[int]]
    logprobs: list[list[float]]


# ---- state rows ----------------------------------------------------------------------------------


class StateRows:
    """The state rows of one batch.

    Args:
        levels: n.
        batch: rows, B.
        steps: steps that are entered before the host reads them.
        capacity: tokens per text.
        eos: ids that end a text, at most.

    Attributes:
        head: ``[B, shape.log_at]`` int64, header and levels of each row as the host knows them: the
            rows themselves on the CPU, elsewhere as they were when it last read them.
        windows: of level 1 ... n-1, then their rounds, by row; as in `head`.
        numbers: ``[capacity]`` int64, 1, 2, ...
        queue: planned steps that are left of the round; None: the rows say which step is due.
        log: entries of the round's steps, where the host reads each.
    """

    def __init__(
        self,
        levels: int,
        batch: int,
        steps: int = 1,
        capacity: int = 0,
        eos: int = 1,
        device: torch.device = _CPU,
    ) -> None:
        self.shape = shape = RoundShape(levels, steps, capacity)
        self.batch, self.device = batch, device
        self.words = torch.zeros(batch, shape.words, dtype=torch.int64, device=device)
        self.eos = torch.full((batch, eos), -1, dtype=torch.int64, device=device)
        self.numbers = torch.arange(1, capacity + 1, device=device)
        self.queue: Iterator[PlannedStep] | None = None
        self.log: list[Sequence[Entry]] = []
        self._levels = [shape.level_at(level) for level in range(1, levels + 1)]
        # Windows of all levels but the drafter, then their bounds; and all that a batch keeps.
        above, kept = self._levels[:-1], (shape.CACHED, shape.ROUND)
        self._sizes = [at + word for word in (shape.WINDOW, shape.BOUND) for at in above]
        self.windows = [(0,) * len(self._sizes)] * batch
        self._lasting = [*self._sizes, *(at + word for word in kept for at in self._levels)]
        self._drafted = self._levels[-1] + shape.CACHED  # word of the drafter's cached length
        if device.type == "cpu":  # the same memory
            host = self.words.numpy()
            self.head: npt.NDArray[np.int64] = host[:, : shape.log_at]
            self._rounds = HostRounds(shape, host, self.eos.numpy())
            self._table = torch.from_numpy(self._rounds.plan)
            self._plan = Plan._make(self._table.unbind())
        else:
            self.head = np.zeros((batch, shape.log_at), np.int64)

    def fits(self, steps: int, capacity: int) -> bool:
        return steps <= self.shape.steps and capacity <= self.shape.capacity

    def write(self, rows: Sequence[Row], before: StateRows, tail: int = 0) -> None:
        """Write these rows, with windows, cached lengths and round counts of `before`, and at most
        `tail` tokens of a tail. Nothing is pending."""
        shape = self.shape
        table = torch.zeros(self.batch, shape.words, dtype=torch.int64)
        host = table.numpy()
        host[:, self._lasting] = before.head[:, self._lasting]
        self.windows = list(before.windows)
        host[:, shape.TAIL_WINDOW] = tail
        for words, row in zip(host, rows, strict=True):
            words[shape.TOTAL], words[shape.ROOM] = len(row.tokens), row.room
            words[shape.text_at : shape.text_at + len(row.tokens)] = row.tokens
        ends = [[*sorted(row.eos), *[-1] * (self.eos.shape[1] - len(row.eos))] for row in rows]
        if self.device.type != "cpu":
            self.head, table = host[:, : shape.log_at], table.pin_memory()
        self.words.copy_(table, non_blocking=True)
        self.eos.copy_(on_device(ends, torch.int64, self.device).view_as(self.eos))

    def select(self, rows: Sequence[int | None]) -> StateRows:
        """Return windows, cached lengths and round counts of these rows, in that order; None: of a
        row that begins."""
        made = StateRows(self.shape.levels, len(rows))
        for place, row in enumerate(rows):
            if row is not None:
                made.head[place] = self.head[row]
                made.windows[place] = self.windows[row]
        return made

    @property
    def round_counts(self) -> npt.NDArray[np.int64]:
        """Return a copy of the round counts of each level, by row, as the host knows them."""
        return self.head[:, [at + self.shape.ROUND for at in self._levels]]

    def begin_again(self, round_counts: npt.NDArray[np.int64]) -> None:
        """Set the round counts of each level, and empty all caches."""
        self.head[:, [at + self.shape.ROUND for at in self._levels]] = round_counts
        self.head[:, [at + self.shape.CACHED for at in self._levels]] = 0

    def set_windows(self, slot: int, sizes: Sequence[int]) -> None:
        """Set `windows` of one row from its next step on."""
        self.windows[slot] = tuple(sizes)
        self.head[slot, self._sizes] = sizes
        if self.device.type != "cpu":
            for word, size in zip(self._sizes, sizes, strict=True):
                self.words[slot, word] = size

    def cached(self, level: int) -> list[int]:
        """Return the cached lengths of `level` by row, as the host knows them."""
        lengths: list[int] = self.head[:, self._levels[level - 1] + self.shape.CACHED].tolist()
        return lengths

    def read_by(self, level: int) -> torch.Tensor:
        """Return the cached lengths of `level`, ``[B]`` int64 on the rows' device."""
        return self.words[:, self._levels[level - 1] + self.shape.CACHED]

    def set_cached(self, level: int, cached: Sequence[int]) -> None:
        """Set the cached lengths of `level` by row."""
        word = self._levels[level - 1] + self.shape.CACHED
        self.head[:, word] = cached
        if self.device.type != "cpu":
            self.words[:, word] = on_device(cached, torch.int64, self.device)

    def end(self, slot: int) -> None:
        """Exclude a row from all steps to come."""
        self.words[slot, self.shape.ROOM] = 0

    def complete(self) -> torch.Tensor:
        """Return which rows are complete, ``[B]`` bool."""
        return self.words[:, self.shape.ROOM] <= 0

    def text(self, slot: int) -> torch.Tensor:
        """Return the text of a row with its pending tokens, ``[N]`` int64 on the CPU."""
        begin = self.shape.text_at
        return self.words[slot, begin : begin + int(self.head[slot, self.shape.TOTAL])]

    def next(self, unread: torch.Tensor | None = None) -> Step | PlannedStep | None:
        """Return the step to do now: the next of the queue, whatever the steps before have emitted;
        else a draft, or the deepest verification that is due, so that rows that lag find the others
        at the same level.

        Args:
            unread: ``[B]`` int64, the drafter reads from this position on at the latest.
        """
        if self.queue is not None:
            return next(self.queue, None)
        before = None if unread is None else self._read_again(unread)
        due = self._rounds.next()
        if before is not None:
            self.words[:, self._drafted] = before
        if due is None:  # every row is complete
            return None
        input_ids = torch.from_numpy(due.input_ids)
        return Step(due.level, due.most, due.lag, due.tail, input_ids, self._table, self._plan, due)

    def step(
        self,
        level: int,
        most: int,
        width: int,
        tail: bool = False,
        unread: torch.Tensor | None = None,
    ) -> Step:
        """Return a step of `level`, in which rows that are due for another one idle, without host
        synchronisation.

        Args:
            most, width, tail: as of `PlannedStep`.
            unread: as of `next`, of a draft.
        """
        if unread is not None:
            # It stays, since few operators are captured; the report of a draft writes it anew.
            cached = self.words[:, self._drafted]
            torch.minimum(cached, unread, out=cached)
        input_ids, table = schedule.next_step(self.words, self.shape, level, width)
        plan = Plan._make(table.unbind())
        lag, numbers = width - most, self.numbers
        return Step(level, most, lag, tail, input_ids, table, plan, None, numbers)

    def _read_again(self, unread: torch.Tensor) -> torch.Tensor:
        cached = self.words[:, self._drafted]
        before = cached.clone()
        torch.minimum(before, unread, out=cached)
        return before

    def report(
        self,
        step: Step,
        tokens: torch.Tensor,
        counts: torch.Tensor | None,
        status: torch.Tensor | None,
        padding: int | None = None,
        ends: bool = True,
    ) -> Report:
        """Enter the tokens of a step, on any device if `next` returned it.

        Args:
            tokens ... padding: see `schedule.report`; `status` None: no error in a draft. `padding`
                None: no slots are wanted.
            ends: whether a token may end a text.
        """
        if step.host is None:
            if status is None:
                status = torch.zeros_like(tokens, dtype=torch.int32)
            eos, level = self.eos if ends else self.eos[:, :0], step.level
            slots, kept = schedule.report(
                self.words, self.shape, level, step.table, tokens, counts, status, eos, padding or 0
            )
            return Report(slots, list(zip(itertools.repeat(None), kept.unbind())))
        made = self._rounds.report(
            step.host,
            tokens.cpu().numpy(),
            None if counts is None else counts.cpu().numpy(),
            None if status is None else status.cpu().numpy(),
            padding or 0,
            ends,
        )
        entries = made.entries
        self.log.append(entries)
        wanted = None if padding is None else torch.from_numpy(made.slots)
        return Report(wanted, list(zip(made.kept)), entries, made.cut, made.status)

    def record(self, tokens: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
        """Return what the host reads of a round, ``[B, N]`` int64: the rows without their texts,
        and the target's tokens, ``[B, W]`` int64, with log-probabilities, ``[B, W]`` float32."""
        bits = logprobs.view(torch.int32).to(torch.int64)
        return torch.cat([self.words[:, : self.shape.text_at], tokens, bits], 1)

    def read(self, record: torch.Tensor) -> Record:
        """Return a round's record on the host, and empty the log. Waits for the device."""
        self.words[:, self.shape.STEP].zero_()
        shape, table = self.shape, record.cpu()
        width = (table.shape[1] - shape.text_at) // 2
        probabilities = table[:, shape.text_at + width :].to(torch.int32).view(torch.float32)
        rows: list[list[int]] = table[:, : shape.text_at + width].tolist()
        if self.device.type != "cpu":
            self.head = table.numpy()[:, : shape.log_at]
        begins = range(shape.log_at, shape.text_at, shape.PER_STEP)
        return Record(
            [[words[at : at + shape.PER_STEP] for words in rows] for at in begins],
            [words[shape.text_at :] for words in rows],
            probabilities.tolist(),
        )


# ---- pending draft tokens ------------------------------------------------------------------------


class PendingRows:
    """The draft logits q of all pending tokens, by the level that verifies them (contract C1).

    Rows of a verification are copied into a table with a fixed address: blocks of several passes
    are pending at once, and a level may write over its logits with its next pass. Rows of a drafter
    stay in its buffer.

    Attributes:
        max_pending: tokens that can be pending for level 1 ... n-1.
        tables: rows by level; a drafter's are in its buffer. Empty where all rows are greedy.
        tail_has_statistics: whether the statistics of all rows for the target are known.
        tree: pending for the level above the drafter; None: a chain of tokens.
    """

    def __init__(self) -> None:
        self.max_pending: Sequence[int] = ()
        self.tables: dict[int, RowBuffer | None] = {}
        self.tail_has_statistics = True
        self.tree: Tree | None = None
        # Trees drafted without host synchronisation, by their depth, with their rows.
        self._trees: dict[int, tuple[Tree, RowBuffer | None]] = {}

    def take(self, level: int, device: torch.device) -> RowBuffer | None:
        """Return the rows of the tokens that `level`, on `device`, verifies, ``[B, N, Vd]``; None:
        the tokens are deterministic."""
        rows = self.tables.get(level)
        if rows is None:
            return None
        logits, statistics = rows
        if level == 1 and not self.tail_has_statistics:
            statistics = None
        if logits.device == device:
            return rows if statistics is rows.statistics else RowBuffer(logits, None)
        return RowBuffer(
            moved(logits, device), None if statistics is None else moved(statistics, device)
        )

    def padding(self, level: int) -> int:
        """Return the slot of rows that belong to no token, behind all that can be pending."""
        most, rows = self.max_pending[level - 1], self.tables.get(level)
        return most if rows is None else max(most, rows.logits.shape[1] - 1)

    def append(
        self,
        level: int,
        logits: torch.Tensor,
        statistics: torch.Tensor,
        slots: torch.Tensor,
        padding: int,
    ) -> None:
        """Append the rows that the level below has verified or drawn its emitted tokens with.

        Args:
            logits: ``[B, W, V]``; statistics: ``[B, W, 2]``, of them.
            slots: ``[B, W]`` int64, index of each among those pending; `padding` for the others.
        """
        (batch, _, vocab), device = logits.shape, logits.device
        old = self.tables.get(level)
        # Windows may change: a table that only grows keeps the address of earlier graphs.
        if (
            old is None
            or old.logits.shape[1] <= padding
            or (*old.logits.shape[::2], old.logits.device) != (batch, vocab, device)
            or torch.promote_types(old.logits.dtype, logits.dtype) != old.logits.dtype
        ):
            # Zeros: rows without a token are handed to the operator as well, and must be harmless.
            old = self.tables[level] = RowBuffer(
                logits.new_zeros(batch, padding + 1, vocab),
                statistics.new_zeros(batch, padding + 1, 2),
            )
        table, known = old
        logits, slots = logits.to(table.dtype), slots.to(device)
        unchecked.put_rows(table, known, logits, statistics, slots, padding)

    def append_tail(
        self,
        tokens: torch.Tensor,
        rows: RowBuffer | None,
        slots: torch.Tensor,
        of_tail: torch.Tensor,
        id_map: IdMap,
    ) -> None:
        """Append the rows of a tail for the target, behind those of the level below it.

        Args:
            tokens: ``[B, W]``, drafted; slots: as of `append`.
            rows: ``[B, at least W, Vd]``; None: the tokens are deterministic.
            of_tail: ``[B]`` int64, 0 where a row drafts no tail.
            id_map: of the drafter.
        """
        table = self.tables.get(1)
        if table is None:  # nothing is pending for the target, of any row
            return
        width, vocab = tokens.shape[1], table.logits.shape[2]
        device, padding = table.logits.device, table.logits.shape[1] - 1
        slots = slots.where(of_tail[:, None] > 0, padding)
        if rows is None:
            logits = table.logits.new_full((*tokens.shape, vocab), -float("inf"))
            ids = tokens.to(device).clamp_min(0)[..., None]
            statistics, logits = None, logits.scatter_(2, ids, 0.0)
        else:
            logits, statistics = rows
            logits = logits[:, :width]
            if logits.shape[2] < vocab:  # the statistics are of fewer ids
                logits, statistics = id_map.spread(logits, vocab), None
        logits = logits.to(device)
        dtype = torch.promote_types(table.logits.dtype, logits.dtype)
        if dtype != table.logits.dtype:  # nothing of either is rounded
            table = self.tables[1] = RowBuffer(table.logits.to(dtype), table.statistics)
        statistics = None if statistics is None else statistics[:, :width].to(device)
        known = None if statistics is None else table.statistics
        logits, slots = logits.to(dtype), slots.to(device)
        unchecked.put_rows(table.logits, known, logits, statistics, slots, padding)
        self.tail_has_statistics = self.tail_has_statistics and statistics is not None

    def append_tree(self, name: str, block: DraftBlock, step: Step, vocab_size: int) -> None:
        """Append the trees of a draft: checked where the host reads the rows; else at a fixed
        address. `name` and `vocab_size` are of the drafter and of the level above."""
        if step.host is not None:
            require_tree(name, block, step.host.lengths, vocab_size)
            self.tree = pending_tree(block, step.plan.lengths, step.most)
            if block.rows is not None:
                self.tree = with_repeats(self.tree)
            return
        tree = pending_tree(block, step.plan.lengths, step.most)
        kept = self._trees[step.most][0] if step.most in self._trees else None
        shapes = [[None if x is None else x.shape for x in each] for each in (kept or (), tree)]
        if kept is None or shapes[0] != shapes[1]:
            drawn = None if tree.drawn is None else tree.drawn.clone()  # the drafter writes it
            kept = tree._replace(drawn=drawn)
        else:
            for into, new in zip(kept, tree, strict=True):
                if into is not None and new is not None:
                    into.copy_(new)
        self.tree = kept
        self._trees[step.most] = kept, block.rows

    def begin_draft(self, level: int, most: int) -> None:
        """Make the trees current that a replayed draft of this depth writes for `level`."""
        kept, self.tree = self._trees.get(most), None
        if kept is not None:
            self.tree, self.tables[level] = kept


class Rows:
    """All that is kept by row from round to round, with fixed addresses, so that CUDA graphs can be
    replayed.

    Args:
        state: the state rows.
        on_host: whether the host reads them after each step.

    Attributes:
        parameters: of the rows.
        pending: the draft logits of pending tokens.
        hidden: states of the tokens since the last draft.
        requests: number of each row's request; eos: ids that end each text; text: a row's text.
            Empty and None where the host does not read the rows.
    """

    def __init__(self, state: StateRows, on_host: bool = True) -> None:
        self.state, self.on_host = state, on_host
        self.parameters = RowParameters(state.batch, state.device)
        self.pending = PendingRows()
        self.hidden = HiddenWindow(state.batch, _CPU)
        self.requests: Sequence[int] = ()
        self.eos: Sequence[frozenset[int]] | None = None
        self.text: Callable[[int], torch.Tensor] | None = state.text if on_host else None

    def write(self, slots: Sequence[Row], before: Rows, tail: int, width: int) -> None:
        """Write the requests of a batch (`StateRows.write`), and the hidden states of `before`, at
        most `width` of a row (`HiddenWindow`)."""
        self.state.write(slots, before.state, tail)
        if not width or self.hidden.width < width:
            self.hidden = HiddenWindow(self.state.batch, self.state.device, width)
        self.hidden.write(before.hidden)
        self.parameters.write([row.sampling for row in slots], [row.seed for row in slots])
        if self.on_host:
            self.requests, self.eos = [row.number for row in slots], [row.eos for row in slots]

    def fill(self, step: PlannedStep) -> Step:
        """Return a planned step with its tokens (`StateRows.step`)."""
        level, most, width, tail = step
        if level < self.state.shape.levels or not self.hidden.width:
            return self.state.step(level, most, width, tail)
        # From the first token on whose state is told, and the one that was emitted last.
        width = max(width, self.hidden.width + 1)
        return self.state.step(level, most, width, tail, self.hidden.begin)

    def select(self, keep: Sequence[int | None]) -> Rows:
        """Return windows, cached lengths and hidden states of these rows, in that order; None: of
        a row that begins. What was pending is forgotten."""
        rows = Rows(self.state.select(keep))
        window = HiddenWindow(self.state.batch, _CPU)
        window.write(self.hidden)
        window.select(keep)
        rows.hidden = window
        return rows

    def process(
        self, processors: LogitsProcessors, logits: torch.Tensor, step: Step, tree: Tree | None
    ) -> torch.Tensor:
        """Return the logits of a verification, changed by processors, float32."""
        changed = logits.to(torch.float32, copy=True)
        for slot, rows, prefix in self._texts(step, tree):
            changed[slot, rows] = processors.apply(
                logits[slot, rows], prefix.to(logits.device), self.requests[slot]
            )
        return changed

    def allowed(
        self, processors: RequestProcessors, shape: Sequence[int], step: Step, tree: Tree | None
    ) -> Words:
        """Return the allow-masks of a verification of logits of a shape ``[B, W, V]``,
        ``[B, W, ceil(V / 32)]``."""
        batch, width, vocab_size = shape
        allowed = stacked([None] * (batch * width), vocab_size).reshape(batch, width, -1)
        for slot, rows, prefix in self._texts(step, tree):
            count = rows.stop - rows.start
            masks = processors.masks(prefix.tolist(), count, self.requests[slot])
            allowed[slot, rows] = stacked(masks, vocab_size, step.level > 1)
        return allowed

    def _texts(self, step: Step, tree: Tree | None) -> Iterator[tuple[int, slice, torch.Tensor]]:
        """Yield for each slot of a step rows of the level's logits, and the text that the last of
        them is behind."""
        assert step.host is not None
        for slot in step.host.group:
            text, length = self.state.text(slot), step.host.lengths[slot]
            if tree is None:
                yield slot, slice(0, length + 1), text
                continue
            root = text[: len(text) - length]
            for node in range(-1, int(tree.counts[slot])):
                path = root.new_tensor(tree.path_to(slot, node))
                yield slot, slice(node + 1, node + 2), torch.cat([root, path])

    def place(self, level: int, tail: bool, hidden: bool) -> Place:
        """Return the memory that a captured step of `level` uses, which may draft a `tail` or give
        the drafter `hidden` states."""
        pending, levels = self.pending, self.state.shape.levels
        parameters = self.parameters.on(self.state.device).values()
        tensors = [self.state.words, self.state.eos, self.state.numbers]
        tensors += [value for value in parameters if isinstance(value, torch.Tensor)]
        # Rows that it verifies, and that it appends; a tail goes to the target.
        for at in {level, level - 1, 1} if tail else {level, level - 1}:
            tensors += [tensor for tensor in pending.tables.get(at) or () if tensor is not None]
        if level >= levels - 1 and pending.tree is not None:
            tensors += [tensor for tensor in pending.tree if tensor is not None]
        form: tuple[int | bool, ...] = (level == 1 and not pending.tail_has_statistics,)
        if self.hidden.width and (level == levels or hidden):
            tensors += self.hidden.tensors
            form = (*form, self.hidden.width)
        return Place(self, tensors, form)
