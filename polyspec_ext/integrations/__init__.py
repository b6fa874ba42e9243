"""Plug-ins of chains for other programs. Each module imports its host program.

This module has the settings shared by the plug-ins for serving engines.
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
    """Settings of a plug-in.

    Args:
        rule: "token" or "block", the verification rule of sampled drafts.
        levels: models below the engine's, the largest first, named as on the command line.
            Empty: the engine drafts.
        window: per level, maximum number of draft tokens for the next level up.
    """

    rule: str = "token"
    levels: tuple[str, ...] = ()
    window: tuple[int, ...] = ()

    def load(self, device: Any, **options: Any) -> DraftChain:
        """Load the levels below an engine's target. `options`: arguments of `DraftChain`.

        Raises:
            TypeError, ValueError: a level cannot be loaded, or does not fit the target.
        """
        from ..chain import Chain
        from .draft_chain import DraftChain

        windows = list(self.window[1:])
        chain = Chain(list(self.levels), windows, rule=self.rule, device=device)
        return DraftChain(chain, **options)


def read_settings(name: str, given: Any, of_levels: Sequence[str]) -> Settings:
    """Check a mapping of settings and return them; `window` is empty by default. `of_levels`: names
    of further settings that need levels.

    Raises:
        TypeError, ValueError: a setting is unknown or wrong.
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
