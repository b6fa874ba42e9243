"""Hidden states on their way to the drafter, as they come or at a fixed address."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyspec_ext.drafters.features import HiddenRing, HiddenWindow

LAYER = 2
CPU = torch.device("cpu")
WIDTH = 8


def empty(width: int) -> HiddenWindow:
    return HiddenWindow(2, CPU).empty(2, CPU, width)


def states(begins: Sequence[int], level: int, tokens: int) -> dict[int, torch.Tensor]:
    """100 times the level and the position, in rows that begin at `begins`."""
    positions = 100.0 * level + torch.tensor(begins)[:, None] + torch.arange(tokens)
    return {LAYER: positions[:, :, None].expand(-1, -1, 3).clone()}


def by_position(window: HiddenWindow, row: int) -> dict[int, float]:
    """Return the states that the drafter reads."""
    own = window.states()
    first = int(own.positions[row])
    count = int(own.counts[row])
    return {first + i: float(own.layers[LAYER][row, i, 0]) for i in range(count)}


# Events of two rows. Of a pass: how far before the end it begins, tokens, and skipped tokens.
step = st.tuples(
    st.sampled_from(["pass", "pass", "pass", "forget", "cut", "write", "select"]),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 3)), min_size=2,
             max_size=2),
)  # fmt: skip


@pytest.mark.parametrize("width", [0, WIDTH], ids=["as many as come", "in place"])
@settings(max_examples=300)
@given(st.lists(step, max_size=12))
def test_a_window_has_the_latest_state_of_every_token(width: int, steps: list[tuple]) -> None:
    """A pass keeps skipped states; `write` copies into a window of the other kind."""
    window, other = empty(width), empty(WIDTH - width)
    rows: list[dict[int, float]] = [{}, {}]
    ends = [0, 0]
    for level, (kind, numbers) in enumerate(steps):
        if kind == "pass":
            begins, counts, skipped = [], [], []
            for row, (back, count, skip) in enumerate(numbers):
                # It leaves no gap, and a window is not wider than it may be.
                begin = max(ends[row] - back, 0)
                own = min(begin + skip, begin + count, ends[row])
                if begin + count - min([own, *rows[row]]) > WIDTH:
                    count = 0
                begins.append(begin)
                counts.append(count)
                skipped.append(own - begin)
                if count:
                    kept = {at: state for at, state in rows[row].items() if at < own}
                    ends[row] = begin + count
                    rows[row] = kept | {at: 100.0 * level + at for at in range(own, ends[row])}
            made = states(begins, level, max(*counts, window.width > 0))
            some = torch.tensor(skipped) if any(skipped) else None
            window.add(made, torch.tensor(begins), torch.tensor(counts), some)
        elif kind == "forget":
            part = torch.tensor([number[0] % 2 for number in numbers])
            window.forget(part, [False, False], window.counts)
            rows = [{} if number[0] % 2 else own for own, number in zip(rows, numbers, strict=True)]
        elif kind == "cut":
            ends = [max(end - number[0], 0) for end, number in zip(ends, numbers, strict=True)]
            window.cut(torch.tensor(ends))
            rows = [{at: own[at] for at in own if at < ends[row]} for row, own in enumerate(rows)]
        elif kind == "write":
            other.write(window)
            window, other = other, window
        else:
            keep = [None if back > 3 else back % 2 for back, _, _ in numbers]
            window.select(keep)
            rows = [{} if row is None else rows[row] for row in keep]
            ends = [0 if row is None else ends[row] for row in keep]
        assert [by_position(window, row) for row in range(2)] == rows
        assert window.counts.tolist() == [len(own) for own in rows]
        assert window.end.tolist() == ends
        for most in range(WIDTH + 1):
            assert window.fits([0, 1], most) == (
                min(map(len, rows)) > 0 and max(map(len, rows)) <= most
            )


@pytest.mark.parametrize("width", [0, WIDTH])
def test_states_of_two_types_are_not_rounded(width: int) -> None:
    window = empty(width)
    made = states([4, 4], 1, 2)
    window.add(made, torch.tensor([4, 4]), torch.tensor([2, 2]))
    half = {LAYER: torch.full((2, 1, 3), 0.5, dtype=torch.float16)}
    window.add({LAYER: made[LAYER] + 1e-4}, torch.tensor([4, 4]), torch.tensor([2, 2]))
    window.add(half, torch.tensor([6, 6]), torch.tensor([1, 1]))
    own = window.states().layers[LAYER]
    assert own.dtype == torch.float32
    assert own[0, :3, 0].tolist() == pytest.approx([104.0001, 105.0001, 0.5], abs=1e-5)


def test_a_window_of_some_width_stays_at_its_address() -> None:
    window = HiddenRing(2, CPU, WIDTH)
    window.add(states([0, 0], 1, 2), torch.tensor([0, 0]), torch.tensor([2, 1]))
    addresses = [own.data_ptr() for own in window.tensors]
    window.add(states([2, 1], 1, 2), torch.tensor([2, 1]), torch.tensor([1, 0]))
    assert [own.data_ptr() for own in window.tensors] == addresses
