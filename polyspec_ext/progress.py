"""Progress bars, notes and phases on standard error: notes only on a terminal, phases of a long
command always, bars as a line every ten seconds off a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

_SECONDS = 10.0  # between two lines off a terminal


class _Lines(tqdm):  # type: ignore[misc]
    """A bar in lines, the first after `_SECONDS`."""

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if not getattr(self, "ends", False) and not self.disable:
            self.fp.write(f"{self}\n")
            self.fp.flush()

    def close(self) -> None:
        self.ends = True
        super().close()


def bar(things: Any = None, **options: Any) -> Any:
    """Return a tqdm bar over `things`, or to be updated by hand."""
    if on_terminal():
        return tqdm(things, file=sys.stderr, **options)
    lines: dict[str, Any] = {"leave": False, "ncols": 0}
    lines |= {"delay": _SECONDS, "mininterval": _SECONDS, "maxinterval": _SECONDS}
    return _Lines(things, file=sys.stderr, disable=sys.stderr is None, **{**options, **lines})


def on_terminal() -> bool:
    """Return whether standard error is a terminal."""
    return sys.stderr is not None and sys.stderr.isatty()


def note(line: str) -> None:
    """Print a line above the bars; nothing off a terminal."""
    if on_terminal():
        tqdm.write(line, file=sys.stderr)


def phase(line: str) -> None:
    """Print a line about the next phase of a long command, on a terminal or to a log."""
    if sys.stderr is not None:
        tqdm.write(line, file=sys.stderr)
        sys.stderr.flush()


@contextmanager
def loading(shown: bool = True) -> Iterator[None]:
    """Hide transformers' bars in the block off a terminal, or where `shown` is false."""
    from huggingface_hub import utils
    from transformers.utils import logging

    if (shown and on_terminal()) or not logging.is_progress_bar_enabled():
        yield
        return
    hub: Any = utils
    hidden = hub.are_progress_bars_disabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()
        if hidden:  # the line above shows the hub's as well
            hub.disable_progress_bars()
