"""A round that the device has done alone, entered into what the host keeps of each row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..errors import ERROR_BITS, PolyspecError, RequestError
from ..stats import Books
from .engine import DeviceRounds, Entry, Outcome
from .request import Row

Observer = Callable[[int, torch.Tensor], None]


def replay(
    rounds: DeviceRounds,
    out: Outcome,
    slots: Sequence[Row],
    books: Books,
    observe: Observer | None,
) -> list[tuple[int, list[int]]]:
    """Tells every row's scheduler and the statistics what each step has brought, and the levels how
    long their rows are. Returns what was committed, by the number of its row.

    Raises:
        RequestError: a row of logits has no law; names request, level and position.
        PolyspecError: the device did not do what a row's scheduler says: a defect.
    """
    steps = rounds.program
    for place, number in enumerate(steps.steps):
        took_part = []
        for row in slots:
            entry = out.entries[row.slot][place]
            if entry.tokens >= 0:
                _step(row, number, number == steps.levels, entry, books)
                took_part.append(row.stats)
        passes = steps.drafts if number == steps.levels else 1
        index = -1 if number == steps.levels else number - 1
        books.spent(took_part, index, out.seconds[place], passes)
    rounds.passed(out, slots)
    committed = []
    for row in slots:
        slot = row.slot
        if out.entries[slot][-1].tokens < 0:
            if not row.ended:
                raise _defect(row, "the target", "has not judged it")
            continue
        tokens = out.tokens[slot]
        row.tokens += tokens
        row.logprobs += out.logprobs[slot]
        row.cached[:] = out.cached[slot][: len(row.cached)]
        row.rounds[:] = out.rounds[slot][: len(row.rounds)]
        row.context.round, row.context.valid = out.rounds[slot][-1], len(row.tokens)
        books.committed(row.stats, len(tokens))
        if observe is not None:
            observe(row.number, out.logits[slot, : len(tokens)])
        row.ended = row.ended or row.scheduler.done
        committed.append((row.number, tokens))
    return committed


def _step(row: Row, number: int, draft: bool, entry: Entry, books: Books) -> None:
    step = row.scheduler.next()
    if (step.level, step.count) != (number, entry.tokens):
        raise _defect(row, f"level {number}", f"took {entry.tokens} tokens where {step} was due")
    if entry.status & ERROR_BITS:
        start = row.committed + sum(row.scheduler.pending(above) for above in range(1, number))
        at = start + (entry.emitted if draft else entry.accepted)
        raise RequestError(row.number, number, at, entry.status)
    row.scheduler.report(number, entry.emitted, entry.ended)
    if draft:
        books.proposed(row.stats, entry.emitted)
    else:
        books.judged(row.stats, number - 1, entry.tokens, entry.accepted, entry.emitted)


def _defect(row: Row, who: str, what: str) -> PolyspecError:
    return PolyspecError(
        f"request {row.number} at position {row.committed}: {who} {what}; this is a defect of "
        "polyspec_ext, please report it"
    )
