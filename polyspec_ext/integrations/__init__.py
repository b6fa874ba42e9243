"""Where a chain plugs into other programs; each module imports what it plugs into.

Here are the settings that plug-ins for serving engines share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import arguments

if TYPE_CHECKING:
    from .draft_chain import DraftChain


@dataclass(frozen=True)
class Settings:
    """Configure a plug-in.

    Args:
        rule: "token" or "block", by which drafts that were drawn are verified.
        levels: models below the engine's, the largest first, as the command line names them.
            Without them the engine drafts.
        window: most draft tokens that each level hands up.
    """

    rule: str = "token"
    levels: tuple[str, ...] = ()
    window: tuple[int, ...] = ()

    def load(self, device: Any, **options: Any) -> DraftChain:
        """Return the levels below an engine's target. `options`: of `DraftChain`.

        Raises:
            TypeError, ValueError: a level cannot be loaded, or does not fit the target.
        """
        from ..chain import Chain
        from .draft_chain import DraftChain

        windows = list(self.window[1:])
        chain = Chain(list(self.levels), windows, rule=self.rule, device=device)
        return DraftChain(chain, **options)


def read_settings(name: str, given: Any, of_levels: Sequence[str]) -> Settings:
    """Return the settings `given`; `window` is empty without one. `of_levels`: other names of
    settings that need levels.

    Raises:
        TypeError, ValueError: settings that are unknown or wrong.
    """
    names = ["rule", "levels", "window", *of_levels]
    shown = ", ".join(names)
    if not isinstance(given, Mapping):
        raise TypeError(
            f"{name}: expected a mapping with any of {shown}, given {arguments.shown(given)}"
        )
    for key in given:
        if key not in names:
            raise ValueError(f"{name}: expected any of {shown}, given {key!r}")
    rule = given.get("rule", "token")
    if rule not in ("token", "block"):
        raise ValueError(f'rule: expected "token" or "block", given {arguments.shown(rule)}')
    levels = tuple(arguments.strings("levels", given.get("levels")))
    for key in names[2:]:
        if key in given and not levels:
            raise ValueError(f"{key}: expected none without levels")
    window: Sequence[int] = ()
    if "window" in given:
        window = arguments.sizes("window", given["window"], len(levels), len(levels) + 1)
    return Settings(rule, levels, tuple(window))
