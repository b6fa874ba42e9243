"""Between the ids of a chain's text, which are the target's, and those of one of its models."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise

import torch


class IdMap:
    """How a model reads and draws ids of the text. The identity by default; a model may read fewer
    ids than the text has, and draw a part of those that it reads.

    Args:
        vocab_size: ids that the model reads are below it.
        drawn: ``[Vd]`` int64, strictly increasing, below `vocab_size`: the id that each entry of
            the model's rows of logits stands for. None: entry i stands for id i.
        text_size: ids of the text are below it; None: below `vocab_size`.

    Attributes:
        reads_all: `to_below` changes nothing.
    """

    def __init__(
        self, vocab_size: int, drawn: torch.Tensor | None = None, text_size: int | None = None
    ) -> None:
        self.vocab_size, self.drawn = vocab_size, drawn
        self.reads_all = text_size is None or text_size <= vocab_size
        if drawn is None:
            return
        if drawn.dim() != 1 or drawn.dtype != torch.int64 or not len(drawn):
            raise ValueError(
                f"drawn: expected int64 [Vd], Vd >= 1, given {drawn.dtype} {list(drawn.shape)}"
            )
        self._known: list[int] = drawn.tolist()  # every draft asks the host
        increase = all(a < b for a, b in pairwise((-1, *self._known, vocab_size)))
        if not increase:
            raise ValueError(f"drawn: expected increasing ids in [0, {vocab_size}), given others")
        # With one entry more, for entry -1: a token that could not be drawn stays -1.
        self._table = torch.cat([drawn, drawn.new_tensor([-1])])

    def of_text(self, text_size: int) -> IdMap:
        """The same for a text whose ids are below `text_size`."""
        return IdMap(self.vocab_size, self.drawn, text_size)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All of its memory, for the keys of captured graphs."""
        return [] if self.drawn is None else [self._table]

    def to_below(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids of the text as the model reads them: those that it does not have as 0. That costs a
        draft some accuracy and no exactness: the distribution that is handed up is still the one
        that was sampled from."""
        return ids if self.reads_all else ids.masked_fill(ids >= self.vocab_size, 0)

    def to_above(self, entries: torch.Tensor) -> torch.Tensor:
        """Ids of the text of entries of a row of logits; -1 stays -1."""
        return entries if self.drawn is None else self._table[entries]

    def entries_below(self, vocab_size: int) -> int:
        """How many entries of a row, its first, stand for ids below `vocab_size`."""
        if self.drawn is None:
            return min(self.vocab_size, vocab_size)
        return bisect_left(self._known, vocab_size)

    def spread(self, rows: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Rows of logits, ``[..., at most Vd]``, with an entry for every id below `vocab_size`:
        those that the model does not draw have none, -inf."""
        ids = self.to_above(torch.arange(rows.shape[-1], device=rows.device))
        full = rows.new_full((*rows.shape[:-1], vocab_size), -float("inf"))
        return full.index_copy_(full.dim() - 1, ids, rows)

    def gather(self, rows: torch.Tensor, entries: int) -> torch.Tensor:
        """The first `entries` entries of the model's own rows, out of rows with one for each id."""
        if self.drawn is None:
            return rows[..., :entries]
        return rows.index_select(-1, self.drawn[:entries])

    def target_to_draft(self, vocab_size: int) -> torch.Tensor | None:
        """``[vocab_size]`` int32: the entry of each id of the level above, -1 where it has none.
        None: entry i is id i, as far as a row goes."""
        if self.drawn is None:
            return None
        known = self.drawn[: self.entries_below(vocab_size)]
        entries = torch.full((vocab_size,), -1, dtype=torch.int32, device=known.device)
        entries[known] = torch.arange(len(known), dtype=torch.int32, device=known.device)
        return entries
