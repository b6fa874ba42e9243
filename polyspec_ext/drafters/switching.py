"""Several drafters of a chain, of which one at a time is active."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from .. import arguments
from ..levels.base import PromptBatch, id_map_of, input_vocab_size
from ..tensors import RowCounts, padded
from .base import (
    BatchedDrafter,
    DraftBlock,
    Drafter,
    DrafterCapabilities,
    DraftInput,
    RowBuffer,
    levels_of,
)
from .proposals import ProposalDrafter, cut_at_eos


class SwitchingDrafter:
    """A drafter that drafts with its member number `active`, for all rows of a batch. A member
    reads missed tokens when it drafts: an unused member reads only the prompt.

    `active` may depend only on past rounds (contract C2); a window policy sets it between drafts
    (`policies.DrafterChoice`).

    Args:
        members: drafters of chains of tokens without hidden states: `DraftModel`, `PromptLookup`,
            a user's `Drafter`.
        level: the drafter's number in the chain, n; for members of the last two kinds.
        vocab_size: ids of the level above are below it; for the same members. None: the largest of
            the other members'.

    Raises:
        TypeError: a member is no drafter, or a number is of another type.
        ValueError: less than two members, a member with hidden states or trees, two members with
            the same level, members on several devices, or `vocab_size` is missing or out of range.
    """

    def __init__(
        self,
        members: Sequence[BatchedDrafter | Drafter],
        *,
        level: int = 2,
        vocab_size: int | None = None,
    ) -> None:
        entries = arguments.listed("members", members, "drafters")
        if len(entries) < 2:
            raise ValueError(f"members: expected at least 2 drafters, given {len(entries)}")
        level = arguments.integer("level", level, arguments.LEVEL_MAX, 1)
        for number, member in enumerate(entries):
            if isinstance(member, type) or not isinstance(member, Drafter | BatchedDrafter):
                shown = arguments.shown(member)
                raise TypeError(f"members[{number}]: expected a drafter, given {shown}")
        sizes = [entry.vocab_size for entry in entries if isinstance(entry, BatchedDrafter)]
        if vocab_size is None and not sizes:
            raise ValueError("vocab_size: expected that of the level above, given None")
        size = max(sizes) if vocab_size is None else vocab_size
        size = arguments.integer("vocab_size", size, arguments.SIZE_MAX, 1)
        self.members: list[BatchedDrafter] = [
            item if isinstance(item, BatchedDrafter) else ProposalDrafter(item, level, size, size)
            for item in entries
        ]
        self.member_levels: list[object] = []
        for number, entry in enumerate(self.members):
            if entry.capabilities.hidden_layers:
                raise ValueError(f"{entry.name}: expected a drafter without hidden states")
            if entry.capabilities.trees:
                raise ValueError(f"{entry.name}: expected a drafter of chains, given one of trees")
            caches = levels_of(entry)
            if any(cache is other for cache in caches for other in self.member_levels):
                raise ValueError(
                    f"members[{number}]: expected a drafter with a cache of its own, given "
                    f"{entry.name} again"
                )
            self.member_levels += caches
        devices = sorted({str(member.device) for member in self.members})
        if len(devices) > 1:
            raise ValueError(f"members: expected drafters on one device, given {devices}")
        self.device = self.members[0].device
        self.vocab_size = max(member.vocab_size for member in self.members)
        self.input_vocab_size = max(map(input_vocab_size, self.members))
        self._maps = [id_map_of(member).of_text(arguments.SIZE_MAX) for member in self.members]
        longest = (m.max_length for m in self.members if m.max_length is not None)
        self.max_length = min(longest, default=None)
        self.name = " | ".join(member.name for member in self.members)
        self.active = 0
        # By member: number of tokens read by row, and rows of logits of the latest draft.
        self._lengths: list[list[int]] = [[] for _ in self.members]
        self._rows: list[RowBuffer | None] = [None] * len(self.members)

    @property
    def num_forward_passes(self) -> int:
        return sum(member.num_forward_passes for member in self.members)

    @property
    def capabilities(self) -> DrafterCapabilities:
        return DrafterCapabilities(batches=all(m.capabilities.batches for m in self.members))

    @property
    def one_at_a_time(self) -> str:
        """Reason why a member takes no batches."""
        alone = next(member for member in self.members if not member.capabilities.batches)
        return str(getattr(alone, "one_at_a_time", f"{alone.name} serves one at a time"))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the state of a batch, for `copy` and `pickle`."""
        count = len(self.members)
        return {**self.__dict__, "_lengths": [[] for _ in self.members], "_rows": [None] * count}

    def prefill(self, prompts: PromptBatch) -> None:
        batch, width = prompts.tokens.shape
        for number, member in enumerate(self.members):
            member.prefill(prompts._replace(tokens=self._maps[number].to_below(prompts.tokens)))
            self._lengths[number] = list(prompts.counts or [width] * batch)

    def read(self, tokens: torch.Tensor, counts: Sequence[int]) -> None:
        """Read nothing: a member reads missed tokens when it drafts."""

    def draft(self, inputs: DraftInput) -> DraftBlock:
        assert inputs.text is not None
        assert inputs.eos is not None
        member, read = self.members[self.active], self._lengths[self.active]
        lengths = list(inputs.lengths)
        texts = [inputs.text(b)[read[b] :].tolist() if n else [] for b, n in enumerate(lengths)]
        tokens, counts = padded(texts, self.device)
        tokens = self._maps[self.active].to_below(tokens)
        # A member overwrites its rows of logits, never another member's, which may be a user's.
        rows = self._rows[self.active]
        block = member.draft(replace(inputs, tokens=tokens, counts=RowCounts(counts), rows=rows))
        self._rows[self.active] = block.rows
        if block.rows is not None and id_map_of(member).drawn is not None:
            # Members draw different ids: the level above gets rows over all ids.
            size = min(self.vocab_size, inputs.vocab_size)
            whole = id_map_of(member).spread(block.rows.logits, size)
            block = replace(block, rows=RowBuffer(whole, None))
        drafted = block.counts.tolist() if block.counts is not None else lengths
        for b, ids in enumerate(block.tokens.tolist()):
            if counts[b]:
                # The last token of a text is read with the next draft.
                read[b] += counts[b] + len(cut_at_eos(ids[: drafted[b]], inputs.eos[b])) - 1
        return block

    def rollback(self, lengths: RowCounts) -> RowCounts:
        for number, member in enumerate(self.members):
            counts = list(map(min, lengths, self._lengths[number]))
            if counts != self._lengths[number]:
                self._lengths[number] = list(member.rollback(RowCounts(counts)))
        return lengths

    def select(self, rows: Sequence[int]) -> None:
        for number, member in enumerate(self.members):
            member.select(rows)
            self._lengths[number] = [self._lengths[number][row] for row in rows]
