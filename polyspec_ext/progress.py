"""Progress bars, notes and phases on standard error: notes only on a terminal, phases of a long
command always, bars as a line every ten seconds off a terminal."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

T = TypeVar("T")
_SECONDS = 10.0  # between two lines off a terminal
_LONG = 256  # tokens of a prompt that takes a while
_prompts = False  # whether their reading has bars


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
def prompts() -> Iterator[None]:
    """Show bars in the block while long prompts are read."""
    global _prompts
    _prompts = True
    try:
        yield
    finally:
        _prompts = False


def after_prompts(things: Iterable[T]) -> Iterator[T]:
    """Yield `things`; bars show the prompts that are read before the first, not later ones, which
    would overwrite a streamed text."""
    rest = iter(things)
    with prompts():
        first = list(itertools.islice(rest, 1))
    yield from first
    yield from rest


@contextmanager
def reading(name: str, tokens: int) -> Iterator[Callable[[int], object]]:
    """Yield a function to be called with the tokens that the level `name` has read of a prompt of
    `tokens`; a bar counts them in a block of `prompts`."""
    if not _prompts or tokens <= _LONG:
        yield lambda count: None
        return
    about = f"{name} reads the prompt; Ctrl-C ends it"
    with bar(total=tokens, desc=about, unit=" tokens", leave=False) as shown:
        yield shown.update


@contextmanager
def loading(shown: bool = True, folder: str | None = None) -> Iterator[None]:
    """Show bars instead of transformers' in the block, in bytes of the weights in `folder`, and
    those of the hub on a terminal; or none where `shown` is false."""
    from huggingface_hub import utils
    from transformers.utils import logging

    if not logging.is_progress_bar_enabled():
        yield
        return
    hub: Any = utils
    hidden, sizes = hub.are_progress_bars_disabled(), _sizes(folder) if shown else {}

    def made(factory: Any, given: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return _weights(sizes, *given, **options) if shown else factory(*given, **options)

    before = logging.set_tqdm_hook(made)
    if not shown:
        logging.disable_progress_bar()
    elif not on_terminal():
        hub.disable_progress_bars()
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)
        logging.enable_progress_bar()
        if hidden:  # the line above shows the hub's as well
            hub.disable_progress_bars()


_LONGEST_HEADER = 100_000_000  # bytes; the limit of safetensors


def _sizes(folder: str | None) -> dict[str, int]:
    """Return the bytes of the weights in the files of a folder, by name."""
    sizes: dict[str, int] = {}
    for file in Path(folder).glob("*.safetensors") if folder is not None else ():
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, OverflowError):
            with file.open("rb") as opened:
                size = min(int.from_bytes(opened.read(8), "little"), _LONGEST_HEADER)
                head = json.loads(opened.read(size))
            spans = {name: about.get("data_offsets", (0, 0)) for name, about in head.items()}
            sizes |= {name: end - begin for name, (begin, end) in spans.items()}
    return sizes


def _weights(sizes: Mapping[str, int], things: Any = None, **options: Any) -> Any:
    if things is None or not sizes:
        return bar(things, **{**options, "leave": False})
    return _in_bytes(sizes, list(things), options.get("desc"))


def _in_bytes(sizes: Mapping[str, int], things: list[Any], about: str | None) -> Iterator[Any]:
    mean = sum(sizes.values()) // len(sizes)  # of weights that have other names in the model
    counts = [sizes.get(thing[0], mean) for thing in things]
    with bar(total=sum(counts), desc=about, unit="B", unit_scale=True, leave=False) as shown:
        for thing, count in zip(things, counts, strict=True):
            yield thing
            shown.update(count)
