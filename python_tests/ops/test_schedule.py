"""The operators over state rows under torch (see csrc/tests), and rows of the runtime."""

from typing import Any

import numpy as np
import pytest
import torch

from polyspec_ext._C import HostRounds, RoundShape
from polyspec_ext.runtime.graphs import next_step, report

SHAPE = RoundShape(levels=3, steps=4, capacity=40)
FORM = SHAPE.levels, SHAPE.steps
WINDOWS, ROUNDS = (6, 2), (2, 0)


def rows(batch: int) -> torch.Tensor:
    """Return rows of a prompt 5 6 7 with a last token that no level has read."""
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
    input_ids, table, _ = next_step(state, *FORM, 3, 3, 0)
    tokens = torch.tensor([[1, 2]] * state.shape[0])
    status = torch.zeros(state.shape[0], 2, dtype=torch.int32)
    eos = torch.full((state.shape[0], 1), 9)
    return input_ids, table, *report(state, *FORM, 3, table, tokens, None, status, eos)


def test_a_level_reads_again_from_a_position() -> None:
    """The cached lengths stay."""
    state = rows(4)
    before = state.clone()
    input_ids, table, _ = next_step(state, *FORM, 3, 3, 0, torch.tensor([0, 1, 2, -1]))
    assert input_ids.tolist() == [[5, 6, 7], [6, 7, 0], [7, 0, 0], [0, 0, 0]]
    assert table[1].tolist() == [3, 2, 1, 0]
    assert state.equal(before)


def test_opcheck() -> None:
    state = rows(2)
    torch.library.opcheck(torch.ops.polyspec.schedule_next, (state, *FORM, 3, 3, 2))
    _, table, _ = next_step(state, *FORM, 3, 3, 0)
    tokens, status = torch.ones(2, 2, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int32)
    eos, counts = torch.full((2, 1), 9), torch.tensor([2, 1])
    for own in (None, counts):
        call = (*FORM, 3, table, tokens, own, status, eos)
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
        ({"most": -1}, "most: expected >= 0, got -1"),
    ],
)
def test_bad_input_is_refused(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"state": rows(2), "levels": 3, "steps": 4, "level": 3, "width": 3}
    given |= {"most": 0, **change}
    with pytest.raises(RuntimeError, match=message):
        torch.ops.polyspec.schedule_next(**given)


def test_a_report_of_another_form_is_refused() -> None:
    state = rows(2)
    _, table, _ = next_step(state, *FORM, 3, 3, 0)
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
            report(state, *FORM, 3, *arguments)
    with pytest.raises(RuntimeError, match="status: expected 1 dimensions"):
        report(state, *FORM, 2, table, tokens, counts, status, eos)
    assert state.equal(before)


def host(batch: int = 2) -> tuple[HostRounds, np.ndarray]:
    words = rows(batch).numpy()
    return HostRounds(SHAPE, words, np.full((batch, 1), 9)), words


def drafted(batch: int = 2) -> np.ndarray:
    return np.array([[1, 2]] * batch)


def test_a_step_is_reported_to_the_rows_it_is_of_and_once() -> None:
    """A step's plan has the batch of its rows, and the counts of the state that it was due in."""
    own, words = host()
    before = words.copy()
    step = own.next()
    for others in (host(), host(3), host(1)):
        other = others[0].next()
        with pytest.raises(ValueError, match="step: expected the one that `next` of this object"):
            own.report(other, drafted(), None, None)
    with pytest.raises(ValueError, match=r"tokens: expected shape \[2, W\]"):
        own.report(step, drafted(3), None, None)
    assert (words == before).all()
    own.report(step, drafted(), None, None)
    with pytest.raises(ValueError, match="step: expected"):
        own.report(step, drafted(), None, None)


@pytest.mark.parametrize(
    ("levels", "steps", "capacity", "said"),
    [
        (3, 0, 40, "steps: expected >= 1, given 0"),
        (1, 4, 40, r"levels: expected \[2, 2\^16\), given 1"),
        (3, 4, -1, "capacity: expected >= 0, given -1"),
        (3, -2, 40, "steps: expected >= 0, given -2"),
        (3, 2**62, 40, "steps: expected at most"),
    ],
)
def test_shapes_of_host_rounds(levels: int, steps: int, capacity: int, said: str) -> None:
    """Without room for a step in the log, the tokens of a step would be read elsewhere."""
    shape = RoundShape(levels=levels, steps=steps, capacity=capacity)
    words = np.zeros((2, max(shape.words, 0)), np.int64)
    with pytest.raises(ValueError, match=said):
        HostRounds(shape, words, np.full((2, 1), 9))


@pytest.mark.parametrize(
    ("word", "value", "said"),
    [
        (SHAPE.TOTAL, 41, "0 <= cached <= total <= 40"),
        (SHAPE.TOTAL, 2**60, "0 <= cached <= total <= 40"),
        (SHAPE.level_at(3), -1, "0 <= cached <= total <= 40"),
        (SHAPE.level_at(2) + SHAPE.PENDING, -1, "those of a step"),
        (SHAPE.level_at(1) + SHAPE.WINDOW, -1, "those of a step"),
    ],
)
def test_words_that_cannot_be(word: int, value: int, said: str) -> None:
    own, words = host()
    words[1, word] = value
    with pytest.raises(ValueError, match=f"words: expected {said} in row 1"):
        own.next()
