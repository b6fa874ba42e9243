"""Paths that users name, files that are replaced as a whole, the folder for those that are kept
between processes, and the file of a chain: its elements, how each runs, and its windows."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

GGUF_MAGIC = b"GGUF"
_OLD = 24 * 3600  # seconds after which nobody writes a file any more


def path_of(place: str | Path) -> Path:
    """Return a path, in the user's folder where it begins with a tilde."""
    path = Path(place)
    try:
        return path.expanduser()
    except RuntimeError:  # no such user
        return path


def begins(path: Path, first: bytes) -> bool:
    """Return whether these are the first bytes of a file."""
    try:
        with path.open("rb") as file:
            return file.read(len(first)) == first
    except OSError:
        return False


def is_gguf(place: object) -> bool:
    """Return whether a path is that of a GGUF file, by its name or its first bytes."""
    if not isinstance(place, str | Path):
        return False
    path = path_of(place)
    return path.is_file() and (path.suffix.lower() == ".gguf" or begins(path, GGUF_MAGIC))


@contextmanager
def replacing(place: Path) -> Iterator[Path]:
    """Yield a path to write, which replaces `place` when the block ends.

    Other processes may read or write `place` meanwhile: each finds an old file or a new one,
    whole, and a file that is mapped stays as it was. Where the block raises, nothing is left; what
    a process that was killed has left goes a day later.
    """
    place = place.resolve()  # a link stays one
    part = place.with_name(f"{place.name}.{uuid.uuid4().hex[:12]}.part")
    try:
        yield part
        os.replace(part, place)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    for other in place.parent.glob(f"{glob.escape(place.name)}.*.part"):
        with contextlib.suppress(OSError):
            if time.time() - other.stat().st_mtime > _OLD:
                other.unlink()


def replace_text(place: Path, text: str) -> None:
    """Replace the contents of `place` by `text` in UTF-8."""
    with replacing(place) as part:
        part.write_text(text, encoding="utf-8")


def cache_folder() -> Path | None:
    """Return the package's folder in the user's cache: ``polyspec_ext`` in ``$XDG_CACHE_HOME`` or
    ``~/.cache`` (XDG Base Directory Specification). None for a user without a home folder."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "polyspec_ext" if os.path.isabs(base) else None


# ---- chains --------------------------------------------------------------------------------------


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# By key what a value is, and the words for it.
_FORM = Mapping[str, tuple[Callable[[Any], Any], str]]
_OF_CHAIN: _FORM = {
    "format": (lambda value: value == "polyspec chain", "'polyspec chain'"),
    "version": (lambda value: value == 1, "1"),
    "elements": (lambda value: isinstance(value, list) and value, "a list"),
    "window": (lambda value: isinstance(value, list), "a list"),
    "rounds": (lambda value: isinstance(value, list), "a list"),
    "tail": (_is_number, "a number"),
    "rule": (lambda value: isinstance(value, str), "a string"),
    "prediction": (
        lambda value: isinstance(value, list) and [*map(_is_number, value)] == [True] * 3,
        "three numbers",
    ),
}
_OF_ELEMENT: _FORM = {
    "source": (lambda value: isinstance(value, str), "a string"),
    "dtype": (lambda value: isinstance(value, str | None), "a string or null"),
    "pack": (lambda value: isinstance(value, bool), "true or false"),
    "device": (lambda value: isinstance(value, str | None), "a string or null"),
}


@dataclass(frozen=True)
class Element:
    """An element of a chain: a path, an id or a word; the data type of its weights by name (None:
    it has none, or that of its checkpoint); `pack` as of `HuggingFaceLevel`; and the device of its
    weights by name (None: the CPU)."""

    source: str
    dtype: str | None = None
    pack: bool = False
    device: str | None = None


@dataclass(frozen=True)
class ChainFile:
    """Contents of the file; `prediction`: tokens per second, its relative uncertainty, and the
    prompts of a call."""

    elements: list[Element]
    window: list[int]
    rounds: list[int]
    tail: int
    rule: str
    prediction: tuple[float, float, int]

    def write(self, path: Path) -> None:
        """Replace the file at `path`."""
        data = {"format": "polyspec chain", "version": 1, **asdict(self)}
        replace_text(path, json.dumps(data, indent=1) + "\n")

    @classmethod
    def read(cls, name: str, path: Path) -> ChainFile:
        """Return what the file at `path` holds; a ValueError for another begins with `name`."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            _require(data, _OF_CHAIN)
            elements = []
            for one in data["elements"]:
                # Files of earlier versions say less of an element, or more.
                _require(one := {"device": None, **one}, _OF_ELEMENT)
                elements.append(Element(*(one[key] for key in _OF_ELEMENT)))
            first = ("format", "version", "elements")
            return cls(elements, **{key: data[key] for key in data if key not in first})
        except (OSError, ValueError, TypeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(
                f"{name}: expected a chain that `plan --save` wrote, given {str(path)!r}: {reason}"
            ) from error


def _require(data: Any, form: _FORM) -> None:
    for key, (holds, wanted) in form.items():
        if not isinstance(data, dict) or key not in data:
            raise ValueError(f"it has no {key}")
        if not holds(data[key]):
            raise ValueError(f"{key}: expected {wanted}, given {str(data[key])[:40]!r}")
