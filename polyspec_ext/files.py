"""Paths that users name, files that are replaced as a whole, and the folder for those that are kept
between processes."""

from __future__ import annotations

import contextlib
import glob
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
