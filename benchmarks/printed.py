"""The numbers that the papers print (printed.json), for comparison with measurements."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PRINTED = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
OVERALL = "overall"
TASK_NAMES: dict[str, str] = PRINTED["tasks"]
# By target and system, and task: speedup over plain decoding, accepted tokens per pass.
SPEEDUPS = {(target, system): by_task for target, system, by_task in PRINTED["speedups"]}
POLYBASIC, FOUR_LEVELS, EAGLE_2 = "polybasic", "four levels", "EAGLE-2"
LARGER = ("Vicuna-13B", "LLaMA2-70B")  # Table 3


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def target_of(model: Mapping[str, Any]) -> str | None:
    """Return the paper's name of a model, by its path, id or name, or None."""
    name = str(model.get("place") or model["name"]).rstrip("/").rpartition("/")[2]
    plain = _letters(name).removeprefix("meta")
    return next((target for target, _ in SPEEDUPS if plain.startswith(_letters(target))), None)


def system_of(method: Mapping[str, Any]) -> str | None:
    """Return the papers' system that equals a method of ``run.json``, or None."""
    if method["kind"] not in ("chain", "eagle") or not method.get("tree"):
        return None
    _, *middle, last = (str(name).lower() for name in method["levels"])
    if _letters(last) not in ("eagle", "eagle2"):
        return None
    named = not middle or any("w4" in name for name in middle)
    return {0: EAGLE_2, 1: POLYBASIC, 2: FOUR_LEVELS}.get(len(middle)) if named else None


def speedup_of(target: str | None, system: str | None, task: str) -> dict[str, float | None]:
    """Return the paper's speedup and mean accepted length, each None if not printed."""
    found = SPEEDUPS.get((target or "", system or ""), {}).get(task, (None, None))
    return dict(zip(("paper_speedup", "paper_length"), found, strict=True))
