"""The operators over state rows under torch. What they compute is checked in csrc/tests; here, that
torch hands them on, and the rows as the runtime writes and reads them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polyspec_ext.ops import schedule
from polyspec_ext.ops.schedule import Plan, RoundShape
from polyspec_ext.runtime.request import Row
from polyspec_ext.runtime.state import Entry, Progress, StateRows
from polyspec_ext.sampling import Sampling
from polyspec_ext.stats import LevelStats, Stats

SHAPE = RoundShape(levels=3, steps=4, capacity=40)
WINDOWS, ROUNDS = (6, 2), (2, 0)


def rows(batch: int) -> torch.Tensor:
    """Rows of a prompt 5 6 7 whose last token no level has read."""
    state = torch.zeros(batch, SHAPE.words, dtype=torch.int64)
    state[:, SHAPE.TOTAL], state[:, SHAPE.ROOM] = 3, 30
    for level in range(1, 4):
        at = SHAPE.level_at(level)
        state[:, at + SHAPE.CACHED] = 2
        if level < 3:
            state[:, at + SHAPE.WINDOW] = WINDOWS[level - 1]
            state[:, at + SHAPE.BOUND] = ROUNDS[level - 1]
    state[:, SHAPE.text_at : SHAPE.text_at + 3] = torch.tensor([5, 6, 7])
    return state


def draft(state: torch.Tensor) -> tuple[torch.Tensor, ...]:
    due = schedule.due(state, SHAPE)
    input_ids, table = schedule.next_step(state, SHAPE, 3, 3)
    tokens = torch.tensor([[1, 2]] * state.shape[0])
    status = torch.zeros(state.shape[0], 2, dtype=torch.int32)
    eos = torch.full((state.shape[0], 1), 9)
    slots, kept = schedule.report(state, SHAPE, 3, table, tokens, None, status, eos, 2)
    return due, input_ids, table, slots, kept


def test_a_draft() -> None:
    state = rows(2)
    state[1, SHAPE.ROOM] = 0
    due, input_ids, table, slots, kept = draft(state)
    assert due.tolist() == [[3, 0], [2, 0]]
    plan = Plan(*table.tolist())
    assert plan == Plan([1, 0], [1, 0], [0, 0], [2, 0], [3, 3], [0, 0], [0, 0])
    assert input_ids.tolist() == [[7, 0, 0], [0, 0, 0]]
    assert slots.tolist() == [[0, 1], [2, 2]]
    assert kept.tolist() == [[2, 2], [2, 2], [4, 2]]
    assert state[0, SHAPE.text_at : SHAPE.text_at + 5].tolist() == [5, 6, 7, 1, 2]
    log = state[:, SHAPE.log_at : SHAPE.log_at + SHAPE.PER_STEP].tolist()
    assert log == [[2, 3, 0, 2, 0, 0, 0], [-1, 0, 0, 0, 0, 0, 0]]
    assert schedule.due(state, SHAPE).tolist() == [[2, 0], [2, 0]]


def test_opcheck() -> None:
    """Schemas (what is written to), fake tensors and tracing."""
    state, form = rows(2), (SHAPE.levels, SHAPE.steps)
    torch.library.opcheck(torch.ops.polyspec.schedule_due, (state, *form))
    torch.library.opcheck(torch.ops.polyspec.schedule_next, (state, *form, 3, 3))
    _, table = schedule.next_step(state, SHAPE, 3, 3)
    tokens, status = torch.ones(2, 2, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int32)
    eos, counts = torch.full((2, 1), 9), torch.tensor([2, 1])
    for own in (None, counts):
        call = (*form, 3, table, tokens, own, status, eos, 2)
        torch.library.opcheck(torch.ops.polyspec.schedule_report, (state, *call))


def test_one_graph_under_compile() -> None:
    compiled = torch.compile(draft, fullgraph=True, backend="aot_eager")
    eager, traced = rows(3), rows(3)
    for mine, theirs in zip(compiled(traced), draft(eager), strict=True):
        assert mine.equal(theirs)
    assert traced.equal(eager)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"state": torch.zeros(2, 7, dtype=torch.int64)}, "state: expected at least 55 columns"),
        ({"state": torch.zeros(7, dtype=torch.int64)}, "state: expected 2 dimensions, got 1"),
        ({"state": rows(2).to(torch.int32)}, "state: expected int64"),
        ({"levels": 1}, "levels: expected 2 to 65535, got 1"),
        ({"levels": 2**16}, "levels: expected 2 to 65535, got 65536"),
        ({"steps": -1}, "steps: expected >= 0, got -1"),
        ({"level": 4}, "level: expected 1 to 3, got 4"),
        ({"level": 0}, "level: expected 1 to 3, got 0"),
        ({"width": 0}, "width: expected >= 1, got 0"),
    ],
)
def test_bad_input_is_refused(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"state": rows(2), "levels": 3, "steps": 4, "level": 3, "width": 3}
    given |= change
    with pytest.raises(RuntimeError, match=message):
        torch.ops.polyspec.schedule_next(**given)
    if not {"level", "width"} & change.keys():
        del given["level"], given["width"]
        with pytest.raises(RuntimeError, match=message):
            torch.ops.polyspec.schedule_due(**given)


def test_a_report_of_another_form_is_refused() -> None:
    state = rows(2)
    _, table = schedule.next_step(state, SHAPE, 3, 3)
    before = state.clone()
    tokens, eos = torch.ones(2, 2, dtype=torch.int64), torch.full((2, 1), 9)
    status = torch.zeros(2, 2, dtype=torch.int32)
    counts = torch.zeros(2, dtype=torch.int64)
    for arguments, message in (
        ((table, tokens[:1], None, status, eos), "tokens: expected size 2"),
        ((table, tokens[0], None, status, eos), "tokens: expected 2 dimensions"),
        ((table[:3], tokens, None, status, eos), "plan: expected size 7"),
        ((table, tokens, None, status[:, 0], eos), "status: expected 2 dimensions"),
        ((table, tokens, counts[:1], status, eos), "counts: expected size 2"),
        ((table, tokens, counts.int(), status, eos), "counts: expected int64"),
        ((table, tokens, None, status, eos.T), "eos: expected size 2"),
    ):
        with pytest.raises(RuntimeError, match=message):
            schedule.report(state, SHAPE, 3, *arguments, 2)
    with pytest.raises(RuntimeError, match="status: expected 1 dimensions"):
        schedule.report(state, SHAPE, 2, table, tokens, counts, status, eos, 2)
    assert state.equal(before)


def test_the_form_of_a_row() -> None:
    assert (SHAPE.levels, SHAPE.steps, SHAPE.capacity) == (3, 4, 40)
    assert SHAPE.log_at == SHAPE.level_at(4)
    assert SHAPE.text_at == SHAPE.log_at + 4 * SHAPE.PER_STEP
    assert SHAPE.words == SHAPE.text_at + 40


# ---- the rows as the runtime writes and reads them -----------------------------------------------


def request(number: int, tokens: list[int], most: int, eos: set[int]) -> Row:
    stats = Stats([LevelStats("a"), LevelStats("b"), LevelStats("c")])
    return Row(number, tokens, most, Sampling(), number, frozenset(eos), stats)


def written(steps: int = 1) -> StateRows:
    made = StateRows(3, 3, steps, 40, 2, torch.device("cpu"))
    given = [request(0, [5, 6, 7], 30, {9, 4}), request(1, [8], 0, set()), request(2, [1], 9, {2})]
    progress = [[Progress(len(row.tokens) - 1, 3)] * 3 for row in given]
    made.write(given, progress, [[6, 2], [6, 2], [6, 0]], [[2, 0]] * 3)
    return made


def test_rows_are_written_as_the_operators_read_them() -> None:
    state = written()
    assert state.progress()[0] == [Progress(2, 3)] * 3
    # A draft of two, a row that is complete, and one whose second level drafts alone.
    step = state.next()
    assert step is not None
    assert (step.level, step.group, step.most) == (3, [0], 2)
    assert (step.counts, step.lengths) == ([1, 0, 0], [2, 0, 0])
    assert (step.positions[0], step.rounds) == (3, [3, 3, 3])
    assert step.input_ids.tolist() == [[7], [0], [0]]
    assert step.plan.tolist()[1:3] == [step.counts, step.first]
    assert state.eos.tolist() == [[4, 9], [-1, -1], [2, -1]]
    assert state.text(0).tolist() == [5, 6, 7]
    assert state.fits(1, 40)
    assert not state.fits(2, 40)
    assert not state.fits(1, 41)


def entered(state: StateRows, tokens: list[int], *given: Any, **options: Any) -> Any:
    """The step that is due for all rows, each of which has brought `tokens`."""
    step = state.next()
    assert step is not None
    return state.enter(step, torch.tensor([tokens] * 3), *given, **options)


def test_a_step_by_hand() -> None:
    state = written()
    entries, kept, slots = entered(state, [3, 9], None, None, 2)
    assert kept[2] == [4, 0, 0]
    assert slots.tolist() == [[0, 1], [2, 2], [2, 2]]
    idle = Entry(-1, 0, 0, 0, 0, 0, 0)
    assert entries == [Entry(2, 3, 0, 2, 1, 0, 0), idle, idle]
    assert state.text(0).tolist() == [5, 6, 7, 3, 9]
    step = state.next()
    assert step is not None
    assert (step.level, step.group, step.first) == (2, [0, 2], [0, 0, 0])
    state.end(0)
    step = state.next()
    assert step is not None
    assert (step.level, step.group) == (2, [2])
    state.end(2)
    assert state.next() is None


def test_a_step_is_what_the_operators_say() -> None:
    one, other = written(), written()
    status = torch.zeros(3, 2, dtype=torch.int32)
    input_ids, table = other.next_step(3, 1)
    step = one.next()
    assert step is not None
    assert (step.input_ids.tolist(), step.plan.tolist()) == (input_ids.tolist(), table.tolist())
    tokens = torch.tensor([[3, 9]] * 3)
    _, kept, slots = one.enter(step, tokens, None, status, 7)
    expected, all_kept = other.report(3, table, tokens, None, status, 7)
    assert (slots.tolist(), kept) == (expected.tolist(), all_kept.tolist())
    other.words[:, other.shape.STEP] = 0
    assert torch.equal(one.words, other.words)


def test_tokens_that_end_no_text() -> None:
    """Of a tree, one path of which stands for the others."""
    entries, _, _ = entered(written(), [9, 9], None, None, ends=False)
    assert entries[0] == Entry(2, 3, 0, 2, 0, 0, 0)


def test_windows_and_lengths_change_between_steps() -> None:
    state = written()
    state.set_windows(0, [0, 2], [1, 0])
    state.set_windows(2, [6, 3], [2, 0])
    step = state.next()
    assert step is not None
    assert (step.level, step.group, step.lengths) == (3, [2], [0, 0, 3])
    state.set_windows(2, [0, 3], [1, 0])
    state.set_cached(0, 1, 1)
    step = state.next()
    assert step is not None
    assert (step.level, step.group, step.counts) == (1, [0, 2], [2, 0, 1])


def test_a_row_that_stopped_takes_no_part() -> None:
    state = written()
    status = torch.tensor([[0, 1], [0, 0], [0, 0]], dtype=torch.int32)
    entries, _, _ = entered(state, [3, -1], None, status)
    assert (entries[0].status, entries[0].emitted) == (1, 1)
    step = state.next()
    assert step is not None
    assert step.group == [2]


@pytest.mark.parametrize(
    ("tokens", "counts", "status"),
    [
        (torch.zeros(2, 2, dtype=torch.int64), None, None),
        (torch.zeros(3, 2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), None),
        (torch.zeros(3, 2, dtype=torch.int64), None, torch.zeros(3, dtype=torch.int32)),
    ],
)
def test_wrong_reports_are_errors(tokens: Any, counts: Any, status: Any) -> None:
    state = written()
    step = state.next()
    assert step is not None
    with pytest.raises(ValueError, match="expected"):
        state.enter(step, tokens, counts, status)
    assert state.next() is not None


def test_a_record_has_all_that_the_host_is_told() -> None:
    state = written(steps=2)
    _, table = state.next_step(3, 1)
    zeros = torch.zeros(3, 2, dtype=torch.int32)
    state.report(3, table, torch.tensor([[3, 9]] * 3), None, zeros, 2)
    _, table = state.next_step(2, 4)
    tokens = torch.tensor([[3, 9, 1], [-1] * 3, [7, -1, -1]])
    counts = torch.tensor([1, 0, 0])
    state.report(2, table, tokens, counts, torch.zeros(3, dtype=torch.int32), 6)
    logprobs = torch.tensor([[-0.5, -1.5, 0.0], [0.0] * 3, [-2.25, 0.0, 0.0]])
    record = state.read(state.record(tokens, logprobs))
    assert [own[0].tokens for own in record.entries] == [2, -1, -1]
    assert [(own[1].accepted, own[1].emitted) for own in record.entries] == [(1, 2), (0, 0), (0, 1)]
    assert record.progress == state.progress()
    assert record.tokens == tokens.tolist()
    assert record.logprobs == logprobs.tolist()
    assert state.text(0).tolist() == [5, 6, 7, 3, 9]
    assert state.text(2).tolist() == [1, 7]
