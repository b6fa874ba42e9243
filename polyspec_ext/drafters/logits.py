"""Rows of logits that tokens are drawn from: behind processors, and as the level above has them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .base import DraftInput, RowBuffer


def processed(
    logits: torch.Tensor, inputs: DraftInput, left: Sequence[int], drafted: torch.Tensor
) -> torch.Tensor:
    """Return the logits ``[B, n, V]`` behind the processors, of the rows that draw another token;
    they follow the tokens `drafted`, ``[B, n, N]``."""
    assert inputs.text is not None
    assert inputs.processors is not None
    out = logits.to(torch.float32, copy=True)  # what processors return, whatever the dtype
    for b, more in enumerate(left):
        for j, tokens in enumerate(drafted[b] if more else ()):
            prefix, at = torch.cat([inputs.text(b).to(logits.device), tokens]), slice(j, j + 1)
            changed = inputs.processors.apply(logits[b, at], prefix, inputs.requests[b])
            # Where every id of a smaller vocabulary is forbidden, the draft is drawn as without
            # processors (out has these logits), and the level above rejects it.
            if not bool(changed.isneginf().all()):
                out[b, at] = changed
    return out


def row_buffer(old: RowBuffer | None, most: int, logits: torch.Tensor) -> RowBuffer:
    """Return `old`, if it has room for `most` rows per request like those of `logits`, or another
    buffer."""
    batch, _, vocab = logits.shape
    if old is not None and old.statistics is not None:
        shape = old.logits.shape
        fits = shape[0] == batch and shape[1] >= most and shape[2] == vocab
        if fits and old.logits.dtype == logits.dtype and old.logits.device == logits.device:
            return old
    # Zeros: rows that nothing fills are read by the operator as well, and must be harmless.
    statistics = torch.zeros(batch, most, 2, dtype=torch.int64, device=logits.device)
    return RowBuffer(logits.new_zeros(batch, most, vocab), statistics)
