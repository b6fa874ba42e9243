"""Attention over a cache as a function over torch tensors (polyspec/attention.hpp)."""

from __future__ import annotations

from collections.abc import Callable

import torch

# That a head may have: kAttentionStep and kAttentionWidth of polyspec/attention.hpp.
WIDTHS = frozenset(range(32, 256 + 1, 32))
# Of a row, at most, where the CUDA operator is meant for them: those of a verification.
FEW_TOKENS = 64
_DTYPES = (torch.float32, torch.bfloat16)
_fake: Callable[[str], Callable[[Callable[..., object]], object]] = torch.library.register_fake
_attention: Callable[..., torch.Tensor] = torch.ops.polyspec.attention.default


def takes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> bool:
    """Return whether `attention` reads these, and on CUDA as few tokens as it is meant for."""
    dtype = query.dtype
    if dtype not in _DTYPES or not (key.dtype == value.dtype == dtype):
        return False
    if mask is not None and not (mask.dim() == 4 and mask.shape[1] == 1 and mask.dtype == dtype):
        return False
    if not (query.shape[3] in WIDTHS and value.shape[3] in WIDTHS):
        return False
    place = query.device
    for x in (query, key, value, mask):  # a generator's frames are calls
        if x is not None and not (x.stride(3) == 1 and x.device == place):
            return False
    if query.is_cpu:
        return True
    few = query.is_cuda and query.shape[2] <= FEW_TOKENS
    return few and _in_vectors(key) and _in_vectors(value)


def _in_vectors(x: torch.Tensor) -> bool:
    # The operator reads 16 bytes at a time. (Memory of torch's begins at such an address.)
    offsets = (x.storage_offset(), *x.stride()[:3])
    return all(offset * x.element_size() % 16 == 0 for offset in offsets)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool = False,
    lengths: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``softmax(scale query key^T + mask) value``, where heads of queries share those of
    keys.

    Row (b, t, h) is the same, bit for bit, whatever other queries are in the call, what lies behind
    the keys that it sees, on CUDA, and whatever the processor and the number of threads are. Where
    every key is hidden it is 0. On CUDA it is one launch, and one more beyond 512 keys.

    Args:
        query: [B, Hq, T, D] float32 or bfloat16; as all others, unit stride along the last
            dimension.
        key: [B, Hkv, N, D], N >= 1; Hkv divides Hq, and query head h reads key head
            ``h // (Hq // Hkv)``.
        value: [B, Hkv, N, Dv]. D and Dv are multiples of 32 up to 256.
        mask: [B or 1, 1, T, N] of the same dtype, added to the scores (-inf or the lowest number
            hides a key, whose value must be finite); None: every token sees every key.
        scale: of the scores.
        causal: query t sees keys 0 to ``N - T + t`` only; N >= T then.
        lengths: [B] int64, not with `causal`: query t of row b sees keys 0 to ``lengths[b] + t``
            only, which the device looks up; None: all that `causal` and the mask leave.

    Returns:
        [B, T, Hq, Dv], contiguous, in the dtype of `query`.

    Raises:
        RuntimeError: a shape, dtype or stride does not fit; the message names the argument.
    """
    return _attention(query, key, value, mask, scale, causal, lengths)


@_fake("polyspec::attention")
def _(query: torch.Tensor, key: object, value: torch.Tensor, *_: object) -> torch.Tensor:
    batch, heads, tokens = query.shape[:3]
    return query.new_empty(batch, tokens, heads, value.shape[3])
