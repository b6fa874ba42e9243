"""The rows of a batch. A state row has a request's tokens and, for each level, cached length,
pending draft tokens, window and round count. Pending rows are the logits of pending draft tokens.

The host reads the rows between steps, and `StateRows.next` computes the next step from them; or
the steps are queued (`runtime.graphs.Queue`), and the host reads the rows once per round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from .. import rooms
from .._C import HostRounds, HostStep, RoundShape
from ..drafters.base import RowBuffer
from ..inputs import Request
from ..ops.decoder import append
from ..stats import LevelStats, Stats
from ..tensors import IdMap, Plan, RowCounts, RowParameters, moved, on_device

_CPU = torch.device("cpu")


@dataclass(slots=True)
class Row:
    """A request on the host.

    Attributes:
        number: index of the request in the batch, for messages.
        names: of the chain's levels, for `stats`.
        tokens: prompt and committed tokens.
        max_new_tokens: of the request; a caller that rewinds the row may change it.
        slot: row in the caches, which changes when other rows leave.
        logprobs: log-probabilities of committed tokens under the target's processed distribution.
        ended: whether the text is complete.
        paused: whether the row idles in the next rounds.
        origins: origins of the committed tokens (`origins` below), if traced.
        policy_number: number of the row for the policy; numbers of removed rows are reused.
        num_reported: committed tokens reported to the policy.
        error: why the request has failed.
        kept: committed tokens at the last copy to the prefix cache; 0: no copy.
        models: the models that read the text first (`Prefixes.forget_unless`).
    """

    number: int
    request: Request
    names: InitVar[Sequence[str]]
    tokens: list[int] = field(init=False)
    max_new_tokens: int = field(init=False)
    stats: Stats = field(init=False)
    slot: int = 0
    logprobs: list[float] = field(default_factory=list)
    ended: bool = False
    paused: bool = False
    origins: list[Any] = field(default_factory=list)
    policy_number: int = 0
    num_reported: int = 0
    error: Exception | None = None
    kept: int = 0
    models: object = None

    def __post_init__(self, names: Sequence[str]) -> None:
        self.tokens, self.max_new_tokens = list(self.request.tokens), self.request.max_new_tokens
        self.stats = Stats([LevelStats(name) for name in names], len(self.tokens))
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
    def room(self) -> int:  # remaining new tokens
        return 0 if self.ended or self.paused else self.max_new_tokens - len(self.logprobs)


# ---- steps ---------------------------------------------------------------------------------------

# A step in one row (`RoundShape::Log`): tokens to draft or verify (-1: the row idled), position of
# the first, accepted tokens, emitted tokens, 1 if the last emitted token ends the text, status
# bits, tail tokens among the tokens to draft or verify.
Entry = Sequence[int]


class Step(NamedTuple):
    """A step of a round: the tokens that its level drafts or verifies in every row.

    Attributes:
        level: n for a draft.
        most: maximum tokens that a row drafts or verifies.
        lag: maximum tokens that a row reads before the tokens to draft or verify.
        tail: whether any row may draft a tail.
        input_ids: ``[B, T]`` int64, tokens to read, left-aligned in each row.
        table: ``[7, B]`` int64; plan: its rows. The next step may overwrite them.
        host: the same as lists, if the host reads the rows.
        pending: the tokens to verify among `input_ids`, ``[B, most]`` int64.
    """

    level: int
    most: int
    lag: int
    tail: bool
    input_ids: torch.Tensor
    table: torch.Tensor
    plan: Plan
    pending: torch.Tensor
    host: HostStep | None = None

    def on(self, device: torch.device) -> Plan:
        """Return `plan` on `device`."""
        if self.table.device == device:
            return self.plan
        return Plan._make(moved(self.table, device).unbind())

    def by_row(self, name: str) -> RowCounts:
        """Return the row `name` of `plan`, with host values where the host knows them."""
        host = None if self.host is None else getattr(self.host, name)
        return RowCounts(host, getattr(self.plan, name))


class Report(NamedTuple):
    """The effect of a step on the state rows: `appended`, ``[2, B]`` int64, how many tokens were
    pending for the level above, and how many emitted tokens follow them; `kept`, the remaining
    cached lengths by level, on the host or the device; `entries` by row, empty if the host does
    not read them (`status` is 0 then); and `cut`, the levels from the step's downwards with caches
    to truncate (None: unknown, all levels of the round)."""

    appended: torch.Tensor
    kept: Sequence[Sequence[int] | torch.Tensor]
    entries: Sequence[Entry] = ()
    cut: Sequence[int] | None = None
    status: int = 0


class Record(NamedTuple):
    """A round on the host: the entries of every step by row; and by row the target's tokens, of
    which the entry's emitted count is valid, with their log-probabilities."""

    entries: Sequence[Sequence[Entry]]
    tokens: list[list[int]]
    logprobs: list[list[float]]


class Origin(NamedTuple):
    """The level that proposed a token, from 1, the target, to n, the drafter; and whether the token
    corrects a draft token that the level rejected."""

    level: int
    corrected: bool


def origins(
    levels: int, steps: Sequence[int], entries: Sequence[Sequence[Entry]], slot: int
) -> list[Origin]:
    """Return the origin of each token emitted by a round of the target in one row.

    Args:
        levels: n.
        steps: the level of each step in order; the last is the target's.
        entries: entries of each step, by row.
    """
    drafted = Origin(levels, False)
    pending: dict[int, list[Origin]] = {level: [] for level in range(levels + 1)}
    for level, by_row in zip(steps, entries, strict=False):  # a log may be longer
        checked, _, accepted, emitted, *_ = by_row[slot]
        if checked < 0:
            continue
        if level == levels and levels > 1:
            pending[level - 1] += [drafted] * emitted
            continue
        # A tail follows the tokens emitted by the level below.
        tokens = [*pending[level], *[drafted] * checked][:accepted]
        pending[level] = []
        pending[level - 1] += [*tokens, *[Origin(level, accepted < checked)] * (emitted - accepted)]
    return pending[0]


# ---- state rows ----------------------------------------------------------------------------------


class StateRows:
    """The state rows of one batch.

    Args:
        levels: n.
        batch: rows, B.
        steps: maximum steps entered before the host reads them.
        capacity: tokens per text.
        eos: maximum ids that end a text.

    Attributes:
        head: ``[B, shape.log_at]`` int64, header and levels of each row on the host: on the CPU
            the rows themselves, elsewhere the last copy that the host read.
        windows: windows of level 1 ... n-1, then their rounds, by row; as in `head`.
        log: entries of the round's steps, if the host reads each step.
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
        self.log: list[Sequence[Entry]] = []
        self._levels = [shape.level_at(level) for level in range(1, levels + 1)]
        # Words of the windows of all levels but the drafter, of their bounds, and of lasting state.
        above, lasting = self._levels[:-1], (shape.CACHED, shape.ROUND)
        self._sizes = [at + word for word in (shape.WINDOW, shape.BOUND) for at in above]
        self.windows = [(0,) * len(self._sizes)] * batch
        self._lasting = [*self._sizes, *(at + word for word in lasting for at in self._levels)]
        if device.type == "cpu":  # the same memory
            host = self.words.numpy()
            self.head: npt.NDArray[np.int64] = host[:, : shape.log_at]
            self._host_rounds = HostRounds(shape, host, self.eos.numpy())
            self._table = torch.from_numpy(self._host_rounds.plan)
            self._plan = Plan._make(self._table.unbind())
        else:
            self.head = np.zeros((batch, shape.log_at), np.int64)

    def fits(self, steps: int, capacity: int) -> bool:
        return steps <= self.shape.steps and capacity <= self.shape.capacity

    def write(self, rows: Sequence[Row], before: StateRows, tail: int = 0) -> None:
        """Write `rows`, with windows, cached lengths and round counts of `before`, a
        tail window of `tail` tokens, and no pending tokens."""
        shape = self.shape
        table = torch.zeros(self.batch, shape.words, dtype=torch.int64)
        host = table.numpy()
        host[:, self._lasting] = before.head[:, self._lasting]
        self.windows = list(before.windows)
        host[:, shape.TAIL_WINDOW] = tail
        for words, row in zip(host, rows, strict=True):
            words[shape.TOTAL], words[shape.ROOM] = len(row.tokens), row.room
            words[shape.text_at : shape.text_at + len(row.tokens)] = row.tokens
        wide = self.eos.shape[1]
        ends = [[*sorted(row.request.eos), *[-1] * (wide - len(row.request.eos))] for row in rows]
        if self.device.type != "cpu":
            self.head, table = host[:, : shape.log_at], table.pin_memory()
        self.words.copy_(table, non_blocking=True)
        self.eos.copy_(on_device(ends, torch.int64, self.device).view_as(self.eos))

    def select(self, rows: Sequence[int | None]) -> StateRows:
        """Return state rows with windows, cached lengths and round counts of `rows`, in that order;
        None: an empty row."""
        state = StateRows(self.shape.levels, len(rows))
        for index, row in enumerate(rows):
            if row is not None:
                state.head[index] = self.head[row]
                state.windows[index] = self.windows[row]
        return state

    @property
    def round_counts(self) -> npt.NDArray[np.int64]:
        """Return a copy of the round counts of each level by row, from `head`."""
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
        """Return the cached lengths of `level` by row, from `head`."""
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
        """Exclude a row from all later steps."""
        self.words[slot, self.shape.ROOM] = 0

    def text(self, slot: int) -> torch.Tensor:
        """Return the text of a row with its pending tokens, ``[N]`` int64 on the CPU."""
        begin = self.shape.text_at
        return self.words[slot, begin : begin + int(self.head[slot, self.shape.TOTAL])]

    def next(self, unread: torch.Tensor | None = None) -> Step | None:
        """Return the next step, on the host: the deepest verification that is due, or a draft, so
        that rows that lag catch up at the same level. None: all rows are complete. The drafter
        reads from position `unread`, ``[B]`` int64, or an earlier position on."""
        due = self._host_rounds.next(None if unread is None else unread.numpy())
        if due is None:  # every row is complete
            return None
        input_ids, pending = torch.from_numpy(due.input_ids), torch.from_numpy(due.pending)
        return Step(
            due.level, due.most, due.lag, due.tail, input_ids, self._table, self._plan, pending, due
        )

    def report(
        self,
        step: Step,
        tokens: torch.Tensor,
        counts: torch.Tensor | None,
        status: torch.Tensor | None,
        ends: bool = True,
    ) -> Report:
        """Enter the tokens of a step (`graphs.report`), on any device if `next` returned the
        step. `status` None: a draft without errors; `ends`: whether a token may end a text."""
        if step.host is None:
            if status is None:
                status = torch.zeros_like(tokens, dtype=torch.int32)
            at = self.shape.levels, self.shape.steps, step.level, step.table
            eos = self.eos if ends else self.eos[:, :0]
            appended, cached = rooms.graphs.report(self.words, *at, tokens, counts, status, eos)
            return Report(appended, cached.unbind())
        result = self._host_rounds.report(
            step.host,
            tokens.cpu().numpy(),
            None if counts is None else counts.cpu().numpy(),
            None if status is None else status.cpu().numpy(),
            ends,
        )
        entries = result.entries
        self.log.append(entries)
        appended = torch.from_numpy(result.appended)
        return Report(appended, result.kept, entries, result.cut, result.status)


# ---- pending draft tokens ------------------------------------------------------------------------


class PendingRows:
    """The draft logits q of all pending tokens, by the level that verifies them (contract C1).

    Rows of a verification are copied into a table with a fixed address: blocks of several passes
    are pending at once, and the next pass of a level may overwrite its logits. Rows of a drafter
    stay in its buffer.

    Attributes:
        max_pending: maximum pending tokens of level 1 ... n-1.
        tables: rows by level; a drafter's are in its buffer. Empty if all rows are greedy.
        tail_has_statistics: whether the statistics of all rows for the target are known.
        tree: pending trees for the level above the drafter; None: a chain of tokens.
        trees: trees drafted without host synchronisation, by depth, with their rows.
    """

    def __init__(self) -> None:
        self.max_pending: Sequence[int] = ()
        self.tables: dict[int, RowBuffer | None] = {}
        self.tail_has_statistics = True
        self.tree: rooms.pending_trees.PendingTree | None = None
        self.trees: dict[int, tuple[rooms.pending_trees.PendingTree, RowBuffer | None]] = {}

    def take(self, level: int, device: torch.device) -> RowBuffer | None:
        """Return the rows of the tokens that `level`, on `device`, verifies, ``[B, N, Vd]``; None:
        a deterministic draft."""
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

    def room(self, level: int) -> int:
        """Return how many rows the table of `level` has, or has to have."""
        most, rows = self.max_pending[level - 1], self.tables.get(level)
        return most if rows is None else max(most, rows.logits.shape[1])

    def append(
        self,
        level: int,
        logits: torch.Tensor,
        statistics: torch.Tensor,
        appended: torch.Tensor,
    ) -> None:
        """Append the rows from which level + 1 drew or accepted its emitted tokens, for `level` to
        verify: logits ``[B, W, V]``, their statistics ``[B, W, 2]``, and `appended` of the
        report."""
        (batch, _, vocab), device = logits.shape, logits.device
        most, old = self.max_pending[level - 1], self.tables.get(level)
        # Windows may change: reuse a large enough table, whose address earlier graphs have.
        if (
            old is None
            or old.logits.shape[1] < most
            or (*old.logits.shape[::2], old.logits.device) != (batch, vocab, device)
            or torch.promote_types(old.logits.dtype, logits.dtype) != old.logits.dtype
        ):
            # Zeros: the operator also reads rows without a token, which must be harmless.
            zeros = statistics.new_zeros(batch, most, 2)
            self.tables[level] = old = RowBuffer(logits.new_zeros(batch, most, vocab), zeros)
        _append_rows(old, logits, statistics, *appended.to(device).unbind())

    def append_tail(
        self,
        tokens: torch.Tensor,
        rows: RowBuffer | None,
        appended: torch.Tensor,
        of_tail: torch.Tensor,
        id_map: IdMap,
    ) -> None:
        """Append the rows ``[B, at least W, Vd]`` of a tail for the target, after the rows of the
        level below the target. `tokens` ``[B, W]`` are the draft; `rows` None: it is deterministic.
        `of_tail` ``[B]`` is 0 in a row that drafts no tail."""
        table = self.tables.get(1)
        if table is None:  # no row has tokens pending for the target
            return
        width, vocab = tokens.shape[1], table.logits.shape[2]
        device = table.logits.device
        if rows is None:
            logits = table.logits.new_full((*tokens.shape, vocab), -float("inf"))
            ids = tokens.to(device).clamp_min(0)[..., None]
            statistics, logits = None, logits.scatter_(2, ids, 0.0)
        else:
            logits, statistics = rows
            logits = logits[:, :width]
            if logits.shape[2] < vocab:  # the statistics cover fewer ids
                logits, statistics = id_map.spread(logits, vocab), None
        logits = logits.to(device)
        dtype = torch.promote_types(table.logits.dtype, logits.dtype)
        if dtype != table.logits.dtype:  # promote, to round no logits
            table = self.tables[1] = RowBuffer(table.logits.to(dtype), table.statistics)
        self.tail_has_statistics = self.tail_has_statistics and statistics is not None
        if statistics is None:  # unread
            statistics = of_tail.new_zeros(len(tokens), width, 2)
        begins, counts = appended
        counts = counts.minimum(of_tail)  # all of a draft's tokens, or none
        statistics = statistics[:, :width].to(device)
        _append_rows(table, logits, statistics, begins.to(device), counts.to(device))


def _append_rows(
    table: RowBuffer,
    logits: torch.Tensor,
    statistics: torch.Tensor,
    begins: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    # The first ``counts[b]`` rows of logits [B, W, V] and statistics [B, W, 2] follow the first
    # ``begins[b]`` rows of the table.
    into, known = table
    assert known is not None
    dtype = into.dtype  # bits are copied
    old, new = known.view(dtype).unsqueeze(1), statistics.view(dtype).unsqueeze(1)
    append(into.unsqueeze(1), old, logits.to(dtype).unsqueeze(1), new, begins, counts)


# ---- all rows ------------------------------------------------------------------------------------


class Rows:
    """The lasting state of a batch by row, at fixed addresses, so that CUDA graphs can be replayed.
    If the host reads the state rows after each step (`on_host`), `requests`, `eos` and `text` have
    request numbers, ids that end each text, and texts. `hidden` are the hidden states for a
    drafter that reads them."""

    def __init__(
        self,
        state: StateRows,
        on_host: bool = True,
        hidden: rooms.features.HiddenWindow | None = None,
    ) -> None:
        self.state, self.on_host, self.hidden = state, on_host, hidden
        self.parameters = RowParameters(state.batch, state.device)
        self.pending = PendingRows()
        self.requests: Sequence[int] = ()
        self.eos: Sequence[frozenset[int]] | None = None
        self.text: Callable[[int], torch.Tensor] | None = state.text if on_host else None

    def write(self, slots: Sequence[Row], before: Rows, tail: int, width: int) -> None:
        """Write the requests of a batch (`StateRows.write`), and the hidden states of `before`, at
        most `width` per row."""
        self.state.write(slots, before.state, tail)
        if before.hidden is not None:
            if not width or self.hidden is None or self.hidden.width < width:
                self.hidden = before.hidden.empty(self.state.batch, self.state.device, width)
            self.hidden.write(before.hidden)
        requests = [row.request for row in slots]
        self.parameters.write([r.sampling for r in requests], [r.seed for r in requests])
        if self.on_host:
            self.requests, self.eos = [row.number for row in slots], [r.eos for r in requests]

    def select(self, keep: Sequence[int | None]) -> Rows:
        """Return rows with windows, cached lengths and hidden states of the rows `keep`, in that
        order; None: an empty row. Pending tokens are dropped."""
        rows = Rows(self.state.select(keep))
        if self.hidden is not None:
            rows.hidden = self.hidden.empty(self.state.batch, _CPU, 0)
            rows.hidden.write(self.hidden)
            rows.hidden.select(keep)
        return rows
