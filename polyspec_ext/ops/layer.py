"""Compute what lies between the products of a decoder layer, over torch tensors
(polyspec/layer.hpp).

Every token is computed by itself: its bits are the same whatever other tokens are in the call, the
processor and the number of threads are, and on CUDA, where each function is one launch. In bfloat16
a value is rounded wherever a model of transformers' rounds it. All tensors are contiguous but for
caches, of one dtype, float32 or bfloat16.
"""

from __future__ import annotations

import torch

__all__ = ["add_rms_norm", "gated", "rms_norm", "rotary", "rotary_append"]

_rms_norm = torch.ops.polyspec.rms_norm.default
_add_rms_norm = torch.ops.polyspec.add_rms_norm.default
_rotary = torch.ops.polyspec.rotary.default
_rotary_append = torch.ops.polyspec.rotary_append.default
_gated = torch.ops.polyspec.gated.default


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return ``weight * (x / sqrt(mean(x^2) + epsilon))``, [M, N], by rows.

    Args:
        x: [M, N].
        weight: [N].
        epsilon: > 0.

    Raises:
        RuntimeError: a shape, dtype or value does not fit; the message names the argument.
    """
    made: torch.Tensor = _rms_norm(x, weight, epsilon)
    return made


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x + residual`` and `rms_norm` of it, both [M, N]; `residual` is [M, N]."""
    made: tuple[torch.Tensor, torch.Tensor] = _add_rms_norm(x, residual, weight, epsilon)
    return made


def rotary(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    batch: int,
    heads: int,
    groups: int,
    query_norm: torch.Tensor | None = None,
    key_norm: torch.Tensor | None = None,
    epsilon: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split a product into queries, keys and values, and turn queries and keys by their positions:
    ``x cosine + (-second half of x, first half) sine``.

    Args:
        x: [B T, (heads + 2 groups) D].
        bias: [(heads + 2 groups) D], added to `x` first, and rounded; None: nothing.
        cosine, sine: [B or 1, T, D]; D even, up to 512.
        batch: B.
        heads: of the queries.
        groups: heads of keys and of values.
        query_norm, key_norm: [D] each, weights of an `rms_norm` of every head of the queries and of
            the keys, before they are turned; None both: none.
        epsilon: of those norms, > 0.

    Returns:
        [B, heads, T, D], and twice [B, groups, T, D], contiguous.

    Raises:
        RuntimeError: a shape, dtype or value does not fit; the message names the argument.
    """
    made: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _rotary(
        x, bias, cosine, sine, batch, heads, groups, query_norm, key_norm, epsilon
    )
    return made


def rotary_append(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    cache_keys: torch.Tensor,
    cache_values: torch.Tensor,
    lengths: torch.Tensor,
    counts: torch.Tensor | None,
    heads: int,
    query_norm: torch.Tensor | None = None,
    key_norm: torch.Tensor | None = None,
    epsilon: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the queries of `rotary`, and append its keys and values as `ops.kv.append` does.

    Args:
        x, bias, cosine, sine, heads, query_norm, key_norm, epsilon: as of `rotary`.
        cache_keys, cache_values: [B, groups, C, D] in the dtype of `x`, any strides but unit stride
            along the last dimension. Written.
        lengths, counts: as of `ops.kv.append`.

    Returns:
        [B, heads, T, D], contiguous, and status [B] int32 as of `ops.kv.append`.

    Raises:
        RuntimeError: a shape, dtype or value does not fit; the message names the argument.
    """
    made: tuple[torch.Tensor, torch.Tensor] = _rotary_append(
        x, bias, cosine, sine, cache_keys, cache_values, lengths, counts, heads, query_norm,
        key_norm, epsilon,
    )  # fmt: skip
    return made


def gated(x: torch.Tensor) -> torch.Tensor:
    """Return ``silu(gate) * up``, [M, N], of gate and up side by side, [M, 2 N]."""
    made: torch.Tensor = _gated(x)
    return made


def _add_rms_norm_fake(x: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def _rotary_fake(
    x: torch.Tensor,
    bias: object,
    cosine: torch.Tensor,
    sine: object,
    batch: int,
    heads: int,
    groups: int,
    *norms: object,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, width = cosine.shape[1:]
    query, key, value = (
        x.new_empty(batch, count, tokens, width) for count in (heads, groups, groups)
    )
    return query, key, value


def _rotary_append_fake(
    x: torch.Tensor,
    bias: object,
    cosine: torch.Tensor,
    sine: object,
    cache_keys: torch.Tensor,
    cache_values: object,
    lengths: torch.Tensor,
    counts: object,
    heads: int,
    *norms: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    (tokens, width), batch = cosine.shape[1:], cache_keys.shape[0]
    return x.new_empty(batch, heads, tokens, width), lengths.new_empty(batch, dtype=torch.int32)


torch.library.register_fake("polyspec::rms_norm", lambda x, *_: torch.empty_like(x))
torch.library.register_fake("polyspec::add_rms_norm", _add_rms_norm_fake)
torch.library.register_fake("polyspec::rotary", _rotary_fake)
torch.library.register_fake("polyspec::rotary_append", _rotary_append_fake)
torch.library.register_fake("polyspec::gated", lambda x: x.new_empty(x.shape[0], x.shape[1] // 2))
