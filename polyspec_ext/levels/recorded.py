"""Inputs of the functions that compute recurrent states in `transformers`, recorded during a pass.
With these a state is computed again behind fewer of its tokens, without the model's weights."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn


class _Inputs(NamedTuple):
    """Names of the arguments ``[B, T, ...]`` by token, and of the state in front of them."""

    by_token: tuple[str, ...]
    state: str


_DELTA_RULE = _Inputs(("query", "key", "value", "g", "beta"), "initial_state")
# By their names in modeling modules. Each returns its output and the state behind all tokens.
_FUNCTIONS = {
    "torch_chunk_gated_delta_rule": _DELTA_RULE,
    "chunk_kimi_delta_attention": _DELTA_RULE,
    "mamba2_chunk_scan": _Inputs(("hidden_states", "dt", "B", "C"), "initial_states"),
}


class Call(NamedTuple):
    """A call of such a function, with its arguments by name."""

    function: Callable[..., Any]
    inputs: _Inputs
    arguments: dict[str, Any]

    def state(self, count: int, before: torch.Tensor | None) -> torch.Tensor:
        """Return the state behind the first `count` tokens and the state `before` them."""
        some = {name: self.arguments[name][:, :count] for name in self.inputs.by_token}
        arguments = {**self.arguments, **some, self.inputs.state: before}
        state: torch.Tensor = self.function(**arguments)[1]
        return state


class _Recorder(threading.local):
    calls: list[Call] | None = None


_recorder = _Recorder()


def watch(model: nn.Module) -> None:
    """Wrap these functions in the modules of a model's classes, each once. A wrapped function is
    itself but inside `recorded`."""
    modules = {sys.modules[type(module).__module__] for module in model.modules()}
    for module in modules:
        for name, inputs in _FUNCTIONS.items():
            function = vars(module).get(name)
            if function is not None and not hasattr(function, "recorded"):
                setattr(module, name, _watched(function, inputs))


def _watched(function: Callable[..., Any], inputs: _Inputs) -> Callable[..., Any]:
    names = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*values: Any, **options: Any) -> Any:
        if _recorder.calls is not None:
            arguments = {**dict(zip(names, values, strict=False)), **options}
            _recorder.calls.append(Call(function, inputs, arguments))
        return function(*values, **options)

    call.recorded = True  # type: ignore[attr-defined]
    return call


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """Have watched functions that this thread calls leave their calls in the list, in order."""
    calls: list[Call] = []
    _recorder.calls = calls
    try:
        yield calls
    finally:
        _recorder.calls = None
