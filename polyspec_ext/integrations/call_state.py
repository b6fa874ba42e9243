"""State of a callable that its calls may change: attributes, containers, tensors and closures."""

from __future__ import annotations

import functools
import operator
import random
import types
from collections import deque
from collections.abc import Iterator, Mapping, Set
from typing import Any

import numpy
import torch

# State by path. The steps of a path are ".name", "[index]" and, of dicts and sets, "{key}".
State = dict[tuple[str, ...], object]

# Functions and classes of these packages keep nothing from one call to the next.
_LIBRARIES = ("builtins", "collections", "functools", "numpy", "torch", "transformers", "typing")
_MOST = 1_000_000  # entries; more take seconds to compare


def call_state(thing: object) -> State:
    """Return what `thing` reaches, by path: attributes, slots, entries, closure variables, defaults
    and, of functions, the globals of their module that they name.

    Weights of modules count by their version, other tensors and arrays by their content. What
    Python does not look into, such as an object of a compiled library, counts by its type.

    Raises:
        ValueError: too much to compare.
    """
    state: State = {}
    seen: dict[int, object] = {}  # keeps its values alive, so that no id is used twice
    pending: deque[tuple[tuple[str, ...], object]] = deque([((), thing)])
    while pending:
        path, value = pending.popleft()
        state[path] = _shown(value)
        if len(state) > _MOST:
            raise ValueError(f"expected at most {_MOST} entries of state to compare, given more")
        if id(value) not in seen:
            seen[id(value)] = value
            pending += [((*path, step), part) for step, part in _parts(value)]
    return state


def difference(before: State, after: State, rows: int = 0) -> str | None:
    """Return the path of a difference, or None.

    Args:
        rows: where above 0, entries added to a dict or set are a memo of results and no difference,
            unless their key is the number of one of so many rows.
    """
    for path, value in before.items():
        if path not in after or after[path] != value:
            return _named(path)
    numbers = {f"{{{row}}}" for row in range(rows)}
    for path in after.keys() - before.keys():
        added = next(path[:i] for i in range(1, len(path) + 1) if path[:i] not in before)[-1]
        if not rows or not added.startswith("{") or added in numbers:
            return _named(path)
    return None


def _named(path: tuple[str, ...]) -> str:
    return "".join(path).lstrip(".") or "what it holds"


def _shown(value: Any) -> object:
    """Return what of a value itself can change; parts not included."""
    if isinstance(value, bool | int | str | bytes | None):
        return value
    if isinstance(value, float | complex | type | types.ModuleType):
        return repr(value)  # NaN is not equal to itself
    kind = type(value).__qualname__
    if isinstance(value, torch.Tensor):
        return kind, tuple(value.shape), str(value.dtype), _content(value)
    if isinstance(value, numpy.ndarray | numpy.generic):
        return kind, value.shape, str(value.dtype), hash(value.tobytes())
    if isinstance(value, torch.Generator):
        return kind, hash(value.get_state().numpy().tobytes())
    if isinstance(value, random.Random):
        return kind, hash(value.getstate())
    if isinstance(value, types.GeneratorType):
        return kind, value.gi_frame and value.gi_frame.f_lasti
    if isinstance(value, Iterator):
        return repr(value), operator.length_hint(value, -1)
    return kind


def _content(tensor: torch.Tensor) -> int:
    version = 0 if tensor.is_inference() else tensor._version
    if isinstance(tensor, torch.nn.Parameter) or tensor.is_meta or tensor.layout != torch.strided:
        return version
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hash(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else 0


def _parts(value: Any) -> Iterator[tuple[str, object]]:
    if isinstance(value, str | bytes | torch.Tensor | numpy.ndarray | type | types.ModuleType):
        return
    if isinstance(value, Mapping):
        yield from ((f"{{{key!r}}}", part) for key, part in value.items())
    elif isinstance(value, Set):
        yield from ((f"{{{key!r}}}", True) for key in value)
    elif isinstance(value, list | tuple | deque):
        yield from ((f"[{i}]", part) for i, part in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, types.MethodType):
        yield from ((".__self__", value.__self__), (".__func__", value.__func__))
    elif isinstance(value, types.GeneratorType) and value.gi_frame is not None:
        yield from ((f".{name}", part) for name, part in value.gi_frame.f_locals.items())
    elif isinstance(value, numpy.random.Generator):
        yield ".state", value.bit_generator.state
    elif isinstance(value, types.FunctionType):
        yield from _variables(value)
    yield from ((f".{name}", part) for name, part in _attributes(value).items())


def _attributes(value: Any) -> dict[str, object]:
    """Return the attributes of an object, its slots and what its class adds to them."""
    attributes = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        if not _of_library(kind):
            for name, part in vars(kind).items():
                if isinstance(part, types.MemberDescriptorType):
                    attributes.setdefault(name, getattr(value, name, None))
                elif name == "__call__" or not (name.startswith("__") and name.endswith("__")):
                    attributes.setdefault(name, part)
    return attributes


def _variables(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    """Yield the variables of a function that outlive its calls."""
    if _of_library(function):
        return
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if cell != types.CellType():  # an empty cell has no contents
            yield f".{name}", cell.cell_contents
    yield ".__defaults__", function.__defaults__
    yield ".__kwdefaults__", function.__kwdefaults__
    codes = [code, *(inner for inner in code.co_consts if isinstance(inner, types.CodeType))]
    for name in sorted({name for one in codes for name in one.co_names}):
        part = function.__globals__.get(name)
        other = isinstance(part, types.FunctionType) and part.__module__ != function.__module__
        if part is not None and not other:
            yield f".{name}", part


def _of_library(thing: Any) -> bool:
    return str(getattr(thing, "__module__", None)).split(".")[0] in _LIBRARIES
