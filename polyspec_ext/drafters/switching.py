"""Several drafters behind one chain, one of them at work at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from .. import arguments
from ..levels.base import PromptBatch, id_map_of, input_vocab_size
from ..tensors import RowCounts
from ..validate import LEVEL_MAX
from .base import (
    BatchedDrafter,
    DraftBlock,
    Drafter,
    DrafterCapabilities,
    DraftInput,
    RowBuffer,
)
from .proposals import ProposalDrafter


class SwitchingDrafter:
    """Drafts with the member that `active` names, for all rows of a batch.

    Whoever is set to work reads first what it has missed, so a switch costs no more than that, and
    a member that is never used has read the prompt only. A member was active for a whole draft, and
    `active` may follow only what is over (contract C2); a window policy sets it
    (`policies.DrafterChoice`).

    Args:
        members: drafters of chains of tokens that need no hidden states: `DraftModel`,
            `PromptLookup`, a `Drafter` of one's own.
        level: its number in the chain, n; for members of the last two kinds.
        vocab_size: ids of the level above are below it; for the same members. None: the largest of
            the other members'.

    Attributes:
        active: index of the member that drafts next.

    Raises:
        TypeError: a member is no drafter, or a number none.
        ValueError: less than two members, one that wants hidden states or drafts trees, two that
            run one level, or members on several devices; or no vocabulary to go by.
    """

    def __init__(
        self,
        members: Sequence[BatchedDrafter | Drafter],
        *,
        level: int = 2,
        vocab_size: int | None = None,
    ) -> None:
        given = arguments.entries("members", members)
        if given is None:
            raise TypeError(
                f"members: expected a list of drafters, given {arguments.shown(members)}"
            )
        members = given
        if len(members) < 2:
            raise ValueError(f"members: expected at least 2 drafters, given {len(members)}")
        level = arguments.integer("level", level, LEVEL_MAX, 1)
        if vocab_size is not None:
            vocab_size = arguments.integer("vocab_size", vocab_size, arguments.SIZE_MAX, 1)
        for number, one in enumerate(members):
            if isinstance(one, type) or not isinstance(one, Drafter | BatchedDrafter):
                raise TypeError(
                    f"members[{number}]: expected a drafter, given {arguments.shown(one)}"
                )
        known = [one.vocab_size for one in members if isinstance(one, BatchedDrafter)]
        if vocab_size is None and not known:
            raise ValueError("vocab_size: expected that of the level above, given None")
        size = vocab_size if vocab_size is not None else max(known)
        self.members: list[BatchedDrafter] = []
        for one in members:
            if isinstance(one, BatchedDrafter):
                self.members.append(one)
            else:
                self.members.append(ProposalDrafter(one, level, size, size))
        for one in self.members:
            if one.capabilities.hidden_layers:
                raise ValueError(f"{one.name}: expected a drafter without hidden states")
            if one.capabilities.trees:
                raise ValueError(f"{one.name}: expected a drafter of chains, given one of trees")
            if id_map_of(one).drawn is not None:
                raise ValueError(f"{one.name}: expected a drafter of all ids, given one of a part")
        used: list[object] = []
        for number, one in enumerate(self.members):
            own = levels_of(one)
            if any(level is other for level in own for other in used):
                raise ValueError(
                    f"members[{number}]: expected a drafter with a cache of its own, given "
                    f"{one.name} again"
                )
            used += own
        devices = {one.device for one in self.members}
        if len(devices) > 1:
            raise ValueError(
                f"members: expected drafters on one device, given {sorted(map(str, devices))}"
            )
        self.device = self.members[0].device
        self.vocab_size = max(one.vocab_size for one in self.members)
        self.input_vocab_size = max(map(input_vocab_size, self.members))
        self._maps = [id_map_of(one).of_text(arguments.SIZE_MAX) for one in self.members]
        limits = [one.max_length for one in self.members if one.max_length is not None]
        self.max_length = min(limits) if limits else None
        self.name = " | ".join(one.name for one in self.members)
        self.active = 0
        self._held: list[list[int]] = [[] for _ in self.members]  # tokens read, by member and row
        self._rows: list[RowBuffer | None] = [None] * len(self.members)  # of their latest drafts

    @property
    def num_forward_passes(self) -> int:
        return sum(one.num_forward_passes for one in self.members)

    @property
    def capabilities(self) -> DrafterCapabilities:
        return DrafterCapabilities(batches=all(one.capabilities.batches for one in self.members))

    @property
    def one_at_a_time(self) -> str:
        """Why it takes no batches."""
        alone: Any = next(one for one in self.members if not one.capabilities.batches)
        return str(getattr(alone, "one_at_a_time", f"{alone.name} serves one at a time"))

    def __getstate__(self) -> dict[str, Any]:
        """For `copy` and `pickle`: without what belongs to a batch."""
        none: list[None] = [None] * len(self.members)
        return {**self.__dict__, "_held": [[] for _ in self.members], "_rows": none}

    def prefill(self, prompts: PromptBatch) -> None:
        counts = prompts.counts
        read = [prompts.tokens.shape[1]] * len(prompts.tokens) if counts is None else counts
        for number, one in enumerate(self.members):
            known = self._maps[number].to_below(prompts.tokens)
            one.prefill(prompts._replace(tokens=known))
            self._held[number] = [int(n) for n in read]

    def read(self, tokens: torch.Tensor, counts: Sequence[int]) -> None:
        """Nothing yet: a member reads what it has missed when it drafts."""

    def draft(self, inputs: DraftInput) -> DraftBlock:
        """See `BatchedDrafter.draft`."""
        assert inputs.text is not None
        assert inputs.eos is not None
        one, held = self.members[self.active], self._held[self.active]
        lengths = list(inputs.lengths)
        texts = [inputs.text(b)[held[b] :] if n else None for b, n in enumerate(lengths)]
        counts = [0 if text is None else len(text) for text in texts]
        tokens = torch.zeros(len(lengths), max(counts), dtype=torch.int64)
        for b, text in enumerate(texts):
            if text is not None:
                tokens[b, : counts[b]] = text
        given = self._maps[self.active].to_below(tokens.to(self.device))
        # Rows of logits are written again by the member whose they are: another's may be a user's.
        rows = self._rows[self.active]
        block = one.draft(replace(inputs, tokens=given, counts=RowCounts(counts), rows=rows))
        self._rows[self.active] = block.rows
        ids = block.tokens.tolist()
        drawn = None if block.counts is None else block.counts.tolist()
        for b, count in enumerate(counts):
            if count:
                many = min(lengths[b], len(ids[b])) if drawn is None else drawn[b]
                ends = [i for i in range(many) if ids[b][i] in inputs.eos[b]]
                many = ends[0] + 1 if ends else many
                # The last token of a text is read with the next draft.
                held[b] += count + many - 1
        return block

    def rollback(self, lengths: RowCounts) -> RowCounts:
        for number, one in enumerate(self.members):
            held = self._held[number]
            wanted = list(map(min, lengths, held))
            if wanted != held:
                self._held[number] = list(one.rollback(RowCounts(wanted)))
        return lengths

    def select(self, rows: Sequence[int]) -> None:
        for number, one in enumerate(self.members):
            one.select(rows)
            self._held[number] = [self._held[number][row] for row in rows]


def levels_of(drafter: object) -> list[object]:
    """What holds the caches of a drafter: the levels that it runs, or the drafter itself."""
    if isinstance(drafter, SwitchingDrafter):
        return [level for one in drafter.members for level in levels_of(one)]
    if isinstance(drafter, ProposalDrafter):
        return [drafter.drafter]
    return [getattr(drafter, "level", drafter)]
