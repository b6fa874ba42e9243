"""Decoder layers of known families with one operator each for what lies between their products:
RMSNorm with the residual sum before it, the split into heads with rotary positions, and the gated
activation (`ops.layer`).

Eager, that is some 60 small operators a layer, which take as long as the products of a pass of one
token. Compiled passes call the same operators, so that their logits stay the same bits.

A module is replaced where it is exactly a class of `transformers` that is known here, has no hooks,
and gives what its class gives on random input. Every other one stays as it is.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from ..ops import layer as operators
from . import grouped_attention
from .replacement import Part, RowProduct, hooked

# Families by the names of their modules and classes.
_FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
_DTYPES = (torch.float32, torch.bfloat16)
_PROBED = 3  # tokens
# Relative to the largest value: the sum of squares and the exponential round differently.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


class _Norm(nn.Module):
    """RMSNorm."""

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1]).contiguous()
        made = operators.rms_norm(rows, self.weight, self.variance_epsilon)
        return made.view(hidden_states.shape)


class _Mlp(nn.Module):
    """The gated layer over merged projections."""

    gate_proj: Part
    down_proj: RowProduct

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self.gate_proj.merged.linear.forward(x.reshape(-1, x.shape[-1]))
        return self.down_proj.forward(operators.gated(both)).view(x.shape)


class _Attention(nn.Module):
    """Attention over merged projections."""

    q_proj: Part
    o_proj: RowProduct
    q_norm: _Norm
    k_norm: _Norm
    config: Any
    head_dim: int
    layer_idx: int
    scaling: float

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        **arguments: Any,
    ) -> tuple[torch.Tensor, None]:
        merged, width = self.q_proj.merged, self.head_dim
        batch, tokens, features = hidden_states.shape
        linear: Any = merged.linear
        product = linear.product(hidden_states.reshape(-1, features))
        heads, groups = merged.sizes[0] // width, merged.sizes[1] // width
        norms: tuple[Any, ...] = ()
        if hasattr(self, "q_norm"):
            norms = self.q_norm.weight, self.k_norm.weight, self.q_norm.variance_epsilon
        query, key, value = operators.rotary(
            product, linear.late_bias, *position_embeddings, batch, heads, groups, *norms
        )
        cache = past_key_values if cache is None else cache  # as older releases call it
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        made, _ = grouped_attention.grouped_attention(
            self, query, key, value, attention_mask, scaling=self.scaling, **arguments
        )
        rows = self.o_proj.forward(made.view(batch * tokens, heads * width))
        return rows.view(batch, tokens, -1), None


class _Layer(nn.Module):
    """A decoder layer: attention and the gated layer, each behind a norm, each added."""

    self_attn: nn.Module
    mlp: nn.Module
    input_layernorm: _Norm
    post_attention_layernorm: _Norm

    def forward(self, hidden_states: torch.Tensor, **arguments: Any) -> torch.Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **arguments)
        norm, shape = self.post_attention_layernorm, hidden_states.shape
        rows = hidden_states.reshape(-1, shape[-1])
        residual, normed = operators.add_rms_norm(
            rows, attended.reshape(rows.shape), norm.weight, norm.variance_epsilon
        )
        made: torch.Tensor = residual.view(shape) + self.mlp(normed.view(shape))
        return made


@torch.inference_mode()
def use_fused(made: nn.Module) -> None:
    """Modules of `made` compute so from now on; the objects must be the caller's own."""
    dtype = next((parameter.dtype for parameter in made.parameters()), None)
    if dtype not in _DTYPES:
        return
    known: dict[type, bool] = {}  # modules of a class have one configuration
    for name, fits, own in (
        ("RMSNorm", _fits_norm, _Norm),
        ("MLP", _fits_mlp, _Mlp),
        ("Attention", _fits_attention, _Attention),
        ("DecoderLayer", _fits_layer, _Layer),  # of what stands above
    ):
        for module in made.modules():
            base: Any = type(module)
            if not is_known(base, name) or not fits(module):
                continue
            fused = _subclass(base, own)
            if base not in known:
                known[base] = _agrees(module, fused, dtype)
            if known[base]:
                module.__class__ = fused


def is_whole(layer: nn.Module) -> bool:
    """Whether a decoder layer is one of these operators throughout, and none of its parts has
    hooks."""
    if not isinstance(layer, _Layer):
        return False
    parts = layer.input_layernorm, layer.post_attention_layernorm, layer.self_attn, layer.mlp
    return all(map(_runs, parts, (_Norm, _Norm, _Attention, _Mlp))) and _fits_heads(layer.self_attn)


def is_known(kind: type, name: str) -> bool:
    """Whether it is the class ``<Family><name>`` of one of these families."""
    return any(
        kind.__module__ == f"transformers.models.{family}.modeling_{family}"
        and kind.__name__ == prefix + name
        for family, prefix in _FAMILIES.items()
    )


@functools.cache
def _subclass(base: type, own: type) -> type:
    """The same one for every model."""
    return type(f"Fused{base.__name__}", (own, base), {})


def _runs(module: nn.Module, kind: type) -> bool:
    """Whether a module is of this kind, without hooks."""
    return isinstance(module, kind) and not hooked(module)


def _fits_norm(module: Any) -> bool:
    return bool(module.weight.device.type == "cpu")


def _fits_mlp(module: Any) -> bool:
    merged = _are_merged(module, "gate_proj", "up_proj") and not hooked(module.act_fn)
    return merged and _runs(module.down_proj, RowProduct)


def _fits_attention(module: Any) -> bool:
    own = grouped_attention.is_grouped(module)
    merged = own and _are_merged(module, "q_proj", "k_proj", "v_proj")
    return merged and _runs(module.o_proj, RowProduct) and _fits_heads(module)


def _fits_heads(module: Any) -> bool:
    """Whether the norms of an attention's heads, if it has some, are alike."""
    if not hasattr(module, "q_norm"):
        return True
    norms = module.q_norm, module.k_norm
    alike = norms[0].variance_epsilon == norms[1].variance_epsilon
    return alike and all(_runs(norm, _Norm) for norm in norms)


def _fits_layer(module: Any) -> bool:
    return _runs(module.post_attention_layernorm, _Norm)


def _are_merged(module: Any, *names: str) -> bool:
    """Whether these projections are all the parts of one product, in that order."""
    parts = [getattr(module, name) for name in names]
    if not all(_runs(part, Part) for part in parts):
        return False
    merged = parts[0].merged
    in_order = all(part.merged is merged and part.place == i for i, part in enumerate(parts))
    return in_order and len(merged.sizes) == len(parts) and _runs(merged.linear, RowProduct)


def _agrees(module: Any, fused: Any, dtype: torch.dtype) -> bool:
    """Whether `fused` has the module give what its class does, on random input."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(1, _PROBED, _width(module), generator=random).to(dtype)
    arguments = {}
    attention = getattr(module, "self_attn", module)
    if hasattr(attention, "head_dim"):
        angles = torch.randn(1, _PROBED, attention.head_dim, generator=random)
        turns = (angles.cos().to(dtype), angles.sin().to(dtype))
        arguments = {"position_embeddings": turns, "attention_mask": None}
    try:
        outputs = [kind.forward(module, x, **arguments) for kind in (type(module), fused)]
    except RuntimeError:  # a dtype or size that the operators do not take
        return False
    wanted, given = (out[0] if isinstance(out, tuple) else out for out in outputs)
    difference = (given.float() - wanted.float()).abs().amax()
    return bool(difference <= _TOLERANCE[dtype] * wanted.float().abs().amax())


def _width(module: Any) -> int:
    """Of its input."""
    for name in ("gate_proj", "q_proj"):
        if hasattr(module, name):
            return int(getattr(module, name).in_features)
    return len(getattr(module, "input_layernorm", module).weight)
