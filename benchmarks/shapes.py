"""Shapes of published models: sizes, models and heads with random weights and the same pass times,
memory checks, and the bytes of a model's weights."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import torch

from polyspec_ext.drafters.eagle import EagleConfig, EagleNetwork, HeadPasses
from polyspec_ext.levels import HuggingFaceLevel
from polyspec_ext.levels.products import Part

_BLOCK = 1_000_003  # random numbers to repeat; a prime, so that rows of a matrix differ
_GB = 1e-9


@dataclass(frozen=True)
class Shape:
    """A published model's sizes."""

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    kind: str = "llama"  # or "qwen2" (biases of q, k and v)
    rope_theta: float = 10000.0  # of the rotary positions

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def layer_weights(self) -> int:
        """Number of weights in the matrices of a layer."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * self.inner


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("llama2-7b", 4096, 11008, 32, 32, 32, 32000),
        Shape("vicuna-7b", 4096, 11008, 32, 32, 32, 32000),
        Shape("vicuna-13b", 5120, 13824, 40, 40, 40, 32000),
        Shape("llama2-70b", 8192, 28672, 80, 64, 8, 32000),
        Shape("llama3-8b", 4096, 14336, 32, 32, 8, 128256, rope_theta=500000.0),
        Shape("qwen2.5-0.5b", 896, 4864, 24, 14, 2, 151936, kind="qwen2", rope_theta=1e6),
        Shape("qwen2-7b", 3584, 18944, 28, 28, 4, 152064, kind="qwen2", rope_theta=1e6),
    )
}


def config_of(shape: Shape) -> Any:
    """Return the configuration of transformers' model of a shape."""
    from transformers import LlamaConfig, Qwen2Config

    make = {"llama": LlamaConfig, "qwen2": Qwen2Config}[shape.kind]
    return make(
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocab,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=False,
    )


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
    """Return an EAGLE-2 head of a shape for a level or its model, with the target's embeddings and
    output head, and with packed weights if the level is packed."""
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
    """Set norms to 1, and matrices to random numbers that preserve the size of their inputs. Repeat
    a block of random numbers, since drawing billions takes longer than all passes."""
    parameters = list(module.parameters())
    device, dtype = parameters[0].device, parameters[0].dtype
    random = torch.Generator(device).manual_seed(0)
    block = torch.randn(_BLOCK, generator=random, device=device).to(dtype)
    for weight in parameters:
        if weight.dim() == 1:
            weight.fill_(1.0)
            continue
        scaled, flat = block * weight.shape[-1] ** -0.5, weight.view(-1)
        for begin in range(0, flat.numel(), _BLOCK):
            flat[begin : begin + _BLOCK] = scaled[: flat.numel() - begin]


def require_memory(shape: Shape, device: str) -> None:
    """Refuse a shape that does not fit into memory: a target in bfloat16 and its 4-bit copy, on the
    CPU with packed weights, and a tenth for the rest."""
    matrices = shape.layers * shape.layer_weights
    needed = 4.0 * shape.vocab * shape.hidden + 2.0 * matrices
    needed = 1.1 * (needed * (1 if device == "cuda" else 2) + 0.6 * matrices)
    if device == "cuda":
        free = float(torch.cuda.mem_get_info()[0])
    else:
        free = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    if needed > free:
        raise ValueError(
            f"memory: expected {_GB * needed:.1f} GB on {device} for {shape.layers} layers of "
            f"{shape.name}, given {_GB * free:.1f} GB; --layers N makes fewer"
        )


def weight_bytes(model: Any) -> int:
    """Return the bytes of weights that a pass of one token reads: all but the input embeddings,
    unless they are the output head as well."""
    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    # A 4-bit or packed head has no weight by this name.
    read = getattr(head, "weight", None)
    aside = {embed.weight.data_ptr()} - ({read.data_ptr()} if read is not None else set())
    seen: dict[int, int] = {}
    # Merged projections do not register their product.
    merged = (module.merged.linear for module in model.modules() if isinstance(module, Part))
    for module in (*model.modules(), *merged):
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.data_ptr() not in aside:
                seen[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
    return sum(seen.values())
