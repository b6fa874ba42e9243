"""Hidden states on their way to the drafter: put together as they come, and at a place of their
own."""

from collections.abc import Sequence

import pytest
import torch

from polyspec_ext.runtime.hidden import HiddenWindow

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
