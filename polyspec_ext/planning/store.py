"""Plans on disk: values stored between processes, and the file of a planned chain."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import arguments
from ..drafters import resolve
from ..files import cache_folder, replace_text
from ..levels import Options


class Store:
    """Plans by key, shared between processes; both are JSON objects.

    A plan is in a file of `folder`, which is named by a digest of its key and replaced as a whole,
    so that any number of processes may read and write at once. Without a readable and writable
    folder, plans are in memory only.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._known: dict[str, Any] = {}

    def get(self, key: Mapping[str, Any]) -> Any | None:
        """Return the plan of `key`, or None."""
        name = _digest(key)
        if name not in self._known and self.folder is not None:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                held = json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))
                if held["key"] == key:
                    self._known[name] = held["value"]
        return self._known.get(name)

    def put(self, key: Mapping[str, Any], value: Any) -> None:
        """Store a plan, replacing an older one."""
        name = _digest(key)
        self._known[name] = value
        if self.folder is not None:
            text = json.dumps({"key": key, "value": value}, indent=1)
            with contextlib.suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True)
                replace_text(self.folder / f"{name}.json", text)

    def clear(self) -> None:
        """Remove all plans; files that cannot be removed stay."""
        self._known.clear()
        for file in [] if self.folder is None else list(self.folder.glob("*.json")):
            with contextlib.suppress(OSError):
                file.unlink()


def _digest(key: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]


_store = functools.cache(Store)  # so that the process keeps plans that cannot be written


def default_store() -> Store:
    """Return the store in the user's cache folder, below ``polyspec_ext/plans``."""
    folder = cache_folder()
    return _store(folder and folder / "plans")


# ---- chains --------------------------------------------------------------------------------------


_NUMBERS = (int, float)  # types; a bool is no number
# By key a check of the value, and its description in errors.
_FORM = Mapping[str, tuple[Callable[[Any], Any], str]]
_OF_CHAIN: _FORM = {
    "format": (lambda value: value == "polyspec chain", "'polyspec chain'"),
    "elements": (lambda value: isinstance(value, list) and value, "a list"),
    "window": (lambda value: isinstance(value, list), "a list"),
    "rounds": (lambda value: isinstance(value, list), "a list"),
    "tail": (lambda value: type(value) in _NUMBERS, "a number"),
    "rule": (lambda value: isinstance(value, str), "a string"),
    "prediction": (
        lambda value: (
            isinstance(value, list) and [type(number) in _NUMBERS for number in value] == [True] * 3
        ),
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

    def loaded(self) -> list[Any]:
        """Load the elements."""
        elements: list[Any] = []
        for number, element in enumerate(self.elements):
            name = f"levels[{number}]"
            dtype = arguments.loaded_dtype(f"{name}: dtype", element.dtype)
            options = Options(name, tuple(elements), dtype, element.device, element.pack)
            elements.append(resolve(element.source, options))
        return elements

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
