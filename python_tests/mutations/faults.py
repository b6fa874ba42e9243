"""Faults to plant, one line or a few each, and the tests that catch them."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """A fault: in `file`, `text`, which occurs there once, becomes `planted`.

    Attributes:
        tests: the tests that catch it, each by its node id below the repository, or as "ctest NAME"; the cheapest
            first. All faults but one in ten have one that `make test` runs.
        areas: folders or files below python_tests where `--search` looks for tests.
    """

    name: str
    file: str
    text: str
    planted: str
    tests: tuple[str, ...]
    areas: tuple[str, ...]


FAULTS = (
    Fault(
        "runtime: a kept token more",
        "polyspec_ext/runtime/engine.py",
        "",
        "",
        (),
        (),
    ),
)
