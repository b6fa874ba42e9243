"""Attention on the CPU that reads grouped keys and values as they lie.

Where there is a mask transformers first copies every key and value head once per query head of its
group, and torch's kernel rounds by how many queries there are. Here all goes through the operator
of `ops.attention`, which gives a token the same bits whatever stands beside it: alone, in a
verification, in a batch and in its prompt.

It comes with products that do so too, packed ones and those of 4-bit copies, alone: modules find
their attention by their configuration, and only there are the modules a copy of the level's own. A
model that is run as it was given keeps the attention that its owner chose, whose rounding is part
of its distribution.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..ops import attention as cache_attention

NAME = "polyspec_grouped"
# Arguments that mean more than a mask; none of them comes with the models this is used for so far.
_MORE = frozenset(("position_bias", "cache", "s_aux", "softcap", "head_mask"))
# By thread: for each of its calls since, whether the operator took it.
_watched: dict[int, list[bool]] = {}


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
    causal = attention_mask is None and tokens > 1 and _is_causal(module, arguments)
    # (Several tokens without a mask are the first of a text. Others would see what they saw in
    # transformers: as many keys.)
    other = causal and tokens != key.shape[2]
    more = _MORE.intersection(arguments)
    if other or (more and any(arguments[name] is not None for name in more)):
        _note(False)
        plain: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **arguments
        )
        return plain
    own = cache_attention.takes(query, key, value, attention_mask)
    _note(own)
    if own:
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        made = cache_attention.attention(query, key, value, attention_mask, scale, causal)
        return made, None
    out = nn.functional.scaled_dot_product_attention(
        query, key, value, attention_mask, dropout, causal, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


def _note(taken: bool) -> None:
    if _watched:
        _watched.get(threading.get_ident(), []).append(taken)


@contextmanager
def watched() -> Iterator[list[bool]]:
    """Meanwhile the list gets, for each call of `grouped_attention` on this thread, whether the
    operator takes it, so that a token's result is its own."""
    thread = threading.get_ident()
    _watched[thread] = []
    try:
        yield _watched[thread]
    finally:
        del _watched[thread]


def _is_causal(module: nn.Module, arguments: dict[str, Any]) -> bool:
    """As transformers' sdpa attention finds out."""
    given = arguments.get("is_causal")
    return bool(getattr(module, "is_causal", True) if given is None else given)


def _additive_mask(*form: Any, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """transformers' mask for sdpa, and None where that is, in the form that the operator takes."""
    visible = sdpa_mask(*form, **options)
    if visible is None:
        return None
    shown = torch.zeros((), dtype=dtype, device=visible.device)
    return torch.where(visible, shown, torch.finfo(dtype).min)


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, _additive_mask)


def is_grouped(module: nn.Module) -> bool:
    """Whether a module of attention attends so."""
    return getattr(getattr(module, "config", None), "_attn_implementation", None) == NAME


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
