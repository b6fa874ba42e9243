"""The scheduler's operators under torch. What they compute is checked in csrc/tests, against
Scheduler."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polyspec_ext.ops.schedule import Plan, Schedule, ScheduleShape

SCHEDULE = Schedule((6, 2), (2, 0), tail=12, steps=4)


def lines(batch: int) -> torch.Tensor:
    """Rows of a prompt 5 6 7 whose last token no level has read."""
    shape = SCHEDULE.shape
    state = torch.zeros(batch, shape.words, dtype=torch.int64)
    state[:, shape.TOTAL], state[:, shape.ORIGIN], state[:, shape.ROOM] = 3, 40, 30
    for level in range(1, 4):
        state[:, shape.level_at(level) + shape.CACHED] = 2
    state[:, shape.tail_at : shape.tail_at + 3] = torch.tensor([5, 6, 7])
    return state


def draft(state: torch.Tensor) -> tuple[torch.Tensor, ...]:
    fed, table = SCHEDULE.next(state, 3, 3)
    tokens = torch.tensor([[1, 2]] * state.shape[0])
    status = torch.zeros(state.shape[0], 2, dtype=torch.int32)
    eos = torch.full((state.shape[0], 1), 9)
    place, lengths = SCHEDULE.report(state, 3, table, tokens, None, status, eos, 2)
    return fed, table, place, lengths


def test_a_draft() -> None:
    state = lines(2)
    state[1, SCHEDULE.shape.ROOM] = 0
    fed, table, place, lengths = draft(state)
    plan = Plan(*table.tolist())
    assert plan == Plan([1, 0], [1, 0], [0, 0], [2, 0], [43, 43], [0, 0])
    assert fed.tolist() == [[7, 0, 0], [0, 0, 0]]
    assert place.tolist() == [[0, 1], [2, 2]]
    assert lengths.tolist() == [[42, 42], [42, 42], [44, 42]]
    shape = SCHEDULE.shape
    assert state[0, shape.tail_at : shape.tail_at + 5].tolist() == [5, 6, 7, 1, 2]
    log = state[:, shape.log_at : shape.log_at + shape.PER_STEP].tolist()
    assert log == [[2, 0, 2, 0, 0], [-1, 0, 0, 0, 0]]


def test_opcheck() -> None:
    """Schemas (what is written to), fake tensors and tracing."""
    schedule, shape, state = SCHEDULE, SCHEDULE.shape, lines(2)
    form = (schedule.windows, schedule.rounds, shape.tail, shape.steps)
    torch.library.opcheck(torch.ops.polyspec.schedule_next, (state, *form, 3, 3))
    _, table = schedule.next(state, 3, 3)
    tokens, status = torch.ones(2, 2, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int32)
    eos = torch.full((2, 1), 9)
    call = (*form, 3, table, tokens, None, status, eos, 2)
    torch.library.opcheck(torch.ops.polyspec.schedule_report, (state, *call))


def test_one_graph_under_compile() -> None:
    compiled = torch.compile(draft, fullgraph=True, backend="aot_eager")
    eager, traced = lines(3), lines(3)
    for mine, theirs in zip(compiled(traced), draft(eager), strict=True):
        assert mine.equal(theirs)
    assert traced.equal(eager)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"state": torch.zeros(2, 7, dtype=torch.int64)}, "state: expected size"),
        ({"state": lines(2).to(torch.int32)}, "state: expected int64"),
        ({"windows": []}, "windows, rounds: expected as many of each, 1 to 15; got 0 and 2"),
        ({"rounds": [1]}, "windows, rounds: expected as many"),
        ({"windows": [1, -1]}, "windows and rounds must be >= 0"),
        ({"level": 4}, "level: expected 1 to 3, got 4"),
        ({"width": 0}, "width: expected >= 1, got 0"),
    ],
)
def test_bad_input_is_refused(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "state": lines(2),
        "windows": [6, 2],
        "rounds": [2, 0],
        "tail": 12,
        "steps": 4,
        "level": 3,
        "width": 3,
    }
    with pytest.raises(RuntimeError, match=message):
        torch.ops.polyspec.schedule_next(**given | change)


def test_a_report_of_another_form_is_refused() -> None:
    state = lines(2)
    _, table = SCHEDULE.next(state, 3, 3)
    before = state.clone()
    tokens, eos = torch.ones(2, 2, dtype=torch.int64), torch.full((2, 1), 9)
    status = torch.zeros(2, 2, dtype=torch.int32)
    accepted = torch.zeros(2, dtype=torch.int64)
    for arguments, message in (
        ((table, tokens[:1], None, status, eos), "tokens: expected size 2"),
        ((table[:3], tokens, None, status, eos), "plan: expected size 6"),
        ((table, tokens, None, status[:, 0], eos), "status: expected 2 dimensions"),
        ((table, tokens, accepted, status[:, 0].contiguous(), eos), "not for a draft"),
        ((table, tokens, None, status, eos.T), "eos: expected size 2"),
    ):
        with pytest.raises(RuntimeError, match=message):
            SCHEDULE.report(state, 3, *arguments, 2)
    assert state.equal(before)


def test_the_form_of_a_line() -> None:
    shape = ScheduleShape(3, 12, 4)
    assert (shape.levels, shape.tail, shape.steps) == (3, 12, 4)
    assert shape.tail_at == shape.level_at(4)
    assert shape.log_at == shape.tail_at + 12
    assert shape.words == shape.log_at + 4 * shape.PER_STEP
