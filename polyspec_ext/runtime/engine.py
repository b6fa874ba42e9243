"""Rounds of the target that the host does not look into.

The steps of a round are known beforehand (`device_program`), which rows take part in them is kept
on the device (`device_scheduler`), and what came of all of them is read once, behind the target's
verification. On CUDA a draft is one graph and the verification of each level another.

`batch.py` takes these rounds where all levels are on one CUDA device. Tokens are those of the
rounds that the host follows: rows, draws and laws are the same.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch

from ..drafters import DraftModel
from ..errors import named
from ..levels import device_of
from ..ops.schedule import ScheduleShape
from ..tensors import Parameters
from . import steps as captured
from .graphs import Place
from .plan import Program, program
from .request import Row
from .state import Lines, Outputs

if TYPE_CHECKING:
    from ..chain import Chain

_KEPT = 4  # batch sizes whose lines and laws stay allocated


@runtime_checkable
class ResidentLevel(captured.CapturableLevel, Protocol):
    """A level whose lengths can stay on the device for a whole round, as `HuggingFaceLevel` over a
    `RollbackCache` that keeps every key in one run of slots per row."""

    @property
    def stays(self) -> bool:
        """Whether the cache at hand is such a one."""
        ...

    def reach(self, tokens: int) -> Place | None:
        """A round begins in which no row gets longer than `tokens`; `passed` ends it. Returns what
        its passes use beside their inputs; None: they cannot be captured, since the cache must grow
        first."""
        ...

    def keep(self, lengths: torch.Tensor) -> None:
        """Keep the first ``lengths[b]`` tokens of row b, ``[B]`` int64, read on the device only."""
        ...


class Entry(NamedTuple):
    """What one step brought one row."""

    tokens: int  # drafted or judged; -1: the row had no part
    accepted: int
    emitted: int
    ended: bool  # the last emitted token ends the text
    status: int


class Outcome(NamedTuple):
    """A round as the host reads it, by slot.

    Attributes:
        entries: of every step.
        tokens: that the target has committed.
        logprobs: of these.
        cached: leading tokens that each level's cache holds, by level.
        rounds: that each level has done, by level.
        seconds: of every step.
        logits: the target's, ``[B, most + 1, V]``; row j is the one that token j was drawn from.
            Valid until the next round.
    """

    entries: list[list[Entry]]
    tokens: list[list[int]]
    logprobs: list[list[float]]
    cached: list[list[int]]
    rounds: list[list[int]]
    seconds: list[float]
    logits: torch.Tensor


class DeviceRounds:
    """The rounds of a chain on one device.

    Args:
        chain: whose drafter is a model.
        steps: of its round.
    """

    def __init__(self, chain: Chain, steps: Program) -> None:
        self.chain, self.program = chain, steps
        assert isinstance(chain.drafter, DraftModel)
        self._drafter = chain.drafter
        self.levels: list[Any] = [*chain.levels, chain.drafter.level]  # by number, from 1
        self.device = device_of(chain.levels[0])
        self._lines: OrderedDict[Hashable, Lines] = OrderedDict()

    @classmethod
    def of(cls, chain: Chain) -> DeviceRounds | None:
        """Those of `chain`; None where it cannot have any: its drafter is no model, a level keeps
        its lengths on the host, levels lie on several devices, or rounds are not bounded."""
        steps = program(chain.window, [*chain.rounds, 0])
        if steps is None or not isinstance(chain.drafter, DraftModel):
            return None
        made = cls(chain, steps)
        devices = {torch.device(getattr(level, "device", "cpu")) for level in made.levels}
        if len(devices) > 1 or not all(isinstance(level, ResidentLevel) for level in made.levels):
            return None
        return made

    def ready(self, slots: Sequence[Row]) -> bool:
        """Whether the next round can be one of these: every level of it has read the rows up to the
        few tokens that its first step will read, and a context has room for drafts that overshoot
        the end of a text. (Nothing waits to be judged between rounds of the target.)"""
        steps, cached = self.program, self._drafter.cached
        longest = max(len(row.tokens) for row in slots) + self.ahead
        for number in set(steps.steps):
            level = self.levels[number - 1]
            limit = getattr(level, "max_length", None)
            if not level.stays or (limit is not None and longest > limit):
                return False
            for row in slots:
                if number == steps.levels:
                    have = -1 if cached is None else cached[row.slot]
                else:
                    have = row.cached[number - 1]
                if not row.ended and len(row.tokens) - have > number:
                    return False
        return True

    def run(self, slots: Sequence[Row], parameters: Parameters) -> Outcome:
        """One round of the target for all rows."""
        steps, lines = self.program, self._lines_of(slots, parameters)
        limit = max(len(row.tokens) for row in slots) + self.ahead
        places = {n: self.levels[n - 1].reach(limit) for n in sorted(set(steps.steps))}
        graphs = None if None in places.values() else self.chain.graphs
        clock = _Clock(self.device)
        everybody = [(row, 0) for row in slots]
        outputs: Outputs = ()
        for number in steps.steps:
            step = lines.draft if number == steps.levels else lines.verify(number)
            with named(self.chain.names, number - 1, everybody):
                if graphs is None:
                    outputs = step()
                else:
                    # The levels below are cut as well, so the graph depends on where they are.
                    touched = [place for n, place in places.items() if n >= number]
                    kind = f"the part of {self.chain.names[number - 1]} in a round"
                    outputs = graphs.run(kind, [number, lines.place, *touched], step, [])
            clock.tick()
        packed, logits = outputs
        assert packed is not None
        assert logits is not None
        return self._read(packed, logits, slots, clock)

    def passed(self, out: Outcome, slots: Sequence[Row]) -> None:
        """Tells the levels and the drafter what their caches hold after a round."""
        steps = self.program
        for number in set(steps.steps):
            lengths = [out.cached[row.slot][number - 1] for row in slots]
            self.levels[number - 1].passed(lengths)
            if number == steps.levels:
                self._drafter.cached = lengths
                self._drafter.num_forward_passes += steps.drafts * steps.steps.count(number)

    @property
    def ahead(self) -> int:
        """Tokens by which a round may run ahead of what is committed."""
        return self.program.tail + self.program.drafts

    def _lines_of(self, slots: Sequence[Row], parameters: Parameters) -> Lines:
        """The lines of so many rows, with these rows in them."""
        eos = max(1, *(len(row.eos) for row in slots))
        key = (len(slots), eos, parameters.greedy)
        lines = self._lines.get(key)
        if lines is None:
            lines = self._lines[key] = Lines(
                self.chain,
                self.levels,
                self.program,
                batch=len(slots),
                eos=eos,
                greedy=parameters.greedy,
            )
            if len(self._lines) > _KEPT:
                self._lines.popitem(last=False)
        self._lines.move_to_end(key)
        lines.write(slots, parameters, self._drafter.cached)
        return lines

    def _read(
        self, packed: torch.Tensor, logits: torch.Tensor, slots: Sequence[Row], clock: _Clock
    ) -> Outcome:
        """The one place where a round waits for the device."""
        table = packed.cpu()
        shape = ScheduleShape(self.program.levels, self.program.tail, len(self.program.steps))
        words: list[list[int]] = table[:, : shape.words].tolist()
        probabilities = table[:, shape.words :].to(torch.int32).view(torch.float32).tolist()
        out = Outcome([], [], [], [], [], clock.seconds(), logits)
        for slot, row in enumerate(slots):
            own, at = words[slot], shape.log_at
            entries = []
            for start in range(at, at + len(self.program.steps) * shape.PER_STEP, shape.PER_STEP):
                count, accepted, emitted, ended, status = own[start : start + shape.PER_STEP]
                entries.append(Entry(count, accepted, emitted, bool(ended), status))
            last = entries[-1]
            emitted = last.emitted if last.tokens >= 0 else 0
            origin = own[shape.ORIGIN]
            begin = shape.tail_at + len(row.tokens) - origin
            out.entries.append(entries)
            out.tokens.append(own[begin : begin + emitted])
            out.logprobs.append(probabilities[slot][:emitted])
            ats = [shape.level_at(number) for number in range(1, self.program.levels + 1)]
            out.cached.append([origin + own[at + shape.CACHED] for at in ats])
            out.rounds.append([own[at + shape.ROUND] for at in ats])
        return out


class _Clock:
    """Seconds between ticks, by the device's own clock where it has one; reading them waits for
    nothing that has not been waited for."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._ticks: list[Any] = []
        self.tick()

    def tick(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._ticks.append(event)
        else:
            self._ticks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Between each tick and the one before. Once all of the round has been read."""
        pairs = itertools.pairwise(self._ticks)
        if self._cuda:
            return [before.elapsed_time(after) / 1000 for before, after in pairs]
        return [after - before for before, after in pairs]
