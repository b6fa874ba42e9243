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
from ...levels.base import Counts, InputBlock, LevelOutput, PromptBatch
from ...ops import unchecked
from ...tensors import padded
from ..base import DraftBlock, DrafterCapabilities, DraftInput, TreeSize
from ..model import DraftModel
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
        sample: `ops.unchecked.sample`, or what stands in for it.
    """

    def __init__(
        self,
        head: HeadPasses,
        tree: Tree | None = None,
        name: str = "eagle",
        sample: Callable[..., Any] = unchecked.sample,
    ) -> None:
        arguments.instance("head", head, HeadPasses, none=False)
        arguments.instance("tree", tree, Tree)
        arguments.function("sample", sample)
        self._head, self.tree, self.name = head, tree, name
        self.vocab_size, self.device = head.vocab_size, head.device
        self.max_length: int | None = head.config.layer.max_position_embeddings
        self._level = _HeadLevel(head, name)
        self._chain = DraftModel(self._level, sample=sample)
        self._own_passes = 0  # beside those of `_chain`
        self._states = torch.empty(0)  # [B, 1, H], behind each row's last pair

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
                that both share. Below one that decodes through `torch.compile` its passes of one
                row do as well: the first draft takes seconds to minutes.
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
    def num_forward_passes(self) -> int:
        return self._chain.num_forward_passes + self._own_passes

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
            device_lengths=self._head.stays,
        )

    def _tree_size(self, depth: int) -> TreeSize:
        assert self.tree is not None
        return self.tree.size(depth, self._head.num_ids)

    @torch.inference_mode()
    def prefill(self, prompts: PromptBatch) -> None:
        # The prompts' states come with the first draft.
        self._head.begin(prompts.tokens.shape[0], prompts.capacity)
        self._states = self._head.no_states(prompts.tokens.shape[0])

    def read(self, tokens: torch.Tensor, counts: Sequence[int]) -> None:
        """Nothing is read without the states, which come with the next draft."""

    @torch.inference_mode()
    def rollback(self, lengths: Counts) -> Counts:
        # A pair ends with a token: n tokens have n - 1 of them.
        if isinstance(lengths, torch.Tensor):
            self._head.keep(lengths - 1)
        else:
            self._head.keep([max(n - 1, 0) for n in lengths])
        return lengths

    @torch.inference_mode()
    def select(self, rows: Sequence[int]) -> None:
        self._head.select(rows)
        self._states = self._states[list(rows)]

    @torch.inference_mode()
    def reserve_span(self, tokens: int) -> Hashable | None:
        """See `DeviceLengths`."""
        return self._head.reach(tokens)

    def note_lengths(self, lengths: Sequence[int]) -> None:
        """The device knows the pairs, which are not the tokens."""

    @torch.inference_mode()
    def draft(self, inputs: DraftInput) -> DraftBlock:
        """See `BatchedDrafter.draft`."""
        states = self._read_told(inputs) if inputs.text is None else self._read_pairs(inputs)
        if self.tree is None:
            self._level.begin(states)
            return self._chain.draft(inputs)
        return self._draft_tree(self.tree, inputs, states)

    def _draft_tree(self, tree: Tree, inputs: DraftInput, states: torch.Tensor) -> DraftBlock:
        head, places = self._head, self._head.places_below(inputs.vocab_size)

        def logits(of: torch.Tensor) -> torch.Tensor:
            own = head.logits(of)
            return own if places is None else own.index_select(-1, places)

        def targets(tokens: torch.Tensor) -> torch.Tensor:
            return head.tokens_of_target(tokens if places is None else places[tokens])

        def expand(
            tokens: torch.Tensor, above: torch.Tensor, depth: int, ancestors: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            self._own_passes += 1
            out = head.step(targets(tokens), above, depth, ancestors)
            return out, logits(out)

        lengths = torch.as_tensor(inputs.lengths, device=self.device)
        self._own_passes += 1
        nodes = tree.grow(logits(states)[:, 0], states, lengths, inputs.most, expand)
        return DraftBlock(targets(nodes.tokens), nodes.counts, parents=nodes.parents)

    def _read_told(self, inputs: DraftInput) -> torch.Tensor:
        """`_read_pairs` where the host knows no text: what is told is all that is new."""
        (told,), head = inputs.hidden, self._head
        assert isinstance(inputs.counts, torch.Tensor)
        layers = [told.layers[layer] for layer in head.config.hidden_layers]
        features = torch.cat(layers, -1) if len(layers) > 1 else layers[0]
        width = features.shape[1]
        part = inputs.counts > 0
        head.keep(torch.where(part, told.positions, torch.iinfo(torch.int64).max))
        # Pair t is the state behind token t, and token t + 1.
        tokens = inputs.tokens[:, 1 : width + 1].clamp(0, head.vocab_size - 1)
        return head.extend(tokens, features, (inputs.counts - 1).clamp(0, width))

    def _read_pairs(self, inputs: DraftInput) -> torch.Tensor:
        """Reads all pairs that are new, and gives the state behind each row's last."""
        assert inputs.text is not None, "texts are told step by step"
        head, batch = self._head, len(inputs.lengths)
        asked = [b for b in range(batch) if int(inputs.lengths[b]) or int(inputs.counts[b])]
        begin = list(head.pairs)
        known: list[list[int]] = [[] for _ in range(batch)]  # tokens of pairs with a told state
        unknown: list[list[int]] = [[] for _ in range(batch)]
        for b in asked:
            text: list[int] = inputs.text(b).tolist()
            told = [own for own in inputs.hidden if own.counts[b]]
            end = len(text) - 1
            if end == 0:  # no pair yet: the token is read behind a state of zeros
                begin[b], known[b] = 0, text
                continue
            begin[b] = min([begin[b], end, *(own.positions[b] for own in told)])
            # (States behind the last token are none of a pair yet.)
            last = min(max((own.positions[b] + own.counts[b] for own in told), default=0), end)
            last = max(last, begin[b])
            known[b], unknown[b] = text[begin[b] + 1 : last + 1], text[last + 1 :]
        head.keep(begin)
        if any(known):
            self._read_known(inputs, begin, known)
        for place in range(max(map(len, unknown))):
            counts = [int(len(own) > place) for own in unknown]
            tokens = [own[place : place + 1] or [0] for own in unknown]
            ids = torch.tensor(tokens, device=self.device).clamp(0, head.vocab_size - 1)
            self._own_passes += 1
            self._note(head.follow(ids, self._states, counts), counts)
        for b in asked:
            if inputs.text(b).shape[0] == 1:
                head.pairs[b] = 0
        return self._states

    def _read_known(self, inputs: DraftInput, begin: list[int], rows: list[list[int]]) -> None:
        """Reads the pairs of `rows` from `begin` on, whose states are told."""
        head = self._head
        tokens, counts = padded(rows, self.device)
        features = torch.zeros(
            *tokens.shape, head.config.feature_size, dtype=head.dtype, device=self.device
        )
        for own in inputs.hidden:
            layers = [own.layers[layer] for layer in head.config.hidden_layers]
            for b, count in enumerate(counts):
                first = own.positions[b]
                last = min(first + own.counts[b], begin[b] + count)
                if count and last > first:  # rows that do not draft are told again
                    part = [layer[b, : last - first] for layer in layers]
                    states = torch.cat(part, -1) if len(part) > 1 else part[0]
                    features[b, first - begin[b] : last - begin[b]] = states
        ids = tokens.clamp(0, head.vocab_size - 1)
        self._note(head.extend(ids, features, counts), counts)

    def _note(self, states: torch.Tensor, counts: Sequence[int]) -> None:
        """The states behind the last pairs of those rows that have read any."""
        if all(counts):
            self._states = states
        else:
            read = torch.tensor(counts, device=self.device)[:, None, None] > 0
            self._states = torch.where(read, states, self._states)


class _HeadLevel:
    """The head as a level for `DraftModel`, which draws from it: its first pass of a draft has
    been done, and each later one reads a token that was drawn."""

    supports_batches = True

    def __init__(self, head: HeadPasses, name: str) -> None:
        self._head, self.name = head, name
        self.vocab_size, self.device = head.vocab_size, head.device
        self._states = torch.empty(0)
        self._reads = False

    def begin(self, states: torch.Tensor) -> None:
        self._states, self._reads = states, False

    def prefill(self, tokens: torch.Tensor) -> None:
        raise NotImplementedError(f"{self.name} reads with its drafts")

    def forward(
        self,
        tokens: torch.Tensor,
        keep: int,
        counts: Counts | None = None,
        first: Counts | None = None,
    ) -> torch.Tensor:
        head = self._head
        if self._reads:
            own = [1] * len(tokens) if counts is None else counts
            self._states = head.follow(tokens, self._states, own, stays=False)
        self._reads = True
        return head.of_target(head.logits(self._states))

    def forward_block(self, block: InputBlock) -> LevelOutput:
        return LevelOutput(self.forward(block.tokens, block.keep, block.counts))

    def rollback(self, lengths: Sequence[int]) -> None:
        raise NotImplementedError(f"{self.name} is rolled back by its drafter")
