"""The one place where a round looks at values on the device.

A verification's tokens, counts, status and log-probabilities, and the status of the draft it
judged, come to the host together: one copy, one wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..drafters.model import Draft
from ..ops import VerifyResult
from ..tensors import moved


class Reading(NamedTuple):
    """What the host learns from a verification, by slot."""

    tokens: list[list[int]]
    accepted: list[int]
    status: list[int]
    logprobs: list[list[float]]
    drafted: list[list[int]] | None  # status bits of the draft's tokens, where nobody had looked


def read(r: VerifyResult, draft: Draft | None, logprobs: bool) -> Reading:
    """Read a verification.

    Args:
        draft: the draft it judged, where the host has not seen it.
        logprobs: whether anybody wants them.
    """
    if draft is None and r.tokens.device.type == "cpu":
        return Reading(
            r.tokens.tolist(),
            r.num_accepted.tolist(),
            r.status.tolist(),
            r.logprobs.tolist() if logprobs else [],
            None,
        )
    width = r.tokens.shape[1]
    parts = [r.num_accepted[:, None], r.status[:, None], r.tokens]
    if logprobs:
        parts.append(r.logprobs)
    if draft is not None:
        parts.append(moved(draft.status, r.tokens.device))
    # Doubles hold ids, counts and status bits (below 2**53) and float32 exactly.
    table: list[list[float]] = torch.cat([part.to(torch.float64) for part in parts], 1).tolist()

    def columns(first: int, count: int) -> list[list[float]]:
        return [row[first : first + count] for row in table]

    def whole(rows: Sequence[Sequence[float]]) -> list[list[int]]:
        return [[int(value) for value in row] for row in rows]

    after = 2 + width
    probabilities = columns(after, width) if logprobs else []
    drafted = None
    if draft is not None:
        drafted = whole(columns(after + width * logprobs, draft.status.shape[1]))
    return Reading(
        whole(columns(2, width)),
        [int(row[0]) for row in table],
        [int(row[1]) for row in table],
        probabilities,
        drafted,
    )
