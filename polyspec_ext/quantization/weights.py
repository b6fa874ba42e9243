"""Linear layers with 4-bit weights, by this package's products on the CPU and on CUDA, and copies
of models that use the layers.

Weights are ``(q - 8) * scale + zero`` with q in 0 to 15 and a scale and zero for each group of
inputs (polyspec/int4.hpp).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import processor
from ..levels.products import Part, QuantizedLinear, in_huge_pages, is_plain, replaced, stacked_bias
from ..ops import decoder, int4
from ..ops.decoder import Matrix

SAMPLE = 32  # weights of a layer, to recognise its model


@dataclass(frozen=True)
class Int4Weights:
    """A quantised matrix.

    Attributes:
        values: ``[N, K]`` uint8, q in 0 to 15.
        scales, zeros: ``[N, K / group]`` float32, exact in bfloat16.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor

    @property
    def group(self) -> int:
        """Number of inputs with a common scale and zero."""
        return self.values.shape[1] // self.scales.shape[1]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.values, self.scales, self.zeros

    def to(self, device: torch.device | str) -> Int4Weights:
        """Return the matrix on a device."""
        return Int4Weights(*(tensor.to(device) for tensor in self.tensors))

    def split(self, sizes: Sequence[int]) -> list[Int4Weights]:
        """Split the matrix by rows."""
        pieces = (tensor.split(list(sizes)) for tensor in self.tensors)
        return [Int4Weights(*piece) for piece in zip(*pieces, strict=True)]


def joined(matrices: Sequence[Int4Weights]) -> Int4Weights:
    """Stack matrices by rows."""
    if len(matrices) == 1:
        return matrices[0]
    return Int4Weights(*map(torch.cat, zip(*(each.tensors for each in matrices), strict=True)))


class Int4Linear(QuantizedLinear):
    """``x W^T + b`` with 4-bit weights, in the dtype of `x`."""

    packed: Tensor

    def __init__(self, weights: Int4Weights, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weights.values.shape
        self.group = weights.group
        self.register_buffer("packed", in_huge_pages(int4.pack(*weights.tensors, self.group)))
        self.register_buffer("bias", bias)

    def weights(self) -> Int4Weights:
        """Return the unpacked weights."""
        return Int4Weights(
            *int4.unpack(self.packed, self.out_features, self.in_features, self.group)
        )

    def product(self, x: Tensor) -> Tensor:
        return int4.product(x, self.packed, self.out_features, self.group)

    def matrices(self) -> Sequence[Matrix]:
        form = decoder.INT4, self.out_features, self.in_features
        return [Matrix(*form, self.packed, self.group)]


class CudaInt4Linear(QuantizedLinear):
    """An `Int4Linear` on CUDA, packed there. Inputs in float32 are multiplied in bfloat16."""

    packed: Tensor

    def __init__(
        self, weights: Int4Weights, bias: Tensor | None = None, device: torch.device | str = "cuda"
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weights.values.shape
        self.group = weights.group
        self.register_buffer("packed", int4.pack(*weights.to(device).tensors, self.group))
        self.register_buffer("bias", bias)

    def product(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return self.product(x.bfloat16()).float()
        return int4.product(x, self.packed, self.out_features, self.group)


def quantisable(model: Any, group: int, head: bool = False) -> dict[str, nn.Linear]:
    """Return the linear layers of `model` that 4-bit weights can replace, by name: plain layers
    with a multiple of `group` inputs, with `head` including the output head. A layer at several
    paths has its first name."""
    output = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if (head or module is not output) and is_plain(module) and module.in_features % group == 0
    }


def head_of(model: Any) -> str | None:
    """Return the name of the output head; None: it is no module of the model."""
    head = model.get_output_embeddings()
    return next((name for name, module in model.named_modules() if module is head), None)


def sample_of(layer: nn.Linear) -> Tensor:
    """Return some of a layer's weights, evenly spread, ``[32]`` float32: the same, to rounding, in
    any dtype that a checkpoint is loaded in."""
    weight = layer.weight.detach().flatten()
    indices = torch.linspace(0, weight.numel() - 1, SAMPLE, dtype=torch.float64).long()
    return weight[indices.to(weight.device)].float().cpu()


def with_weights(model: Any, names: Collection[str], weights: Callable[[str], Int4Weights]) -> Any:
    """Return a copy of `model` that multiplies with 4-bit weights and shares all else with it.

    Projections of the same input are a single product. The copy's `sampled_weights` are `sample_of`
    the layers, by name.

    Args:
        names: names of the layers, as in `quantisable`.
        weights: function of a name; called once for each, and packed before the next product's
            calls, so that not all weights need be in memory.
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
    """Yield the 4-bit weights of a copy on the CPU, with the layers' names in its model."""
    for name, module in model.named_modules():
        if isinstance(module, Int4Linear):
            yield name, module.weights()
        elif isinstance(module, Part) and isinstance(module.merged.linear, Int4Linear):
            yield name, module.merged.linear.weights().split(module.merged.sizes)[module.index]


# ---- rounding ------------------------------------------------------------------------------------


INPUTS_8_BITS = 32  # inputs with a common scale
DAMPING = 0.01  # added to the Hessian's diagonal, as a share of its mean
_ROWS = 1 << 14  # rows with errors in memory at once


def round_to_nearest(weight: Tensor, group: int) -> Int4Weights:
    """Round ``weight [N, K]``, each number independently."""
    return Int4Weights(*int4.round_to_nearest(weight.detach().cpu(), group))


def to_8_bits(weight: Tensor) -> Tensor:
    """Return ``weight [N, K]`` as blocks of GGUF's type Q8_0, ``[N, K / 32 * 34]`` uint8: of 32
    inputs a float16 scale, the largest magnitude over 127, and the nearest integer multiples of it.
    """
    made = []
    for rows in weight.detach().cpu().split(_ROWS):
        groups = rows.float().unflatten(1, (-1, INPUTS_8_BITS))
        scales = groups.abs().amax(-1, keepdim=True) / 127
        scales = scales.clamp_max(torch.finfo(torch.float16).max).half()
        # A scale that is too small for float16 is 0, and so are its weights.
        wide = torch.where(scales == 0, torch.inf, scales.float())
        numbers = (groups / wide).round_().clamp_(-127, 127).to(torch.int8)
        blocks = [scales.view(torch.uint8), numbers.view(torch.uint8)]
        made.append(torch.cat(blocks, -1).flatten(1))
    return torch.cat(made)


def with_feedback(weight: Tensor, hessian: Tensor, group: int) -> Int4Weights:
    """Round ``weight [N, K]`` column by column, and compensate each rounding error in the later
    columns that are correlated with it (GPTQ, Frantar et al. 2023, arXiv 2210.17323, algorithm 1).
    Groups of the largest inputs come first, while most columns are left to compensate their errors.

    With ``H = L L^T``, L lower triangular, errors E cost ``|E L|^2``, and column j of ``E L`` has
    no error before j. So, from the last column to the first, ``w_j + (E L)_j / L_jj`` is best for
    column j, and no inverse of H is needed.

    Args:
        hessian: H, ``[K, K]`` float32, symmetric: the inputs' ``X^T X`` up to a factor.
    """
    importance = hessian.diagonal().cpu().view(-1, group)
    order = importance.sum(1).argsort()
    places = order.to(hessian.device)
    by_group = hessian.view(len(order), group, len(order), group)
    damped = torch.empty_like(hessian)
    for own, rows in zip(order.tolist(), damped.view(by_group.shape), strict=True):
        torch.index_select(by_group[own], 1, places, out=rows)
    damped.diagonal().add_(DAMPING * importance.mean().clamp_min(1e-30))
    factor = torch.linalg.cholesky(damped, upper=True).mT
    importance = importance[order].flatten()
    given = weight.unflatten(1, (-1, group)).index_select(1, order.to(weight.device)).flatten(1)
    made = joined([_fed_back(rows, importance, factor, group) for rows in given.split(_ROWS)])
    back = order.argsort()
    values = made.values.unflatten(1, (-1, group)).index_select(1, back).flatten(1)
    return Int4Weights(values, made.scales.index_select(1, back), made.zeros.index_select(1, back))


def _fed_back(weight: Tensor, importance: Tensor, factor: Tensor, group: int) -> Int4Weights:
    """Round some rows, which do not depend on each other (`with_feedback`)."""
    given = weight.float()
    owed = torch.zeros_like(given)  # E L, of the errors so far
    unit = torch.eye(group, device=given.device)
    made = []
    for begin in reversed(range(0, given.shape[1], group)):
        own = slice(begin, begin + group)
        # Row j: compensation of an error of column j in the columns before it.
        feedback = torch.linalg.solve_triangular(factor[own, own], unit, upper=False)
        rest = given[:, own] + owed[:, own] @ feedback
        # The range of a group is the range of its compensated weights.
        _, scales, zeros = int4.round_to_nearest(rest.cpu(), group, importance[own])
        scale, zero = scales[:, 0].to(rest.device), zeros[:, 0].to(rest.device)
        columns = rest.T.contiguous()
        rounded = torch.empty_like(columns, dtype=torch.uint8)
        for j in reversed(range(group)):
            rounded[j] = ((columns[j] - zero) / scale + 8).round_().clamp_(0, 15)
            value = (rounded[j] - 8.0) * scale + zero
            error = (columns[j] - value) / feedback[j, j]
            columns[:j].addr_(feedback[j, :j], error, alpha=-1)
            columns[j] = value
        made.append((rounded.T.cpu(), scales, zeros))
        errors = given[:, own] - columns.T
        with processor.bfloat16_factors():  # 8 bits of an error suffice
            owed[:, :begin].addmm_(errors, factor[own, :begin])
    return Int4Weights(*(torch.cat(part[::-1], 1) for part in zip(*made, strict=True)))
