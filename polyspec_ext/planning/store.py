"""Values stored between processes, for plans."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..files import cache_folder, replace_text


class Store:
    """A store of values by key, shared between processes; both are JSON objects.

    A value is in a file of `folder`, which is named by a digest of its key and replaced as a whole,
    so that any number of processes may read and write at once. Without a readable and writable
    folder, values are in memory only.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._known: dict[str, Any] = {}

    def get(self, key: Mapping[str, Any]) -> Any | None:
        """Return the value of `key`, or None."""
        name = _digest(key)
        if name not in self._known and self.folder is not None:
            try:
                held = json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))
                if held["key"] == key:
                    self._known[name] = held["value"]
            except (OSError, ValueError, KeyError, TypeError):
                return None
        return self._known.get(name)

    def put(self, key: Mapping[str, Any], value: Any) -> None:
        """Store `value`, replacing an older value."""
        name = _digest(key)
        self._known[name] = value
        if self.folder is None:
            return
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"key": key, "value": value}, indent=1)
            replace_text(self.folder / f"{name}.json", text)

    def clear(self) -> None:
        """Remove all values; files that cannot be removed stay."""
        self._known.clear()
        for file in [] if self.folder is None else list(self.folder.glob("*.json")):
            with contextlib.suppress(OSError):
                file.unlink()


def _digest(key: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]


def default_store() -> Store:
    """Return the store in the user's cache folder, below ``polyspec_ext/plans``."""
    folder = cache_folder()
    return _store(folder and folder / "plans")


@functools.cache
def _store(folder: Path | None) -> Store:
    return Store(folder)  # cached, so that the process keeps values that cannot be written
