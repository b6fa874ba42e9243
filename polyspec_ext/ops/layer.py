"""The operators between the products of a decoder layer, over torch tensors (polyspec/layer.hpp).

Every token is computed by itself: its bits are the same whatever other tokens are in the call, the
processor and the number of threads are, and on CUDA, where each operator is one launch. In bfloat16
a value is rounded wherever a model of transformers' rounds it. All tensors are contiguous but for
caches, of one dtype, float32 or bfloat16. A shape, dtype or value that does not fit is a
RuntimeError that names the argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_fake: Callable[[str], Callable[[Callable[..., object]], object]] = torch.library.register_fake

rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
rms_norm = torch.ops.polyspec.rms_norm.default
"""``weight * (x / sqrt(mean(x^2) + epsilon))``, [M, N] by rows: of x [M, N], weight [N] and
epsilon > 0."""

add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
add_rms_norm = torch.ops.polyspec.add_rms_norm.default
"""``x + residual`` and `rms_norm` of it, both [M, N]: of x, residual [M, N], weight and epsilon."""

gated: Callable[[torch.Tensor], torch.Tensor] = torch.ops.polyspec.gated.default
"""``silu(gate) * up``, [M, N], of gate and up side by side, [M, 2 N]."""

rotary: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
rotary = torch.ops.polyspec.rotary.default
"""Split a product into queries [B, heads, T, D], keys and values [B, groups, T, D], contiguous, and
turn queries and keys by their positions: ``x cosine + (-second half of x, first half) sine``.

Args:
    x: [B T, (heads + 2 groups) D].
    bias: [(heads + 2 groups) D], added to `x` first, and rounded; None: nothing.
    cosine, sine: [B or 1, T, D]; D even, up to 512.
    batch: B.
    heads: of the queries.
    groups: heads of keys and of values.
    query_norm, key_norm: [D] each, weights of an `rms_norm` of every head of the queries and of the
        keys, before they are turned; None both: none.
    epsilon: of those norms, > 0.
"""

rotary_append: Callable[..., tuple[torch.Tensor, torch.Tensor]]
rotary_append = torch.ops.polyspec.rotary_append.default
"""Return the queries of `rotary`, append its keys and values as `ops.kv.append` does, and return
that status [B] int32.

Args:
    x, bias, cosine, sine: as of `rotary`.
    cache_keys, cache_values: [B, groups, C, D] in the dtype of `x`, any strides but unit stride
        along the last dimension. Written.
    lengths, counts: as of `ops.kv.append`.
    heads, query_norm, key_norm, epsilon: as of `rotary`.
"""


@_fake("polyspec::rms_norm")
def _(x: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(x)


@_fake("polyspec::add_rms_norm")
def _(x: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


@_fake("polyspec::gated")
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // 2)


@_fake("polyspec::rotary")
def _(*given: Any) -> tuple[torch.Tensor, ...]:
    x, _, cosine, _, batch, heads, groups, *_ = given
    shape = cosine.shape[1:]
    return tuple(x.new_empty(batch, count, *shape) for count in (heads, groups, groups))


@_fake("polyspec::rotary_append")
def _(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x, _, cosine, _, keys, _, lengths, _, heads, *_ = given
    batch = keys.shape[0]
    return x.new_empty(batch, heads, *cosine.shape[1:]), lengths.new_empty(batch, dtype=torch.int32)
