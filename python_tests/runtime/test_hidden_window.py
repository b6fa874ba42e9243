"""Hidden states on their way to the drafter: put together as they come, and at a place of their
own."""

from collections.abc import Sequence

import pytest
import torch

from polyspec_ext.runtime.rows import HiddenWindow

LAYER = 2
CPU = torch.device("cpu")


def states(begin: int, level: int, tokens: int) -> dict[int, torch.Tensor]:
    """Of two rows alike: 100 times the level and the position."""
    positions = 100.0 * level + torch.arange(begin, begin + tokens)
    return {LAYER: positions[None, :, None].expand(2, -1, 3).clone()}


def by_position(window: HiddenWindow, row: int) -> dict[int, float]:
    """What the drafter reads."""
    own = window.states()
    first = int(own.positions[row])
    count = int(own.counts[row])
    return {first + i: float(own.layers[LAYER][row, i, 0]) for i in range(count)}


def of(level: int, positions: Sequence[int]) -> dict[int, float]:
    return {position: 100.0 * level + position for position in positions}


@pytest.fixture(params=[0, 8], ids=["as many as come", "in place"])
def window(request: pytest.FixtureRequest) -> HiddenWindow:
    return HiddenWindow(2, CPU, request.param)


def test_what_a_level_above_has_read_stays_as_it_was(window: HiddenWindow) -> None:
    # Row 0 has been told 4 to 8 by the target; the drafter knows all of row 1 already.
    window.add(states(4, 1, 5), torch.tensor([4, 4]), torch.tensor([5, 0]))
    # A level below begins at 7, of which row 0 has read two tokens and row 1 three.
    begin, skipped = torch.tensor([7, 7]), torch.tensor([2, 3])
    window.add(states(7, 2, 5), begin, torch.tensor([4, 5]), skipped)
    assert by_position(window, 0) == {**of(1, range(4, 9)), **of(2, [9, 10])}
    assert by_position(window, 1) == of(2, [10, 11])


def test_a_pass_that_has_skipped_all_brings_nothing(window: HiddenWindow) -> None:
    window.add(states(4, 1, 3), torch.tensor([4, 4]), torch.tensor([3, 0]))
    skipped = torch.tensor([3, 3])
    window.add(states(4, 2, 3), torch.tensor([4, 4]), torch.tensor([2, 2]), skipped)
    assert by_position(window, 0) == of(1, [4, 5])
    assert by_position(window, 1) == {}


def test_a_later_pass_replaces_what_it_has_read(window: HiddenWindow) -> None:
    window.add(states(4, 1, 5), torch.tensor([4, 4]), torch.tensor([5, 5]))
    window.add(states(6, 2, 2), torch.tensor([6, 6]), torch.tensor([2, 0]))
    # What stood behind the later pass's end does not stand any more.
    assert by_position(window, 0) == {**of(1, [4, 5]), **of(2, [6, 7])}
    assert by_position(window, 1) == of(1, range(4, 9))
    window.add(states(3, 3, 2), torch.tensor([3, 3]), torch.tensor([0, 2]))
    assert by_position(window, 1) == of(3, [3, 4])


def test_what_the_drafter_knows_waits_no_longer(window: HiddenWindow) -> None:
    window.add(states(4, 1, 5), torch.tensor([4, 4]), torch.tensor([5, 3]))
    window.forget(torch.tensor([1, 0]))
    assert by_position(window, 0) == {}
    assert by_position(window, 1) == of(1, [4, 5, 6])
    assert window.begin.tolist() == [9, 4]
    window.add(states(7, 2, 3), torch.tensor([9, 7]), torch.tensor([1, 2]))
    assert by_position(window, 0) == {9: 207.0}  # the first of that pass
    assert by_position(window, 1) == {**of(1, [4, 5, 6]), **of(2, [7, 8])}
    window.forget(torch.tensor([1, 1]))
    assert window.begin.tolist() == [10, 9]


def test_what_is_rejected_stands_no_more(window: HiddenWindow) -> None:
    window.add(states(4, 1, 5), torch.tensor([4, 4]), torch.tensor([5, 5]))
    window.cut(torch.tensor([6, 9]))
    assert by_position(window, 0) == of(1, [4, 5])
    assert by_position(window, 1) == of(1, range(4, 9))
    window.forget(torch.tensor([0, 1]))
    window.cut(torch.tensor([3, 7]))
    assert not window.counts.any()
    assert window.begin.tolist() == [3, 7]


def test_states_of_two_types_are_not_rounded(window: HiddenWindow) -> None:
    window.add(states(4, 1, 2), torch.tensor([4, 4]), torch.tensor([2, 2]))
    half = {LAYER: torch.full((2, 1, 3), 0.5, dtype=torch.float16)}
    window.add({LAYER: states(4, 1, 2)[LAYER] + 1e-4}, torch.tensor([4, 4]), torch.tensor([2, 2]))
    window.add(half, torch.tensor([6, 6]), torch.tensor([1, 1]))
    own = window.states().layers[LAYER]
    assert own.dtype == torch.float32
    assert own[0, :3, 0].tolist() == pytest.approx([104.0001, 105.0001, 0.5], abs=1e-5)


def test_from_one_to_the_other_and_back() -> None:
    window, place = HiddenWindow(2, CPU), HiddenWindow(2, CPU, 8)
    # Prompts of one token have no states.
    window.add(states(0, 1, 0), torch.tensor([0, 0]), torch.tensor([0, 0]))
    assert not window.states().layers
    window.add(states(0, 1, 2), torch.tensor([0, 0]), torch.tensor([2, 1]))
    assert window.fits([0, 1], 2)
    assert not window.fits([0, 1], 1)
    place.write(window)
    addresses = [own.data_ptr() for own in place.tensors]
    place.add(states(2, 1, 2), torch.tensor([2, 1]), torch.tensor([1, 0]))
    assert [own.data_ptr() for own in place.tensors] == addresses
    window.write(place)
    place.add(states(0, 5, 2), torch.tensor([0, 0]), torch.tensor([2, 2]))
    assert by_position(window, 0) == of(1, [0, 1, 2])
    assert by_position(window, 1) == of(1, [0])
    place.forget(torch.tensor([1, 1]))
    window.write(place)
    assert not window.counts.any()
    assert not window.fits([0, 1], 8)


def test_rows_leave(window: HiddenWindow) -> None:
    window.add(states(4, 1, 3), torch.tensor([4, 5]), torch.tensor([3, 2]))
    window.select([1])
    assert by_position(window, 0) == {5: 104.0, 6: 105.0}
