"""Linear layers with 4-bit weights, by this package's products on the CPU and on CUDA; and copies
of models that have them.

Weights are ``(q - 8) * scale + zero`` with q in 0 to 15 and a scale and zero for each group of
inputs (polyspec/int4.hpp).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..levels.products import Part, QuantizedLinear, in_huge_pages, is_plain, replaced, stacked_bias
from ..ops import decoder, int4
from ..ops.decoder import Matrix

SAMPLE = 32  # weights of a layer by which its model is told from others


@dataclass(frozen=True)
class Int4Weights:
    """A quantised matrix.

    Attributes:
        values: ``[N, K]`` uint8, q in 0 to 15.
        scales, zeros: ``[N, K / group]`` float32, exact in bfloat16.
    """

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor

    @property
    def group(self) -> int:
        """Inputs with one scale and zero."""
        return self.values.shape[1] // self.scales.shape[1]

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.values, self.scales, self.zeros

    def to(self, device: torch.device | str) -> Int4Weights:
        """Return the matrix on a device."""
        return Int4Weights(*(tensor.to(device) for tensor in self.tensors))

    def split(self, sizes: Sequence[int]) -> list[Int4Weights]:
        """Split the matrix by rows."""
        pieces = (tensor.split(list(sizes)) for tensor in self.tensors)
        return [Int4Weights(*piece) for piece in zip(*pieces, strict=True)]


def joined(matrices: Sequence[Int4Weights]) -> Int4Weights:
    """Join matrices one below the other."""
    if len(matrices) == 1:
        return matrices[0]
    return Int4Weights(*map(torch.cat, zip(*(each.tensors for each in matrices), strict=True)))


class Int4Linear(QuantizedLinear):
    """``x W^T + b`` with 4-bit weights, in the dtype of `x`."""

    packed: torch.Tensor

    def __init__(self, weights: Int4Weights, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weights.values.shape
        self.group = weights.group
        self.register_buffer("packed", in_huge_pages(int4.pack(*weights.tensors, self.group)))
        self.register_buffer("bias", bias)

    def weights(self) -> Int4Weights:
        """Return the weights that it was made from."""
        return Int4Weights(
            *int4.unpack(self.packed, self.out_features, self.in_features, self.group)
        )

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return int4.product(x, self.packed, self.out_features, self.group)

    def matrices(self) -> Sequence[Matrix]:
        form = decoder.INT4, self.out_features, self.in_features
        return [Matrix(*form, self.packed, self.group)]


class CudaInt4Linear(QuantizedLinear):
    """The same on CUDA, packed there. Inputs in float32 are multiplied in bfloat16."""

    packed: torch.Tensor

    def __init__(
        self,
        weights: Int4Weights,
        bias: torch.Tensor | None = None,
        device: torch.device | str = "cuda",
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weights.values.shape
        self.group = weights.group
        self.register_buffer("packed", int4.pack(*weights.to(device).tensors, self.group))
        self.register_buffer("bias", bias)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float32:
            return self.product(x.bfloat16()).float()
        return int4.product(x, self.packed, self.out_features, self.group)


def quantisable(model: Any, group: int, head: bool = False) -> dict[str, nn.Linear]:
    """Return the linear layers of `model` that 4-bit weights can stand for, by name: plain ones
    whose inputs are whole groups, the output head among them with `head`. A layer at several
    paths has its first name."""
    output = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if (head or module is not output) and is_plain(module) and module.in_features % group == 0
    }


def head_of(model: Any) -> str | None:
    """Return the name of the output head; None: it is none of the model's modules."""
    head = model.get_output_embeddings()
    return next((name for name, module in model.named_modules() if module is head), None)


def sample_of(layer: nn.Linear) -> torch.Tensor:
    """Return some of a layer's weights, evenly spread, ``[32]`` float32: the same, to rounding, in
    whatever dtype a checkpoint is loaded."""
    weight = layer.weight.detach().flatten()
    indices = torch.linspace(0, weight.numel() - 1, SAMPLE, dtype=torch.float64).long()
    return weight[indices.to(weight.device)].float().cpu()


def with_weights(model: Any, names: Collection[str], weights: Callable[[str], Int4Weights]) -> Any:
    """Return a copy of `model` that multiplies with 4-bit weights and shares all else with it.

    Projections of one input are one product. The copy's `sampled_weights` are `sample_of` the
    layers, by name.

    Args:
        names: of the layers, as `quantisable` has them.
        weights: by name; called once for each, and packed before the next call, so that they need
            not all be in memory.
    """
    layers = {name: model.get_submodule(name) for name in names}
    known = {id(layer): name for name, layer in layers.items()}

    def make(siblings: Sequence[nn.Linear]) -> nn.Module:
        bias, device = stacked_bias(siblings), siblings[0].weight.device
        matrices = [weights(known[id(layer)]) for layer in siblings]
        if device.type == "cuda":
            return CudaInt4Linear(joined([each.to(device) for each in matrices]), bias, device)
        return Int4Linear(joined(matrices), bias)

    made = replaced(model, lambda module: id(module) in known, make)
    made.sampled_weights = {name: sample_of(layer) for name, layer in layers.items()}
    return made


def weights_of(model: Any) -> Iterator[tuple[str, Int4Weights]]:
    """Yield the 4-bit weights of a copy on the CPU, by the names that the layers have in its
    model."""
    for name, module in model.named_modules():
        if isinstance(module, Int4Linear):
            yield name, module.weights()
        elif isinstance(module, Part) and isinstance(module.merged.linear, Int4Linear):
            yield name, module.merged.linear.weights().split(module.merged.sizes)[module.index]
