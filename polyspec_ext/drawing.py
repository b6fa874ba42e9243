"""Pictures as PNG; matplotlib, which draws them, is an optional dependency."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any


def pyplot() -> Any:
    """Return matplotlib's pyplot without a display. ImportError: it is not installed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, place: Path | IO[bytes]) -> None:
    """Writes a figure, which is done with."""
    figure.savefig(place, format="png", dpi=120)
    pyplot().close(figure)
