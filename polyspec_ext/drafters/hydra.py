"""Hydra heads (arXiv 2402.05109), mlp form: like Medusa's, but each also reads the tokens that were
drafted before its own. Read from `hydra_lm_head.pt` as it is published."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from . import checkpoint
from .last_state import Block, LastStateDrafter, LastStateHeads
from .target import Target


class HydraHeads(LastStateHeads):
    """Head i reads the state and the embeddings of the i + 1 tokens behind it, side by side. Its
    first block is R x + silu(W x), with the target's embeddings in x, and others x + silu(W x)."""

    FILE, FIRST = "hydra_lm_head.pt", "hydra_lm_head.0.weight"

    def __init__(self, tensors: Mapping[str, torch.Tensor], target: Target) -> None:
        super().__init__(tensors, target)
        self._embed: list[nn.Module] = [target.model.get_input_embeddings()]  # not a part of this
        width = self.hidden_size
        self.count = checkpoint.count_of(tensors, "hydra_lm_head.")

        def product(key: str, inner: int, outer: int) -> nn.Linear:
            return nn.Linear(inner, outer, bias=f"{key}.bias" in tensors)

        self.hydra_mlp = nn.ModuleList()
        self.hydra_lm_head = nn.ModuleList()
        for i in range(self.count):
            key, wide = f"hydra_mlp.{i}", (i + 2) * width
            residual = product(f"{key}.0.res_connection", wide, width)
            blocks = [Block(product(f"{key}.0.linear", wide, width), residual)]
            for j in range(1, checkpoint.count_of(tensors, f"{key}.")):
                blocks.append(Block(product(f"{key}.{j}.linear", width, width)))
            self.hydra_mlp.append(nn.Sequential(*blocks))
            self.hydra_lm_head.append(product(f"hydra_lm_head.{i}", width, self.vocab_size))

    @classmethod
    def require_form(cls, folder: Path) -> None:
        if (folder / "config.json").is_file():
            form = checkpoint.read_config(folder).get("hydra_head_arch", "mlp")
            if form != "mlp":
                raise ValueError(f"{folder}: hydra_head_arch: expected 'mlp', given {form!r}")

    def root(self, state: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        return self.below(state, token)

    def below(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return torch.cat([states, self._embed[0](tokens).to(states.dtype)], -1)

    def logits(self, states: torch.Tensor, place: int) -> torch.Tensor:
        out: torch.Tensor = self.hydra_lm_head[place](self.hydra_mlp[place](states))
        return out

    def tensors(self) -> list[torch.Tensor]:
        return [*super().tensors(), *self._embed[0].parameters(), *self._embed[0].buffers()]


class Hydra(LastStateDrafter):
    """Hydra heads as the drafter of a chain. Its tree is no deeper than the heads are many."""

    HEADS = HydraHeads
