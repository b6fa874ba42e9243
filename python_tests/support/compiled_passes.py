"""Which passes of a level are not compiled."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from polyspec_ext.kv_cache import RollbackCache
from polyspec_ext.levels import compiled


@contextmanager
def short_passes_in_python(levels: Sequence[Any]) -> Iterator[list[int]]:
    """Counts, by level, the passes of as many tokens as are compiled, prompts of that length among
    them, in which Python appends the keys of the first layer: compiled passes call no Python."""
    counts = [0] * len(levels)

    def seen(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or frame.f_code is not RollbackCache.update.__code__:
            return
        cache, keys = frame.f_locals["self"], frame.f_locals["key_states"]
        first = frame.f_locals["layer_idx"] == 0
        for number, level in enumerate(levels):
            if cache is level.cache and first and keys.shape[2] <= compiled.LONGEST:
                counts[number] += 1

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        yield counts
    finally:
        sys.setprofile(before)
