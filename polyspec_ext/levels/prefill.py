"""Prefilling prompts of different lengths: rows of like length are read together, so that little
padding is."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from .base import PromptBatch

# What a pass costs beside its tokens, as a number of tokens: the model's Python on a CPU, the
# reading of its weights on a device.
_PASS = {"cpu": 64}
_PASS_ELSEWHERE = 512


class Reader(Protocol):
    """What is used of a `HuggingFaceLevel`."""

    device: torch.device

    @property
    def cache(self) -> Any: ...  # a `SequenceState`

    def adopt(self, cache: Any) -> None: ...

    def append(
        self, tokens: torch.Tensor, counts: Sequence[int] | None, layers: tuple[int, ...] = ()
    ) -> dict[int, torch.Tensor]: ...


def read_prompts(
    level: Reader,
    new_cache: Callable[[int, int], Any],
    tokens: torch.Tensor,
    counts: Sequence[int] | None,
    layers: tuple[int, ...] = (),
) -> dict[int, torch.Tensor]:
    """Row b of the empty batch reads its first ``counts[b]`` of `tokens`, ``[B, T]``; None: all.

    Args:
        new_cache: an empty cache of so many rows and tokens.
        layers: whose hidden states are wanted.

    Returns:
        Hidden states ``[B, T, H]`` by layer; zeros behind a row's tokens, or anything.
    """
    apart: list[list[int]] = []
    if counts is not None and level.cache.takes_rows:
        apart = groups(counts, level.device.type)
    if len(apart) < 2:
        return level.append(tokens, counts, layers)
    whole, part = level.cache, None
    hidden: dict[int, torch.Tensor] = {}
    for group in apart:  # those of the longest rows first
        some = [counts[b] for b in group]  # type: ignore[index]
        if part is None or not part.refit(len(group)):
            part = new_cache(len(group), max(some))
        rows = torch.tensor(group).to(tokens.device, non_blocking=True)
        level.adopt(part)
        try:
            states = level.append(tokens[rows, : max(some)], some, layers)
        finally:
            level.adopt(whole)
        whole.take(part, group)
        for layer, own in states.items():
            if layer not in hidden:
                hidden[layer] = own.new_zeros(*tokens.shape, own.shape[2])
            hidden[layer][rows.to(own.device), : own.shape[1]] = own
    return hidden


def read_apart(
    level: Reader,
    new_cache: Callable[[int, int], Any],
    slots: Sequence[int],
    prompts: PromptBatch,
) -> dict[int, torch.Tensor]:
    """The rows `slots` of the batch at hand, which are empty, read `prompts` as a batch of their
    own would, which begins: none of the others has a part in its passes.

    Args, Returns: as of `read_prompts`.
    """
    tokens, counts, capacity, layers = prompts[:4]
    whole = level.cache
    level.adopt(new_cache(len(slots), max(capacity, tokens.shape[1])))
    try:
        hidden = read_prompts(level, new_cache, tokens, counts, layers)
        part = level.cache
    finally:
        level.adopt(whole)
    if tokens.shape[1]:
        whole.take(part, slots)
    return hidden


def groups(counts: Sequence[int], device: str) -> list[list[int]]:
    """Rows that are read together, so that all passes take the least time: that of every group's
    longest row times its rows, and a pass each. Rows without tokens are in none.

    Args:
        counts: tokens of each row.
        device: type of the device that reads them.
    """
    cost = _PASS.get(device, _PASS_ELSEWHERE)
    rows = sorted((b for b, n in enumerate(counts) if n), key=lambda b: -counts[b])
    # best[i]: the least for the i longest rows, and where its last group begins.
    best = [(0, 0)]
    for end in range(1, len(rows) + 1):
        best.append(min((best[s][0] + cost + counts[rows[s]] * (end - s), s) for s in range(end)))
    cuts = [len(rows)]
    while cuts[-1]:
        cuts.append(best[cuts[-1]][1])
    return [sorted(rows[a:b]) for a, b in itertools.pairwise(reversed(cuts))]
