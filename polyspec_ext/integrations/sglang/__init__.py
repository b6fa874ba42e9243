"""SGLang's plug-in: this package's rules verify drafts inside SGLang, and its chains draft.

SGLang calls `register` in each of its processes. Without the environment variable ``POLYSPEC`` it
does nothing. Nothing here has run inside SGLang: signatures were read from the sources of 0.5.23.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

from ... import arguments

__all__ = ["Settings", "register"]

_SAMPLE = "sglang.srt.speculative.eagle_utils.eagle_sample"
_NAMES = ("rule", "levels", "window")


@dataclass(frozen=True)
class Settings:
    """Configure the plug-in.

    Args:
        rule: "token" or "block", by which drafts that were drawn are verified.
        levels: models below SGLang's, the largest first, as the command line names them; without
            them ``--speculative-algorithm`` is one of SGLang's.
        window: most draft tokens that each level hands up.
    """

    rule: str = "token"
    levels: tuple[str, ...] = ()
    window: tuple[int, ...] = ()

    @staticmethod
    def of(text: str) -> Settings:
        """Return the settings of ``POLYSPEC``, a JSON object. TypeError, ValueError: it is none."""
        given = json.loads(text)
        if not isinstance(given, Mapping) or not set(given) <= set(_NAMES):
            names = ", ".join(_NAMES)
            raise ValueError(f"POLYSPEC: expected a JSON object of any of {names}, given {text}")
        rule = given.get("rule", "token")
        if rule not in ("token", "block"):
            raise ValueError(f'rule: expected "token" or "block", given {arguments.shown(rule)}')
        levels = tuple(arguments.strings("levels", given.get("levels")))
        if not levels:
            if "window" in given:
                raise ValueError("window: expected none without levels")
            return Settings(rule)
        sizes = given.get("window", [8] * len(levels))
        window = arguments.sizes("window", sizes, len(levels), len(levels) + 1)
        return Settings(rule, levels, tuple(window))


def register() -> None:
    """Hook `eagle_sample`, and register the algorithm POLYSPEC if there are levels.

    SystemExit: settings are wrong, or SGLang differs. SGLang only logs other errors of a plug-in.
    """
    text = os.environ.get("POLYSPEC")
    if text:
        try:
            _register(Settings.of(text))
        except Exception as error:
            raise SystemExit(f"polyspec: {error}") from error


def _register(settings: Settings) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative import eagle_utils

    from . import rule

    given = " ".join(inspect.signature(eagle_utils.eagle_sample).parameters)
    if given != rule.PARAMETERS:
        raise ImportError(f"sglang: expected eagle_sample({rule.PARAMETERS}), given ({given})")
    sample = functools.partial(rule.eagle_sample, rule=settings.rule)
    HookRegistry.register(_SAMPLE, sample, HookType.AROUND)
    if settings.levels:
        from . import worker

        worker.register(settings.levels, settings.window, settings.rule)
