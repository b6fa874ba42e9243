"""A model's short passes through `torch.compile`, which takes transformers' Python out of them.

What is compiled are few kinds of passes, all of one row: of one token and of several, with the
hidden states of all layers and with the last ones alone, which the head reads anyway, so that they
cost nothing. All of them are compiled when the first one is asked for. A pass that would need yet
another kind runs as without compilation, since compiling it takes longer than any text.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

LONGEST = 32  # tokens per row; longer passes spend their time in matrices, not in Python
WIDTHS = (1, 3)  # tokens of the passes with which every kind is compiled
# Tokens that stand before a pass, at the least: 0 and 1 would be cases of their own.
CONTEXT = 2
# The dimension of each argument that counts the tokens; `states`: of heads that read a model's.
_TOKENS = {"input_ids": 1, "position_ids": 1, "attention_mask": 2, "states": 1}
_numbers = itertools.count()


def logits(model: Any, **arguments: Any) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """A pass of a `transformers` model that gives no hidden states."""
    return model.forward(**arguments).logits, ()


def logits_and_last(model: Any, **arguments: Any) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """One that gives the last hidden states."""
    out = model.forward(**arguments, output_hidden_states=True)
    return out.logits, out.hidden_states[-1:]


def logits_and_all(model: Any, **arguments: Any) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """One that gives the hidden states of all layers."""
    out = model.forward(**arguments, output_hidden_states=True)
    return out.logits, out.hidden_states


class CompiledPasses:
    """A model's passes of one row.

    Dynamo keeps what it compiles by code object. Models would look through, and use up, each
    other's entries, so every one gets its own copy.

    Args:
        call: a pass, of the model and its arguments.
        model: changes of it, and of the functions that it calls, behind the first passes are not
            seen: guards on every module, parameter and function would cost more than a small
            model's pass.
    """

    def __init__(self, call: Callable[..., Any], model: Any) -> None:
        assert isinstance(call, types.FunctionType)
        code = call.__code__
        own = types.FunctionType(
            code.replace(co_name=f"{code.co_name}_{next(_numbers)}"), call.__globals__
        )
        self.call, method = call, types.MethodType(own, model)
        options: dict[str, Any] = {
            "guard_filter_fn": _of_arguments,
            # Half precision is rounded where the model rounds it, whatever is fused: else a pass of
            # one token and one of several would round at different places.
            "emulate_precision_casts": True,
        }
        self._compile: Callable[..., Any] = torch.compile(method, dynamic=True, options=options)
        self._run: Callable[..., Any] = torch._dynamo.run(method)

    def compile(self, **arguments: Any) -> Any:
        """A pass of a kind that may not have been compiled. Arguments: the model's."""
        arguments = _alike(arguments)
        # Else a number of tokens that happens to be the number of heads would be taken for it.
        if arguments["input_ids"].shape[1] > 1:
            mark: Callable[..., None] = torch._dynamo.maybe_mark_dynamic
            for name, dimension in _TOKENS.items():
                for tensor in _tensors(arguments.get(name)):
                    mark(tensor, dimension)
        # Else the model's own numbers, such as a norm's epsilon, are first traced as variables, and
        # then all over again as what they are.
        with torch._dynamo.config.patch(specialize_float=True):
            return self._compile(**arguments)

    def __call__(self, **arguments: Any) -> Any:
        """A pass; compiled if it is of a kind that was."""
        return self._run(**_alike(arguments))


def _of_arguments(guards: Sequence[Any]) -> list[bool]:
    """Which guards are kept: those on a pass's arguments, on their shapes and on torch's state."""
    modules = torch.compiler.skip_guard_on_all_nn_modules_unsafe(guards)
    functions = torch.compiler.skip_guard_on_globals_unsafe(guards)
    return [both[0] and both[1] for both in zip(modules, functions, strict=True)]


def _alike(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same arguments as tensors of the inference mode with strides of their own: tensors from
    elsewhere, and those that are a part of a larger one, would each be a kind of their own."""
    changed = dict(arguments)
    for name in _TOKENS:
        given = arguments.get(name)
        if isinstance(given, dict):
            changed[name] = {kind: _own(tensor) for kind, tensor in given.items()}
        elif given is not None:
            changed[name] = _own(given)
    return changed


def _own(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _tensors(given: Any) -> list[torch.Tensor]:
    if given is None:
        return []
    return list(given.values()) if isinstance(given, dict) else [given]
