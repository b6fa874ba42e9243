"""A model's short passes through `torch.compile`, which takes transformers' Python out of them."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from typing import Any

import torch

LONGEST = 32  # tokens per row; longer passes spend their time in matrices, not in Python
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
    # Weights are packed for the processor's matrix kernels, once: a pass of several tokens then
    # costs hardly more than one of a single token. They take their memory again, and later changes
    # to the model's are not seen.
    options = {"freezing": model.device.type == "cpu"}
    run: Callable[..., Any] = torch.compile(method, dynamic=True, options=options)
    return run
