"""The arguments with which a Python function calls an operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class _Spy(TorchDispatchMode):
    def __init__(self, operator: Any, seen: list[tuple[Any, ...]]) -> None:
        super().__init__()
        self._operator, self._seen = operator, seen

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is self._operator:
            self._seen.append(args)
        return func(*args, **(kwargs or {}))


def arguments_of(operator: Any, call: Callable[[], Any]) -> list[tuple[Any, ...]]:
    """Of every call of `operator` in `call`, as the dispatcher sees them."""
    seen: list[tuple[Any, ...]] = []
    with _Spy(operator, seen):
        call()
    return seen
