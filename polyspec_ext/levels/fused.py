"""Passes of a model over packed products (`levels.products`): attention over grouped keys without
copies, fused decoder layers of known families, and all layers in a single call.

Eager layers run some 60 small operators between their products, which on the CPU take as long as
the products of a single-token pass. On CUDA a fused layer has at most 10 launches. Results are
block-invariant: a token has the same bits alone, in a verification, in a batch and in its prompt
(on CUDA torch's products are not). Passes run a copy of the modules. A model that runs unmodified
keeps its attention, because the rounding of attention is part of its distribution.
"""

from __future__ import annotations

import copy
import functools
import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .. import progress
from ..kv_cache import RollbackCache, device_of
from ..kv_cache.layers import takes
from ..kv_cache.rollback import Slots
from ..ops import decoder as operators
from ..ops.decoder import DecoderLayers, LayerOperators, LayerParts, LayerShape
from ..tensors import gather
from .base import LevelOutput
from .products import (
    DenseLinear,
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
    taken = not other and takes(query, key, value, attention_mask)
    calls = _calls.get()
    if calls is not None:
        calls.append(taken)
    if other:
        plain: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **arguments
        )
        return plain
    if taken:
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        attended = operators.attention(query, key, value, attention_mask, scale, causal)
        return attended, None
    out = nn.functional.scaled_dot_product_attention(
        query, key, value, attention_mask, dropout, causal, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


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


# ---- fused decoder layers ------------------------------------------------------------------------

# Families: transformers' module name to class prefix.
_FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
_FUSED_DTYPES = (torch.float32, torch.bfloat16)
_SILU = ("SiLU", "SiLUActivation")
_WIDEST_HEAD = 512  # maximum of `ops.decoder.rotary`


class _Norm(nn.Module):
    """RMSNorm by a fused operator."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1]).contiguous()
        normed = operators.rms_norm(rows, self.weight, self.variance_epsilon)
        return normed.view(hidden_states.shape)


class _Mlp(nn.Module):
    """Gated layer over merged projections."""

    gate_proj: Part
    down_proj: RowProduct

    def forward(self, x: Tensor) -> Tensor:
        linear: Any = self.gate_proj.merged.linear
        gated = linear.gated_function()(x.reshape(-1, x.shape[-1]))
        return self.down_proj.forward(gated).view(x.shape)


class _Attention(nn.Module):
    """Attention over merged projections."""

    q_proj: Part
    o_proj: RowProduct
    q_norm: _Norm
    k_norm: _Norm
    head_dim: int
    layer_idx: int
    scaling: float

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        **arguments: Any,
    ) -> tuple[Tensor, None]:
        merged, width = self.q_proj.merged, self.head_dim
        batch, tokens, features = hidden_states.shape
        linear: Any = merged.linear
        product = linear.product(hidden_states.reshape(-1, features))
        heads, groups = merged.sizes[0] // width, merged.sizes[1] // width
        norms: tuple[Any, ...] = (None, None, 0.0)
        if hasattr(self, "q_norm"):
            norms = self.q_norm.weight, self.k_norm.weight, self.q_norm.variance_epsilon
        query, key, value = operators.rotary(
            product, linear.late_bias, *position_embeddings, batch, heads, groups, *norms
        )
        cache = past_key_values if cache is None else cache  # argument name in older releases
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attended, _ = grouped_attention(
            self, query, key, value, attention_mask, scaling=self.scaling, **arguments
        )
        rows = self.o_proj.forward(attended.view(batch * tokens, heads * width))
        return rows.view(batch, tokens, -1), None


class _Layer(nn.Module):
    """A decoder layer: attention and the gated layer, each after a norm and with a residual sum."""

    self_attn: nn.Module
    mlp: nn.Module
    input_layernorm: _Norm
    post_attention_layernorm: _Norm

    def forward(self, hidden_states: Tensor, **arguments: Any) -> Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **arguments)
        norm, shape = self.post_attention_layernorm, hidden_states.shape
        rows = hidden_states.reshape(-1, shape[-1])
        residual, normed = operators.add_rms_norm(
            rows, attended.reshape(rows.shape), norm.weight, norm.variance_epsilon
        )
        output: Tensor = residual.view(shape) + self.mlp(normed.view(shape))
        return output


@torch.inference_mode()
def use_fused(made: nn.Module, plain_norms: bool = False) -> None:
    """Replace known modules of `made` by fused modules, with a single operator each for norms,
    heads and activations (`ops.decoder`); the module objects must be the caller's.

    A module is replaced if it is exactly a class of `transformers` of the families above and its
    submodules have no hooks; with `plain_norms` also torch's `RMSNorm`, which rounds differently.
    """
    dtypes = {parameter.dtype for parameter in made.parameters()}
    if len(dtypes) != 1 or not dtypes < set(_FUSED_DTYPES):
        return
    norms: Any = made.modules() if plain_norms else ()
    for norm in norms:
        kind: Any = type(norm)
        if kind is nn.RMSNorm and _fits_norm(norm):
            norm.variance_epsilon = norm.eps
            norm.__class__ = _subclass(kind, _Norm)
    for name, fits, kind in (
        ("RMSNorm", _fits_norm, _Norm),
        ("MLP", _fits_mlp, _Mlp),
        ("Attention", _fits_attention, _Attention),
        # A layer needs the fused norm from above.
        ("DecoderLayer", lambda layer: _runs(layer.post_attention_layernorm, _Norm), _Layer),
    ):
        for module in made.modules():
            base: Any = type(module)
            if _is_known(base, name) and fits(module):
                module.__class__ = _subclass(base, kind)


def _is_known(kind: type, name: str) -> bool:
    return any(
        kind.__module__ == f"transformers.models.{family}.modeling_{family}"
        and kind.__name__ == prefix + name
        for family, prefix in _FAMILIES.items()
    )


@functools.cache
def _subclass(base: type, kind: type) -> type:
    # Cached: the same class for every model.
    return type(f"Fused{base.__name__}", (kind, base), {})


def _runs(module: nn.Module, kind: type) -> bool:
    return isinstance(module, kind) and not hooked(module)


def _fits_norm(module: Any) -> bool:
    return module.weight.device.type in ("cpu", "cuda")


def _fits_mlp(module: Any) -> bool:
    if type(module.act_fn).__name__ not in _SILU or hooked(module.act_fn):
        return False
    return _are_merged(module, "gate_proj", "up_proj") and _runs(module.down_proj, RowProduct)


def _fits_attention(module: Any) -> bool:
    if getattr(module.config, "_attn_implementation", None) != NAME:
        return False
    if not (_are_merged(module, "q_proj", "k_proj", "v_proj") and _runs(module.o_proj, RowProduct)):
        return False
    norms = [module.q_norm, module.k_norm] if hasattr(module, "q_norm") else []
    alike = len({norm.variance_epsilon for norm in norms}) < 2
    width = module.head_dim % 2 == 0 and module.head_dim <= _WIDEST_HEAD
    return alike and width and all(_runs(norm, _Norm) for norm in norms)


def _are_merged(module: Any, *names: str) -> bool:
    # Whether the projections are exactly a merged product, in that order.
    parts = [getattr(module, name) for name in names]
    if not all(_runs(p, Part) for p in parts):
        return False
    merged = parts[0].merged
    in_order = all(p.merged is merged and p.index == i for i, p in enumerate(parts))
    return in_order and len(merged.sizes) == len(parts) and _runs(merged.linear, RowProduct)


# ---- all layers in a single call -----------------------------------------------------------------


class StackedPass:
    """Passes of a model with fused layers of equal shape: embeddings, layers, norm and head,
    instead of transformers' forward. Results are bit-identical to passes layer by layer.

    Layer by layer, a short pass of a small model spends much of its time between its products, on
    calls, allocations and checks.
    """

    def __init__(self, model: Any, native: DecoderLayers | LayerOperators) -> None:
        self.model, self.native, self._run = model, native, native.run
        # Queries look up how many slots they see, so that a chain of tokens needs no mask.
        self.by_lengths = isinstance(native, LayerOperators)
        self._widest = operators.FEW_TOKENS if self.by_lengths else sys.maxsize
        layers: list[Any] = list(model.model.layers)
        self.numbers = tuple(layer.self_attn.layer_idx for layer in layers)
        self._entered = frozenset(range(len(layers)))  # layers with a state before them
        # Checked by every pass. The tables and parameters keep their identity when hooks are added
        # or memory is replaced.
        self._hooks = [
            table
            for module in (model, model.model, *layers, model.model.norm)
            for table in (module._forward_hooks, module._forward_pre_hooks)
        ]
        self._norms = [norm.weight for layer in layers for norm in _norms_of(layer)]
        head = model.get_output_embeddings()
        self._head = head.function() if isinstance(head, DenseLinear) else head

    def needs_mask(self, cache: Any, width: int) -> bool:
        """Return whether a pass of `width` tokens of a chain needs a mask, because the model's
        forward may have to run it."""
        if not self.by_lengths or width > operators.FEW_TOKENS or any(self._hooks):
            return True
        as_made = all(map(Tensor.is_set_to, self._norms, self.native.norms))
        return not (as_made and isinstance(cache, RollbackCache) and cache.in_one_place)

    def __call__(
        self,
        tokens: Tensor,
        inputs: dict[str, Any],
        cache: Any,
        keep: int,
        indices: Tensor | None = None,
        hidden_layers: Sequence[int] = (),
    ) -> LevelOutput | None:
        """Run the pass. Returns None, without any effect, if the model's forward has to run it, as
        with hooks or another type of cache.

        Args:
            tokens: ``[B, T]`` int64.
            inputs: result of `RollbackCache.inputs`, which has prepared the cache.
            keep, indices: return logits after the last `keep` tokens, or after the tokens
                `indices`, ``[B, keep]``.
            hidden_layers: layers of requested hidden states (`levels.base.Hidden`).
        """
        body = self.model.model
        if not isinstance(cache, RollbackCache) or "position_ids" not in inputs:
            return None
        # Norms belong to the user's model, and may have been moved or converted.
        if any(self._hooks) or not all(map(Tensor.is_set_to, self._norms, self.native.norms)):
            return None
        rows, mask, width = cache.rows, inputs["attention_mask"], tokens.shape[1]
        if isinstance(mask, dict) or width > self._widest:
            return None
        # Several tokens without a mask begin a text.
        causal = mask is None and width > 1
        if causal and rows.span != width and not self.by_lengths:
            return None
        slots: Slots | None = rows.memory.get(self.numbers) or cache.memory_of(self.numbers)
        if slots is None:
            return None
        rows.seen.update(self.numbers)
        x = body.embed_tokens(tokens)
        cosine, sine = body.rotary_emb(x, inputs["position_ids"])
        count = len(self.numbers)
        taken = sorted(self._entered.intersection(hidden_layers))
        deepest, entering, status = self._run(
            x, cosine, sine, mask, *slots, rows.base, rows.counts, rows.span, causal, taken
        )
        if rows.at is None:  # else the host knows that there was room
            rows.status.bitwise_or_(status)
        norm = body.norm
        last = operators.rms_norm(deepest.flatten(0, 1), norm.weight, norm.variance_epsilon)
        last = last.view(deepest.shape)
        rows_with_logits = last[:, -keep:] if indices is None else gather(last, indices)
        logits = self._head(rows_with_logits.flatten(0, 1)).unflatten(0, rows_with_logits.shape[:2])
        if not hidden_layers:
            return LevelOutput(logits)
        states = {**dict(zip(taken, entering, strict=True)), count: deepest, -1: last}
        return LevelOutput(logits, {layer: states[layer] for layer in hidden_layers})


def stacked_pass(model: Any) -> StackedPass | None:
    """Return the pass of a model with fused layers of equal shape, on the CPU a single call for all
    layers; None: another model."""
    body: Any = getattr(model, "model", None)
    if not (_is_known(type(model), "ForCausalLM") and _is_known(type(body), "Model")):
        return None
    layers: list[Any] = list(body.layers)
    whole = all(isinstance(x, _Layer) and _runs(x.self_attn, _Attention) for x in layers)
    known = layer_operators(layers, all_known=True) if whole and _runs(body.norm, _Norm) else None
    if known is None or known.norms[0].is_cuda:
        return None if known is None else StackedPass(model, known)
    weights = [weight for weight in map(_weights, layers) if weight is not None]
    if len(weights) < len(layers):
        return None
    return StackedPass(model, DecoderLayers(weights, known.shape))


def layer_operators(layers: Sequence[Any], all_known: bool = False) -> LayerOperators | None:
    """Return layers to run operator by operator; None: layers of different shapes or unknown class.

    Args:
        layers: of a copy after `pack_layers` and `use_fused`.
        all_known: layers of any class, with the submodules and computation of Llama's layers; the
            first may have no norm before its attention.
    """
    fused = bool(layers) and all(
        (all_known or (isinstance(layer, _Layer) and _is_known(type(layer.self_attn), "Attention")))
        and _are_merged(layer.self_attn, "q_proj", "k_proj", "v_proj")
        and _runs(layer.self_attn.o_proj, RowProduct)
        and _runs(layer.mlp, _Mlp)
        and all(_runs(norm, _Norm) for norm in _norms_of(layer))
        for layer in layers
    )
    shape = _shape_of_all(layers) if fused else None
    return None if shape is None else LayerOperators(list(map(_products, layers)), shape)


def _shape_of_all(layers: Sequence[Any]) -> LayerShape | None:
    """Return the common shape of layers; None: shapes differ or heads are not supported."""
    if layers[0].self_attn.head_dim not in operators.WIDTHS:
        return None
    norms = [norm for layer in layers for norm in _norms_of(layer)]
    facts: list[set[Any]] = [
        {_shape(layer) for layer in layers},
        {(norm.weight.dtype, norm.weight.is_contiguous(), norm.weight.device) for norm in norms},
        {norm.variance_epsilon for norm in norms},
        *(
            {len(weight) for weight in of_place if weight is not None}
            for of_place in zip(*map(_norm_weights, layers), strict=True)
        ),
    ]
    return None if any(len(fact) > 1 for fact in facts) else facts[0].pop()


def _shape(layer: Any) -> LayerShape:
    attends, width = layer.self_attn, layer.self_attn.head_dim
    heads, groups = (size // width for size in attends.q_proj.merged.sizes[:2])
    epsilon, scale = layer.post_attention_layernorm.variance_epsilon, attends.scaling
    return LayerShape(heads, groups, layer.mlp.gate_proj.merged.sizes[0], epsilon, scale)


def _products_of(layer: Any) -> list[RowProduct]:
    attends, mlp = layer.self_attn, layer.mlp
    return [
        attends.q_proj.merged.linear, attends.o_proj, mlp.gate_proj.merged.linear, mlp.down_proj
    ]  # fmt: skip


def _weights(layer: Any) -> LayerParts | None:
    products = _products_of(layer)
    matrices = [product.matrices() for product in products]
    # A bias added after the rounding is supported only where the heads are split.
    if not all(matrices) or any(product.late_bias is not None for product in products[1:]):
        return None
    return LayerParts(*_norm_weights(layer), *matrices)


def _products(layer: Any) -> LayerParts:
    first, out, gate, down = _products_of(layer)
    calls: list[Any] = [first.product if first.late else first.function(), out.function()]
    calls += gate.gated_function(), down.function()
    return LayerParts(*_norm_weights(layer), *calls)


def _norm_weights(layer: Any) -> tuple[Any, ...]:
    # The first fields of `LayerParts`.
    norms: list[Any] = [norm.weight.detach() for norm in _norms_of(layer)]
    if isinstance(layer.input_layernorm, nn.Identity):
        norms.insert(0, None)
    first, second, *heads = norms
    return first, second, _products_of(layer)[0].late_bias, *(heads or (None, None))


def _norms_of(layer: Any) -> list[Any]:
    # In the order of `DecoderLayers.norms`.
    attends = layer.self_attn
    heads = [attends.q_norm, attends.k_norm] if hasattr(attends, "q_norm") else []
    norms = [layer.input_layernorm, layer.post_attention_layernorm, *heads]
    return [norm for norm in norms if not isinstance(norm, nn.Identity)]


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
    """Modules that a level's passes run instead of its model.

    Attributes:
        model: the model or a copy of its modules.
        varies: operations with results for a token that may depend on the other tokens of a pass:
            "attention", "products", "head". Empty: logits are bit-identical in any batch. None:
            unknown.
    """

    model: Any
    varies: tuple[str, ...] | None = None


def modules_with_states(model: nn.Module) -> list[nn.Module]:
    """Return the modules that keep a state outside of the cache between passes."""
    return [module for module in model.modules() if not IN_MODULES.isdisjoint(vars(module))]


def can_pack(model: nn.Module) -> bool:
    """Return whether a model has a linear layer to pack."""
    return any(map(is_packable, model.modules()))


def fuses_on_cuda(model: nn.Module) -> bool:
    """Return whether `packed` fuses the layers of a bfloat16 model, which is faster on CUDA."""
    kinds = type(model), type(getattr(model, "model", None))
    known = all(map(_is_known, kinds, ("ForCausalLM", "Model"))) and not _is_quantised(model)
    return known and device_of(model).type == "cuda" and model.dtype == torch.bfloat16


def pack_layers(module: _Model, merge: bool = True) -> _Model:
    """Return a copy of `module` with packed linear layers, which shares all other parameters and
    buffers. On the CPU, later changes of its linear weights have no effect on the copy. Only plain
    `nn.Linear` layers are packed. With `merge`, projections of the same input share a product."""
    count = sum(map(is_packable, module.modules()))
    shown = {"desc": "packing", "unit": " layers", "delay": 1.0, "leave": False}
    with progress.bar(total=count, **shown) as bar:

        def pack(layers: Sequence[nn.Linear]) -> nn.Module:
            product = pack_linear(layers)
            bar.update(len(layers))
            return product

        copied: _Model = replaced(module, is_packable, pack, merge)
    return copied


def keep_freed_memory() -> None:
    """Have glibc keep blocks of less than 32 MiB for the next allocation, and up to 64 MiB of them.

    By default it returns the larger temporaries of every operator to the system, and they are
    faulted in again page by page, which slows a prefill of several prompts. Its threshold follows
    the largest block that was freed so far (M_MMAP_THRESHOLD in mallopt(3), where its settings in
    the environment come first), so a block of this size is allocated and freed without touching its
    pages. Other allocators are not affected.
    """
    torch.empty(_LARGEST_KEPT, dtype=torch.uint8)


def packed(model: nn.Module, name: str) -> Runs:
    """Return `model` with packed linear layers (`pack_layers`), grouped attention instead of sdpa,
    and fused layers. Layers of 4-bit weights are packed already. On the CPU, the process keeps
    freed memory from then on (`keep_freed_memory`)."""
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
        try:
            difference, runs = _compared(model, pack_layers(model, merge))
        except RuntimeError:
            if merge:
                continue
            raise
        except AttributeError as error:
            raise _refused(model, name, str(error)) from error
        if difference <= _tolerance(model):
            return runs
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
    attention instead of sdpa, and fused layers; a model with states in its modules runs in a copy,
    since other threads may run the model."""
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
    """Set grouped attention and fused layers in `made`, and compare its logits with those of
    `model`, after some tokens of two texts, with a masked token.

    Returns:
        The difference relative to the largest logit, in float32 the maximum. In fewer bits a state
        can be so large that rounding alone moves all logits of its token: there it is the median of
        a text, the larger of both texts. And `made` as `Runs`.
    """
    use_grouped(made)
    use_fused(made)
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
