"""Progress bars, notes and phases: on standard error, and only where that is a terminal, but for
the phases of a long command."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm


def bar(things: Any = None, **options: Any) -> Any:
    """tqdm over `things`, or to be moved on by hand; silent where nobody watches."""
    return tqdm(things, file=sys.stderr, disable=None, **options)


def on_terminal() -> bool:
    """Whether somebody watches standard error."""
    return sys.stderr is not None and sys.stderr.isatty()


def note(line: str) -> None:
    """A line about what goes on, above the bars; nothing where nobody watches."""
    if on_terminal():
        tqdm.write(line, file=sys.stderr)


def phase(line: str) -> None:
    """A line about what a command of minutes does next. It stands in a log as well, where it is all
    that shows that something is going on."""
    if sys.stderr is not None:
        tqdm.write(line, file=sys.stderr)
        sys.stderr.flush()


@contextmanager
def loading(shown: bool = True) -> Iterator[None]:
    """transformers' bars for the models loaded here: none off a terminal, or where `shown` is
    false. Its setting is as before afterwards."""
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
