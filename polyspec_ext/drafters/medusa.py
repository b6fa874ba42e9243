"""Medusa heads (arXiv 2401.10774): several output heads over one hidden state of the target.

Read from `medusa_lm_head.pt` as it is published. Its "typical acceptance" changes the target's
distribution; the tree verified by a chain's rule does not.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from .. import arguments
from ..kv_cache.factory import device_of
from ..levels import HuggingFaceLevel
from . import checkpoint
from .last_state import LastStateDrafter, LastStateHeads
from .trees import DynamicTree, Tree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FILE = "medusa_lm_head.pt"


class MedusaHeads(LastStateHeads):
    """Head i: blocks x + silu(W x + b), then a product to the vocabulary. It says what follows the
    token i + 1 places behind the one that the state stands behind.

    Args:
        count: heads.
        blocks: of each.
        hidden_size, vocab_size: of the target.
    """

    def __init__(self, count: int, blocks: int, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.count, self.hidden_size, self.vocab_size = count, hidden_size, vocab_size
        self.heads = nn.ModuleList(
            nn.Sequential(
                *[Block(hidden_size) for _ in range(blocks)],
                nn.Linear(hidden_size, vocab_size, bias=False),
            )
            for _ in range(count)
        )

    def root(self, state: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        return state

    def below(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return states

    def logits(self, states: torch.Tensor, place: int) -> torch.Tensor:
        out: torch.Tensor = self.heads[place](states)
        return out


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + F.silu(self.linear(x))
        return out


class Medusa(LastStateDrafter):
    """Medusa heads as the drafter of a chain. Its tree is no deeper than the heads are many."""

    @classmethod
    def from_pretrained(
        cls,
        place: str | Path,
        target: HuggingFaceLevel | PreTrainedModel,
        *,
        tree: Tree | None = None,
        dtype: torch.dtype | None = None,
    ) -> Medusa:
        """Published heads.

        Args:
            place: a directory with `medusa_lm_head.pt`, or its id on the Hugging Face hub.
            target: that they were trained for. Below a level with packed weights
                (`HuggingFaceLevel`) they run on packed ones too, whose memory is taken again.
            tree: `DynamicTree()` by default, or Medusa's own as a `StaticTree` of its paths.
            dtype: of the heads; None: the target's.

        Raises:
            ValueError: no such file, one with code in it, or tensors that are missing, unknown or
                of another shape; names them.
        """
        level = target if isinstance(target, HuggingFaceLevel) else None
        model: Any = target if level is None else level.model
        text = model.config.get_text_config(decoder=True)
        file = checkpoint.folder_of(place, (FILE, "*.json")) / FILE
        tensors = checkpoint.read_file(file)
        name = str(file)
        count, blocks = _sizes(tensors, name)
        with torch.device("meta"):
            heads = MedusaHeads(count, blocks, text.hidden_size, text.vocab_size)
        wanted = arguments.dtype("dtype", dtype) or model.dtype
        checkpoint.load_into(
            heads,
            {f"heads.{key}": value for key, value in tensors.items()},
            wanted,
            device_of(model),
            name,
        )
        heads.eval().requires_grad_(False)
        pack = level is not None and level.pack
        return cls(heads, tree or DynamicTree(), Path(str(place)).name, pack)


def _sizes(tensors: dict[str, torch.Tensor], name: str) -> tuple[int, int]:
    """Heads, and blocks of each: the keys ``{head}.{block}.linear...`` and
    ``{head}.{blocks}.weight`` say so. (Several blocks share their weights, and keys repeat.)"""
    parts = [key.split(".") for key in tensors]
    numbered = [part for part in parts if len(part) > 2 and part[0].isdigit() and part[1].isdigit()]
    if not numbered:
        raise ValueError(
            f"{name}: expected Medusa's tensors, 0.0.linear.weight and so on, given "
            f"{', '.join(sorted(tensors)[:3]) or 'none'}"
        )
    count = max(int(part[0]) for part in numbered) + 1
    return count, max(int(part[1]) for part in numbered if part[2] != "weight") + 1
