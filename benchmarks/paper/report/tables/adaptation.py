"""The adaptation paper's table: policies beside the best fixed windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import printed, statistics
from ..form import Table, interval, method_cell, number, word
from ..saved import Saved

_FIXED = ("chain", "eagle", "planned", "cascade")  # kinds of methods whose windows do not change


def adaptation(run: Saved) -> Table:
    """Every policy beside the best fixed windows of the same levels."""
    base = run.turns[run.baseline]
    speedups = {name: statistics.speedup(turns, base) for name, turns in run.turns.items()}
    rates = {name: found.value for name, found in speedups.items() if found is not None}
    rows = []
    for name, method in run.methods.items():
        if method["kind"] != "adaptive" or name not in rates:
            continue
        fixed = [
            other
            for other in rates
            if run.methods[other]["kind"] in _FIXED
            and run.methods[other]["levels"] == method["levels"]
        ]
        best = max(fixed, key=lambda other: rates[other], default=None)
        gain = None if best is None else statistics.speedup(run.turns[name], run.turns[best])
        best_label = None if best is None else run.methods[best]["label"]
        best_rate = None if best is None else rates[best]
        rows.append(
            [
                method_cell(name, method["label"]),
                word("policy", "policy", method["policy"]),
                interval("speedup", "speedup", speedups[name], ratio=True),
                word("best fixed", "best_fixed", best_label),
                number("its speedup", "best_fixed_speedup", best_rate),
                interval("gain", "gain", gain, 3, ratio=True),
                word("paper", "paper", _printed_gain(run, method)),
            ]
        )
    return Table(
        "adaptation",
        "Adaptive windows",
        "Gain: tokens per second over those of the fastest fixed windows of the same levels in "
        "this run, over the same turns. The paper's gains are over its best fixed window, on its "
        "models.",
        rows,
    )


def _printed_gain(run: Saved, method: Mapping[str, Any]) -> str:
    own = printed.EAGLE_GAINS.get(printed.target_of(run.target) or "")
    if own is not None and "eagle" in str(method["levels"][-1]).lower():
        return f"{1 + own:.3f} (EAGLE-2, MT-bench)"
    return f"{1 + printed.WINDOW_GAIN:.3f} ({printed.WINDOW_SPEEDUP:.2f} over plain decoding)"
