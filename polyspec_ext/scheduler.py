"""The state machine of a chain without its models: who drafts or verifies next, and how much."""

from __future__ import annotations

from collections.abc import Sequence

from . import _C, arguments


class Scheduler(_C.Scheduler):
    """Host state machine of one chain, without tensors (``polyspec/scheduler.hpp``): `next` says
    which level does what with how many tokens, `report` tells it what came of that.

    Args:
        windows: ``windows[i - 1]`` tokens are gathered for level i = 1 ... n-1 before it verifies,
            each >= 0.
        rounds: ``rounds[i - 1]`` blocks from the level below, after which it waits no longer; 0: no
            bound. Empty: none for all.

    Raises:
        TypeError, ValueError: no such integers, or not as many of both.
    """

    def __init__(self, windows: Sequence[int], rounds: Sequence[int] = ()) -> None:
        own = _counts("windows", windows)
        if not own:
            raise ValueError("windows: expected one for each level but the last, given none")
        bounds = _counts("rounds", rounds)
        if bounds and len(bounds) != len(own):
            raise ValueError(f"rounds: expected none or {len(own)}, given {len(bounds)}")
        super().__init__(own, bounds)

    def start(self, max_new_tokens: int) -> None:
        """Begins a request of at most so many tokens, >= 0."""
        super().start(arguments.integer("max_new_tokens", max_new_tokens))

    def report(self, level: int, emitted: int, eos: bool = False) -> None:
        """Tells what the step that `next` named has brought.

        Args:
            level: that took the step.
            emitted: tokens that it hands up.
            eos: the last of them ends the text.

        Raises:
            TypeError, ValueError: no such numbers.
            RuntimeError: the step was another, or cannot have brought so many.
        """
        super().report(
            arguments.integer("level", level, self.levels, 1),
            arguments.integer("emitted", emitted),
            arguments.flag("eos", eos),
        )

    def set_windows(self, windows: Sequence[int]) -> None:
        """Changes the windows from the next step on; their number stays."""
        super().set_windows(arguments.sizes("windows", windows, self.levels - 1, self.levels))

    def set_tail(self, tail: int) -> None:
        """Tokens that level n drafts at most before level 1 verifies, from three levels on; 0:
        none."""
        high = arguments.SIZE_MAX if self.levels > 2 else 0
        super().set_tail(arguments.integer("tail", tail, high))

    def pending(self, level: int) -> int:
        """Tokens waiting for level 1 ... n-1."""
        return super().pending(arguments.integer("level", level, self.levels - 1, 1))


def _counts(name: str, value: Sequence[int]) -> list[int]:
    given = arguments.row_integers(name, value)
    if len(given) >= 2**16 - 1:
        raise ValueError(f"{name}: expected fewer than {2**16 - 1}, given {len(given)}")
    return [arguments.integer(name, one) for one in given]
