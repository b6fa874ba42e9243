"""The faults of python_tests/mutations can be planted, and their tests exist. (`make mutations`
plants them.)"""

import ast
import functools
import importlib.util
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def loaded(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / "python_tests" / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FAULTS = loaded("mutations/faults.py").FAULTS
slow_tests: Callable[[], dict[str, set[str]]] = loaded("conftest.py").slow_tests


@functools.cache
def functions(path: str) -> set[str]:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    tree = ast.parse((ROOT / "python_tests" / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def is_slow(test: str, kept: dict[str, set[str]]) -> bool:
    """Return whether `make test` leaves a test out, as conftest.py does."""
    function, _, instance = test.partition("[")
    return function in kept and instance.removesuffix("]") not in kept[function]


def test_names_are_unique() -> None:
    twice = [name for name, count in Counter(fault.name for fault in FAULTS).items() if count > 1]
    assert not twice
    assert all(": " in fault.name for fault in FAULTS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted_and_is_looked_for(fault: Any) -> None:
    text = (ROOT / fault.file).read_text(encoding="utf-8")
    assert text.count(fault.text) == 1, f"{fault.file} has moved on: repair {fault.name!r}"
    assert fault.planted != fault.text
    if fault.file.endswith(".py"):
        ast.parse(text.replace(fault.text, fault.planted))
    assert fault.tests
    programs = {path.stem for path in (ROOT / "csrc/tests").rglob("*_test.c*")}
    for test in fault.tests:
        if test.startswith("ctest "):
            assert test.removeprefix("ctest ") in programs
            continue
        path, _, function = test.partition("[")[0].partition("::")
        assert function in functions(path), test


def test_nine_in_ten_are_caught_by_make_test() -> None:
    kept = slow_tests()
    missed = [fault.name for fault in FAULTS if all(is_slow(test, kept) for test in fault.tests)]
    assert len(missed) <= len(FAULTS) / 10, missed
