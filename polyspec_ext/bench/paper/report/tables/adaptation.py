"""The adaptation paper's tables: policies beside the best fixed windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import printed, statistics
from ..form import Column, Table, below_one, interval, number, word
from ..saved import Saved
from .compared import spread

_FIXED = ("chain", "eagle", "planned", "cascade")  # kinds of methods whose windows do not change
_SELECTS = ("select", "draft", "switch")  # in the name of a policy that chooses among drafters


def adaptation(run: Saved) -> Table:
    """The adaptation paper's tables: a policy beside the best fixed windows of the same levels,
    and of any drafter where it chooses among them."""
    base = run.turns[run.baseline]
    rates = {
        name: found.value
        for name in run.methods
        if (found := statistics.speedup(run.turns[name], base)) is not None
    }
    records = []
    for name, method in run.methods.items():
        if method["kind"] != "adaptive" or name not in rates:
            continue
        selects = any(text in str(method.get("policy", "")).lower() for text in _SELECTS)
        fixed = [
            other
            for other, one in run.methods.items()
            if one["kind"] in _FIXED
            and other in rates
            and (one["levels"] == method["levels"] or (selects and len(one["levels"]) == 2))
        ]
        best = max(fixed, key=lambda other: rates[other]) if fixed else None
        gain = None if best is None else statistics.speedup(run.turns[name], run.turns[best])
        paper = _printed_gain(run, method, selects)
        records.append(
            {
                "method": name,
                "label": method["label"],
                "policy": method.get("policy"),
                "chooses": "drafter" if selects else "windows",
                **spread("speedup", statistics.speedup(run.turns[name], base)),
                "best_fixed": None if best is None else run.methods[best]["label"],
                "best_fixed_speedup": None if best is None else rates[best],
                **spread("gain", gain),
                "paper": paper,
            }
        )
    return Table(
        "adaptation",
        "Adaptive windows and choice of drafter",
        "Gain: tokens per second over those of the fastest fixed windows of the same levels in "
        "this run, over the same turns. The paper's gains are over its best fixed window, on its "
        "models.",
        [
            Column("method", word("label"), words=True),
            Column("policy", word("policy"), words=True),
            Column("chooses", word("chooses"), words=True),
            Column("speedup", interval("speedup"), loses=below_one("speedup")),
            Column("best fixed", word("best_fixed"), words=True),
            Column("its speedup", number("best_fixed_speedup")),
            Column("gain", interval("gain", 3), loses=below_one("gain")),
            Column("paper", word("paper"), words=True),
        ],
        records,
    )


def _printed_gain(run: Saved, method: Mapping[str, Any], selects: bool) -> str:
    if selects:
        low, high = printed.SELECTION_GAIN
        return f"{1 + low:.3f} to {1 + high:.3f}"
    own = printed.EAGLE_GAINS.get(printed.target_of(run.target) or "")
    if own is not None and "eagle" in str(method["levels"][-1]).lower():
        return f"{1 + own:.3f} (EAGLE-2, MT-bench)"
    return f"{1 + printed.WINDOW_GAIN:.3f} ({printed.WINDOW_SPEEDUP:.2f} over plain decoding)"
