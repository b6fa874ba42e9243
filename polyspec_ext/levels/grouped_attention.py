"""Attention on the CPU that reads grouped keys and values as they lie.

Where there is a mask, transformers first copies every key and value head once per query head of its
group, since the kernels of some devices want that. The CPU's does not, and a verification over a
batch, which always has a mask, would spend a good part of its time on the copies.

A few tokens are what the CPU's attention kernel is slowest at: it works in blocks of far more
queries. Then the queries of a group's heads go as one block, and in float32 the two products are
left to the matrix kernels. A single token of a single row goes as such a block in half precision
alone.

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

NAME = "polyspec_grouped"
# Tokens of a row; a compiled pass (`compiled.LONGEST`) must not branch on their number.
_FEW = 32
_latest: tuple[torch.Tensor, tuple[int, ...], torch.Tensor] | None = None
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
    single = query.shape[0] == query.shape[2] == 1
    more = any(arguments.get(name) is not None for name in _MORE)
    half = query.dtype != torch.float32
    if single and attention_mask is None and not more and half:
        block = query.reshape(1, key.shape[1], -1, query.shape[3])
        out = nn.functional.scaled_dot_product_attention(block, key, value, scale=scaling)
        return out.reshape(1, 1, query.shape[1], -1), None
    if attention_mask is None or more or (single and not half):
        plain: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **arguments
        )
        return plain
    few = query.shape[2] <= _FEW
    if few and attention_mask.shape[1] == 1 and attention_mask.is_floating_point():
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        return _few_tokens(query, key, value, attention_mask, scale), None
    out = nn.functional.scaled_dot_product_attention(
        query, key, value, attention_mask, dropout, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


def _few_tokens(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    batch, heads, tokens, width = query.shape
    groups, length = key.shape[1:3]
    block = heads // groups * tokens  # queries that share keys
    masks = _mask_of_blocks(mask, batch, groups, heads // groups)
    if query.dtype == torch.float32:
        flat, own = batch * groups, query.reshape(batch * groups, block, width)
        weights = torch.baddbmm(
            masks.reshape(flat, block, length),
            own,
            key.reshape(flat, length, width).transpose(1, 2),
            alpha=scale,
        )
        out = torch.bmm(weights.softmax(-1), value.reshape(flat, length, -1))
    else:
        out = nn.functional.scaled_dot_product_attention(
            query.reshape(batch, groups, block, width), key, value, masks, scale=scale
        )
    return out.reshape(batch, heads, tokens, -1).transpose(1, 2).contiguous()


def _mask_of_blocks(mask: torch.Tensor, *form: int) -> torch.Tensor:
    """``[B, groups, heads * T, N]`` of a mask ``[B or 1, 1, T, N]``, by B, groups and heads. All
    layers of a pass are given the same mask, so the latest is kept."""
    global _latest
    if not torch.compiler.is_compiling() and _latest is not None:
        given, known, made = _latest
        if given is mask and known == form:
            return made
    batch, groups, heads = form
    tokens, length = mask.shape[2:]
    blocks = mask[:, :, None].expand(batch, groups, heads, tokens, length)
    made = blocks.reshape(batch, groups, heads * tokens, length)
    if not torch.compiler.is_compiling():
        _latest = mask, form, made
    return made


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
