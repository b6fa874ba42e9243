"""Atomic replacement of files, and the user's cache folder."""

from __future__ import annotations

import contextlib
import glob
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_OLD = 24 * 3600  # seconds after which a partial file is abandoned


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
