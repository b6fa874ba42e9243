"""A model's short passes through `torch.compile`, which takes transformers' Python out of them."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from typing import Any

import torch

LONGEST = 32  # tokens per row; longer passes spend their time in matrices, not in Python
# The dimension of each argument that counts the tokens.
_TOKENS = {"input_ids": 1, "position_ids": 1, "attention_mask": 2}
_numbers = itertools.count()


def compiled(model: Any) -> Callable[..., Any]:
    """`model.forward`, compiled when it is called, with sizes left open.

    Dynamo keeps what it compiles by code object. All models of `transformers` share a few, and
    would look through, and use up, each other's entries, so every model gets its own copy.
    """
    method = model.forward
    function = getattr(method, "__func__", None)
    if isinstance(function, types.FunctionType):
        code = function.__code__
        own = types.FunctionType(
            code.replace(co_name=f"{code.co_name}_{next(_numbers)}"),
            function.__globals__,
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        own.__kwdefaults__ = function.__kwdefaults__
        method = types.MethodType(own, model)
    # Guards on every module and parameter would cost more than a small model's pass. Without them a
    # change of the model behind its first passes is not seen.
    options: dict[str, Any] = {
        "guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe
    }
    call: Callable[..., Any] = torch.compile(method, dynamic=True, options=options)
    mark: Callable[..., None] = torch._dynamo.maybe_mark_dynamic

    def run(**arguments: Any) -> Any:
        # Else a number of tokens that happens to be the number of heads would be taken for it.
        if arguments["input_ids"].shape[1] > 1:
            for name, dimension in _TOKENS.items():
                if arguments.get(name) is not None:
                    mark(arguments[name], dimension)
        return call(**arguments)

    return run
