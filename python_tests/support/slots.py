"""Calls of the operators whose parameters do not lie side by side."""

from __future__ import annotations

from typing import Any

import torch


def slotted(call: dict[str, Any]) -> dict[str, Any]:
    """The parameters of the requests lie at slots of longer arrays."""
    batch = len(call["seed"])
    slots = torch.randperm(batch + 3, device=call["seed"].device)[:batch]
    made = {**call, "slots": slots}
    for name in ("temperature", "seed", "position", "room", "eos"):
        given = call.get(name)
        if isinstance(given, torch.Tensor):
            made[name] = given.new_full((batch + 3, *given.shape[1:]), -1)
            made[name][slots] = given
    return made
