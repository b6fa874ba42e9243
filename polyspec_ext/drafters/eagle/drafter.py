"""An EAGLE head as the drafter of a chain.

What it reads of a text are pairs of a token and the state behind the token before it, from
whichever verifier read that last. The target's states replace those of the levels below it after
each of its passes. Pairs made of the head's own states are dropped when a draft ends.

A verifier whose states have another width, or that has not the layers that the head reads (a
smaller model between the target and the head), tells none: the head reads what that one accepted
behind its own states, until another verifier has read it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ... import arguments
from ...levels import HuggingFaceLevel
from ...levels.base import InputBlock, LevelOutput, PromptBatch
from ...ops import unchecked
from ...tensors import RowCounts
from ..base import DraftBlock, DrafterCapabilities, DraftInput, TreeSize
from ..model import draw_chain
from ..trees import Tree
from .load import load_head
from .passes import HeadPasses

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Eagle:
    """An EAGLE-1, EAGLE-2 or EAGLE-3 head (arXiv 2401.15077, 2406.16858, 2503.01840).

    As a chain it draws one token after another from its processed distribution, which it hands up
    as q. With a tree its proposals are deterministic, and the level above verifies a tree.

    Args:
        head: the network, and what it borrows from the target.
        tree: `DynamicTree()`, a `StaticTree`, or None for a chain.
        name: for messages and statistics.
        draw: `ops.unchecked.draw`, or what stands in for it.
    """

    def __init__(
        self,
        head: HeadPasses,
        tree: Tree | None = None,
        name: str = "eagle",
        draw: Callable[..., Any] = unchecked.draw,
    ) -> None:
        arguments.instance("head", head, HeadPasses, none=False)
        arguments.instance("tree", tree, Tree)
        arguments.function("draw", draw)
        self._head, self.tree, self.name = head, tree, name
        self.vocab_size, self.device = head.vocab_size, head.device
        self.max_length: int | None = head.config.layer.max_position_embeddings
        self._draw, self.num_forward_passes = draw, 0
        self.revision = 0  # see `Continuing`

    @classmethod
    def from_pretrained(
        cls,
        place: str | Path,
        target: HuggingFaceLevel | PreTrainedModel,
        *,
        tree: Tree | None = None,
        dtype: torch.dtype | None = None,
        name: str | None = None,
    ) -> Eagle:
        """A published head.

        Args:
            place: a directory as SafeAILab (SpecForge) or speculators publish it: config.json, and
                model.safetensors or pytorch_model.bin. Or its id on the Hugging Face hub.
            target: that the head was trained for: it gives embeddings and output head where the
                checkpoint has none. Below a level with packed weights (`HuggingFaceLevel`) the
                head runs on packed ones too, whose memory is taken again, but for the output head
                that both share.
            tree: see `Eagle`.
            dtype: of the head; None: the target's.
            name: for messages; None: the directory's name.

        Raises:
            TypeError: an argument is none of these.
            ValueError: no such directory, a checkpoint with code in it, tensors that are missing,
                unknown or of another shape, a head for another target; names what was expected and
                what was found.
        """
        arguments.instance("tree", tree, Tree)
        arguments.label("name", name)
        own = name or Path(str(place)).name
        return cls(load_head(place, target, dtype), tree, own)

    @property
    def config(self) -> Any:
        """`EagleConfig` of the head."""
        return self._head.config

    @property
    def capabilities(self) -> DrafterCapabilities:
        return DrafterCapabilities(
            batches=True,
            reads_apart=True,
            hidden_layers=self._head.config.hidden_layers,
            hidden_size=self._head.config.target_hidden_size,
            trees=self.tree is not None,
            tree_size=None if self.tree is None else self._tree_size,
            keeps_lengths=True,
            continues=True,
            device_lengths=self._head.features.in_one_place,
            id_map=self._head.id_map,
        )

    def _tree_size(self, depth: int) -> TreeSize:
        assert self.tree is not None
        return self.tree.size(depth, self._head.id_map.entries_below(self.vocab_size))

    @torch.inference_mode()
    def prefill(self, prompts: PromptBatch) -> None:
        # The prompts' states come with the first draft.
        self.revision += 1
        if prompts.held is None:
            self._head.begin(prompts.tokens.shape[0], prompts.capacity)

    def read(self, tokens: torch.Tensor, counts: Sequence[int]) -> None:
        """Nothing is read without the states, which come with the next draft."""

    @torch.inference_mode()
    def rollback(self, lengths: RowCounts) -> RowCounts:
        self.revision += 1
        self._head.features.rollback(lengths)
        return lengths

    @torch.inference_mode()
    def select(self, rows: Sequence[int]) -> None:
        self.revision += 1
        self._head.features.select(rows)

    @torch.inference_mode()
    def reserve_span(self, tokens: int) -> Hashable | None:
        """See `DeviceLengths`."""
        return self._head.reserve_span(tokens)

    def note_lengths(self, lengths: Sequence[int]) -> None:
        """The device knows the pairs, which are not the tokens."""

    @torch.inference_mode()
    def draft(self, inputs: DraftInput) -> DraftBlock:
        """See `BatchedDrafter.draft`."""
        self.revision += 1
        head = self._head
        states = head.features.read(inputs, head.config.hidden_layers, head.extend, self._follow)
        if self.tree is None:
            return self._draft_chain(inputs, states)
        return self._draft_tree(self.tree, inputs, states)

    def _draft_chain(self, inputs: DraftInput, states: torch.Tensor) -> DraftBlock:
        head, begun = self._head, False

        def forward(block: InputBlock) -> LevelOutput:
            """The first pass has been done, and each later one reads a token that was drawn."""
            nonlocal states, begun
            if begun:
                counts = block.counts or RowCounts([1] * len(block.tokens))
                states = head.follow(block.tokens, states, counts, stays=False)
            begun = True
            return LevelOutput(head.logits(states))

        block = draw_chain(inputs, forward, head.id_map, self.vocab_size, self._draw)
        self.num_forward_passes += block.tokens.shape[1]
        return block

    def _draft_tree(self, tree: Tree, inputs: DraftInput, states: torch.Tensor) -> DraftBlock:
        head, id_map = self._head, self._head.id_map
        entries = id_map.entries_below(inputs.vocab_size)

        def logits(of: torch.Tensor) -> torch.Tensor:
            return head.logits(of)[..., :entries]

        def expand(
            tokens: torch.Tensor, above: torch.Tensor, depth: int, ancestors: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            self.num_forward_passes += 1
            out = head.step(id_map.to_above(tokens), above, depth, ancestors)
            return out, logits(out)

        lengths = inputs.lengths.on(self.device)
        self.num_forward_passes += 1
        nodes = tree.grow(logits(states)[:, 0], states, lengths, inputs.most, expand)
        return DraftBlock(id_map.to_above(nodes.tokens), nodes.counts, parents=nodes.parents)

    def _follow(
        self, tokens: torch.Tensor, states: torch.Tensor, counts: RowCounts
    ) -> torch.Tensor:
        self.num_forward_passes += 1
        return self._head.follow(tokens.clamp(0, self.vocab_size - 1), states, counts)
