"""Errors of the operators' binding as TypeError or ValueError, the ends of texts as tensors, and
the fake implementations, which check devices alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import arguments
from ..arguments import INT64_MAX, kind_of
from ..errors import PolyspecError

_OF_BINDING = re.compile(r"\.[ch]pp:\d+, (?:polyspec: )?(.*)", re.DOTALL)
_OF_DISPATCHER = re.compile(
    r"type '\S*?(int|float|Tensor)\]?' for argument '(\w+)' but instead found type '([^']*)'"
)
_KINDS = {"int": "an integer", "float": "a number", "Tensor": "a tensor"}


def typed(error: RuntimeError, name: str, first: Any) -> Exception:
    """Return an error of a binding as TypeError, for wrong types and dtypes, or ValueError; other
    errors as they are. `first` is the operator's first argument, `name`."""
    if isinstance(error, NotImplementedError):  # no tensor, or of a backend without operators
        if not isinstance(first, Tensor):
            return TypeError(f"{name}: expected a tensor, given {kind_of(first)}")
        given = f"a {first.layout} tensor on {first.device}"
        return ValueError(f"{name}: expected a strided tensor on cpu or cuda, given {given}")
    if found := _OF_DISPATCHER.search(str(error)):
        return TypeError(f"{found[2]}: expected {_KINDS[found[1]]}, given {found[3]}")
    if not (found := _OF_BINDING.search(str(error))):
        return error
    if "no CUDA kernels" in found[1]:
        return PolyspecError(
            "expected tensors on the CPU, since polyspec_ext was built without CUDA kernels: "
            "reinstall with POLYSPEC_CUDA=1 in the environment"
        )
    return (TypeError if "given a tensor of dtype" in found[1] else ValueError)(found[1])


def cuts(eos: Any, room: Any, logits: Tensor) -> tuple[Any, ...]:
    """Return the ids that end texts, ``[1, E]`` (the same for all requests) or ``[B, E]`` on the
    logits' device, and the room. `eos` is an id, several (-1 is no id), or an integer tensor
    ``[E]`` or ``[B, E]``."""
    left = (0, room) if isinstance(room, Tensor) else (INT64_MAX, None)
    if room is not None and not isinstance(room, Tensor):
        left = arguments.whole("room", room), None
    if eos is None:
        return None, *left
    if isinstance(eos, Tensor):
        return (eos[None] if eos.dim() == 1 else eos), *left
    listed = list(eos) if isinstance(eos, Sequence) else [eos]
    tokens = [arguments.index("eos", entry) for entry in listed]
    if any(not -1 <= token <= INT64_MAX for token in tokens):
        raise ValueError(f"eos: expected ids >= 0, or -1 for none, given {tokens}")
    return torch.tensor([tokens], dtype=torch.int64, device=logits.device), *left


# ---- fake implementations ------------------------------------------------------------------------


def _fake(operator: str, result: Callable[..., Any]) -> None:
    schema = getattr(torch.ops.polyspec, operator).default._schema
    names = [argument.name for argument in schema.arguments]
    # A parameter that may differ per request is a scalar and a tensor: "seed", "seeds".
    names = [name[:-1] if name[:-1] in names else name for name in names]

    def fake(first: Tensor, *rest: object) -> Any:
        for name, value in zip(names[1:], rest, strict=False):
            if isinstance(value, Tensor) and value.device != first.device:
                raise ValueError(
                    f"{name}: expected the logits' device {first.device}, given {value.device}"
                )
        return result(first, *rest)

    torch.library.register_fake(f"polyspec::{operator}", fake)


def _emitted(logits: Tensor, batch: Any, rows: Any) -> tuple[Tensor, ...]:
    """Return empty tensors like the common results of all verifications, for requests of `rows`
    target rows, and a tensor [5, B] for the last fields of `CutVerifyResult`."""

    def empty(*shape: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        return logits.new_empty(shape, dtype=dtype)

    return (
        empty(batch, rows),
        empty(batch),
        empty(batch, rows, dtype=torch.float32),
        empty(batch, dtype=torch.int32),
        empty(batch, rows, 2),
        empty(5, batch),
    )


def _sampled(logits: Tensor, *rest: object) -> tuple[Tensor, ...]:
    tokens, _, logprobs, status, statistics, _ = _emitted(logits, len(logits), 1)
    return tokens.view(-1), logprobs.view(-1), status, statistics.view(-1, 2)


def _verified(logits: Tensor, _: object, offsets: Any, most: int, *__: object) -> Any:
    if offsets is None:
        return _emitted(logits, *logits.shape[:2])
    return _emitted(logits, len(offsets) - 1, most + 1)


def _verified_tree(
    logits: Tensor, tokens: object, parents: object, offsets: Any, most: Any, depth: Any, *_: object
) -> tuple[Tensor, ...]:
    most = logits.shape[1] - 1 if offsets is None else most
    depth = most if depth is None else depth
    batch = len(logits) if offsets is None else len(offsets) - 1
    *emitted, ends = _emitted(logits, batch, depth + 1)
    tokens = emitted[0]
    return (*emitted, tokens.new_empty(batch, depth), torch.empty_like(tokens), ends)


_fake("sample", _sampled)
_fake("verify", _verified)
_fake("verify_tree", _verified_tree)
_fake("draw", lambda logits, *_: logits.new_empty((len(logits), 1), dtype=torch.int64))
_fake("put_rows", lambda *_: None)
