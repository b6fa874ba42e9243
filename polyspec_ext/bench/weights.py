"""What a model's weights cost to read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from polyspec_ext.levels.replacement import Part


def weight_bytes(model: Any) -> int:
    """Bytes of weights that a pass of one token reads: all but the input embeddings, unless they
    are the output head as well."""
    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    aside = {embed.weight.data_ptr()}
    if head is not None:
        aside -= {getattr(head, "weight", embed.weight).data_ptr()}
    modules = list(model.modules())
    # (Projections that are one product do not own it.)
    modules += {module.merged.linear for module in modules if isinstance(module, Part)}
    seen: dict[int, int] = {}
    for tensor in itertools.chain.from_iterable(_tensors(module) for module in modules):
        if tensor.data_ptr() not in aside:
            seen[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
    return sum(seen.values())


def _tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)
