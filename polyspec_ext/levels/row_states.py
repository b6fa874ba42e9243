"""The state of a row of a model whose state cannot be cut: its cache, copies of it, and how it goes
back to fewer tokens; and the inputs of the functions that compute recurrent states in
`transformers`, recorded during a pass. With these a state is computed again behind fewer of its
tokens, without the model's weights."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

# Tensors of a layer that passes overwrite; keys and values are replaced by new tensors.
_OVERWRITTEN = ("conv_states", "recurrent_states")
# States that modules of RecurrentGemma keep as attributes; passes replace them by new tensors.
_IN_MODULES = frozenset(("conv1d_state", "recurrent_states"))
# Copies of a row at the ends of prompts, and of answers that a server saves.
_PINNED = 3


class SavedState(NamedTuple):
    """A copy of a row's state, which no pass overwrites.

    Attributes:
        length: tokens that were read.
        layers: what each layer of the cache holds, by attribute.
    """

    length: int
    layers: list[dict[str, Any]]


@dataclass(slots=True)
class _Pass:
    """A pass over a row.

    Attributes:
        before: the state in front of it.
        end: tokens that were read behind it.
        calls: that computed its recurrent states; None: not recorded.
        after: layers behind it, whose recurrent states later passes overwrite.
    """

    before: SavedState
    end: int = 0
    calls: list[Call] | None = None
    after: Sequence[dict[str, Any]] = ()


def modules_with_states(model: nn.Module) -> list[nn.Module]:
    """Return the modules that keep a state between passes themselves, beside the cache."""
    return [module for module in model.modules() if not _IN_MODULES.isdisjoint(vars(module))]


class RowState:
    """The state of one row.

    Args:
        past: an empty cache.
        checkpoints: latest passes that a rollback may return to.
        modules: of `modules_with_states`.

    Attributes:
        length: tokens that `past` has read.
        told: leading tokens whose hidden states were returned.
        passes: the latest, oldest first.
        pinned: at the ends of the latest prompts and where a text was saved, oldest first.
    """

    def __init__(self, past: Any, checkpoints: int, modules: Sequence[nn.Module] = ()) -> None:
        self.past, self.length, self.told = past, 0, 0
        self._modules = modules
        # The modules' states, as a layer of the cache has its states.
        self._beside = [
            SimpleNamespace(**dict.fromkeys(_IN_MODULES.intersection(vars(module))))
            for module in modules
        ]
        self.passes: deque[_Pass] = deque(maxlen=checkpoints)
        self.pinned: deque[SavedState] = deque(maxlen=_PINNED)
        self._empty = self._copy()

    @property
    def _layers(self) -> list[Any]:
        return [*self.past.layers, *self._beside]

    def _copy(self) -> SavedState:
        for layer in self.past.layers if self.length else ():
            if getattr(layer, "record_past", False):
                _cut(layer)
        return SavedState(self.length, [_copied(vars(layer)) for layer in self._layers])

    def begin_pass(self) -> None:
        """Keep a copy of the state as it is, for the next rollbacks."""
        self.passes.append(_Pass(self._copy()))
        for module, states in zip(self._modules, self._beside, strict=True):
            vars(module).update(vars(states))

    def end_pass(self, count: int, calls: list[Call] | None) -> None:
        """Note a pass over `count` tokens, and the calls of it that were recorded."""
        for module, states in zip(self._modules, self._beside, strict=True):
            vars(states).update({name: vars(module)[name] for name in vars(states)})
        self.length += count
        latest = self.passes[-1]
        latest.end, latest.calls = self.length, calls
        if calls is not None:
            latest.after = [_copied(vars(layer), ()) for layer in self._layers]

    def pin(self) -> None:
        """Keep a copy of the state as it is, however many passes follow."""
        if self.length and all(state.length != self.length for state in self.pinned):
            self.pinned.append(self._copy())

    def restore(self, state: SavedState) -> None:
        """Return to a copy, which stays as it is."""
        self.length = state.length
        for layer, kept in zip(self._layers, state.layers, strict=True):
            vars(layer).clear()
            vars(layer).update(_copied(kept))

    def rollback(self, length: int) -> bool:
        """Keep at most `length` tokens. Returns whether it advanced to them; else they are those of
        the newest checkpoint."""
        self.told = min(self.told, length)
        if length >= self.length:
            return False
        while self.passes and self.passes[-1].before.length > length:
            self.passes.pop()
        pinned = [state for state in self.pinned if state.length <= length]
        self.pinned = deque(pinned, _PINNED)
        latest = self.passes[-1] if self.passes else None
        if latest is not None and latest.calls is not None and latest.before.length < length:
            self._advance(latest, latest.calls, length)
            return True
        states = [self._empty, *pinned, *(one.before for one in self.passes)]
        newest = max(states, key=lambda state: state.length)
        self.restore(newest)
        if latest is not None and latest.before is newest:  # the next pass makes it again
            self.passes.pop()
        return False

    def _advance(self, latest: _Pass, calls: Sequence[Call], length: int) -> None:
        left = iter(calls)
        for layer, before, after in zip(
            self._layers, latest.before.layers, latest.after, strict=True
        ):
            vars(layer).clear()
            vars(layer).update(_copied(after, ()))
            if length < latest.end:
                layer.crop(length - latest.end)
            for number, state in after.get("recurrent_states", {}).items():
                if state is None:
                    continue
                fresh = next(left).state(
                    length - latest.before.length, before["recurrent_states"][number]
                )
                layer.recurrent_states[number] = fresh.to(state.dtype, copy=True)
        self.length = length


def _cut(layer: Any) -> None:
    layer.crop(0)  # what only rollbacks into the latest pass want
    for number, states in getattr(layer, "conv_states", {}).items():
        if states is not None:
            # Some models write over these in passes of one token, and want their full width.
            missing = layer.conv_kernel_size[number] - states.shape[-1]
            layer.conv_states[number] = F.pad(states, (max(missing, 0), 0)).clone()


def _copied(values: dict[str, Any], overwritten: Sequence[str] = _OVERWRITTEN) -> dict[str, Any]:
    """Return the attributes of a layer, with copies of what passes overwrite."""
    kept = dict(values)
    for name, value in kept.items():
        if isinstance(value, dict):
            kept[name] = dict(value)
    for name in overwritten:
        states = kept.get(name)
        if isinstance(states, torch.Tensor):
            kept[name] = states.clone()
        elif isinstance(states, dict):
            kept[name] = {key: copy.deepcopy(state) for key, state in states.items()}
    return kept


# ---- calls that compute a state ------------------------------------------------------------------


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
