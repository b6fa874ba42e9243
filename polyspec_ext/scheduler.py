"""State machine of a chain without models: the level that acts next, and its number of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from . import _C, arguments


class Scheduler(_C.Scheduler):
    """Host state machine of a chain, without tensors (``polyspec/scheduler.hpp``): `next` returns
    the next step (level, action and tokens), `report` enters its result.

    Args:
        windows: ``windows[i - 1]`` tokens are gathered for level i = 1 ... n-1 before it verifies,
            each >= 0.
        rounds: ``rounds[i - 1]`` bounds the blocks from the level below that level i waits for; 0:
            no bound. Empty: no bounds.

    Raises:
        TypeError, ValueError: no integers >= 0, or different numbers of windows and rounds.
    """

    def __init__(self, windows: Sequence[int], rounds: Sequence[int] = ()) -> None:
        sizes = _counts("windows", windows)
        if not sizes:
            raise ValueError("windows: expected one for each level but the last, given none")
        bounds = _counts("rounds", rounds)
        if bounds and len(bounds) != len(sizes):
            raise ValueError(f"rounds: expected none or {len(sizes)}, given {len(bounds)}")
        super().__init__(sizes, bounds)

    def start(self, max_new_tokens: int) -> None:
        """Begin a request of at most `max_new_tokens` tokens, >= 0."""
        super().start(arguments.integer("max_new_tokens", max_new_tokens))

    def report(self, level: int, emitted: int, eos: bool = False) -> None:
        """Enter the result of the step that `next` returned.

        Args:
            level: level of the step.
            emitted: number of tokens that it hands up.
            eos: whether the last token ends the text.

        Raises:
            TypeError, ValueError: an argument has another type or is out of range.
            RuntimeError: `next` named another step, or the step cannot emit as many tokens.
        """
        super().report(
            arguments.integer("level", level, self.levels, 1),
            arguments.integer("emitted", emitted),
            arguments.flag("eos", eos),
        )

    def set_windows(self, windows: Sequence[int]) -> None:
        """Set the windows from the next step on, as many as before."""
        super().set_windows(arguments.sizes("windows", windows, self.levels - 1, self.levels))

    def set_tail(self, tail: int) -> None:
        """Set the maximum tokens of a tail, which level n drafts before level 1 verifies, from
        three levels on; 0: no tail."""
        high = arguments.SIZE_MAX if self.levels > 2 else 0
        super().set_tail(arguments.integer("tail", tail, high))

    def pending(self, level: int) -> int:
        """Return the number of pending tokens of level 1 ... n-1."""
        return super().pending(arguments.integer("level", level, self.levels - 1, 1))


def _counts(name: str, value: Sequence[int]) -> list[int]:
    numbers = arguments.row_integers(name, value)
    if len(numbers) >= 2**16 - 1:
        raise ValueError(f"{name}: expected fewer than {2**16 - 1}, given {len(numbers)}")
    return [arguments.integer(name, number) for number in numbers]
