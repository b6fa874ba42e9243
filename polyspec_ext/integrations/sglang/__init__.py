"""SGLang's plug-in: this package's rules verify drafts inside SGLang, and its chains draft.

SGLang calls `register` in each of its processes. Without the environment variable ``POLYSPEC`` it
has no effect. It has never run inside SGLang: signatures were read from the sources of 0.5.23.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import os

from .. import Settings, read_settings

__all__ = ["register"]

_SAMPLE = "sglang.srt.speculative.eagle_utils.eagle_sample"


def register() -> None:
    """Hook `eagle_sample`, and register the algorithm POLYSPEC if there are levels.

    SystemExit: settings are wrong, or SGLang differs. SGLang only logs other errors of a plug-in.
    """
    text = os.environ.get("POLYSPEC")
    if text:
        try:
            _register(read_settings("POLYSPEC", json.loads(text), []))
        except Exception as error:
            raise SystemExit(f"polyspec: {error}") from error


def _register(settings: Settings) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative import eagle_utils

    from . import rule

    names = " ".join(inspect.signature(eagle_utils.eagle_sample).parameters)
    if names != rule.PARAMETERS:
        raise ImportError(f"sglang: expected eagle_sample({rule.PARAMETERS}), given ({names})")
    sample = functools.partial(rule.eagle_sample, rule=settings.rule)
    HookRegistry.register(_SAMPLE, sample, HookType.AROUND)
    if settings.levels:
        windows = settings.window or (8,) * len(settings.levels)
        rule.register(dataclasses.replace(settings, window=windows))
