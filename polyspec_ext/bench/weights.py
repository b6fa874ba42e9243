"""What a model's weights cost to read, and how many they are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from polyspec_ext.levels.quantized import CudaInt4Linear
from polyspec_ext.levels.replacement import Part, RowProduct


def weight_bytes(model: Any) -> int:
    """Bytes of weights that a pass of one token reads: all but the input embeddings, unless they
    are the output head as well."""
    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    # (A head in 4 bits or packed has weights of its own, and none by this name.)
    read = getattr(head, "weight", None)
    aside = {embed.weight.data_ptr()} - ({read.data_ptr()} if read is not None else set())
    seen: dict[int, int] = {}
    for tensor in itertools.chain.from_iterable(_tensors(each) for each in _modules(model)):
        if tensor.data_ptr() not in aside:
            seen[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
    return sum(seen.values())


def parameters(model: Any) -> int:
    """How many a model has, those of packed and quantised layers as many as before. What is shared
    counts once: a tied head too, unless a copy of it multiplies."""
    seen: dict[int, int] = {}
    for module in _modules(model):
        if isinstance(module, RowProduct | CudaInt4Linear):
            bias = getattr(module, "bias", None)
            more = 0 if bias is None else bias.numel()
            seen[id(module)] = module.in_features * module.out_features + more
        seen |= {tensor.data_ptr(): tensor.numel() for tensor in module.parameters(recurse=False)}
    return sum(seen.values())


def _modules(model: Any) -> Iterator[torch.nn.Module]:
    """Each once."""
    seen: set[int] = set()
    for module in model.modules():
        # (Projections that are one product do not own it.)
        own = [module, module.merged.linear] if isinstance(module, Part) else [module]
        for each in own:
            if id(each) not in seen:
                seen.add(id(each))
                yield each


def _tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)
