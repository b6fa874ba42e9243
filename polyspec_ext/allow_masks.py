"""Allow-masks: which ids may come next, a bit each, as a grammar gives them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

Words = npt.NDArray[np.int32]  # of an allow-mask, 32 ids each


class MaskSource:
    """A `RowProcessor` that does nothing but forbid ids, which `masks` says."""

    def masks(self, prefix: Sequence[int], count: int) -> list[Words | None]:
        """Return the allow-masks of `count` successive tokens (`GrammarMatcher.masks`)."""
        raise NotImplementedError


def stacked(masks: Sequence[Words | None], vocab_size: int, partial: bool = False) -> Words:
    """Return masks (`GrammarMatcher.masks`) as rows of `vocab_size` ids, ``[k, ceil(V / 32)]``.

    Args:
        partial: of a level below the target, whose distribution may be any: a row that allows none
            of its ids allows all.
    """
    rows = np.full((len(masks), -(-vocab_size // 32)), -1, np.int32)
    last = np.int32(-1 if vocab_size % 32 == 0 else (1 << vocab_size % 32) - 1)
    for row, words in zip(rows, masks, strict=True):
        if words is None:
            continue
        known = min(len(words), len(row))
        row[:known], row[known:] = words[:known], 0
        row[-1] &= last
        if partial and not row.any():
            row[:] = -1
    return rows


def masked(logits: torch.Tensor, allowed: Words) -> torch.Tensor:
    """Return logits ``[.., V]`` with -inf at the ids that the rows of `stacked` do not allow."""
    bits = np.unpackbits(allowed.view(np.uint8), axis=-1, count=logits.shape[-1], bitorder="little")
    return logits.masked_fill(torch.from_numpy(bits == 0).to(logits.device), -torch.inf)
