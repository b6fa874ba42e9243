"""Drafters whose heads read one state of the verifier and remember nothing: Medusa's and Hydra's.

The state is the last hidden state behind the token before the text's last one, which the verifier
emitted from it. Proposals are trees of the likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from .. import arguments
from ..levels import HuggingFaceLevel
from ..levels.base import PromptBatch
from ..levels.cpu_packed import pack_layers
from ..tensors import Place, RowCounts
from . import checkpoint
from .base import DraftBlock, DrafterCapabilities, DraftInput, TreeSize
from .target import Target
from .trees import DynamicTree, Nodes, Tree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LAST = -1  # the last hidden state of a model, after its final norm

_Drafter = TypeVar("_Drafter", bound="LastStateDrafter")


class Block(nn.Module):
    """x + silu(W x), or R x + silu(W x) with a `residual` R, under the published names."""

    def __init__(self, linear: nn.Linear, residual: nn.Linear | None = None) -> None:
        super().__init__()
        self.linear = linear
        self.res_connection: nn.Module = nn.Identity() if residual is None else residual

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.res_connection(x) + F.silu(self.linear(x))
        return out


class LastStateHeads(nn.Module):
    """Heads that draft ``count`` tokens ahead, from states of ``hidden_size`` values, their
    tensors under the published names.

    Args:
        tensors: of the checkpoint, whose names and numbers say what there is; there are 0 heads
            where it has none of this kind.
        target: that they are for.
    """

    FILE: ClassVar[str]  # of the checkpoint
    FIRST: ClassVar[str]  # a tensor of it, for messages
    count: int

    def __init__(self, tensors: Mapping[str, torch.Tensor], target: Target) -> None:
        super().__init__()
        self.hidden_size, self.vocab_size = target.hidden_size, target.vocab_size

    @classmethod
    def require_form(cls, folder: Path) -> None:
        """Refuse a checkpoint whose config.json names another form.

        Raises:
            ValueError: names the form expected and the one found.
        """

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

    HEADS: ClassVar[type[LastStateHeads]]

    def __init__(
        self,
        heads: LastStateHeads,
        tree: Tree,
        name: str,
        pack: bool = False,
    ) -> None:
        self._given, self.tree, self.name = heads, tree, name
        self._pack = pack
        self._heads = pack_layers(heads) if pack else heads
        weight = next(heads.parameters())
        self.device, self._dtype = weight.device, weight.dtype
        self.vocab_size = heads.vocab_size
        self.max_length: int | None = None
        self.num_forward_passes = 0
        self.revision = 0  # nothing is remembered

    def __reduce__(self) -> tuple[Any, ...]:
        """For `copy` and `pickle`: made anew over copies."""
        return type(self), (self._given, self.tree, self.name, self._pack)

    @classmethod
    def from_pretrained(
        cls: type[_Drafter],
        place: str | Path,
        target: HuggingFaceLevel | PreTrainedModel,
        *,
        tree: Tree | None = None,
        dtype: torch.dtype | None = None,
    ) -> _Drafter:
        """Published heads.

        Args:
            place: a directory with the heads' file (`medusa_lm_head.pt`, `hydra_lm_head.pt`) and,
                where there is one, config.json; or its id on the Hugging Face hub.
            target: that they were trained for. Below a level with packed weights
                (`HuggingFaceLevel`) they run on packed ones too, whose memory is taken again.
            tree: `DynamicTree()` by default, or a `StaticTree`.
            dtype: of the heads; None: the target's.

        Raises:
            TypeError: an argument is none of these.
            ValueError: no such file, one with code in it, heads of another form, or tensors that
                are missing, unknown or of another shape; names them.
        """
        own = Target(target)
        arguments.instance("tree", tree, Tree)
        arguments.dtype("dtype", dtype)
        folder, kind = checkpoint.folder_of(place, (cls.HEADS.FILE, "*.json")), cls.HEADS
        kind.require_form(folder)
        name = str(folder / kind.FILE)
        tensors = checkpoint.read_file(folder / kind.FILE)

        def make() -> LastStateHeads:
            heads = kind(tensors, own)
            if heads.count == 0:
                raise ValueError(
                    f"{name}: expected {cls.__name__}'s tensors, {kind.FIRST} and so on, given "
                    f"{', '.join(sorted(tensors)[:3]) or 'none'}"
                )
            return heads

        heads = own.load(make, tensors, dtype, name)
        return cls(heads, tree or DynamicTree(), Path(str(place)).name, own.pack)

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
            continues=True,
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

    def rollback(self, lengths: RowCounts) -> RowCounts:
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
        lengths, last = inputs.lengths.on(self.device), inputs.counts.less(1).on(self.device)
        state, known = self._state(inputs, inputs.positions.to(self.device) - 2)
        nodes, passes = self._grow(
            inputs.tokens.gather(1, last[:, None]).clamp(0, self.vocab_size - 1),
            state,
            torch.where(known, lengths, 0),
            min(inputs.most, self._heads.count),
            inputs.vocab_size,
        )
        self.num_forward_passes += passes
        return DraftBlock(nodes.tokens, nodes.counts, parents=nodes.parents)

    def _grow(
        self,
        tokens: torch.Tensor,
        states: torch.Tensor,
        lengths: torch.Tensor,
        depth: int,
        vocab_size: int,
    ) -> tuple[Nodes, int]:
        """Return trees below the tokens ``[B, 1]`` that the verifier emitted from its `states`
        ``[B, 1, H]`` (see `Tree.grow`), of ids below `vocab_size`, and how many passes of heads
        they took."""
        heads, passes = self._heads, 1

        def expand(
            tokens: torch.Tensor, above: torch.Tensor, depth: int, ancestors: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            nonlocal passes
            passes += 1
            out = heads.below(above, tokens)
            return out, heads.logits(out, depth)[..., :vocab_size]

        first = heads.root(states, tokens)
        likely = heads.logits(first, 0)[:, 0, :vocab_size]
        nodes = self.tree.grow(likely, first, lengths, depth, expand)
        return nodes, passes

    def _state(self, inputs: DraftInput, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The state behind the token at ``places[b]`` of each text, ``[B, 1, H]``; and ``[B]``
        bool, whether one was told."""
        hidden, batch = inputs.hidden, places.shape[0]
        if hidden is None or not hidden.layers:  # of texts of one token
            state = torch.zeros(
                batch, 1, self._heads.hidden_size, dtype=self._dtype, device=self.device
            )
            return state, torch.zeros(batch, dtype=torch.bool, device=self.device)
        layer = hidden.layers[LAST]
        at = places - hidden.positions.to(places.device)
        known = (at >= 0) & (at < hidden.counts.to(places.device))
        index = at.clamp(0, layer.shape[1] - 1)[:, None, None].expand(-1, 1, layer.shape[2])
        state = layer.gather(1, index.to(layer.device)).to(self.device, self._dtype)
        return torch.where(known[:, None, None], state, 0), known
