"""Models and heads at the shapes of published ones, with random weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from benchmarks.published_shapes import Shape, config_of
from polyspec_ext.drafters.eagle import EagleConfig, EagleNetwork, HeadPasses
from polyspec_ext.levels import HuggingFaceLevel

_BLOCK = 1_000_003  # a prime: rows of a matrix made of repeats of so many numbers differ


def random_model(shape: Shape, dtype: torch.dtype, device: str) -> Any:
    """Return a causal model of a shape, with weights drawn on the device."""
    from transformers import AutoModelForCausalLM

    config = config_of(shape)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    rotary = type(model.model.rotary_emb)
    model = model.to(dtype).to_empty(device=device).eval().requires_grad_(False)
    model.model.rotary_emb = rotary(config).to(device)
    _draw(model)
    return model


def random_head(shape: Shape, target: Any) -> HeadPasses:
    """Return an EAGLE-2 head of a shape for a level or its model, with their embeddings and output
    head, and packed weights where the level has them."""
    model = target.model if isinstance(target, HuggingFaceLevel) else target
    layer = config_of(replace(shape, kind="llama", layers=1))
    biased = shape.kind == "qwen2"
    config = EagleConfig(1, layer, shape.hidden, (-1,), fc_bias=True, qkv_bias=biased)
    with torch.device("meta"):
        network = EagleNetwork(config)
    network = network.to(model.dtype).to_empty(device=model.device).eval().requires_grad_(False)
    _draw(network)
    return HeadPasses(network, target)


@torch.no_grad()
def _draw(module: torch.nn.Module) -> None:
    """Set norms to ones, and matrices to numbers that keep the size of what they multiply. Repeats
    one block of random numbers, since drawing billions takes longer than all passes."""
    parameters = list(module.parameters())
    device, dtype = parameters[0].device, parameters[0].dtype
    random = torch.Generator(device).manual_seed(0)
    block = torch.randn(_BLOCK, generator=random, device=device).to(dtype)
    for weight in parameters:
        if weight.dim() == 1:
            weight.fill_(1.0)
            continue
        own, flat = block * weight.shape[-1] ** -0.5, weight.view(-1)
        for begin in range(0, flat.numel(), _BLOCK):
            flat[begin : begin + _BLOCK] = own[: flat.numel() - begin]
