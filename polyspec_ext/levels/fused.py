"""Passes of a model over packed products (`levels.products`): attention over grouped keys without
copies, and the layers of known families by operators.

Eager layers run some 60 small operators between their products, which on the CPU take as long as
the products of a single-token pass. On CUDA a layer by operators has at most 10 launches. Results
are block-invariant: a token has the same bits alone, in a verification, in a batch and in its
prompt (on CUDA torch's products are not). Passes run a copy of the modules: there are two ways to
run a layer, because models of other families and models with hooks need transformers' modules. A
model that runs unmodified keeps its attention, because the rounding of attention is part of its
distribution.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .. import progress, rooms
from ..kv_cache import RollbackCache, device_of
from ..kv_cache.layers import attended, query_positions, takes
from ..kv_cache.lengths import RowLengths
from ..kv_cache.rollback import Slots
from ..ops import decoder as operators
from ..ops.decoder import DecoderLayers, LayerParts, LayerShape
from .base import LevelOutput
from .products import (
    DenseLinear,
    EnteringProduct,
    LeavingProduct,
    OneDnnLinear,
    Part,
    QuantizedLinear,
    RowProduct,
    hooked,
    is_packable,
    pack_linear,
    replaced,
    with_adapters,
)

# ---- attention -----------------------------------------------------------------------------------

NAME = "polyspec_grouped"
# Attention arguments beyond a mask; so far unused by the supported models.
_MORE = frozenset(("position_bias", "cache", "s_aux", "softcap", "head_mask"))
# Per call of `grouped_attention` in this thread: whether the operator ran.
_calls: ContextVar[list[bool] | None] = ContextVar("calls", default=None)


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' sdpa attention does: ``[B, Hq, T, D]`` queries over
    ``[B, Hkv, N, D]`` keys to ``[B, T, Hq, D]``.

    With a mask, transformers first copies every key and value head once per query head of its
    group, and the rounding of torch's kernel depends on the number of queries.
    """
    tokens, causal = query.shape[2], False
    if attention_mask is None and tokens > 1:
        stated = arguments.get("is_causal")
        causal = bool(getattr(module, "is_causal", True) if stated is None else stated)
    # (Several tokens without a mask begin a text. Others see the same number of keys as in
    # transformers, by its attention.)
    extras = _MORE.intersection(arguments)
    other = causal and tokens != key.shape[2]
    other = other or bool(extras and any(arguments[name] is not None for name in extras))
    calls = _calls.get()
    if calls is not None:
        calls.append(not other and takes(query, key, value, attention_mask))
    if other:
        plain: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **arguments
        )
        return plain
    return attended(query, key, value, attention_mask, scaling, causal).contiguous(), None


@contextmanager
def _watched() -> Iterator[list[bool]]:
    calls: list[bool] = []
    token = _calls.set(calls)
    try:
        yield calls
    finally:
        _calls.reset(token)


def _additive_mask(*form: Any, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    # transformers' mask for sdpa, in the operator's form; None if that is None.
    visible = sdpa_mask(*form, **options)
    if visible is None:
        return None
    shown = torch.zeros((), dtype=dtype, device=visible.device)
    return torch.where(visible, shown, torch.finfo(dtype).min)


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, _additive_mask)


def use_grouped(made: nn.Module) -> None:
    """Set grouped attention in the modules of `made` that use sdpa. Their configurations, which
    select the attention, are replaced by copies; the module objects must be the caller's."""
    config: Any = getattr(made, "config", None)
    if getattr(config, "_attn_implementation", None) != "sdpa":
        return
    copies: dict[int, Any] = {}
    copy.deepcopy(config, copies)._attn_implementation = NAME
    for module in made.modules():
        before = getattr(module, "config", None)
        if id(before) in copies:
            module.config = copies[id(before)]


# ---- rotary positions ----------------------------------------------------------------------------

# Tables of cosines and sines, ``[P, D]``, and positions, as of `ops.decoder.rotary_append`.
Rotation = tuple[Tensor, Tensor, Tensor | None]
_FOLLOW_LENGTH = ("dynamic", "longrope")  # rope types that depend on the longest position


class Angles:
    """Cosines and sines by position, computed once, unless they depend on the longest position.

    Args:
        compute: returns cosines, sines and any further values ``[B, T, D]``, in the dtype and on
            the device of its first argument, of positions ``[B, T]``.
        kind: rope type.

    Attributes:
        tables: of each value ``[P, D]``; empty: not computed.
        reached: P, or 0.
    """

    def __init__(self, compute: Callable[[Tensor, Tensor], Sequence[Tensor]], kind: str) -> None:
        self._compute, self._fixed = compute, kind not in _FOLLOW_LENGTH
        self._whole: Tensor | None = None  # all tables
        self._form: tuple[torch.dtype, torch.device] | None = None  # of the tables
        self.tables: tuple[Tensor, ...] = ()
        self.reached = 0

    def reach(self, count: int, like: Tensor) -> None:
        """Compute the values of `count` or more positions, in the dtype and on the device of
        `like`."""
        if self._fixed:
            self._form = None  # until all is there
            with torch.inference_mode(False), torch.no_grad():  # readable outside of inference mode
                numbers = torch.arange(max(count, 2 * self.reached), device=like.device)[None]
                self._whole = torch.stack([x[0] for x in self._compute(like, numbers)])
                self.tables, self.reached = self._whole.unbind(), numbers.shape[1]
                self._form = like.dtype, like.device

    def key(self, count: int, like: Tensor) -> rooms.graphs.MemoryKey:
        """Return a key of the tables, computed for `count` positions."""
        if self.reached < count or self._form != (like.dtype, like.device):
            self.reach(count, like)
        return rooms.graphs.MemoryKey(self, self.tables)

    def at(self, like: Tensor, positions: Tensor) -> Sequence[Tensor]:
        """Return the values of `positions`, ``[B, T]``, which are below `reached` if it is not 0:
        ``[B, T, D]`` each."""
        if self._whole is None or self._form != (like.dtype, like.device):
            return self._compute(like, positions)
        return self._whole[:, positions].unbind()

    def rotation(self, like: Tensor, positions: Tensor | None, rows: RowLengths) -> Rotation:
        """Return the angles of a pass, in the dtype of `like`, ``[B, T, any]``, over a cache with
        the lengths `rows`. `positions`: ``[B or 1, T or 1]``; None: after these lengths."""
        if self.reached < rows.capacity or self._form != (like.dtype, like.device):
            self.reach(rows.capacity, like)
        if self._fixed:
            return self.tables[0], self.tables[1], positions
        if positions is None:
            positions = query_positions(rows.base, rows.counts, like.shape[1])
        cosine, sine = (x.flatten(0, 1) for x in self._compute(like, positions)[:2])
        return cosine, sine, torch.arange(len(cosine), device=like.device).view(positions.shape)


# ---- layers of known families --------------------------------------------------------------------

# Families: transformers' module name to class prefix.
_FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
_FUSED_DTYPES = (torch.float32, torch.bfloat16)
_SILU = ("SiLU", "SiLUActivation")
_WIDEST_HEAD = 512  # maximum of `ops.decoder.rotary`
_PRODUCTS = ("attention_in", "attention_out", "gated_in", "gated_out")  # of `LayerParts`


class CachedLayers:
    """Layers of equal shape over a `RollbackCache`, with a single operator each for norms, heads
    and activations.

    Operators write keys and values where a layer has them in a single tensor. Else the cache
    appends them, with the same bits: in a first pass, which allocates memory, in a streaming cache,
    and with masks by type of layer.

    On CUDA a layer is 9 launches if each product is one launch, 5 in 4 bits, and one more where
    attention reads more than 512 slots. The device reads the number of slots that queries see.

    Args:
        layers: with functions as products.
        shape: of all layers.
        numbers: of the layers in a cache.
        head_dim: D.

    Attributes:
        key_shape: number of key heads, and their width.
        longest: maximum tokens of a pass without a mask for which operators write keys and values:
            queries look up how many slots they see.
    """

    def __init__(
        self,
        layers: Sequence[LayerParts],
        shape: LayerShape,
        numbers: Sequence[int],
        head_dim: int,
    ) -> None:
        self.layers, self.shape = layers, shape
        self.numbers, self.key_shape = tuple(numbers), (shape.groups, head_dim)
        on_cuda = layers[0].gated_norm.is_cuda
        self.longest = operators.FEW_TOKENS if on_cuda else sys.maxsize
        if head_dim not in operators.WIDTHS:
            self.longest = 0

    def run(
        self,
        x: Tensor,
        rotation: Rotation,
        mask: Any,
        cache: RollbackCache,
        taken: Sequence[int] = (),
        first: Tensor | None = None,
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Run a pass for which `cache` is prepared.

        Args:
            x, taken, first: as in `through`.
            rotation: of `Angles`.
            mask: of `RollbackCache.inputs`.

        Returns:
            As `through`.
        """
        rows, numbers, width = cache.rows, self.numbers, x.shape[1]
        # Several tokens without a mask begin a text.
        causal = mask is None and width > 1
        slots: Slots | None = None
        if width <= self.longest and not isinstance(mask, dict):
            slots = rows.memory.get(numbers) or cache.memory_of(numbers)
        if slots is None:
            masks = [mask[kind] if isinstance(mask, dict) else mask for kind in cache.types]

            def appended(number: int, product: Tensor) -> Tensor:
                query, keys, values = self.heads(number, product, rotation, len(x))
                keys, values = cache.update(keys, values, numbers[number])
                seen = masks[numbers[number]]
                return attended(query, keys, values, seen, self.shape.scale, causal)

            return self.through(x, appended, taken, first)
        rows.seen.update(numbers)
        base, counts, span = rows.base, rows.counts, rows.span
        scale, visible = self.shape.scale, base if mask is None else None

        def in_place(number: int, query: Tensor) -> Tensor:
            key, value = slots[0][number].narrow(2, 0, span), slots[1][number].narrow(2, 0, span)
            return operators.attention(query, key, value, mask, scale, lengths=visible)

        append = rotation, slots, (rows.status, base, counts, self.shape.heads)
        return self.through(x, in_place, taken, first, append)

    def heads(
        self, number: int, product: Tensor, rotation: Rotation, batch: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values from the product of a layer's `attention_in`, as
        `ops.decoder.rotary` does."""
        layer, (heads, groups, _, epsilon, _) = self.layers[number], self.shape
        norms = layer.query_norm, layer.key_norm, epsilon
        sizes = batch, heads, groups
        return operators.rotary(product, layer.attention_bias, *rotation, *sizes, *norms)

    def through(
        self,
        x: Tensor,
        attention: Callable[[int, Tensor], Tensor],
        taken: Sequence[int] = (),
        first: Tensor | None = None,
        append: tuple[Rotation, Slots, tuple[Any, ...]] | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Run a pass with any attention.

        Args:
            x: ``[B, T, N]``, contiguous.
            attention: returns the results of the heads, ``[B, T, heads, D]``, from the number of a
                layer and the product of its `attention_in`, ``[B * T, any]``.
            taken: layers with input states to return, ascending.
            first: ``[B, T, any]``, read by the first layer's attention instead of the norm of `x`.
            append: angles and positions, keys and values of each layer, and status, lengths, counts
                and heads, of `rotary_append`; `attention` then receives its queries.

        Returns:
            The states after the last layer, ``[B, T, N]``, and before each of the layers `taken`.
        """
        shape, epsilon = x.shape, self.shape.epsilon
        rows, more = x.reshape(-1, shape[2]), None
        states = list[Tensor]()
        for number, layer in enumerate(self.layers):
            ending: tuple[Any, ...] = ()
            if append is not None:
                (rotation, (keys, values), into), norms = append, (layer.query_norm, layer.key_norm)
                into = keys[number], values[number], *into
                ending = layer.attention_bias, *rotation, *into, *norms, epsilon
            if first is not None and number == 0:
                _, product = layer.attention_in(first.flatten(0, 1), None, None, epsilon, *ending)
            else:
                weight = layer.attention_norm
                rows, product = layer.attention_in(rows, more, weight, epsilon, *ending)
            if number in taken:
                states.append(rows.view(shape))
            results = attention(number, product).flatten(2).flatten(0, 1)
            rows, more = layer.attention_out(results, rows)
            rows, gates = layer.gated_in(rows, more, layer.gated_norm, epsilon)
            rows, more = layer.gated_out(gates, rows)
        return (rows if more is None else rows + more).view(shape), states


def cached_layers(
    module: nn.Module,
    layers: Any,
    numbers: Sequence[int],
    all_known: bool = False,
) -> CachedLayers | None:
    """Return the layers of a packed copy; None: they have hooks, different shapes, or another
    computation than Llama's.

    Args:
        module: the copy (`pack_layers`), which has the layers.
        numbers: of the layers in a cache.
        all_known: the layers and their attention are of other classes with Llama's submodules and
            computation; the first may have no norm before its attention.
    """
    if not has_operators(module) or any(map(hooked, module.modules())):
        return None
    if not all(_is_computed(layer, all_known) for layer in layers):
        return None
    shapes = {(_shape(layer), layer.self_attn.head_dim) for layer in layers}
    if len(shapes) != 1:
        return None
    ((shape, head_dim),) = shapes

    def function(name: str, product: RowProduct) -> Any:
        gated = name == "gated_in"
        return entering(product, gated) if gated or name == "attention_in" else leaving(product)

    return CachedLayers(_with_products(layers, function), shape, numbers, head_dim)


def entering(product: RowProduct, gated: bool) -> EnteringProduct:
    """Return the norm, a product, and `ops.decoder.gated` of its results if `gated`. Else a late
    bias is left out: it is added where the heads are split."""
    multiply = product.function() if gated or not product.late else product.product

    def run(
        x: Tensor, more: Tensor | None, weight: Tensor | None, epsilon: float, *append: Any
    ) -> tuple[Tensor, Tensor]:
        normed = x
        if more is not None:
            x, normed = operators.add_rms_norm(x, more, weight, epsilon)
        elif weight is not None:
            normed = operators.rms_norm(x, weight, epsilon)
        y = multiply(normed)
        if append:
            return x, operators.rotary_append(y, *append)
        return x, operators.gated(y) if gated else y

    return product.entering(run, gated)


def leaving(product: RowProduct) -> LeavingProduct:
    """Return a product that ends the attention or the gated layer."""
    multiply = product.function()
    return product.leaving(lambda x, residual: (residual, multiply(x)))


def _with_products(layers: Any, of: Callable[[str, RowProduct], Any]) -> list[LayerParts]:
    parts = list(map(_parts, layers))
    made = [{name: of(name, getattr(each, name)) for name in _PRODUCTS} for each in parts]
    return [each._replace(**products) for each, products in zip(parts, made, strict=True)]


def _in_one_call(layers: Any, known: CachedLayers) -> DecoderLayers | None:
    """Return the layers `known` with matrices as products; None: there are none."""

    def matrices(name: str, product: RowProduct) -> Any:
        late = product.late_bias is not None and name != _PRODUCTS[0]
        return () if late else product.matrices()

    parts = _with_products(layers, matrices)
    on_cpu = not parts[0].gated_norm.is_cuda
    if on_cpu and known.longest and all(all(each[-len(_PRODUCTS) :]) for each in parts):
        return DecoderLayers(parts, known.shape)
    return None


def has_operators(module: nn.Module) -> bool:
    """Return whether all parameters have one data type and one device that the operators of layers
    support."""
    kinds = {(parameter.dtype, parameter.device) for parameter in module.parameters()}
    return len(kinds) == 1 and all(
        dtype in _FUSED_DTYPES and device.type in ("cpu", "cuda") for dtype, device in kinds
    )


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is exactly an RMSNorm of torch or of a known family."""
    return type(module) is nn.RMSNorm or _is_known(module, "RMSNorm")


def epsilon_of(norm: Any) -> float:
    """Return the epsilon of a norm (`is_norm`)."""
    epsilon: Any = norm.eps if type(norm) is nn.RMSNorm else norm.variance_epsilon
    return float(epsilon)


def _is_known(module: Any, name: str) -> bool:
    kind = type(module)
    return any(
        kind.__module__ == f"transformers.models.{family}.modeling_{family}"
        and kind.__name__ == prefix + name
        for family, prefix in _FAMILIES.items()
    )


def _is_computed(layer: Any, all_known: bool) -> bool:
    attends: Any = getattr(layer, "self_attn", None)
    mlp: Any = getattr(layer, "mlp", None)
    known = _is_known(layer, "DecoderLayer") and _is_known(attends, "Attention")
    if not (known or all_known) or not _is_known(mlp, "MLP"):
        return False
    norms = _norms_of(layer)
    if all_known and isinstance(norms[0], nn.Identity):
        norms = norms[1:]
    merged = attends.q_proj, attends.k_proj, attends.v_proj, mlp.gate_proj, mlp.up_proj
    return (
        type(mlp.act_fn).__name__ in _SILU
        and all(isinstance(projection, Part) for projection in merged)
        and all(isinstance(product, RowProduct) for product in (attends.o_proj, mlp.down_proj))
        and all(map(is_norm, norms))
        and len(set(map(epsilon_of, norms))) == 1
        and attends.head_dim % 2 == 0
        and attends.head_dim <= _WIDEST_HEAD
    )


def _norms_of(layer: Any) -> list[Any]:
    attends = layer.self_attn
    heads = [attends.q_norm, attends.k_norm] if hasattr(attends, "q_norm") else []
    return [layer.input_layernorm, layer.post_attention_layernorm, *heads]


def _shape(layer: Any) -> LayerShape:
    attends, gated = layer.self_attn, layer.mlp.gate_proj.out_features
    heads, groups = (size // attends.head_dim for size in attends.q_proj.merged.sizes[:2])
    epsilon = epsilon_of(layer.post_attention_layernorm)
    return LayerShape(heads, groups, gated, epsilon, attends.scaling)


def _parts(layer: Any) -> LayerParts:
    """Return the parts of a layer, with modules as products."""
    attends, mlp = layer.self_attn, layer.mlp
    first = attends.q_proj.merged.linear
    norms: list[Any] = [getattr(norm, "weight", None) for norm in _norms_of(layer)]
    weights: list[Any] = [None if norm is None else norm.detach() for norm in norms]
    before, after, query, key = (*weights, None, None)[:4]
    products = first, attends.o_proj, mlp.gate_proj.merged.linear, mlp.down_proj
    return LayerParts(before, after, first.late_bias, query, key, *products)


class StackedPass:
    """Passes of a packed model of a known family: embeddings, layers, norm and head, instead of
    transformers' forward. On the CPU a token has the same bits in every pass."""

    def __init__(
        self, model: Any, layers: CachedLayers, native: DecoderLayers | None = None
    ) -> None:
        self.model, self.layers = model, layers
        self.native = native  # a single call, where operators write keys and values
        self.longest = layers.longest if native is None else 0  # of passes without a mask
        rotary = model.model.rotary_emb
        self.angles = Angles(rotary, rotary.rope_type)
        self._entered = frozenset(range(len(layers.numbers)))  # layers with a state before them
        head = model.get_output_embeddings()
        self._head = head.function() if isinstance(head, DenseLinear) else head

    def needs_mask(self, cache: RollbackCache, width: int) -> bool:
        """Return whether a pass of `width` tokens of a chain needs a mask."""
        return width > self.longest or not cache.in_one_place

    def __call__(
        self,
        tokens: Tensor,
        inputs: dict[str, Any],
        cache: RollbackCache,
        keep: int,
        first: Tensor | None = None,
        hidden_layers: Sequence[int] = (),
    ) -> LevelOutput:
        """Run a pass.

        Args:
            tokens: ``[B, T]`` int64.
            inputs: result of `RollbackCache.inputs`, which has prepared the cache.
            keep, first: return logits after the last `keep` tokens, or after as many from token
                ``first[b]`` on.
            hidden_layers: layers of requested hidden states (`levels.base.Hidden`).
        """
        body = self.model.model
        x, norm = body.embed_tokens(tokens), body.norm
        taken = sorted(self._entered.intersection(hidden_layers))
        rows, mask, numbers = cache.rows, inputs["attention_mask"], self.layers.numbers
        rotation = *self.angles.tables[:2], inputs["position_ids"]
        if self.angles.reached < rows.capacity:
            rotation = self.angles.rotation(x, inputs["position_ids"], rows)
        slots: Slots | None = None
        if self.native is not None and not isinstance(mask, dict):
            slots = rows.memory.get(numbers) or cache.memory_of(numbers)
        entering: Any
        if self.native is None or slots is None:
            deepest, entering = self.layers.run(x, rotation, mask, cache, taken)
        else:
            rows.seen.update(numbers)
            causal = mask is None and tokens.shape[1] > 1  # which begins a text
            deepest, entering, status = self.native.run(
                x, *rotation, mask, *slots, rows.base, rows.counts, rows.span, causal, taken
            )
            if rows.at is None:  # else the host knows that there was room
                rows.status.bitwise_or_(status)
        last = operators.rms_norm(deepest.flatten(0, 1), norm.weight, norm.variance_epsilon)
        last = last.view(deepest.shape)
        kept = last[:, -keep:]
        if first is not None:
            kept = operators.take_rows(last, first, None, 0, keep, False)
        logits = self._head(kept.flatten(0, 1)).unflatten(0, kept.shape[:2])
        if not hidden_layers:
            return LevelOutput(logits)
        count = len(self._entered)
        states = {**dict(zip(taken, entering, strict=True)), count: deepest, -1: last}
        return LevelOutput(logits, {layer: states[layer] for layer in hidden_layers})


def stacked_pass(model: Any) -> StackedPass | None:
    """Return the passes of a packed copy; None: of another family or with hooks, which need
    modules."""
    body: Any = getattr(model, "model", None)
    if not (_is_known(model, "ForCausalLM") and _is_known(body, "Model")):
        return None
    if model.config._attn_implementation != NAME or not _is_known(body.norm, "RMSNorm"):
        return None
    numbers = [layer.self_attn.layer_idx for layer in body.layers]
    layers = cached_layers(model, body.layers, numbers)
    if layers is None:
        return None
    return StackedPass(model, layers, _in_one_call(body.layers, layers))


# ---- modules of a level's passes -----------------------------------------------------------------

_Model = TypeVar("_Model", bound=nn.Module)

# Maximum difference of the packed model's logits, relative to the largest logit.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
# For 4-bit copies, with 8-bit activations: a last-bit difference may move a value by 1 / 254.
_TOLERANCE_QUANTISED = 0.1
# States that modules of RecurrentGemma keep as attributes; passes replace them by new tensors.
IN_MODULES = frozenset(("conv1d_state", "recurrent_states"))
# Just below the largest block by which glibc's threshold moves.
_LARGEST_KEPT = (32 << 20) - (64 << 10)


class Runs(NamedTuple):
    """Modules of a level's passes.

    Attributes:
        model: the model or a copy of its modules.
        varies: operations with results for a token that may depend on the other tokens of a pass:
            "attention", "products", "head". Empty: logits are bit-identical in any batch. None:
            unknown.
        copies: packed copies by the id of the copied module.
    """

    model: Any
    varies: tuple[str, ...] | None = None
    copies: Mapping[int, nn.Module] = MappingProxyType({})


def modules_with_states(model: nn.Module) -> list[nn.Module]:
    """Return modules that keep a state outside of the cache."""
    return [module for module in model.modules() if not IN_MODULES.isdisjoint(vars(module))]


def can_pack(model: nn.Module) -> bool:
    """Return whether a model has a linear layer to pack."""
    return any(map(is_packable, model.modules()))


def fuses_on_cuda(model: nn.Module) -> bool:
    """Return whether `packed` fuses the layers of a bfloat16 model, which is faster on CUDA."""
    known = _is_known(model, "ForCausalLM") and not _is_quantised(model)
    return known and device_of(model).type == "cuda" and model.dtype == torch.bfloat16


def pack_layers(
    module: _Model, merge: bool = True, copies: dict[int, nn.Module] | None = None
) -> _Model:
    """Return a copy of `module` with packed linear layers, which shares all other parameters and
    buffers. On the CPU, later changes of its linear weights have no effect on the copy. Only plain
    `nn.Linear` layers are packed. With `merge`, projections of the same input share a product.
    `copies`: as in `replaced`."""
    count = sum(map(is_packable, module.modules()))
    shown = {"desc": "packing", "unit": " layers", "delay": 1.0, "leave": False}
    with progress.bar(total=count, **shown) as bar:

        def pack(layers: Sequence[nn.Linear]) -> nn.Module:
            product = pack_linear(layers)
            bar.update(len(layers))
            return product

        copied: _Model = replaced(module, is_packable, pack, merge, copies)
    return copied


def keep_freed_memory() -> None:
    """Have glibc keep blocks of less than 32 MiB for the next allocation, and up to 64 MiB of them.

    By default larger temporaries go back to the system, and are faulted in again page by page,
    which slows a prefill of several prompts. The threshold follows the largest freed block
    (M_MMAP_THRESHOLD in mallopt(3)), so a block of this size is allocated and freed untouched.
    """
    torch.empty(_LARGEST_KEPT, dtype=torch.uint8)


def packed(model: nn.Module, name: str, known: Mapping[int, nn.Module] | None = None) -> Runs:
    """Return `model` with packed linear layers (`pack_layers`), and grouped attention instead of
    sdpa. Layers of 4-bit weights are packed already. On the CPU, the process keeps freed memory
    from then on (`keep_freed_memory`). `known`: `Runs.copies` of a model that shares modules with
    this one."""
    if not can_pack(model) and not _is_quantised(model):
        raise ValueError(
            f"{name}: expected linear layers in a dtype that is multiplied here to pack, given "
            f"{type(model).__name__} without any"
        )
    other = _patched_forward(model)
    if other is not None:
        raise ValueError(
            f"{name}: expected modules with their class's forward to pack, given another one at "
            f"{other}"
        )
    if device_of(model).type == "cpu":
        if with_adapters(model):
            raise _refused(model, name, "adapters read weights")
        keep_freed_memory()
    # Some models use their projections in a way that needs separate memory for each.
    for merge in (True, False):
        copies = dict(known or {})
        try:
            difference, runs = _compared(model, pack_layers(model, merge, copies))
        except RuntimeError:
            if merge:
                continue
            raise
        except AttributeError as error:
            raise _refused(model, name, str(error)) from error
        if difference <= _tolerance(model):
            return runs._replace(copies=copies)
    raise ValueError(
        f"{name}: expected the packed model's logits to be the model's, given a relative "
        f"difference of {difference:.1e}; use it unpacked"
    )


def _refused(model: nn.Module, name: str, reason: str) -> ValueError:
    advice = "merge_and_unload() or pack=False" if with_adapters(model) else "pack=False"
    if _is_quantised(model):
        advice = "the model without quantised layers"
    return ValueError(
        f"{name}: expected modules that call their linear layers and read nothing but their "
        f"weights, to pack, given {type(model).__name__} ({reason}); use {advice}"
    )


def unpacked(model: nn.Module, name: str) -> Runs:
    """Return `model` itself; a 4-bit copy on the CPU, with block-invariant products, gets grouped
    attention instead of sdpa; a model with states in its modules runs in a copy, since other
    threads may run the model."""
    runs = replaced(model, lambda _: False, pack_linear) if modules_with_states(model) else model
    if not _is_quantised(model):
        return Runs(runs)
    if _patched_forward(model) is None:
        try:
            difference, runs = _compared(model, replaced(model, lambda _: False, pack_linear))
        except AttributeError as error:
            raise _refused(model, name, str(error)) from error
        if difference <= _tolerance(model):
            return runs
    return Runs(runs, _varying(model, False))


@torch.inference_mode()
def _compared(model: Any, made: Any) -> tuple[float, Runs]:
    """Set grouped attention in `made`; return how far its logits are from the logits of `model`,
    relative to the largest, after two texts with a masked token, and `made` as `Runs`.

    In float32 it is the maximum. In fewer bits a state can be so large that rounding alone moves
    all logits of its token: there it is the larger median of both texts.
    """
    use_grouped(made)
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    input_ids = torch.arange(1, 17, device=device_of(model)).view(2, 8) * vocab_size // 17
    mask = torch.ones_like(input_ids)
    mask[0, 0] = 0
    inputs = {"input_ids": input_ids, "attention_mask": mask}
    inputs |= {"use_cache": False, "return_dict": True}
    expected = model(**inputs).logits[:, 1:].float()
    with _watched() as calls:
        logits = made(**inputs).logits[:, 1:].float()
    scale = expected.abs().amax(-1).clamp_min(1e-30)
    differences = ((logits - expected).abs().amax(-1) / scale).nan_to_num(nan=torch.inf)
    exact = next(model.parameters()).dtype == torch.float32 and not _is_quantised(model)
    by_text = differences.amax(-1) if exact else differences.median(-1).values
    attends = bool(calls) and all(calls)
    return float(by_text.max()), Runs(made, _varying(made, attends))


def _varying(model: Any, attends: bool) -> tuple[str, ...]:
    """Return `Runs.varies`. `attends`: all attention runs by the operator."""
    head = model.get_output_embeddings()
    modules = (module for module in model.modules() if module is not head)
    varies = {
        "attention": not attends,
        "products": any(map(_multiplies_elsewhere, modules)),
        "head": head is not None and _multiplies_elsewhere(head),
    }
    return tuple(name for name, does in varies.items() if does)


def _multiplies_elsewhere(module: nn.Module) -> bool:
    if isinstance(module, OneDnnLinear):
        return True
    tensors = itertools.chain(module.parameters(recurse=False), module.buffers(recurse=False))
    # (Packed matrices are vectors of bytes, masks are bool.)
    matrix = any(tensor.dim() > 1 and tensor.dtype != torch.bool for tensor in tensors)
    return matrix and not isinstance(module, nn.Embedding)


def _is_quantised(model: nn.Module) -> bool:
    return any(isinstance(module, QuantizedLinear) for module in model.modules())


def _patched_forward(model: nn.Module) -> str | None:
    named = model.named_modules()
    return next((path or "the top" for path, module in named if "forward" in module.__dict__), None)


def _tolerance(model: nn.Module) -> float:
    if _is_quantised(model):
        return _TOLERANCE_QUANTISED
    return _TOLERANCE.get(next(model.parameters()).dtype, 1e-4)
