"""Pictures of a plan, as PNG; matplotlib is an optional dependency."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .. import drawing
from .planner import Plan
from .search import Insertion
from .theory import Acceptance, ConstantSeconds, Floats, expectation

_RATIOS = np.linspace(0.05, 0.8, 8)
_SHARES = np.linspace(0.6, 0.99, 8)
_WINDOWS = (2, 4, 7, 12)


def draw(plan: Plan, path: Path) -> None:
    """Writes predicted against measured tokens per second of the chains that were run, and for
    every model that was tried between two others the region of (T_new/T_i, acceptance) in which it
    pays, with itself as a point. ImportError without matplotlib."""
    tests = [one for one in plan.insertions if len(one.with_new.parts) == 3]
    count = 1 + len(tests)
    figure, axes = drawing.pyplot().subplots(1, count, squeeze=False, figsize=(4.6 * count, 4.4))
    first = axes[0, 0]
    ran = [one for one in plan.candidates if one.measured_tokens_per_second is not None]
    for one in ran:
        first.errorbar(
            one.measured_tokens_per_second, one.predicted_tokens_per_second,
            yerr=one.uncertainty * one.predicted_tokens_per_second, fmt="o", markersize=4,
            capsize=2, label=", ".join(one.levels),
        )  # fmt: skip
    most = max(one.predicted_tokens_per_second for one in plan.candidates) * 1.1
    first.plot([0, most], [0, most], color="grey", linewidth=0.8)
    first.set_xlabel("tokens/s measured")
    first.set_ylabel("tokens/s predicted")
    if ran:
        first.legend(fontsize=6)
    for axis, test in zip(axes[0, 1:], tests, strict=True):
        gains = region(plan, test)
        shown = axis.contourf(_RATIOS, _SHARES, gains, levels=12, cmap="RdYlGn")
        axis.contour(_RATIOS, _SHARES, gains, levels=[1.0], colors="black")
        figure.colorbar(shown, ax=axis)
        above, new, _ = test.with_new.parts
        axis.plot(test.seconds[1] / test.seconds[0], plan.measured.rate(above, new), "k*")
        axis.set_xlabel(f"T of the new model / T of {test.above}")
        axis.set_ylabel(f"acceptance by {test.above}")
        axis.set_title(f"{test.new} between {test.above} and {test.below}", fontsize=8)
    figure.tight_layout()
    drawing.save(figure, path)


def region(plan: Plan, test: Insertion) -> Floats:
    """``[acceptance, T ratio]``, tokens per second with a model of that kind in the middle over
    those without, each with its best window; what the last drafter costs and gains stays."""
    above, new, below = test.with_new.parts
    outer, inner = plan.measured.rate(above, below), plan.measured.rate(new, below)
    cost, _, draft = test.seconds
    own, window = plan.measured.own, test.with_new.windows[-1]
    two = max(
        expectation(
            [size], [], Acceptance.constant(outer), ConstantSeconds([cost + own, draft])
        ).tokens_per_second
        for size in (1, *_WINDOWS)
    )

    def three(share: float, ratio: float) -> float:
        accept = Acceptance.constant(share, inner)
        seconds = ConstantSeconds([cost + own, ratio * cost + own, draft])
        return max(
            expectation([size, window], [2], accept, seconds).tokens_per_second for size in _WINDOWS
        )

    return np.array([[three(share, ratio) / two for ratio in _RATIOS] for share in _SHARES])
