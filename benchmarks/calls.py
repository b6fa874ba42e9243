"""Python calls of the package itself per round of the target, counted with `sys.setprofile`.

A count does not depend on how busy the machine is, unlike a time, so a test can hold a budget
against it. What torch and `transformers` call among themselves is theirs and is left out.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

import polyspec_ext as ps
from polyspec_ext import tiny
from polyspec_ext.drafters.trees import DynamicTree

ROUNDS, WARM_UP = 8, 4
_ROOT = os.path.join(os.path.dirname(ps.__file__), "")


def counted(call: Callable[[], object]) -> Counter[str]:
    """Calls of the package's functions while `call` runs, by file below the package. Generators
    and comprehensions that have a frame of their own count each time they are entered."""
    found: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(_ROOT):
            found[file[len(_ROOT) :]] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found


def _levels(*names: str, pack: bool = False) -> list[Any]:
    # Whatever this processor would choose.
    return list(tiny.levels(names, dtype=torch.float32, pack=pack).values())


def _eagle_tree() -> ps.Chain:
    (target,) = _levels("target")
    head = ps.Eagle.from_pretrained(tiny.path("eagle3"), target, tree=DynamicTree())
    return ps.Chain([target, head], [5])


def _three_levels(pack: bool = False) -> ps.Chain:
    return ps.Chain(_levels(*tiny.LEVELS, pack=pack), [5, 3])


# Name, chain of the shipped models, prompts, temperature.
CASES: dict[str, tuple[Callable[[], ps.Chain], int, float]] = {
    "plain decoding": (lambda: ps.Chain(_levels("target")), 1, 1.0),
    "plain decoding, packed": (lambda: ps.Chain(_levels("target", pack=True)), 1, 1.0),
    "three levels": (_three_levels, 1, 1.0),
    "three levels, packed": (lambda: _three_levels(pack=True), 1, 1.0),
    "three levels, 8 prompts": (_three_levels, 8, 1.0),
    "EAGLE tree": (_eagle_tree, 1, 0.0),
}


def measure(name: str) -> dict[str, Any]:
    """One case: the median of some rounds, and what one of them has crossed.

    Returns:
        name, calls, files (number), and by_folder: calls by folder or file at the top.
    """
    make, rows, temperature = CASES[name]
    prompts = [list(range(1, 9 + row)) for row in range(rows)]
    batch = make().batch(prompts, 400, temperature, seed=3, eos_token_id=[])
    for _ in range(WARM_UP):
        batch.advance()
    rounds = sorted((counted(batch.advance) for _ in range(ROUNDS)), key=Counter.total)
    middle = rounds[ROUNDS // 2]
    folders: Counter[str] = Counter()
    for file, calls in middle.items():
        folders[file.partition(os.sep)[0]] += calls
    return {
        "name": name,
        "calls": statistics.median_high(found.total() for found in rounds),
        "files": len(middle),
        "by_folder": dict(folders.most_common()),
    }
