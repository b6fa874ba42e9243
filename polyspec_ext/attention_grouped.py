"""Attention on the CPU that reads grouped keys and values as they lie.

Where there is a mask, transformers first copies every key and value head once per query head of its
group, since the kernels of some devices want that. The CPU's does not, and a verification over a
batch, which always has a mask, would spend a good part of its time on the copies.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "polyspec_grouped"
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
    single = query.shape[2] == 1  # which transformers treats well itself
    more = any(arguments.get(name) is not None for name in _MORE)
    if attention_mask is None or single or more:
        plain: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **arguments
        )
        return plain
    out = nn.functional.scaled_dot_product_attention(
        query, key, value, attention_mask, dropout, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


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
