"""Linear layers with packed weights, and copies of a model's modules with packed layers instead of
plain layers.

A verification reads a few tokens at once, which should cost as much as a single token: the
processor reads the weights once either way. With torch's layout of weights it costs more, with
packed weights nearly the same. On x86 the product is `ops.decoder.dense_product` in float32 and
bfloat16; everything else on the CPU is oneDNN's. On CUDA the operator takes unpacked weights.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import mmap
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..ops import decoder
from ..ops.decoder import Matrix

# ---- memory in huge pages ------------------------------------------------------------------------

_PAGE = 2 << 20
_ALIGNMENT = 64
_CHUNK = 64 << 20  # bytes of an allocation for several tensors; untouched pages take no memory
_lock = threading.Lock()
# The latest chunk, alive as long as its tensors, and the offset of its free bytes.
_chunk: weakref.ref[mmap.mmap] | None = None
_free = 0


def in_huge_pages(packed: Tensor) -> Tensor:
    """Copy `packed`, uint8 ``[n]`` on the CPU, n > 0, to `huge_pages`."""
    return huge_pages(packed.numel()).copy_(packed)


def huge_pages(size: int) -> Tensor:
    """Return `size` > 0 zeros, uint8, at a multiple of 64 bytes in huge pages.

    A product that waits for its weights also waits for the addresses of their pages, but hardly
    with pages of 2 MiB. The system provides huge pages where it has them. Successive tensors are
    adjacent in memory.
    """
    global _chunk, _free
    with _lock:
        memory = None if _chunk is None else _chunk()
        if memory is None or size > len(memory) - _free:
            # An additional page, since the first may begin at any address.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            memory = mmap.mmap(-1, max(size, _CHUNK) + _PAGE, flags=flags)
            with contextlib.suppress(OSError):  # a system without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
            _chunk = weakref.ref(memory)
            _free = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _PAGE
        piece = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=_free)
        _free += -(-size // _ALIGNMENT) * _ALIGNMENT
    return piece


# ---- products ------------------------------------------------------------------------------------


# (states [M, in], addend or None, weight or None, epsilon) -> (sum, product of its norm, if any).
# With the further arguments of `ops.decoder.rotary_append` its result instead of the product.
EnteringProduct = Callable[..., tuple[Tensor, Tensor]]
# (x [M, in], states [M, out]) -> (states, addend or None): the product is added, or the addend.
LeavingProduct = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]


class RowProduct(nn.Module):
    """``x W^T + b`` with a suitable layout of W, ``[.., in]`` to ``[.., out]``."""

    in_features: int
    out_features: int
    bias: Tensor | None
    late = False  # whether the bias is added to the rounded product

    def product(self, x: Tensor) -> Tensor:
        """Multiply ``[M, in]`` to ``[M, out]``, without `late_bias`."""
        raise NotImplementedError

    def function(self) -> Callable[[Tensor], Tensor]:
        """Return the product of ``[M, in]``, with the bias, without the calls of a module."""
        return self.forward

    def entering(self, plain: EnteringProduct, gated: bool) -> EnteringProduct:
        """Return `plain`, of this product, or the same in fewer launches. `gated`: it ends in
        `ops.decoder.gated`."""
        return plain

    def leaving(self, plain: LeavingProduct) -> LeavingProduct:
        """Return `plain`, of this product, or the same in fewer launches."""
        return plain

    def matrices(self) -> Sequence[Matrix]:
        """Return the weights as matrices of `ops.decoder`, by ranges of rows; empty: not supported
        there."""
        return ()

    @property
    def late_bias(self) -> Tensor | None:
        return self.bias if self.late else None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        if rows.stride(-1) != 1:
            rows = rows.contiguous()
        y = self.product(rows)
        if self.late and self.bias is not None:
            y += self.bias
        return y.view(*x.shape[:-1], self.out_features)


class PackedLinear(RowProduct):
    """``x W^T + b`` with the stacked weights of `layers`. The weights are copies, which take
    additional memory.

    Attributes:
        dtype: data type of weights, inputs and outputs.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.dtype = layers[0].weight.dtype
        self.out_features = sum(layer.out_features for layer in layers)
        self.in_features = layers[0].in_features
        self.register_buffer("bias", stacked_bias(layers))
        # No buffer: the model has the weight already.
        self._plain = [layers[0].weight.detach()] if len(layers) == 1 else []
        self._pack(torch.cat([layer.weight.detach() for layer in layers]))

    @property
    def weight(self) -> Tensor:
        """Weight of the only layer; some models read its dtype, or multiply with it themselves."""
        if not self._plain:
            raise AttributeError(f"{type(self).__name__} of several layers has no weight")
        return self._plain[0]

    def _pack(self, weight: Tensor) -> None:
        raise NotImplementedError


class OneDnnLinear(PackedLinear):
    """A `PackedLinear` by oneDNN's matrix kernels."""

    def _pack(self, weight: Tensor) -> None:
        # The number of rows to pack for is a hint; any number of rows is multiplied correctly.
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, 4)

    def product(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise.default(
            x, self.packed, self.bias, "none", [], ""
        )
        return product


class DenseLinear(PackedLinear):
    """A `PackedLinear` by `ops.decoder.dense_product`, without effects between rows."""

    packed: Tensor

    def _pack(self, weight: Tensor) -> None:
        self.register_buffer("packed", in_huge_pages(decoder.dense_pack(weight)))

    def product(self, x: Tensor) -> Tensor:
        return decoder.dense_product(x, self.packed, self.out_features, self.bias)

    def function(self) -> Callable[[Tensor], Tensor]:
        form = {"packed": self.packed, "outputs": self.out_features, "bias": self.bias}
        return functools.partial(decoder.dense_product, **form)

    def matrices(self) -> Sequence[Matrix]:
        form = decoder.DENSE, self.out_features, self.in_features
        return [Matrix(*form, self.packed, bias=self.bias)]


class CudaLinear(RowProduct):
    """A `RowProduct` on CUDA. The weights of several `layers` become views of a common
    matrix, without additional memory, and later changes of a layer's weights take effect here."""

    weight: Tensor

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.out_features = sum(layer.out_features for layer in layers)
        self.in_features = layers[0].in_features
        self.register_buffer("bias", stacked_bias(layers))
        self.register_buffer("weight", _as_one_matrix(layers))

    def product(self, x: Tensor) -> Tensor:
        return decoder.dense_product(x, self.weight, self.out_features, self.bias)


@torch.inference_mode(False)
def _as_one_matrix(layers: Sequence[nn.Linear]) -> Tensor:
    weights = [layer.weight.detach() for layer in layers]
    first, sizes = weights[0], [layer.out_features for layer in layers]
    form = (sum(sizes), first.shape[1]), (first.shape[1], 1), first.storage_offset()
    if first.untyped_storage().nbytes() >= first.element_size() * (
        form[2] + form[0][0] * form[0][1]
    ):
        parts = first.as_strided(*form).split(sizes)
        if all(map(Tensor.is_set_to, parts, weights)):
            return first.as_strided(*form)
    whole = torch.cat(weights)
    for layer, weight in zip(layers, whole.split(sizes), strict=True):
        layer.weight.data = weight
    return whole


def pack_linear(layers: Sequence[nn.Linear]) -> RowProduct:
    """Return packable `layers` as a single product."""
    if layers[0].weight.device.type == "cuda":
        return CudaLinear(layers)
    return (DenseLinear if _prefers_dense(layers[0].weight.dtype) else OneDnnLinear)(layers)


def is_packable(module: nn.Module) -> bool:
    """Return whether a module is a plain linear layer with a supported dtype: on the CPU, or on
    CUDA, where only fused layers use it."""
    if not is_plain(module):
        return False
    weight: Tensor = module.weight  # type: ignore[assignment]
    if weight.device.type == "cuda":
        return weight.dtype in (torch.float32, torch.bfloat16)
    if weight.device.type != "cpu":
        return False
    if _prefers_dense(weight.dtype):
        return True
    if not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return weight.dtype == torch.float32


def packs_by_default(dtype: torch.dtype) -> bool:
    """Return whether "auto" packs weights of a data type on the CPU: float32 where this package
    multiplies, since oneDNN's packed product is no faster there; other types always."""
    return dtype != torch.float32 or _prefers_dense(dtype)


def _prefers_dense(dtype: torch.dtype) -> bool:
    # Whether this package's product is faster than oneDNN's, or the only product.
    x86 = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return x86 and dtype in (torch.float32, torch.bfloat16)


class QuantizedLinear(RowProduct):
    """``x W^T + b`` with integer weights. On the CPU by a block-invariant operator of this package:
    rows do not affect each other."""

    late = True


# ---- copies of models ----------------------------------------------------------------------------

# Projections of the same input: a single product with stacked weights.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))


class Merged:
    """Sibling projections as a single product. The model calls them in turn, with the same tensor:
    the first call multiplies, the others return their slices of the product."""

    def __init__(self, linear: nn.Module, sizes: Sequence[int]) -> None:
        self.linear, self.sizes = linear, list(sizes)
        # An input and the slices of its product, always replaced together, because another thread
        # may run the same model at any time.
        self.latest: tuple[Tensor, tuple[Tensor, ...]] | None = None

    def part(self, x: Tensor, index: int) -> Tensor:
        """Return the output of projection `index` for `x`."""
        latest = self.latest
        if latest is None or latest[0] is not x:
            latest = self.latest = x, self.linear(x).split(self.sizes, -1)
        if index == len(self.sizes) - 1:
            self.latest = None
        return latest[1][index]


class Part(nn.Module):
    """A projection among several merged projections."""

    def __init__(self, merged: Merged, index: int, in_features: int) -> None:
        super().__init__()
        self.merged, self.index = merged, index
        self.in_features, self.out_features = in_features, merged.sizes[index]

    def forward(self, x: Tensor) -> Tensor:
        return self.merged.part(x, self.index)


class TrimmedHead(nn.Module):
    """An output head of `vocab_size` ids reduced to the ids `drawn`, ``[outputs of linear]`` int64,
    increasing; `linear` has their rows."""

    drawn: Tensor

    def __init__(self, linear: nn.Module, drawn: Tensor, vocab_size: int) -> None:
        super().__init__()
        self.linear, self.vocab_size = linear, vocab_size
        self.register_buffer("drawn", drawn)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(x)
        return logits


# Adapters of `peft` with values of each pass from the wrapper.
_OF_PASSES = ("XLORA", "POLY")


def without_wrapper(model: Any) -> Any:
    """Return the model of `transformers` inside a model of `peft`, with the adapters in its layers;
    `model` itself if it is no `peft` model, or adds tokens to the prompt."""
    config = getattr(model, "active_peft_config", None)
    if config is None or getattr(config, "is_prompt_learning", False):
        return model
    for name, adapter in model.peft_config.items():
        kind = str(getattr(adapter.peft_type, "value", adapter.peft_type))
        activated = getattr(adapter, "alora_invocation_tokens", None) is not None
        if activated:
            kind = "activated LoRA, alora_invocation_tokens"
        if activated or kind in _OF_PASSES:
            raise ValueError(
                f"{type(model).__name__}: expected adapters that follow from the layers alone, "
                f"given {name!r} ({kind}), to which the wrapper hands values in every pass; use "
                "model.generate, or another kind of adapter"
            )
    return model.get_base_model()


def with_adapters(model: nn.Module) -> bool:
    """Return whether layers of `peft` replace some of the model's layers."""
    return any(type(module).__module__.startswith("peft.") for module in model.modules())


def is_plain(module: nn.Module) -> bool:
    """Return whether a module is a linear layer and nothing more: no subclass, no other kind of
    weights (`torchao`), hooks or replaced forward."""
    if type(module) is not nn.Linear or not is_plain_tensor(module.weight):
        return False
    return module.weight.numel() > 0 and not hooked(module)


def is_plain_tensor(tensor: Tensor) -> bool:
    """Return whether a tensor has its values in memory: no subclass computes them."""
    return type(tensor) in (Tensor, nn.Parameter)


def hooked(module: nn.Module) -> bool:
    """Return whether a module has hooks or a replaced forward, which run in its calls alone."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    return bool(hooks) or "forward" in module.__dict__


def stacked_bias(layers: Sequence[nn.Linear]) -> Tensor | None:
    """Return the joined biases of layers, which all have a bias; None: none has."""
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    return torch.cat(biases) if biases else None


def shallow(module: Any) -> Any:
    """Return the module with new tables of the same parameters, buffers, children and hooks. (Later
    hooks are not shared: transformers adds hooks to a model when hidden states are first requested,
    and shared hooks would record each state twice.)"""
    twin: Any = object.__new__(type(module))
    vars(twin).update(vars(module))  # parametrized modules refuse `copy.copy`
    for name, table in vars(module).items():
        if isinstance(table, dict) and name.startswith("_"):
            twin.__dict__[name] = copy.copy(table)
    return twin


def replaced(
    module: Any,
    wanted: Callable[[nn.Module], bool],
    make: Callable[[Sequence[nn.Linear]], nn.Module],
    merge: bool = True,
    copies: dict[int, nn.Module] | None = None,
) -> Any:
    """Return a copy of `module` with ``make([layer])`` for every layer that is `wanted`; with
    `merge`, ``make(siblings)`` for projections of the same input, with concatenated outputs. The
    copy shares all other parameters and buffers.

    Args:
        copies: known copies of modules by id, since a module may be at several paths and in several
            models; extended by this call.
    """
    copies = {} if copies is None else copies

    def copied(module: Any) -> nn.Module:
        if id(module) in copies:
            return copies[id(module)]
        if wanted(module):
            copies[id(module)] = make([module])
            return copies[id(module)]
        twin = copies[id(module)] = shallow(module)
        children = twin._modules
        for names in SIBLINGS if merge else ():
            layers: list[Any] = [children.get(name) for name in names]
            if all(layer is not None and wanted(layer) for layer in layers) and _alike(layers):
                merged = Merged(make(layers), [layer.out_features for layer in layers])
                width = layers[0].in_features
                copies.update((id(layer), Part(merged, i, width)) for i, layer in enumerate(layers))
        for name, child in children.items():
            if child is not None:
                children[name] = copied(child)
        return copies[id(module)]

    return copied(module)


def _alike(layers: Sequence[Any]) -> bool:
    kinds = {(layer.in_features, layer.weight.dtype, layer.bias is None) for layer in layers}
    return len(kinds) == 1 and len({id(layer) for layer in layers}) == len(layers)
