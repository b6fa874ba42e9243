"""The state rows of a batch: every request's text, and who waits for whom with how many tokens.

On the CPU the host reads and writes them as it likes. On another device they stay from round to
round, and what the host is told of a round comes in one copy (`record`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from ..ops import schedule
from ..ops.schedule import HostRounds, HostStep, RoundShape
from ..tensors import on_device
from .request import Row


class Entry(NamedTuple):
    """What one step brought one row.

    Attributes:
        tokens: to draft or to verify; -1: the row had no part.
        position: of the first of them.
        accepted: of those verified.
        emitted: tokens drafted, or handed up by a verification.
        ended: 1 if the last of these ends the text.
        status: status bits.
        of_tail: tokens of a tail among `tokens`.
    """

    tokens: int
    position: int
    accepted: int
    emitted: int
    ended: int
    status: int
    of_tail: int


class Progress(NamedTuple):
    """Where a level stands in a row: tokens in its cache, and rounds it has done."""

    cached: int
    round: int


class StateRows:
    """The state rows of one batch.

    Args:
        levels: n.
        batch: rows, B.
        steps: steps that are entered before the host reads them.
        capacity: tokens per text.
        eos: ids that end a text, at most.
        device: where the rows lie.
    """

    def __init__(
        self, levels: int, batch: int, steps: int, capacity: int, eos: int, device: torch.device
    ) -> None:
        self.shape = RoundShape(levels, steps, capacity)
        self.words = torch.zeros(batch, self.shape.words, dtype=torch.int64, device=device)
        self.eos = torch.full((batch, eos), -1, dtype=torch.int64, device=device)
        # The same memory, on the CPU.
        self._host = self.words.numpy() if device.type == "cpu" else None
        self._rounds = None
        if self._host is not None:
            self._rounds = HostRounds(self.shape, self._host, self.eos.numpy())
        self._levels = [self.shape.level_at(level) for level in range(1, levels + 1)]

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
        progress: Sequence[Sequence[Progress]],
        windows: Sequence[Sequence[int]],
        rounds: Sequence[Sequence[int]],
        tail: int = 0,
    ) -> None:
        """Begin with these rows; nothing is pending.

        Args:
            progress: by row and level.
            windows, rounds: by row, of level 1 ... n-1.
            tail: tokens of a tail at most, of every row.
        """
        shape = self.shape
        table = torch.zeros(self.batch, shape.words, dtype=torch.int64)
        host = table.numpy()
        for b, row in enumerate(rows):
            words = host[b]
            words[shape.TOTAL], words[shape.ROOM] = len(row.tokens), row.room
            words[shape.TAIL_WINDOW] = tail
            for at, (cached, done) in zip(self._levels, progress[b], strict=True):
                words[at + shape.CACHED], words[at + shape.ROUND] = cached, done
            for at, window, bound in zip(self._levels, windows[b], rounds[b], strict=False):
                words[at + shape.WINDOW], words[at + shape.BOUND] = window, bound
            words[shape.text_at : shape.text_at + len(row.tokens)] = row.tokens
        ends = [[*sorted(row.eos), *[-1] * (self.eos.shape[1] - len(row.eos))] for row in rows]
        self.words.copy_(table.pin_memory() if self._host is None else table, non_blocking=True)
        self.eos.copy_(on_device(ends, torch.int64, self.device).view_as(self.eos))

    def set_windows(self, slot: int, windows: Sequence[int], rounds: Sequence[int]) -> None:
        """Windows and rounds of one row from its next step on."""
        shape = self.shape
        for at, window, bound in zip(self._levels, windows, rounds, strict=False):
            self.words[slot, at + shape.WINDOW] = window
            self.words[slot, at + shape.BOUND] = bound

    def set_cached(self, slot: int, level: int, cached: int) -> None:
        """Tokens in the cache of `level`."""
        self.words[slot, self._levels[level - 1] + self.shape.CACHED] = cached

    def end(self, slot: int) -> None:
        """A row takes no part from now on."""
        self.words[slot, self.shape.ROOM] = 0

    # ---- what the host reads, on the CPU ---------------------------------------------------------

    def next(self) -> HostStep | None:
        """The step to do now: a draft, or the deepest verification that is due, so that rows that
        lag behind find the others at the same level. None: every row is complete."""
        assert self._rounds is not None
        return self._rounds.next()

    def enter(
        self,
        step: HostStep,
        tokens: torch.Tensor,
        counts: torch.Tensor | None,
        status: torch.Tensor | None,
        padding: int = 0,
        ends: bool = True,
    ) -> tuple[list[Entry], list[list[int]], torch.Tensor]:
        """`report` of a step that `next` gave, with tensors on any device.

        Args:
            status: None: nothing went wrong.
            ends: whether a token may end a text.

        Returns:
            what the step brought, by row; tokens that each level's cache may keep, by level and
            row; and ``[B, W]`` the slots of `report`.
        """
        assert self._rounds is not None
        made = self._rounds.report(
            step,
            tokens.cpu().numpy(),
            None if counts is None else counts.cpu().numpy(),
            None if status is None else status.cpu().numpy(),
            padding,
            ends,
        )
        entries = [Entry._make(own) for own in made.entries]
        return entries, made.kept, torch.from_numpy(made.slots)

    def text(self, slot: int) -> torch.Tensor:
        """``[N]`` int64, the row's text as it stands, pending tokens included."""
        assert self._host is not None
        begin = self.shape.text_at
        return self.words[slot, begin : begin + int(self._host[slot, self.shape.TOTAL])]

    # ---- steps -----------------------------------------------------------------------------------

    def next_step(self, level: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `schedule.next_step`."""
        return schedule.next_step(self.words, self.shape, level, width)

    def report(
        self,
        level: int,
        plan: torch.Tensor,
        tokens: torch.Tensor,
        counts: torch.Tensor | None,
        status: torch.Tensor,
        padding: int,
        ends: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `schedule.report`.

        Args:
            ends: whether a token may end a text.
        """
        eos = self.eos if ends else self.eos[:, :0]
        return schedule.report(
            self.words, self.shape, level, plan, tokens, counts, status, eos, padding
        )

    @contextmanager
    def read_again(self, level: int, positions: torch.Tensor) -> Iterator[None]:
        """Meanwhile `level` has read the first ``positions[b]`` tokens of row b at most, ``[B]``
        int64: `next_step` gives the others."""
        cached = self.words[:, self._levels[level - 1] + self.shape.CACHED]
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
        entries, progress = [], []
        rows: list[list[int]] = table[:, : shape.text_at + width].tolist()
        for words in rows:
            begins = range(shape.log_at, shape.text_at, shape.PER_STEP)
            entries.append([Entry(*words[at : at + shape.PER_STEP]) for at in begins])
            progress.append(
                [Progress(words[at + shape.CACHED], words[at + shape.ROUND]) for at in self._levels]
            )
        tokens = [words[shape.text_at :] for words in rows]
        return Record(entries, progress, tokens, probabilities.tolist())

    def progress(self) -> list[list[Progress]]:
        """By row and level, on the CPU."""
        shape, table = self.shape, self.words[:, : self.shape.log_at].tolist()
        return [
            [Progress(words[at + shape.CACHED], words[at + shape.ROUND]) for at in self._levels]
            for words in table
        ]


class Record(NamedTuple):
    """A round as the host reads it, by row.

    Attributes:
        entries: of every step.
        progress: by level.
        tokens: that the target has emitted; as many as its entry says.
        logprobs: of these.
    """

    entries: list[list[Entry]]
    progress: list[list[Progress]]
    tokens: list[list[int]]
    logprobs: list[list[float]]
