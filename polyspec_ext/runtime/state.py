"""The state rows of a batch: every request's text, and who waits for whom with how many tokens.

On the CPU the host reads and writes them as it likes. On another device they stay from round to
round, and what the host is told of a round comes in one copy (`record`)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..ops import schedule
from ..ops.schedule import HostRounds, HostStep, Plan, RoundShape
from ..tensors import moved, on_device
from .request import Row

_CPU = torch.device("cpu")


# What one step brought one row (`RoundShape::Log`), seven numbers:
#   tokens      to draft or to verify; -1: the row had no part
#   position    of the first of them
#   accepted    of those verified
#   emitted     tokens drafted, or handed up by a verification
#   ended       1 if the last of these ends the text
#   status      status bits
#   of_tail     tokens of a tail among the first
Entry = Sequence[int]


class Step(NamedTuple):
    """One step of a round: what its level has to do in every row.

    Attributes:
        level: n for a draft.
        most: tokens that a row drafts or verifies at most.
        lag: no row has more tokens to read in front of these.
        tail: whether some row may draft a tail.
        input_ids: ``[B, T]`` int64, tokens to read, at the front of each row.
        table: ``[7, B]`` int64; plan: its rows. The next step may write over them.
        host: the same in lists, where the host reads the rows.
    """

    level: int
    most: int
    lag: int
    tail: bool
    input_ids: torch.Tensor
    table: torch.Tensor
    plan: Plan
    host: HostStep | None

    def on(self, device: torch.device) -> Plan:
        """`plan` on `device`."""
        if self.table.device == device:
            return self.plan
        return Plan._make(moved(self.table, device).unbind())


class Report(NamedTuple):
    """What a step has brought.

    Attributes:
        slots: ``[B, W]`` int64, where each emitted token stands among those that are pending for
            the level above; None: nobody asked.
        kept: by level, what `RowCounts` is made of: the tokens of each row that its cache may keep.
        entries: by row; none where the host does not read the rows.
        cut: the levels from the step's own downwards whose cache holds more; None: any may.
        status: the status bits of all entries.
    """

    slots: torch.Tensor | None
    kept: Sequence[tuple[Any, ...]]
    entries: Sequence[Entry] = ()
    cut: Sequence[int] | None = None
    status: int = 0


class StateRows:
    """The state rows of one batch, and the only place that says where each level stands in a row:
    how many tokens its cache has, how many rounds it has done, its window and its bound.

    Args:
        levels: n.
        batch: rows, B.
        steps: steps that are entered before the host reads them.
        capacity: tokens per text.
        eos: ids that end a text, at most.
        device: where the rows lie.

    Attributes:
        head: ``[B, shape.log_at]`` int64, header and levels of each row as the host knows them: the
            rows themselves on the CPU, elsewhere as they were when it last read them.
        windows: of level 1 ... n-1, then their rounds, by row; what `head` says, ready for use.
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
        self.shape = RoundShape(levels, steps, capacity)
        self.words = torch.zeros(batch, self.shape.words, dtype=torch.int64, device=device)
        self.eos = torch.full((batch, eos), -1, dtype=torch.int64, device=device)
        shape = self.shape
        self._levels = [shape.level_at(level) for level in range(1, levels + 1)]
        # Windows of all levels but the drafter, then their bounds; and all that stays of a batch.
        above, own = self._levels[:-1], (shape.CACHED, shape.ROUND)
        self._sizes = [at + word for word in (shape.WINDOW, shape.BOUND) for at in above]
        self.windows = [(0,) * len(self._sizes)] * batch
        self._lasting = [*self._sizes, *(at + word for word in own for at in self._levels)]
        if device.type == "cpu":  # the same memory
            host = self.words.numpy()
            self.head: npt.NDArray[np.int64] = host[:, : self.shape.log_at]
            self._rounds = HostRounds(self.shape, host, self.eos.numpy())
            self._table = torch.from_numpy(self._rounds.plan)
            self._plan = Plan._make(self._table.unbind())
        else:
            self.head = np.zeros((batch, self.shape.log_at), np.int64)

    @property
    def batch(self) -> int:
        return int(self.words.shape[0])

    @property
    def device(self) -> torch.device:
        return self.words.device

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All of it."""
        return [self.words, self.eos]

    def fits(self, steps: int, capacity: int) -> bool:
        """Whether so many steps between two readings, and texts of so many tokens, have room."""
        return steps <= self.shape.steps and capacity <= self.shape.capacity

    def write(
        self,
        rows: Sequence[Row],
        before: StateRows,
        tail: int = 0,
    ) -> None:
        """Begin with these rows; nothing is pending.

        Args:
            before: where their levels stand.
            tail: tokens of a tail at most, of every row.
        """
        shape = self.shape
        table = torch.zeros(self.batch, shape.words, dtype=torch.int64)
        host = table.numpy()
        host[:, self._lasting] = before.head[:, self._lasting]
        self.windows = list(before.windows)
        host[:, shape.TAIL_WINDOW] = tail
        for b, row in enumerate(rows):
            words = host[b]
            words[shape.TOTAL], words[shape.ROOM] = len(row.tokens), row.room
            words[shape.text_at : shape.text_at + len(row.tokens)] = row.tokens
        ends = [[*sorted(row.eos), *[-1] * (self.eos.shape[1] - len(row.eos))] for row in rows]
        if self.device.type != "cpu":
            self.head, table = host[:, : shape.log_at], table.pin_memory()
        self.words.copy_(table, non_blocking=True)
        self.eos.copy_(on_device(ends, torch.int64, self.device).view_as(self.eos))

    def select(self, rows: Sequence[int]) -> StateRows:
        """Where the levels stand in these rows, in that order, and nothing else of them."""
        made = StateRows(self.shape.levels, len(rows))
        made.head[:] = self.head[list(rows)]
        made.windows = [self.windows[row] for row in rows]
        return made

    def set_windows(self, slot: int, sizes: Sequence[int]) -> None:
        """`windows` of one row from its next step on."""
        self.windows[slot] = tuple(sizes)
        self.head[slot, self._sizes] = sizes
        if self.device.type != "cpu":
            for word, size in zip(self._sizes, sizes, strict=True):
                self.words[slot, word] = size

    def cached(self, level: int) -> list[int]:
        """Tokens in the cache of `level`, by row, as the host knows it."""
        own: list[int] = self.head[:, self._levels[level - 1] + self.shape.CACHED].tolist()
        return own

    def read_by(self, level: int) -> torch.Tensor:
        """``[B]`` int64, tokens in the cache of `level`, where the rows lie."""
        return self.words[:, self._levels[level - 1] + self.shape.CACHED]

    def set_cached(self, level: int, cached: Sequence[int]) -> None:
        """So many tokens are in the cache of `level`, by row."""
        word = self._levels[level - 1] + self.shape.CACHED
        self.head[:, word] = cached
        if self.device.type != "cpu":
            self.words[:, word] = on_device(cached, torch.int64, self.device)

    def end(self, slot: int) -> None:
        """A row takes no part from now on."""
        self.words[slot, self.shape.ROOM] = 0

    def next(self, unread: torch.Tensor | None = None) -> Step | None:
        """On the CPU the step to do now: a draft, or the deepest verification that is due, so that
        rows that lag behind find the others at the same level. None: every row is complete.

        Args:
            unread: ``[B]`` int64, that a drafter reads from there on at the latest.
        """
        if unread is None:
            own = self._rounds.next()
        else:
            with self.read_again(self.shape.levels, unread):
                own = self._rounds.next()
        if own is None:
            return None
        input_ids = torch.from_numpy(own.input_ids)
        return Step(own.level, own.most, own.lag, own.tail, input_ids, self._table, self._plan, own)

    def step(self, level: int, most: int, width: int, tail: bool = False) -> Step:
        """A step of `level`, in which rows that are due for another one idle, without host
        synchronisation.

        Args:
            most, tail: see `Step`.
            width: tokens that a row reads at most, T.
        """
        input_ids, table = schedule.next_step(self.words, self.shape, level, width)
        plan = Plan._make(table.unbind())
        return Step(level, most, width - most, tail, input_ids, table, plan, None)

    def report(
        self,
        step: Step,
        tokens: torch.Tensor,
        counts: torch.Tensor | None,
        status: torch.Tensor | None,
        padding: int | None = None,
        ends: bool = True,
    ) -> Report:
        """Enters what a step has brought, with tensors on any device if `next` gave it.

        Args:
            tokens ... padding: see `schedule.report`; `status` None: nothing went wrong in a draft.
                `padding` None: nobody asks for slots.
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
        wanted = None if padding is None else torch.from_numpy(made.slots)
        return Report(wanted, list(zip(made.kept)), made.entries, made.cut, made.status)

    def text(self, slot: int) -> torch.Tensor:
        """``[N]`` int64 on the CPU, the row's text as it stands, pending tokens included."""
        begin = self.shape.text_at
        return self.words[slot, begin : begin + int(self.head[slot, self.shape.TOTAL])]

    @contextmanager
    def read_again(self, level: int, positions: torch.Tensor) -> Iterator[None]:
        """Meanwhile `level` has read the first ``positions[b]`` tokens of row b at most, ``[B]``
        int64: `step` gives the others."""
        cached = self.read_by(level)
        before = cached.clone()
        cached.copy_(torch.minimum(cached, positions))
        yield
        cached.copy_(before)

    def record(self, tokens: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
        """All that the host is told of a round, ``[B, N]`` int64.

        Args:
            tokens: ``[B, W]`` int64, that the target has emitted.
            logprobs: ``[B, W]`` float32, of these.
        """
        bits = logprobs.view(torch.int32).to(torch.int64)
        return torch.cat([self.words[:, : self.shape.text_at], tokens, bits], 1)

    def read(self, record: torch.Tensor) -> Record:
        """A round's record on the host. Waits for the device; the log is empty then."""
        self.words[:, self.shape.STEP].zero_()
        shape, table = self.shape, record.cpu()
        width = (table.shape[1] - shape.text_at) // 2
        probabilities = table[:, shape.text_at + width :].to(torch.int32).view(torch.float32)
        rows: list[list[int]] = table[:, : shape.text_at + width].tolist()
        if self.device.type != "cpu":
            self.head = table.numpy()[:, : shape.log_at]
        begins = range(shape.log_at, shape.text_at, shape.PER_STEP)
        return Record(
            [[words[at : at + shape.PER_STEP] for at in begins] for words in rows],
            [words[shape.text_at :] for words in rows],
            probabilities.tolist(),
        )


class Record(NamedTuple):
    """A round as the host reads it, by row.

    Attributes:
        entries: of every step, by row.
        tokens: that the target has emitted; as many as its entry says.
        logprobs: of these.
    """

    entries: list[list[Entry]]
    tokens: list[list[int]]
    logprobs: list[list[float]]
