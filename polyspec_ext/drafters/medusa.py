"""Medusa heads (arXiv 2401.10774): several output heads over one hidden state of the target.

Read from `medusa_lm_head.pt` as it is published. Its "typical acceptance" changes the target's
distribution; the tree verified by a chain's rule does not.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from . import checkpoint
from .last_state import Block, LastStateDrafter, LastStateHeads
from .target import Target


class MedusaHeads(LastStateHeads):
    """Head i: blocks x + silu(W x + b), then a product to the vocabulary. It says what follows the
    token i + 1 places behind the one that the state stands behind."""

    FILE, FIRST = "medusa_lm_head.pt", "0.0.linear.weight"

    def __init__(self, tensors: Mapping[str, torch.Tensor], target: Target) -> None:
        super().__init__(tensors, target)
        # Keys: {head}.{block}.linear.weight and .bias, {head}.{blocks}.weight. (Several blocks
        # share their weights, and keys repeat.)
        self.count = checkpoint.count_of(tensors, "")
        blocks = checkpoint.count_of((key for key in tensors if ".linear." in key), "0.")
        width = self.hidden_size
        for i in range(self.count):
            head = [Block(nn.Linear(width, width)) for _ in range(blocks)]
            last = nn.Linear(width, self.vocab_size, bias=False)
            self.add_module(str(i), nn.Sequential(*head, last))

    def root(self, state: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        return state

    def below(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return states

    def logits(self, states: torch.Tensor, place: int) -> torch.Tensor:
        out: torch.Tensor = self.get_submodule(str(place))(states)
        return out


class Medusa(LastStateDrafter):
    """Medusa heads as the drafter of a chain. Its tree is no deeper than the heads are many;
    Medusa's own is a `StaticTree` of its paths."""

    HEADS = MedusaHeads
