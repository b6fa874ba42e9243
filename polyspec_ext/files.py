"""Paths of users, atomic replacement of files, the user's cache folder, and the file of a chain:
its elements with data types and devices, and its windows."""

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
_OLD = 24 * 3600  # seconds after which a partial file is abandoned


def path_of(location: str | Path) -> Path:
    """Return a path; a leading tilde is expanded to the user's folder."""
    path = Path(location)
    try:
        return path.expanduser()
    except RuntimeError:  # no such user
        return path


def begins(path: Path, first: bytes) -> bool:
    """Return whether a file begins with the bytes `first`."""
    try:
        with path.open("rb") as file:
            return file.read(len(first)) == first
    except OSError:
        return False


def is_gguf(location: object) -> bool:
    """Return whether a path is a GGUF file, by its name or its first bytes."""
    if not isinstance(location, str | Path):
        return False
    path = path_of(location)
    return path.is_file() and (path.suffix.lower() == ".gguf" or begins(path, GGUF_MAGIC))


@contextmanager
def replacing(location: Path) -> Iterator[Path]:
    """Yield a temporary path to write; it replaces `location` when the block ends.

    Other processes may read or write it at the same time: each sees a whole file, old or new, and
    a mapped file does not change. If the block raises, the temporary file is removed; the
    temporary file of a killed process is removed a day later.
    """
    location = location.resolve()  # replaces the target of a link, not the link
    temporary = location.with_name(f"{location.name}.{uuid.uuid4().hex[:12]}.part")
    try:
        yield temporary
        os.replace(temporary, location)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    for other in location.parent.glob(f"{glob.escape(location.name)}.*.part"):
        with contextlib.suppress(OSError):
            if time.time() - other.stat().st_mtime > _OLD:
                other.unlink()


def replace_text(location: Path, text: str) -> None:
    """Replace the contents of `location` by `text` in UTF-8."""
    with replacing(location) as temporary:
        temporary.write_text(text, encoding="utf-8")


def cache_folder() -> Path | None:
    """Return the package's folder in the user's cache: ``polyspec_ext`` in ``$XDG_CACHE_HOME`` or
    ``~/.cache`` (XDG Base Directory Specification). None for a user without a home folder."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "polyspec_ext" if os.path.isabs(base) else None


# ---- chains --------------------------------------------------------------------------------------


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# By key a check of the value, and its description in errors.
_FORM = Mapping[str, tuple[Callable[[Any], Any], str]]
_OF_CHAIN: _FORM = {
    "format": (lambda value: value == "polyspec chain", "'polyspec chain'"),
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
    no weights, or the checkpoint's); `pack` as for `HuggingFaceLevel`; and the device of its
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
        data = {"format": "polyspec chain", **asdict(self)}
        replace_text(path, json.dumps(data, indent=1) + "\n")

    @classmethod
    def read(cls, name: str, path: Path) -> ChainFile:
        """Read the file at `path`; a ValueError for any other file begins with `name`."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            _require(data, _OF_CHAIN)
            elements = []
            for element in data["elements"]:
                _require(element, _OF_ELEMENT)
                elements.append(Element(**element))
            first = ("format", "elements")
            return cls(elements, **{key: data[key] for key in data if key not in first})
        except (OSError, ValueError, TypeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(
                f"{name}: expected a chain that `plan --save` wrote, given {str(path)!r}: {reason}"
            ) from error


def _require(data: Any, form: _FORM) -> None:
    for key, (holds, expected) in form.items():
        if not isinstance(data, dict) or key not in data:
            raise ValueError(f"it has no {key}")
        if not holds(data[key]):
            raise ValueError(f"{key}: expected {expected}, given {str(data[key])[:40]!r}")
