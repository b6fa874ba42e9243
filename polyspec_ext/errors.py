"""Typed errors, and the status bits of a request (contract C4)."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch


class Status(enum.IntFlag):
    """Bits of a request's status, as in polyspec/status.hpp. 0: no error.

    Bits below ``ZERO_RESIDUAL`` are errors: the request stopped at the faulty row.
    ``ZERO_RESIDUAL`` is a note about a rounding corner; the tokens are valid.
    """

    NAN = 1 << 0
    INF = 1 << 1
    EMPTY_ROW = 1 << 2
    DRAFT_ROW = 1 << 3
    TOKEN_OUT_OF_RANGE = 1 << 4
    BAD_LENGTH = 1 << 5
    BAD_PARAMETER = 1 << 6
    DRAFT_STATISTICS_MISMATCH = 1 << 7
    BAD_INDEX = 1 << 8
    BAD_TREE = 1 << 9
    ZERO_RESIDUAL = 1 << 16


ERROR_BITS = (1 << 16) - 1

_TEXT = {
    Status.NAN: "a NaN in a row of logits",
    Status.INF: "+inf in a row of logits",
    Status.EMPTY_ROW: "every logit of a row is -inf, so no token has probability",
    Status.DRAFT_ROW: "the row is the draft's",
    Status.TOKEN_OUT_OF_RANGE: "a draft token is outside the vocabulary",
    Status.BAD_LENGTH: "a draft length is outside [0, K], or above the request's rows",
    Status.BAD_PARAMETER: (
        "a parameter (temperature, top_k, top_p, min_p, position, round, node or room) is out of "
        "range"
    ),
    Status.DRAFT_STATISTICS_MISMATCH: (
        "a draft token has probability 0 under the distribution it came with, or "
        "draft_statistics is not its row's"
    ),
    Status.BAD_TREE: (
        "a node's parent does not come before it, deterministic siblings are equal, or a path is "
        "longer than depth"
    ),
    Status.BAD_INDEX: "a slot, an offset or a draft row's id is out of range",
}


def describe(status: int) -> str:
    """Describe the error bits of a request's status; "ok" for none."""
    parts = [text for bit, text in _TEXT.items() if status & bit]
    unknown = status & ERROR_BITS & ~sum(_TEXT)
    if unknown:
        parts.append(f"unknown error bits {unknown:#x}")
    return "; ".join(parts) or "ok"


class PolyspecError(RuntimeError):
    """Base class of the errors of polyspec_ext."""


class RequestError(PolyspecError, ValueError):
    """Error of a request without a valid distribution. Also a ValueError.

    Attributes:
        request: row of the batch.
        level: level of the chain that detected the fault; 1 is the target.
        position: absolute position of the token that could not be verified or drawn.
        status: the request's status bits.
        rules: fields of `LogitsRules` that together leave no token, each with its reason or "";
            empty for any other fault.
    """

    def __init__(
        self,
        request: int,
        level: int,
        position: int,
        status: int,
        rules: Mapping[str, str] | None = None,
    ) -> None:
        self.request = request
        self.level = level
        self.position = position
        self.status = Status(status)
        self.rules = dict(rules or {})
        fault = f"{describe(status)} (status {status:#x})"
        if self.rules:
            names = [f"{name} ({why})" if why else name for name, why in self.rules.items()]
            several = len(names) > 1
            fault = (
                f"{' and '.join(names)} leave{'' if several else 's'} no token: change "
                f"{'one of them' if several else 'it'}"
            )
        super().__init__(f"request {request}, level {level}, position {position}: {fault}")

    def __reduce__(self) -> tuple[type[RequestError], tuple[Any, ...]]:
        return type(self), (self.request, self.level, self.position, int(self.status), self.rules)


def add_note(error: BaseException, note: str) -> None:
    """Add a note to `error.__notes__`, by `BaseException.add_note` where Python has it (3.11)."""
    notes: list[str] = [*getattr(error, "__notes__", []), note]
    setattr(error, "__notes__", notes)  # noqa: B010 (type checkers know the name from 3.11 on)


def name_place(error: Exception, names: Sequence[str], index: int, rows: Iterable[Any]) -> None:
    """Add a note with the origin of an exception: the level's name, by its `index` from 0, and the
    requests and positions of `rows` (`runtime.rows.Row`). A RequestError has them already."""
    if not isinstance(error, RequestError):
        at = [f"request {row.number} at position {row.committed}" for row in rows]
        add_note(error, f"in level {index + 1} ({names[index]}), {', '.join(at)}")


@contextmanager
def named(names: Sequence[str], index: int, rows: Iterable[Any]) -> Iterator[None]:
    """Add the note of `name_place` to an exception of the block."""
    try:
        yield
    except Exception as error:
        name_place(error, names, index, rows)
        raise


def raise_for_status(
    status: torch.Tensor,
    *,
    level: int,
    position: int | Sequence[int] | torch.Tensor,
    num_accepted: torch.Tensor | None = None,
) -> None:
    """Raise an error for the first request with an error bit in its status; notes do not raise.

    Reads ``status`` on the host, so it waits for the device once.

    Args:
        status: [B] int32, from ``sample`` or ``verify``.
        level: level of the chain that called the operator.
        position: the call's ``position``, a scalar or [B].
        num_accepted: [B], from ``verify``: tokens before the fault, added to the position.

    Raises:
        TypeError: `status` is no int32 tensor [B].
        RequestError: names request, level, position and fault.
    """
    if not isinstance(status, torch.Tensor) or status.dtype != torch.int32 or status.dim() != 1:
        kind = type(status).__name__
        raise TypeError(f"status: expected an int32 tensor [B] of an operator, given {kind}")
    for request, bits in enumerate(status.tolist()):
        if bits & ERROR_BITS:
            before = 0 if num_accepted is None else int(num_accepted[request])
            at = position if isinstance(position, int) else int(position[request])
            raise RequestError(request, level, at + before, bits)
