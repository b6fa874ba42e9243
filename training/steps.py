"""Steps of an optimiser: AdamW with a warm-up, and a decay at the end."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

_LEAST = 0.05  # of the rate, at the end


class Steps:
    """An optimiser of some parameters, all float32.

    Args:
        parameters: those that are trained.
        rate: the highest learning rate.
        warm: steps that lead up to it.
        stay: share of the way at that rate, before it decays.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        rate: float,
        warm: int = 20,
        stay: float = 0.4,
    ) -> None:
        self.parameters, self.rate, self.count = list(parameters), rate, 0
        self._warm, self._stay = warm, stay
        groups = [
            {"params": [p for p in self.parameters if (p.dim() > 1) == matrices], "weight_decay": w}
            for matrices, w in ((True, 0.1), (False, 0.0))
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)

    def step(self, loss: torch.Tensor, way: float) -> None:
        """Take a step down `loss`, after so much of the way, in [0, 1]."""
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        rest = min(1.0, max(0.0, (way - self._stay) / (1 - self._stay)))
        factor = _LEAST + (1 - _LEAST) * 0.5 * (1 + math.cos(math.pi * rest))
        factor = min(factor, (self.count + 1) / self._warm)
        for group in self._optimizer.param_groups:
            group["lr"] = self.rate * factor
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.count += 1

    def state(self) -> dict[str, Any]:
        """Return the state that `restore` takes."""
        return {"count": self.count, "optimizer": self._optimizer.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        self._optimizer.load_state_dict(state["optimizer"])
