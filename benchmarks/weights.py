"""Bytes and numbers of a model's weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from polyspec_ext.levels.products import Part, RowProduct
from polyspec_ext.quantization.weights import CudaInt4Linear


def weight_bytes(model: Any) -> int:
    """Return the bytes of weights that a pass of one token reads: all but the input embeddings,
    unless they are the output head as well."""
    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    # A head in 4 bits or packed has other weights, and none by this name.
    read = getattr(head, "weight", None)
    aside = {embed.weight.data_ptr()} - ({read.data_ptr()} if read is not None else set())
    seen: dict[int, int] = {}
    for module in _modules(model):
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.data_ptr() not in aside:
                seen[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
    return sum(seen.values())


def parameters(model: Any) -> int:
    """Return the number of parameters; packed and quantised layers count as before. What is shared
    counts once: a tied head too, unless a copy of it multiplies."""
    seen: dict[int, int] = {}
    for module in _modules(model):
        if isinstance(module, RowProduct | CudaInt4Linear):
            bias = getattr(module, "bias", None)
            more = 0 if bias is None else bias.numel()
            seen[id(module)] = module.in_features * module.out_features + more
        seen |= {tensor.data_ptr(): tensor.numel() for tensor in module.parameters(recurse=False)}
    return sum(seen.values())


def _modules(model: Any) -> Iterable[torch.nn.Module]:
    # Projections that are one product do not own it.
    merged = (module.merged.linear for module in model.modules() if isinstance(module, Part))
    return dict.fromkeys([*model.modules(), *merged])
