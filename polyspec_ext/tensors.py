"""From per-request host values to operator arguments: a scalar where all rows agree (which costs
nothing), else a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .sampling import Sampling


def on_device(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of host values. The copy to a CUDA device does not wait for it."""
    table = torch.tensor(values, dtype=dtype)
    if device.type != "cuda":
        return table if device.type == "cpu" else table.to(device)
    return table.pin_memory().to(device, non_blocking=True)


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` on `device`. Only between CUDA devices is all that uses either of them ordered
    behind the copy; the host would read, or write over, what is not copied yet."""
    if tensor.device == device:
        return tensor
    return tensor.to(device, non_blocking=tensor.device.type == device.type == "cuda")


def integers(values: Sequence[int], device: torch.device) -> int | torch.Tensor:
    """`values`, one per row, as an operator takes them."""
    return values[0] if len(values) == 1 else on_device(values, torch.int64, device)


def signed(seed: int) -> int:
    """The 64 bits of an unsigned seed as torch holds them."""
    return seed - 2**64 if seed >= 2**63 else seed


class Parameters:
    """Sampling parameters and seeds of the rows in a batch, as keyword arguments of ``ps.sample``
    and ``ps.verify``.

    Args:
        sampling, seeds: one per row.
    """

    def __init__(self, sampling: Sequence[Sampling], seeds: Sequence[int]) -> None:
        self._sampling, self._seeds = list(sampling), list(seeds)
        self.greedy = all(one.greedy for one in sampling)
        self._made: dict[torch.device, dict[str, Any]] = {}
        self._tensors: dict[torch.device, list[torch.Tensor]] = {}

    def on(self, device: torch.device) -> dict[str, Any]:
        """temperature, top_k, top_p, min_p and seed. Made once per device."""
        if device not in self._made:
            made: dict[str, Any] = {}
            for name in ("temperature", "top_k", "top_p", "min_p"):
                values = [getattr(one, name) for one in self._sampling]
                dtype = torch.int64 if name == "top_k" else torch.float32
                same = len(set(values)) == 1
                made[name] = values[0] if same else on_device(values, dtype, device)
            bits = [signed(seed) for seed in self._seeds]
            made["seed"] = (
                self._seeds[0] if len(bits) == 1 else on_device(bits, torch.int64, device)
            )
            self._made[device] = made
        return self._made[device]

    def tensors(self, device: torch.device) -> list[torch.Tensor]:
        """temperature, top_k, top_p, min_p and seed as ``[B]`` tensors, whatever they are: a graph
        reads them anew. Made once per device."""
        if device not in self._tensors:
            wanted = (
                ("temperature", torch.float32),
                ("top_k", torch.int64),
                ("top_p", torch.float32),
                ("min_p", torch.float32),
            )
            made = [
                on_device([getattr(one, name) for one in self._sampling], dtype, device)
                for name, dtype in wanted
            ]
            bits = [signed(seed) for seed in self._seeds]
            self._tensors[device] = [*made, on_device(bits, torch.int64, device)]
        return self._tensors[device]


def feed(
    rows: Sequence[Sequence[int]], level: Any, unread: torch.Tensor | None = None
) -> tuple[torch.Tensor, list[int] | None]:
    """Tokens of B rows as a level reads them: ``[B, T]`` int64 on its device, right-padded with 0,
    and how many each row has; None: T each.

    Ids that a smaller vocabulary does not have become 0. That costs a draft level some accuracy
    and no exactness: the law it hands up is still the one it samples from.

    Args:
        unread: ids that the host has not seen yet, of any shape; -1 - j stands for the j-th.
    """
    known, width = level.vocab_size, max(map(len, rows))
    device = torch.device(getattr(level, "device", None) or "cpu")
    counts = [len(row) for row in rows]
    table = [
        [*(token if token < known else 0 for token in row), *[0] * (width - len(row))]
        for row in rows
    ]
    fed = on_device(table, torch.int64, device).view(len(rows), width)
    if unread is not None:
        pool = moved(unread, device).flatten().clamp(0, known - 1)
        fed = torch.where(fed < 0, pool[(-1 - fed).clamp_min(0)], fed)
    return fed, None if min(counts) == width else counts
