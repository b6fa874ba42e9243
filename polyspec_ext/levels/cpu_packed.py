"""Models on the CPU whose linear layers run on packed weights.

A verification reads a few tokens at once, which should cost what one token costs: the weights pass
through the processor once either way. Through weights laid out as torch keeps them it does not;
through packed ones it nearly does. On x86 the product is this package's own
(`polyspec_ext.ops.dense`) in float32 and bfloat16; everything else is oneDNN's.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from ..ops import decoder, dense
from ..ops.decoder import Matrix
from . import huge_pages
from .fused import use_fused
from .grouped_attention import use_grouped, watched
from .quantized import QuantizedLinear
from .replacement import RowProduct, is_plain, replaced, stacked_bias, with_adapters

_Model = TypeVar("_Model", bound=nn.Module)
# What a level's passes run in place of its model; and the parts of a pass that may give a token
# other bits when other tokens stand beside it: "attention", "products", "head". None: nobody has
# looked.
Runs = tuple[Any, tuple[str, ...] | None]

# How far logits of the packed model may be from the model's, relative to the largest.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
# Of 4-bit copies, which round activations to 8 bits: the last bit of one may move it by 1 / 254.
_TOLERANCE_QUANTISED = 0.1

# Just below the largest block by which glibc's threshold moves.
_LARGEST_KEPT = (32 << 20) - (64 << 10)


class PackedLinear(RowProduct):
    """``x W^T + b`` with the weights of `layers` one below the other, ``[.., in]`` to
    ``[.., out]``. The weights are copies, and take their memory again.

    Attributes:
        dtype: of the weights, and so of inputs and outputs.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.dtype = layers[0].weight.dtype
        self.out_features = sum(layer.out_features for layer in layers)
        self.in_features = layers[0].in_features
        self.register_buffer("bias", stacked_bias(layers))
        self._pack(torch.cat([layer.weight.detach() for layer in layers]))

    def _pack(self, weight: torch.Tensor) -> None:
        raise NotImplementedError


class OneDnnLinear(PackedLinear):
    """By oneDNN's matrix kernels."""

    def _pack(self, weight: torch.Tensor) -> None:
        # The count of rows that it is packed for is a hint; any number is multiplied right.
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, 4)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(
            x, self.packed, self.bias, "none", [], ""
        )
        return product


class DenseLinear(PackedLinear):
    """By `polyspec_ext.ops.dense`: a row's product is the same whatever stands beside it."""

    packed: torch.Tensor

    def _pack(self, weight: torch.Tensor) -> None:
        self.register_buffer("packed", huge_pages.kept(dense.pack(weight)))

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return dense.product(x, self.packed, self.out_features, self.bias)

    def matrices(self) -> Sequence[Matrix]:
        form = decoder.DENSE, self.out_features, self.in_features
        return [Matrix(*form, self.packed, bias=self.bias)]


def pack_linear(layers: Sequence[nn.Linear]) -> PackedLinear:
    """`layers`, which are packable, as one."""
    if _prefers_dense(layers[0].weight.dtype):
        return DenseLinear(layers)
    return OneDnnLinear(layers)


def can_pack(model: nn.Module) -> bool:
    """Whether there is a linear layer to pack."""
    return any(map(_packable, model.modules()))


def pack_layers(module: _Model, merge: bool = True) -> _Model:
    """`module` with packed linear layers: a copy of its modules that shares every other parameter
    and buffer with it. Later changes of its linear weights are not seen. Only plain `nn.Linear`
    layers on the CPU are packed. With `merge`, projections of one input are one product."""
    made: _Model = replaced(module, _packable, pack_linear, merge)
    return made


def keep_freed_memory() -> None:
    """Has glibc keep blocks of less than 32 MiB for the next allocation, and up to 64 MiB of them.

    Else it gives the larger temporaries of every operator back to the system and has them faulted
    in again page by page, which a prefill of several prompts feels. Its threshold follows the
    largest block that was freed so far (M_MMAP_THRESHOLD in mallopt(3), where its settings in the
    environment come first), so one such block is made, of which no page is touched.
    Other allocators do not mind.
    """
    torch.empty(_LARGEST_KEPT, dtype=torch.uint8)


def packed(model: nn.Module, name: str) -> Runs:
    """`model` with packed linear layers (`pack_layers`), and grouped attention in place of sdpa.
    Layers of 4-bit weights are packed as they are. The process keeps freed memory from then on
    (`keep_freed_memory`). A model that cannot be run so is refused; `name` is the level's."""
    if not can_pack(model) and not _quantised(model):
        raise ValueError(
            f"{name}: expected linear layers on the CPU, in a dtype that oneDNN multiplies here, "
            f"to pack, given {type(model).__name__} without any"
        )
    other = _patched_forward(model)
    if other is not None:
        raise ValueError(
            f"{name}: expected modules with their class's forward to pack, given another one at "
            f"{other}"
        )
    keep_freed_memory()
    # A model may use its projections in a way that wants each one's own memory.
    for merge in (True, False):
        try:
            difference, runs = _compared(model, pack_layers(model, merge))
        except RuntimeError:
            if merge:
                continue
            raise
        except AttributeError as error:
            advice = "merge_and_unload() or pack=False" if with_adapters(model) else "pack=False"
            raise ValueError(
                f"{name}: expected modules that call their linear layers and read nothing else of "
                f"them, to pack, given {type(model).__name__} ({error}); use {advice}"
            ) from error
        if difference <= _tolerance(model):
            return runs
    raise ValueError(
        f"{name}: expected the packed model's logits to be the model's, given a relative "
        f"difference of {difference:.1e}; use it unpacked"
    )


def unpacked(model: nn.Module) -> Runs:
    """`model` itself; grouped attention in place of sdpa where it is a 4-bit copy on the CPU, whose
    products give a token the same bits whatever stands beside it."""
    if not _quantised(model):
        return model, None
    if _patched_forward(model) is None:
        difference, runs = _compared(model, replaced(model, lambda _: False, pack_linear))
        if difference <= _tolerance(model):
            return runs
    return model, _varying(model, False)


def _compared(model: nn.Module, made: Any) -> tuple[float, Runs]:
    use_grouped(made)
    use_fused(made)
    difference, attends = _difference(model, made)
    return difference, (made, _varying(made, attends))


def _varying(model: Any, attends: bool) -> tuple[str, ...]:
    """See `Runs`. `attends`: attention gives a token the same bits."""
    head = model.get_output_embeddings()
    others = (module for module in model.modules() if module is not head)
    found = {
        "attention": not attends,
        "products": any(map(_multiplies_elsewhere, others)),
        "head": head is not None and _multiplies_elsewhere(head),
    }
    return tuple(part for part, varies in found.items() if varies)


def _multiplies_elsewhere(module: nn.Module) -> bool:
    if isinstance(module, OneDnnLinear):
        return True
    own = itertools.chain(module.parameters(recurse=False), module.buffers(recurse=False))
    # (Packed matrices are vectors of bytes, masks are bool.)
    matrix = any(tensor.dim() > 1 and tensor.dtype != torch.bool for tensor in own)
    return matrix and not isinstance(module, nn.Embedding)


def _quantised(model: nn.Module) -> bool:
    return any(isinstance(module, QuantizedLinear) for module in model.modules())


def _patched_forward(model: nn.Module) -> str | None:
    named = model.named_modules()
    return next((path or "the top" for path, module in named if "forward" in module.__dict__), None)


def _tolerance(model: nn.Module) -> float:
    if _quantised(model):
        return _TOLERANCE_QUANTISED
    return _TOLERANCE.get(next(model.parameters()).dtype, 1e-4)


def _prefers_dense(dtype: torch.dtype) -> bool:
    # There it is faster than oneDNN's, or the only one.
    x86 = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return x86 and dtype in (torch.float32, torch.bfloat16)


def _packable(module: nn.Module) -> bool:
    if not is_plain(module):
        return False
    weight: torch.Tensor = module.weight  # type: ignore[assignment]
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


@torch.inference_mode()
def _difference(model: Any, made: Any) -> tuple[float, bool]:
    """Of the logits behind some tokens of two texts, one of them hidden, relative to the largest:
    the worst in float32. In fewer bits a state can be so large that rounding alone moves all logits
    of its token: there it is the median of a text, the larger of two. And whether all of `made`'s
    attention went through the operator."""
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    input_ids = torch.arange(1, 17).view(2, 8) * vocab_size // 17
    mask = torch.ones_like(input_ids)
    mask[0, 0] = 0
    inputs = {"input_ids": input_ids, "attention_mask": mask}
    inputs |= {"use_cache": False, "return_dict": True}
    wanted = model(**inputs).logits[:, 1:].float()
    with watched() as calls:
        given = made(**inputs).logits[:, 1:].float()
    scale = wanted.abs().amax(-1).clamp_min(1e-30)
    differences = ((given - wanted).abs().amax(-1) / scale).nan_to_num(nan=torch.inf)
    exact = next(model.parameters()).dtype == torch.float32 and not _quantised(model)
    by_text = differences.amax(-1) if exact else differences.median(-1).values
    return float(by_text.max()), bool(calls) and all(calls)
