"""A causal language model's pass with all its decoder layers in one call (`ops.decoder`), in place
of transformers' forward.

Layer by layer, a short pass of a small model spends much of its time between its products, on
calls, allocations and checks. The results are the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..kv_cache import RollbackCache
from ..ops import attention
from ..ops.decoder import DecoderLayers, LayerWeights
from . import fused
from .base import LevelOutput
from .hidden import gather
from .replacement import RowProduct


class StackedPass:
    """Passes of a model whose layers are fused (`levels.fused`) and of one shape: embeddings,
    layers, norm and head. `native` has its layers as the operator has them."""

    def __init__(self, model: Any, native: DecoderLayers) -> None:
        self.model, self.native = model, native
        layers: list[Any] = list(model.model.layers)
        self.numbers = tuple(layer.self_attn.layer_idx for layer in layers)
        # Looked at by every pass. The tables and parameters stay these objects, whatever is hung
        # into the ones and whatever memory the others are given.
        self._hooks = [
            table
            for module in (model, model.model, *layers)
            for table in (module._forward_hooks, module._forward_pre_hooks)
        ]
        self._norms = _norms(layers)

    def __call__(
        self,
        tokens: torch.Tensor,
        inputs: dict[str, Any],
        cache: Any,
        keep: int,
        indices: torch.Tensor | None = None,
        hidden_layers: Sequence[int] = (),
    ) -> LevelOutput | None:
        """Run the pass. None, and nothing done: the pass is one for the model itself, as where
        modules have hooks or the cache is another.

        Args:
            tokens: ``[B, T]`` int64.
            inputs: of `RollbackCache.inputs`, with which the cache is prepared.
            keep, indices: logits are wanted behind the last `keep` tokens, or behind those of
                `indices`, ``[B, keep]``.
            hidden_layers: whose states are wanted (`levels.base.Hidden`).
        """
        model, body = self.model, self.model.model
        if not isinstance(cache, RollbackCache) or "position_ids" not in inputs:
            return None
        # The norms are the given model's, and may have been moved or converted.
        if any(self._hooks) or not all(map(torch.Tensor.is_set_to, self._norms, self.native.norms)):
            return None
        rows, mask, width = cache.rows, inputs["attention_mask"], tokens.shape[1]
        # Several tokens without a mask are the first of a text.
        causal = mask is None and width > 1
        if (causal and rows.span != width) or isinstance(mask, dict):
            return None
        slots = cache.begin_layers(self.numbers)
        if slots is None:
            return None
        x = body.embed_tokens(tokens)
        cosine, sine = body.rotary_emb(x, inputs["position_ids"])
        count, taken = len(self.numbers), list[int]()
        if hidden_layers:
            taken = sorted({layer for layer in hidden_layers if 0 <= layer < count})
        made, entering, status = self.native(
            x, cosine, sine, mask, *slots, rows.base, rows.counts, rows.span, causal, taken
        )
        if rows.at is None:  # else there was room, as the host knows
            rows.status.bitwise_or_(status)
        last = body.norm(made)
        wanted = last[:, -keep:] if indices is None else gather(last, indices)
        logits = model.get_output_embeddings()(wanted)
        if not hidden_layers:
            return LevelOutput(logits)
        states = {**dict(zip(taken, entering, strict=True)), count: made, -1: last}
        return LevelOutput(logits, {layer: states[layer] for layer in hidden_layers})


def stacked_pass(model: Any) -> StackedPass | None:
    """That of a model with fused layers, all alike; None: of another."""
    body = getattr(model, "model", None)
    if not (fused.is_known(type(model), "ForCausalLM") and fused.is_known(type(body), "Model")):
        return None
    layers: list[Any] = list(body.layers)  # type: ignore[union-attr]
    if len(layers) == 0 or not all(fused.is_whole(layer) for layer in layers):
        return None
    if layers[0].self_attn.head_dim not in attention.WIDTHS:
        return None
    shapes = {_shape(layer) for layer in layers}
    weights = [found for found in map(_weights, layers) if found is not None]
    if len(shapes) != 1 or len(weights) != len(layers):
        return None
    sizes = {tuple(map(len, _norms([layer]))) for layer in layers}
    kinds = {(weight.dtype, weight.is_contiguous()) for weight in _norms(layers)}
    if len(sizes) != 1 or len(kinds) != 1:
        return None
    return StackedPass(model, DecoderLayers(weights, *shapes.pop()))


def _shape(layer: Any) -> tuple[int, int, int, float, float]:
    """Heads of queries and of keys, width of the gated layer, epsilon and scale."""
    attends, width = layer.self_attn, layer.self_attn.head_dim
    heads, groups = (size // width for size in attends.q_proj.merged.sizes[:2])
    epsilon, scale = layer.input_layernorm.variance_epsilon, attends.scaling
    return heads, groups, layer.mlp.gate_proj.merged.sizes[0], epsilon, scale


def _weights(layer: Any) -> LayerWeights | None:
    attends, mlp = layer.self_attn, layer.mlp
    products: list[RowProduct] = [
        attends.q_proj.merged.linear, attends.o_proj, mlp.gate_proj.merged.linear, mlp.down_proj
    ]  # fmt: skip
    matrices = [product.matrices() for product in products]
    norms = _norm_modules(layer)
    # A bias that comes behind the rounding is added where the heads are split, and nowhere else.
    late, *others = (product.late_bias for product in products)
    if not all(matrices) or any(bias is not None for bias in others):
        return None
    if len({norm.variance_epsilon for norm in norms}) != 1:
        return None
    first, second, *heads = (norm.weight.detach() for norm in norms)
    query, key = heads or (None, None)
    return LayerWeights(first, second, late, query, key, *matrices)


def _norms(layers: Sequence[Any]) -> list[torch.Tensor]:
    """The weights of all norms of each layer, as `DecoderLayers` has them."""
    return [norm.weight for layer in layers for norm in _norm_modules(layer)]


def _norm_modules(layer: Any) -> list[Any]:
    attends = layer.self_attn
    heads = [attends.q_norm, attends.k_norm] if hasattr(attends, "q_norm") else []
    return [layer.input_layernorm, layer.post_attention_layernorm, *heads]
