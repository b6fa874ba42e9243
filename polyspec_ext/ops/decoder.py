"""Operators of decoder layers over torch tensors: products with packed weights
(polyspec/dense.hpp), attention, norms, rotary positions, caches of keys and values
(polyspec/kv_cache.hpp), and all layers of a model, on the CPU in one call (polyspec/decoder.hpp).

A wrong shape, dtype or device is a RuntimeError that names the argument. Errors in the values of
cached lengths and paths are status bits. Nothing waits for the device; all work under
``torch.compile`` and in CUDA graphs. A rollback of a contiguous cache needs no operator: it changes
the lengths only (contract C7). Paged caches: ``torch.ops.polyspec.append_paged``, ``reserve_pages``
and ``truncate_pages``.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import register_fake

# Head dimensions: kAttentionStep and kAttentionWidth of polyspec/attention.hpp.
WIDTHS = frozenset(range(32, 256 + 1, 32))
# Maximum tokens per row for the CUDA operator, which is for verifications.
FEW_TOKENS = 64
Appended = tuple[Tensor, Tensor]  # lengths or queries, and a status
_append: Callable[..., Appended] = torch.ops.polyspec.append.default
LABEL_BYTES = 64  # header of packed weights with their layout (polyspec/types.hpp, PackedLayout)

# ---- products ------------------------------------------------------------------------------------

dense_pack: Callable[[Tensor], Tensor] = torch.ops.polyspec.dense_pack.default
"""Pack weights [N, K], float32 or bfloat16, unit stride along K, as `dense_product` reads them:
uint8, one dimension, in the layout of polyspec/dense.hpp."""

dense_product: Callable[[Tensor, Tensor, int, Tensor | None], Tensor]
dense_product = torch.ops.polyspec.dense_product.default
"""Return ``x W^T + b``, [M, outputs] in the dtype of `x`.

Sums are float32, in the order that polyspec/dense.hpp states, and numbers below 2^-126 count as
zero. Row m is the same, bit for bit, whatever M and the number of threads are, and on every
processor but for bfloat16 where there is AMX. On CUDA torch multiplies what the header excludes.

Args:
    x: [M, K] in the dtype of the weights, unit stride along K.
    packed: of `dense_pack`, for weights [outputs, K]; on CUDA these weights, which are read before
        earlier kernels of a graph have ended.
    outputs: of these weights.
    bias: [outputs] in that dtype; None: none.
"""


def _packed(weights: Tensor) -> Tensor:
    outputs, inputs = weights.shape
    together = 4 // weights.element_size()
    tiles = -(-outputs // 16) * -(-inputs // together) * 64
    return weights.new_empty(tiles + LABEL_BYTES, dtype=torch.uint8)


register_fake("polyspec::dense_pack", _packed)
register_fake("polyspec::dense_product", lambda x, _, outputs, *__: x.new_empty(len(x), outputs))

# ---- operators of a layer ------------------------------------------------------------------------

attention: Callable[..., Tensor] = torch.ops.polyspec.attention.default
"""Return ``softmax(scale query key^T + mask) value``, where heads of queries share heads of
keys.

Row (b, t, h) is bit-identical for any other queries in the call, any processor and number of
threads, and, on CUDA, any slots after the keys that it sees. If every key is hidden it is 0.
On CUDA it is one launch, and one more beyond 512 keys.

Args:
    query: [B, Hq, T, D] float32 or bfloat16; like all other tensors, unit stride along the last
        dimension.
    key: [B, Hkv, N, D], N >= 1; Hkv divides Hq, and query head h reads key head
        ``h // (Hq // Hkv)``.
    value: [B, Hkv, N, Dv]. D and Dv are multiples of 32 up to 256.
    mask: [B or 1, 1, T, N] of the same dtype, added to the scores (-inf or the lowest number
        hides a key, but its value must be finite); None: every token sees every key.
    scale: factor of the scores.
    causal: query t sees keys 0 to ``N - T + t`` only; N >= T then.
    lengths: [B] int64, not with `causal`: query t of row b sees keys 0 to ``lengths[b] + t``
        only, read on the device; None: limited by `causal` and the mask only.

Returns:
    [B, T, Hq, Dv], contiguous, in the dtype of `query`.

Raises:
    RuntimeError: a shape, dtype or stride does not fit; the message names the argument.
"""


class CacheStatus(enum.IntFlag):
    """Status bits of the cache operators (polyspec/kv_cache.hpp); a row with a bit is unchanged."""

    BAD_LENGTH = 1 << 5
    BAD_PATH = 1 << 10
    CACHE_FULL = 1 << 11
    BAD_PAGE = 1 << 12


def append(
    cache_keys: Tensor,
    cache_values: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    counts: Tensor | None = None,
    *,
    ring: bool = False,
    sinks: int = 0,
) -> Appended:
    """Append new keys and values at each row's length, in place.

    Args:
        cache_keys, cache_values: [B, H, C, Dk] and [B, H, C, Dv], elements of 1, 2 or 4 bytes, any
            strides but unit stride along the last dimension. Written.
        keys, values: [B, H, T, Dk] and [B, H, T, Dv], strides likewise; the cache's dtype.
        lengths: [B] int64, cached lengths: token i of row b goes to position ``lengths[b] + i``.
        counts: [B] int64 in [0, T], new tokens of each row; None: T each.
        ring: positions past the first `sinks` wrap: position p is written to slot ``sinks + (p -
            sinks) % (C - sinks)``, over older tokens (sliding windows; with sinks, StreamingLLM,
            arXiv 2309.17453).
        sinks: first positions, which keep their slots.

    Returns:
        new_lengths [B] int64, and status [B] int32 (`CacheStatus`): CACHE_FULL where a row's tokens
        do not fit, BAD_LENGTH for a negative length or a count out of range. A row with a status
        bit is not written.
    """
    return _append(cache_keys, cache_values, keys, values, lengths, counts, ring, sinks)


update_lengths: Callable[..., None] = torch.ops.polyspec.update_lengths.default
"""Update the lengths of rows, in place, and in this order: cut, copy to `base`, and add the tokens
of a pass.

Args:
    lengths: [B] int64. Written.
    base: [B] int64. Written; None: no copy.
    most: [B] int64; a length becomes at most this, and at least 0; None: no cut.
    counts: [B] int64, new tokens, at least 0 and at most `tokens`; None: `tokens` each.
    tokens: >= 0.
    above: [B] int64, tokens that another level has read. The pass skips as many as exceed the
        length, but reads token number `first`; `base` becomes the length with the skipped tokens.
        None: no token is skipped.
    first: [B] int64, index of the first new token with logits; with `above`.
    rest: [3, B] int64, with `above`: skipped tokens, `counts` and `first` without them. Written.
"""

take_rows: Callable[..., Tensor] = torch.ops.polyspec.take_rows.default
"""Copy `width` rows of every batch row: row j is at ``at[b] - less[b] + plus + j``.

Args:
    rows: [B, S] or [B, S, N], unit stride along N, any dtype.
    at, less: [B] int64; None: 0.
    plus: an integer.
    width: W, rows to copy.
    ring: row p is at slot ``p % S``; otherwise positions out of range are the nearest slot.

Returns:
    [B, W] or [B, W, N], contiguous.
"""

put_rows: Callable[..., None] = torch.ops.polyspec.put_rows.default
"""Copy rows into a ring: row j of batch row b has position ``p = at[b] - less[b] + plus + j`` and
goes to slot ``p % S``. Of more than S rows the last are copied.

Args:
    ring: [B, S, N], unit stride along N. Written.
    rows: [B, W, N] likewise, of the same dtype.
    at, less: [B] int64; None: 0.
    plus: an integer.
    part: [B] int64; a batch row with 0 is unchanged, in all arguments. None: no such row.
    skip: [B] int64, number of first rows that are not copied; None: 0.
    lowest: [B] int64, rows at positions below it are not copied; None: all are.
    begin: [B] int64, becomes at most the position of row 0. Written; None: not used.
    end: [B] int64, becomes `kept`. Written; None: not used.
    kept: [B] int64; with `end`.
"""


rms_norm: Callable[[Tensor, Tensor, float], Tensor]
rms_norm = torch.ops.polyspec.rms_norm.default
"""``weight * (x / sqrt(mean(x^2) + epsilon))``, [M, N] by rows: of x [M, N], weight [N] and
epsilon > 0. No kernel of the same CUDA graph writes `weight`."""

add_rms_norm: Callable[..., tuple[Tensor, Tensor]]
add_rms_norm = torch.ops.polyspec.add_rms_norm.default
"""``x + residual`` and `rms_norm` of it, both [M, N]: of x, residual [M, N], weight and epsilon."""

gated: Callable[[Tensor], Tensor] = torch.ops.polyspec.gated.default
"""``silu(gate) * up``, [M, N], of gate and up side by side, [M, 2 N]."""

rotary: Callable[..., tuple[Tensor, Tensor, Tensor]]
rotary = torch.ops.polyspec.rotary.default
"""Split a product into queries [B, heads, T, D], keys and values [B, groups, T, D], contiguous, and
turn queries and keys by their positions: ``x cosine + (-second half of x, first half) sine``.

Args:
    x: [B T, (heads + 2 groups) D].
    bias: [(heads + 2 groups) D], added to `x` first, and rounded; None: nothing.
    cosine, sine: [P, D], angles of each position; D even, up to 512.
    positions: [B or 1, T or 1] int64, any strides; outside of [0, P) they count as the nearest.
    batch: B.
    heads: of the queries.
    groups: heads of keys and of values.
    query_norm, key_norm: [D] each, weights of an `rms_norm` of every head of the queries and of the
        keys, before they are turned; None both: none.
    epsilon: of those norms, > 0.
"""

rotary_append: Callable[..., Tensor] = torch.ops.polyspec.rotary_append.default
"""Return the queries of `rotary`, and append its keys and values as `append` does.

Args:
    x, bias, cosine, sine: as of `rotary`.
    positions: as of `rotary`; None: token i of row b has the position ``lengths[b] + i``.
    cache_keys, cache_values: [B, groups, C, D] in the dtype of `x`, any strides but unit stride
        along the last dimension. Written.
    status: [B] int32; bits as of `append` are added. Written.
    lengths, counts: as of `append`.
    heads, query_norm, key_norm, epsilon: as of `rotary`.
"""


def _attended(query: Tensor, key: object, value: Tensor, *_: object) -> Tensor:
    batch, heads, tokens = query.shape[:3]
    return query.new_empty(batch, tokens, heads, value.shape[3])


def _rotated(x: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    _, cosine, _, _, batch, heads, groups, *_ = arguments
    sizes = len(x) // max(batch, 1), cosine.shape[1]
    return tuple(x.new_empty(batch, n, *sizes) for n in (heads, groups, groups))


def rotated_into(x: Tensor, *arguments: Any) -> Tensor:
    """Return queries without numbers, like those of `rotary_append`."""
    _, cosine, _, _, keys, _, _, _, _, heads, *_ = arguments
    return x.new_empty(len(keys), heads, len(x) // max(len(keys), 1), cosine.shape[1])


def _lengths(index: int) -> Callable[..., Appended]:
    # Results are like `lengths`, argument number `index`.
    def fake(*arguments: Any) -> Appended:
        lengths = arguments[index]
        return torch.empty_like(lengths), torch.empty_like(lengths, dtype=torch.int32)

    return fake


register_fake("polyspec::attention", _attended)
register_fake("polyspec::rms_norm", lambda x, *_: torch.empty_like(x))
register_fake("polyspec::add_rms_norm", lambda x, *_: (torch.empty_like(x), torch.empty_like(x)))
register_fake("polyspec::gated", lambda x: x.new_empty(len(x), x.shape[1] // 2))
register_fake("polyspec::rotary", _rotated)
register_fake("polyspec::rotary_append", rotated_into)
register_fake("polyspec::update_lengths", lambda *_: None)
register_fake("polyspec::put_rows", lambda *_: None)
register_fake(
    "polyspec::take_rows",
    lambda rows, at, less, plus, width, _: rows.new_empty(len(rows), width, *rows.shape[2:]),
)
register_fake("polyspec::append", _lengths(4))
register_fake("polyspec::append_paged", _lengths(5))
for _name in ("reserve_pages", "truncate_pages"):
    register_fake(f"polyspec::{_name}", lambda pages, *_: pages.new_empty(len(pages)))

# ---- all layers ----------------------------------------------------------------------------------

# PackedLayout and DType of polyspec/types.hpp.
DENSE, INT4, BLOCKS = 4, 5, 6
_BFLOAT16 = 1
_Result = tuple[Tensor, Tensor, Tensor]
_decoder_layers: Callable[..., _Result] = torch.ops.polyspec.decoder_layers.default


class Matrix(NamedTuple):
    """Packed weights.

    Attributes:
        layout: DENSE, INT4 or BLOCKS: packed by `dense_pack`, by `int4_pack` (scales in bfloat16)
            or by `levels.gguf.pack_blocks`.
        outputs, inputs: dimensions of the matrix.
        packed: the packed weights.
        kind: the group of INT4, the type of BLOCKS.
        bias: ``[outputs]``, with DENSE only; None: no bias.
    """

    layout: int
    outputs: int
    inputs: int
    packed: Tensor
    kind: int = 0
    bias: Tensor | None = None


class LayerParts(NamedTuple):
    """A layer ``h = x + out(attention(norm(x)))``, ``h + down(gated(norm(h)))``. A product is a
    sequence of matrices, stacked along the outputs, or in `levels.products` an `EnteringProduct`
    or, after the attention and the activation, a `LeavingProduct`.

    Attributes:
        attention_norm, gated_norm: ``[N]``; `attention_norm` is None if a pass supplies the input
            of the first layer's attention.
        attention_bias: ``[(heads + 2 groups) D]``, added to the rounded product; None: no bias.
        query_norm, key_norm: ``[D]``, as of `rotary`; None both: no norms.
        attention_in: product of queries, keys and values.
        attention_out: product of the heads' results.
        gated_in: product of gate and up, in `levels.products` after `gated`.
        gated_out: product of down.
    """

    attention_norm: Tensor | None
    gated_norm: Tensor
    attention_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    attention_in: Any
    attention_out: Any
    gated_in: Any
    gated_out: Any


class LayerShape(NamedTuple):
    """The shape of all layers of a model."""

    heads: int  # of queries
    groups: int  # of keys and of values
    gated_width: int  # of the gated layer
    epsilon: float  # of the norms
    scale: float  # of the scores


class DecoderLayers:
    """Layers of the same shape with matrices as products, all at fixed addresses.

    Results are bit-identical to separate calls of the operators of this module, and of the
    products.
    """

    def __init__(self, layers: Sequence[LayerParts], shape: LayerShape) -> None:
        self._layers = layers  # keeps the memory that tables point to
        rows, matrices = [], []
        for layer in layers:
            products = layer.attention_in, layer.attention_out, layer.gated_in, layer.gated_out
            vectors = (
                layer.attention_norm, layer.gated_norm, layer.attention_bias, layer.query_norm,
                layer.key_norm,
            )  # fmt: skip
            rows.append([*map(_address, vectors), *map(len, products)])
            matrices += [_row(matrix) for product in products for matrix in product]
        tables = torch.tensor(rows), torch.tensor(matrices)
        self.run: Callable[..., _Result] = functools.partial(_decoder_layers, *tables, *shape)
        """Run a pass.

        Args:
            x: [B, T, N] float32 or bfloat16, like all other float tensors; contiguous.
            cosine, sine, positions: as of `rotary_append`.
            mask, causal: as of `attention`; mask [B or 1, 1, T, span].
            keys, values: of each layer [B, groups, C, D], the same strides in all layers. Written.
            lengths, counts: as of `append`.
            span: slots of the cache that queries see.
            taken: layers with input states to return, ascending.

        Returns:
            The states after the last layer [B, T, N], the states before the layers `taken`
            [len(taken), B, T, N], and status [B] int32 as of `append`.

        Raises:
            RuntimeError: a shape, dtype or number does not fit; the message names it.
        """


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _row(matrix: Matrix) -> list[int]:
    group, kind = (matrix.kind, 0) if matrix.layout == INT4 else (0, matrix.kind)
    addresses = _address(matrix.packed), _address(matrix.bias)
    return [matrix.layout, matrix.outputs, matrix.inputs, group, _BFLOAT16, kind, *addresses]


def _passed(*arguments: Any) -> _Result:
    x, taken = arguments[2 + len(LayerShape._fields)], arguments[-1]
    states = x.new_empty(len(taken), *x.shape)
    return torch.empty_like(x), states, x.new_empty(x.shape[0], dtype=torch.int32)


register_fake("polyspec::decoder_layers", _passed)
