"""Drafters whose heads read one state of the verifier and remember nothing: Medusa's and Hydra's.

The state is the last hidden state behind the token before the text's last one, which the verifier
emitted from it. Proposals are trees of the likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from ..levels.base import Counts, PromptBatch
from ..levels.cpu_packed import pack_layers
from ..tensors import Place
from .base import DraftBlock, DrafterCapabilities, DraftInput, TreeSize
from .trees import Tree

LAST = -1  # the last hidden state of a model, after its final norm


class LastStateHeads(torch.nn.Module):
    """Heads that draft ``count`` tokens ahead, from states of ``hidden_size`` values."""

    count: int
    hidden_size: int
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

    def tensors(self) -> list[torch.Tensor]:
        """All memory that the heads read."""
        return [*self.parameters(), *self.buffers()]


class LastStateDrafter:
    """Such heads behind a batch.

    Args:
        heads: on their device.
        tree: no deeper than there are heads, or cut there.
        name: for messages and statistics.
        pack: on the CPU, run the heads on packed weights (`levels.cpu_packed`), which take their
            memory again; later changes of their linear weights are not seen.
    """

    def __init__(self, heads: LastStateHeads, tree: Tree, name: str, pack: bool = False) -> None:
        self._given, self.tree, self.name, self._pack = heads, tree, name, pack
        self._heads = pack_layers(heads) if pack else heads
        weight = next(heads.parameters())
        self.device, self._dtype = weight.device, weight.dtype
        self.vocab_size = heads.vocab_size
        self.max_length: int | None = None
        self.num_forward_passes = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """For `copy` and `pickle`: made anew over copies."""
        return type(self), (self._given, self.tree, self.name, self._pack)

    @property
    def num_heads(self) -> int:
        """Tokens that it drafts ahead."""
        return self._heads.count

    @property
    def capabilities(self) -> DrafterCapabilities:
        return DrafterCapabilities(
            device_lengths=True,
            reads_apart=True,
            keeps_lengths=True,
            hidden_layers=(LAST,),
            hidden_size=self._heads.hidden_size,
            trees=True,
            tree_size=self._tree_size,
        )

    def _tree_size(self, depth: int) -> TreeSize:
        return self.tree.size(min(depth, self._heads.count), self.vocab_size)

    def prefill(self, prompts: PromptBatch) -> None:
        """Nothing is remembered."""

    def read(self, tokens: torch.Tensor, counts: Sequence[int]) -> None:
        """Nothing is remembered."""

    def rollback(self, lengths: Counts) -> Counts:
        return lengths

    def select(self, rows: Sequence[int]) -> None:
        """Nothing is remembered."""

    def reserve_span(self, tokens: int) -> Hashable:
        """See `DeviceLengths`."""
        return Place(self._heads, self._heads.tensors())

    def note_lengths(self, lengths: Sequence[int]) -> None:
        """Nothing is remembered."""

    @torch.inference_mode()
    def draft(self, inputs: DraftInput) -> DraftBlock:
        """See `BatchedDrafter.draft`. A text of one token has no state, and gets no draft."""
        heads = self._heads
        lengths, counts, positions = (
            torch.as_tensor(given, device=self.device)
            for given in (inputs.lengths, inputs.counts, inputs.positions)
        )
        state, known = self._state(inputs, positions - 2)
        last = (counts - 1).clamp_min(0)
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
            torch.where(known, lengths, 0),
            min(inputs.most, heads.count),
            expand,
        )
        return DraftBlock(nodes.tokens, nodes.counts, parents=nodes.parents)

    def _state(self, inputs: DraftInput, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The state behind the token at ``places[b]`` of each text, the latest told, ``[B, 1, H]``;
        and ``[B]`` bool, whether one was."""
        batch, size = places.shape[0], self._heads.hidden_size
        state = torch.zeros(batch, 1, size, dtype=self._dtype, device=self.device)
        known = torch.zeros(batch, dtype=torch.bool, device=self.device)
        for told in inputs.hidden:
            begin, counts = (
                torch.as_tensor(given, device=self.device)
                for given in (told.positions, told.counts)
            )
            at, layer = places - begin, told.layers[LAST]
            if not layer.shape[1]:  # of prompts of one token
                continue
            has = (at >= 0) & (at < counts)
            index = at.clamp(0, layer.shape[1] - 1)[:, None, None].expand(-1, 1, size)
            own = layer.gather(1, index.to(layer.device)).to(self.device, self._dtype)
            state, known = torch.where(has[:, None, None], own, state), known | has
        return state, known
