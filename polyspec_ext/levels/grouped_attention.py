"""Attention on the CPU that reads grouped keys and values as they lie.

A few tokens are what torch's attention kernel is slowest at: it works in blocks of far more
queries, and where there is a mask transformers first copies every key and value head once per
query head of its group. They go through the operator of `ops.attention`.

It comes with packed weights (`cpu_packed`) alone: modules find their attention by their
configuration, and only there are the modules a copy of the level's own. A model that is run as it
was given keeps the attention that its owner chose, whose rounding is part of its distribution.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..kv_cache import masks as cache_masks
from ..ops import attention as cache_attention

NAME = "polyspec_grouped"
# Tokens of a row; a compiled pass (`compiled.LONGEST`) must not branch on their number.
_FEW = 32
# Arguments that mean more than a mask; none of them comes with the models this is used for so far.
_MORE = ("position_bias", "cache", "s_aux", "softcap", "head_mask")


def grouped_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' sdpa attention: ``[B, Hq, T, D]`` queries over ``[B, Hkv, N, D]`` keys to
    ``[B, T, Hq, D]``."""
    tokens = query.shape[2]
    # Several tokens without a mask see what lies before each of them.
    causal = attention_mask is None and tokens > 1
    if causal and tokens == key.shape[2] <= _FEW and _is_causal(module, arguments):
        # The first of a text: with the bits that they have in a batch, or one by one.
        strip = cache_masks.causal_strip(tokens, 0, query.dtype)
        attention_mask, causal = cache_masks.cut_strip(strip, 0, tokens), False
    if causal or any(arguments.get(name) is not None for name in _MORE):
        plain: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **arguments
        )
        return plain
    if tokens <= _FEW and cache_attention.takes(query, key, value, attention_mask):
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        return cache_attention.attention(query, key, value, attention_mask, scale), None
    out = nn.functional.scaled_dot_product_attention(
        query, key, value, attention_mask, dropout, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


def _is_causal(module: nn.Module, arguments: dict[str, Any]) -> bool:
    """As transformers' sdpa attention finds out."""
    given = arguments.get("is_causal")
    return bool(getattr(module, "is_causal", True) if given is None else given)


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def use_grouped(made: nn.Module) -> None:
    """`made` and its modules attend so from now on, where they used sdpa. Their configurations
    become copies; the module objects must be the caller's own."""
    config: Any = getattr(made, "config", None)
    if getattr(config, "_attn_implementation", None) != "sdpa":
        return
    copies: dict[int, Any] = {}
    copy.deepcopy(config, copies)._attn_implementation = NAME
    for module in made.modules():
        own = getattr(module, "config", None)
        if id(own) in copies:
            module.config = copies[id(own)]
