"""Python calls of the package itself per round of the target, counted with `sys.setprofile`.

A count does not depend on how busy the machine is, unlike a time, so a test can hold a budget
against it. What torch and `transformers` call among themselves is left out.
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
    """Count calls of the package's functions while `call` runs, by file below the package.
    Generators and comprehensions that have a frame count each time they are entered."""
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


def _chain(*names: str, pack: bool = False) -> ps.Chain:
    # Whatever this processor would choose.
    levels = list(tiny.levels(names, dtype=torch.float32, pack=pack).values())
    return ps.Chain(levels, [5, 3][: len(names) - 1])


def _eagle_tree() -> ps.Chain:
    target = tiny.levels(["target"], dtype=torch.float32, pack=False)["target"]
    head = ps.Eagle.from_pretrained(tiny.path("eagle3"), target, tree=DynamicTree())
    return ps.Chain([target, head], [5])


# Name, chain of the shipped models, prompts, temperature.
CASES: dict[str, tuple[Callable[[], ps.Chain], int, float]] = {
    "plain decoding": (lambda: _chain("target"), 1, 1.0),
    "plain decoding, packed": (lambda: _chain("target", pack=True), 1, 1.0),
    "three levels": (lambda: _chain(*tiny.LEVELS), 1, 1.0),
    "three levels, packed": (lambda: _chain(*tiny.LEVELS, pack=True), 1, 1.0),
    "three levels, 8 prompts": (lambda: _chain(*tiny.LEVELS), 8, 1.0),
    "EAGLE tree": (_eagle_tree, 1, 0.0),
}


def measure(name: str) -> dict[str, Any]:
    """Return the median calls of some rounds of a case, and the number of files that one of them
    has crossed."""
    make, rows, temperature = CASES[name]
    prompts = [list(range(1, 9 + row)) for row in range(rows)]
    batch = make().batch(prompts, 400, temperature, seed=3, eos_token_id=[])
    for _ in range(WARM_UP):
        batch.advance()
    rounds = sorted((counted(batch.advance) for _ in range(ROUNDS)), key=Counter.total)
    calls = statistics.median_high(found.total() for found in rounds)
    return {"name": name, "calls": calls, "files": len(rounds[ROUNDS // 2])}
