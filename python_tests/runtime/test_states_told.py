"""Hidden states on their way to the drafter: as a list of passes, and put together in place."""

import torch

from polyspec_ext.runtime.told import StatesList, StatesWindow

LAYER = 2


def states(begin: int, level: int, tokens: int) -> dict[int, torch.Tensor]:
    """Of two rows alike: 100 times the level and the position."""
    positions = 100.0 * level + torch.arange(begin, begin + tokens)
    return {LAYER: positions[None, :, None].expand(2, -1, 3).clone()}


def by_position(told: StatesList | StatesWindow, row: int) -> dict[int, float]:
    """What the drafter would read, a later pass before an earlier one."""
    found: dict[int, float] = {}
    for own in told.told():
        first = int(own.positions[row])
        for i in range(int(own.counts[row])):
            found[first + i] = float(own.layers[LAYER][row, i, 0])
    return found


def both() -> tuple[StatesList, StatesWindow]:
    return StatesList(), StatesWindow(2, 8, torch.device("cpu"))


def test_what_a_level_above_has_read_stays_told_as_it_was() -> None:
    for told in both():
        # Row 0 has been told 4 to 8 by the target; the drafter knows all of row 1 already.
        told.add(1, states(4, 1, 5), torch.tensor([4, 4]), torch.tensor([5, 0]))
        # A level below begins at 7, of which row 0 has read two tokens and row 1 three.
        begin, skipped = torch.tensor([7, 7]), torch.tensor([2, 3])
        told.add(2, states(7, 2, 5), begin, torch.tensor([4, 5]), skipped)
        assert by_position(told, 0) == {
            **{position: 100.0 + position for position in range(4, 9)},
            **{position: 200.0 + position for position in (9, 10)},
        }
        assert by_position(told, 1) == {10: 210.0, 11: 211.0}


def test_a_later_pass_replaces_what_it_has_read() -> None:
    for told in both():
        told.add(1, states(4, 1, 5), torch.tensor([4, 4]), torch.tensor([5, 5]))
        told.add(2, states(6, 2, 2), torch.tensor([6, 6]), torch.tensor([2, 0]))
        # What stood behind the later pass's end does not stand any more.
        assert by_position(told, 0) == {4: 104.0, 5: 105.0, 6: 206.0, 7: 207.0}
        assert by_position(told, 1) == {position: 100.0 + position for position in range(4, 9)}


def test_prompts_of_one_token_have_no_states() -> None:
    """What is put together begins with the pass behind them."""
    told, window = both()
    none = states(0, 1, 0)
    told.add(1, none, torch.tensor([0, 0]), torch.tensor([0, 0]))
    told.add(1, states(0, 1, 2), torch.tensor([0, 0]), torch.tensor([2, 1]))
    assert isinstance(told, StatesList)
    assert isinstance(window, StatesWindow)
    window.write(told)
    assert by_position(window, 0) == {0: 100.0, 1: 101.0}
    assert by_position(window, 1) == {0: 100.0}
