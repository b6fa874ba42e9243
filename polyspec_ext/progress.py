"""Progress bars, notes and phases on standard error: bars and notes only on a terminal, phases of a
long command always."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm


def bar(things: Any = None, **options: Any) -> Any:
    """Return a tqdm bar over `things`, or to be updated by hand; silent off a terminal."""
    return tqdm(things, file=sys.stderr, disable=None, **options)


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
