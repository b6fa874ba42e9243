"""Hydra heads (arXiv 2402.05109), mlp form: like Medusa's, but each also reads the tokens that were
drafted before its own. Read from `hydra_lm_head.pt` as it is published."""

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

FILE = "hydra_lm_head.pt"


class HydraHeads(LastStateHeads):
    """Head i reads the state and the embeddings of the i + 1 tokens behind it, side by side.

    Args:
        tensors: of the checkpoint, which say how many heads and blocks there are, and which
            products have a bias.
        embed: from ids to embeddings, the target's.
        hidden_size, vocab_size: of the target.
        name: of the checkpoint, for messages.
    """

    def __init__(
        self,
        tensors: dict[str, torch.Tensor],
        embed: nn.Module,
        hidden_size: int,
        vocab_size: int,
        name: str,
    ) -> None:
        super().__init__()
        self._embed = [embed]  # not a part of this module
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        heads = {int(k.split(".")[1]) for k in tensors if _numbered(k, "hydra_lm_head")}
        self.count = max(heads, default=-1) + 1
        if self.count == 0:
            raise ValueError(
                f"{name}: expected Hydra's tensors, hydra_lm_head.0.weight and so on, given "
                f"{', '.join(sorted(tensors)[:3]) or 'none'}"
            )

        def product(key: str, inner: int, outer: int) -> nn.Linear:
            return nn.Linear(inner, outer, bias=f"{key}.bias" in tensors)

        self.hydra_mlp = nn.ModuleList()
        self.hydra_lm_head = nn.ModuleList()
        for i in range(self.count):
            key, wide = f"hydra_mlp.{i}", (i + 2) * hidden_size
            first = Block(
                product(f"{key}.0.linear", wide, hidden_size),
                product(f"{key}.0.res_connection", wide, hidden_size),
            )
            more = {int(k.split(".")[2]) for k in tensors if _numbered(k, key)}
            blocks = [first]
            for j in range(1, max(more, default=0) + 1):
                blocks.append(Block(product(f"{key}.{j}.linear", hidden_size, hidden_size)))
            self.hydra_mlp.append(nn.Sequential(*blocks))
            self.hydra_lm_head.append(product(f"hydra_lm_head.{i}", hidden_size, vocab_size))

    def root(self, state: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        return self.below(state, token)

    def below(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return torch.cat([states, self._embed[0](tokens).to(states.dtype)], -1)

    def logits(self, states: torch.Tensor, place: int) -> torch.Tensor:
        out: torch.Tensor = self.hydra_lm_head[place](self.hydra_mlp[place](states))
        return out

    def tensors(self) -> list[torch.Tensor]:
        return [*super().tensors(), *self._embed[0].parameters(), *self._embed[0].buffers()]


class Block(nn.Module):
    """R x + silu(W x), where R is a product of its own in a head's first block, and nothing in
    others."""

    def __init__(self, linear: nn.Linear, residual: nn.Linear | None = None) -> None:
        super().__init__()
        self.linear = linear
        self.res_connection: nn.Module = nn.Identity() if residual is None else residual

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.res_connection(x) + F.silu(self.linear(x))
        return out


class Hydra(LastStateDrafter):
    """Hydra heads as the drafter of a chain. Its tree is no deeper than the heads are many."""

    @classmethod
    def from_pretrained(
        cls,
        place: str | Path,
        target: HuggingFaceLevel | PreTrainedModel,
        *,
        tree: Tree | None = None,
        dtype: torch.dtype | None = None,
    ) -> Hydra:
        """Published heads.

        Args:
            place: a directory with `hydra_lm_head.pt` and, where there is one, config.json; or its
                id on the Hugging Face hub.
            target: that they were trained for. Below a level with packed weights
                (`HuggingFaceLevel`) they run on packed ones too, whose memory is taken again.
            tree: `DynamicTree()` by default, or a `StaticTree`.
            dtype: of the heads; None: the target's.

        Raises:
            ValueError: no such file, one with code in it, heads of another form than mlp, or
                tensors that are missing, unknown or of another shape; names them.
        """
        level = target if isinstance(target, HuggingFaceLevel) else None
        model: Any = target if level is None else level.model
        text = model.config.get_text_config(decoder=True)
        folder = checkpoint.folder_of(place, (FILE, "*.json"))
        name = str(folder / FILE)
        if (folder / "config.json").is_file():
            form = checkpoint.read_config(folder).get("hydra_head_arch", "mlp")
            if form != "mlp":
                raise ValueError(f"{folder}: hydra_head_arch: expected 'mlp', given {form!r}")
        tensors = checkpoint.read_file(folder / FILE)
        embed = model.get_input_embeddings()
        with torch.device("meta"):
            heads = HydraHeads(tensors, embed, text.hidden_size, text.vocab_size, name)
        wanted = arguments.dtype("dtype", dtype) or model.dtype
        checkpoint.load_into(heads, tensors, wanted, device_of(model), name)
        heads.eval().requires_grad_(False)
        pack = level is not None and level.pack
        return cls(heads, tree or DynamicTree(), Path(str(place)).name, pack)


def _numbered(key: str, begin: str) -> bool:
    """``begin.N...``"""
    rest = key.removeprefix(f"{begin}.")
    return rest != key and rest.split(".")[0].isdigit()
