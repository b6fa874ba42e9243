"""Drafters whose heads read one state of the verifier and remember nothing: Medusa's and Hydra's.

The state is the last hidden state behind the token before the text's last one, which the verifier
emitted from it. Proposals are trees of the likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..levels.base import Counts, PromptBatch
from .base import DraftBlock, DrafterCapabilities, DraftInput
from .trees import Tree

LAST = -1  # the last hidden state of a model, after its final norm


class LastStateHeads(torch.nn.Module):
    """Heads that draft ``count`` tokens ahead."""

    count: int
    vocab_size: int

    def root(self, state: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        """From the verifier's state ``[B, 1, H]`` and the token that it emitted, ``[B, 1]``, to
        what the first head reads, ``[B, 1, S]``."""
        raise NotImplementedError

    def below(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """What the next head reads ``[B, n, S]`` behind nodes ``[B, n]``, from what the head that
        drafted them read."""
        raise NotImplementedError

    def logits(self, states: torch.Tensor, place: int) -> torch.Tensor:
        """Of head `place`, ``[B, n, V]``."""
        raise NotImplementedError


class LastStateDrafter:
    """Such heads behind a batch.

    Args:
        heads: on their device.
        tree: no deeper than there are heads, or cut there.
        name: for messages and statistics.
    """

    def __init__(self, heads: LastStateHeads, tree: Tree, name: str) -> None:
        self._heads, self.tree, self.name = heads, tree, name
        weight = next(heads.parameters())
        self.device, self._dtype = weight.device, weight.dtype
        self.vocab_size = heads.vocab_size
        self.max_length: int | None = None
        self.num_forward_passes = 0

    @property
    def num_heads(self) -> int:
        """Tokens that it drafts ahead."""
        return self._heads.count

    @property
    def capabilities(self) -> DrafterCapabilities:
        return DrafterCapabilities(reads_apart=True, hidden_layers=(LAST,), trees=True)

    def prefill(self, prompts: PromptBatch) -> None:
        """Nothing is remembered."""

    def read(self, tokens: torch.Tensor, counts: Sequence[int]) -> None:
        """Nothing is remembered."""

    def rollback(self, lengths: Counts) -> Counts:
        return lengths

    def select(self, rows: Sequence[int]) -> None:
        """Nothing is remembered."""

    @torch.inference_mode()
    def draft(self, inputs: DraftInput) -> DraftBlock:
        """See `BatchedDrafter.draft`. A text of one token has no state, and gets no draft."""
        heads, lengths = self._heads, [int(n) for n in inputs.lengths]
        found: list[torch.Tensor | None] = []
        for b, length in enumerate(lengths):
            found.append(_state(inputs, b) if length else None)
        known = next((state for state in found if state is not None), None)
        if known is None:
            return DraftBlock(
                torch.zeros(len(lengths), 1, dtype=torch.int64, device=self.device),
                torch.zeros(len(lengths), dtype=torch.int64, device=self.device),
                parents=torch.full((len(lengths), 1), -1, device=self.device),
            )
        zeros = torch.zeros_like(known)
        rows = torch.stack([zeros if state is None else state for state in found])
        state = rows[:, None].to(self.device, self._dtype)
        deep = [
            min(n, heads.count) if own is not None else 0
            for n, own in zip(lengths, found, strict=True)
        ]
        last = (torch.as_tensor(inputs.counts, device=self.device) - 1).clamp_min(0)
        token = inputs.tokens.gather(1, last[:, None]).clamp(0, self.vocab_size - 1)
        states = heads.root(state, token)

        def expand(
            tokens: torch.Tensor, above: torch.Tensor, depth: int, ancestors: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            self.num_forward_passes += 1
            out = heads.below(above, tokens)
            return out, heads.logits(out, depth)

        self.num_forward_passes += 1
        nodes = self.tree.grow(
            heads.logits(states, 0)[:, 0],
            states,
            torch.as_tensor(deep, device=self.device),
            max(deep),
            expand,
        )
        return DraftBlock(nodes.tokens, nodes.counts, parents=nodes.parents)


def _state(inputs: DraftInput, row: int) -> torch.Tensor | None:
    """``[H]``, behind the token before the last of a text: the latest told."""
    assert inputs.text is not None, "texts are told step by step"
    place = inputs.text(row).shape[0] - 2
    for told in reversed(inputs.hidden):
        begin = int(told.positions[row])
        if begin <= place < begin + told.counts[row]:
            state: torch.Tensor = told.layers[LAST][row, place - begin]
            return state
    return None
