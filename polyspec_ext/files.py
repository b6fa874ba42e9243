"""Files that are replaced as a whole."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(place: Path) -> Iterator[Path]:
    """A path to write in place of `place`, which it becomes when the block ends.

    Other processes may read or write `place` meanwhile: each finds an old file or a new one,
    whole, and a file that is mapped stays as it was. Where the block raises, nothing is left.
    """
    part = place.with_name(f"{place.name}.{uuid.uuid4().hex[:12]}.part")
    try:
        yield part
        os.replace(part, place)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
