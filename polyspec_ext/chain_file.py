"""The file of a chain: the sources of its elements, how each runs, and its windows."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from .files import replace_text

FORMAT, VERSION = "polyspec chain", 1


@dataclass(frozen=True)
class Element:
    """An element of the chain.

    Attributes:
        source: a path, an id or a word.
        dtype: of its weights, by name; None: it has none, or that of its checkpoint.
        pack: as of `HuggingFaceLevel`.
        device: of its weights, by name; None: the CPU.
    """

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
        data = {"format": FORMAT, "version": VERSION, **asdict(self)}
        replace_text(path, json.dumps(data, indent=1) + "\n")


def read(name: str, path: Path) -> ChainFile:
    """Return what the file at `path` holds.

    Raises:
        ValueError: there is none, or it has another form; begins with `name`.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        _require(data, "format", lambda value: value == FORMAT, f"{FORMAT!r}")
        _require(data, "version", lambda value: value == VERSION, f"{VERSION}")
        _require(data, "elements", lambda value: isinstance(value, list) and value, "a list")
        for one in data["elements"]:
            _require(one, "source", lambda value: isinstance(value, str), "a string")
            _require(one, "dtype", lambda value: isinstance(value, str | None), "a string or null")
            _require(one, "pack", lambda value: isinstance(value, bool), "true or false")
            one.setdefault("device", None)  # files of earlier versions
            _require(one, "device", lambda value: isinstance(value, str | None), "a string or null")
        for key in ("window", "rounds"):
            _require(data, key, lambda value: isinstance(value, list), "a list")
        _require(data, "rule", lambda value: isinstance(value, str), "a string")
        _require(data, "tail", _is_number, "a number")
        _require(data, "prediction", _are_three_numbers, "three numbers")
        # Files of earlier versions say more of an element.
        names = [field.name for field in fields(Element)]
        elements = [Element(*(one[name] for name in names)) for one in data["elements"]]
        return ChainFile(
            elements,
            **{
                key: value
                for key, value in data.items()
                if key not in ("format", "version", "elements")
            },
        )
    except (OSError, ValueError, TypeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"{name}: expected a chain that `plan --save` wrote, given {str(path)!r}: {reason}"
        ) from error


def _require(data: Any, key: str, holds: Callable[[Any], Any], wanted: str) -> None:
    if not isinstance(data, dict) or key not in data:
        raise ValueError(f"it has no {key}")
    if not holds(data[key]):
        raise ValueError(f"{key}: expected {wanted}, given {str(data[key])[:40]!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_three_numbers(value: object) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(map(_is_number, value))
