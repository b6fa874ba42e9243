"""Cheaper copies of models, for levels below them: 4-bit (`quantize_w4`, stored by `save_w4` and
`load_w4`), 8-bit (`quantize_w8`), and with fewer ids (`trim`).

4-bit weights are ``(q - 8) * scale + zero`` with q in 0 to 15 and a scale and zero for each group
of inputs (polyspec/int4.hpp), multiplied by this package's products on the CPU and on CUDA. They
are rounded to the nearest, or by Hessians of the squared errors of a model's linear layers, from
their inputs on texts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from .. import arguments, processor, progress
from ..files import cache_folder, replacing
from ..levels import tokenizer_at
from ..levels.gguf import BlockLinear, head_rows
from ..levels.models import decoder_layers, eos_ids
from ..levels.products import (
    Part,
    QuantizedLinear,
    TrimmedHead,
    in_huge_pages,
    is_plain,
    replaced,
    shallow,
    stacked_bias,
    with_adapters,
)
from ..ops import decoder, int4
from ..ops.decoder import Matrix
from ..ops.int4 import GROUPS

__all__ = ["load_w4", "quantize_w4", "quantize_w8", "save_w4", "trim"]

# Tolerances of a weight between dtypes.
_ROUNDING, _TINY = 2**-8, 2**-24  # relative, absolute
# Minimum share of a head in the bytes that a pass of the copy reads, to quantise it by default.
_HEAD = 0.1
_Q8_0 = 8  # the type's number in GGUF files
_STORED = (128, 64, 32)  # of copies by `stored_w4`


@torch.inference_mode()
def quantize_w4(
    model: Any,
    group_size: int = 128,
    calibration: Sequence[Any] | None = None,
    head: bool | None = None,
) -> Any:
    """Copy a causal language model with 4-bit weights in its linear layers.

    The copy shares all else with `model`, as its embeddings, and reads a quarter of the bytes of
    bfloat16 (``Level(copy, shares_cache_with=model)`` shares the cache as well). `ops.int4.product`
    multiplies.

    Args:
        model: a Hugging Face model in eval mode; it is not changed.
        group_size: number of inputs with a common scale and zero: 32, 64, 128 or 256. Layers are
            not quantised if their number of inputs is no multiple of it.
        calibration: about a hundred texts or lists of token ids, of the kind that will be decoded:
            each rounding error is compensated in weights that are correlated with it on the texts
            (GPTQ). None: every weight is rounded to the nearest, which takes a fraction of the time
            and loses more.
        head: quantise the output head too; look-ups of tied embeddings stay unquantised. None: if
            it would else be a tenth or more of the bytes that a pass of the copy reads, and its
            inputs are a multiple of `group_size`.

    Returns:
        The copy, on the device of `model`.

    Raises:
        TypeError, ValueError: an argument of another type or out of range, or nothing can be
            quantised; the message names the argument.
    """
    arguments.model("model", model)
    if arguments.integer("group_size", group_size) not in GROUPS:
        raise ValueError(f"group_size: expected 32, 64, 128 or 256, given {group_size}")
    layers = _layers(model, group_size, head, 4)
    hessians: Hessians | None = None
    if calibration is not None:
        hessians = Hessians(model, layers, token_ids(model, calibration))
    with progress.bar(total=len(layers), desc="quantisation", leave=False) as bar:

        def rounded(name: str) -> Int4Weights:
            bar.update()
            weight = layers[name].weight.detach()
            if hessians is None:
                return round_to_nearest(weight, group_size)
            return with_feedback(weight, hessians.of(name), group_size)

        return with_weights(model, layers, rounded)


@torch.inference_mode()
def quantize_w8(model: Any, head: bool | None = None) -> Any:
    """Copy a causal language model on the CPU with 8-bit weights in its linear layers, each rounded
    to the nearest in groups of 32 inputs with a float16 scale: blocks of GGUF's type Q8_0, which
    `ops.blocks.product` multiplies.

    The copy shares all else with `model`, as embeddings, and reads 8.5 bits a weight: about half
    the bytes of bfloat16 and twice the bytes of `quantize_w4`, with about a tenth of its error.

    Args:
        model: a Hugging Face model in eval mode on the CPU; it is not changed.
        head: as in `quantize_w4`.

    Returns:
        The copy. It takes seconds, and is not stored.

    Raises:
        TypeError, ValueError: an argument of another type or out of range, or nothing can be
            quantised; the message names the argument.
    """
    arguments.model("model", model)
    if model.device.type != "cpu":
        raise ValueError(f"model: expected one on the CPU, given one on {model.device}")
    chosen = {id(layer) for layer in _layers(model, INPUTS_8_BITS, head, 8).values()}

    def make(siblings: Sequence[nn.Linear]) -> nn.Module:
        parts = [(to_8_bits(layer.weight), _Q8_0) for layer in siblings]
        return BlockLinear(parts, siblings[0].in_features, stacked_bias(siblings))

    return replaced(model, lambda module: id(module) in chosen, make)


def _layers(model: Any, group: int, head: bool | None, bits: int) -> dict[str, nn.Linear]:
    """Return the layers to quantise to `bits` bits, by name (see `quantize_w4`)."""
    if head is not None and not isinstance(head, bool):
        raise TypeError(f"head: expected True, False or None, given {arguments.shown(head)}")
    layers = quantisable(model, group, head=True)
    if with_adapters(model):
        raise ValueError(
            f"model: expected one without adapters, whose layers read the weights that a copy does "
            f"not have, given {type(model).__name__}; merge_and_unload() gives such a model"
        )
    head_name = head_of(model)
    if head and head_name not in layers:
        raise ValueError(
            f"head: expected an output head that is a linear layer with a multiple of {group} "
            f"inputs, given {type(model.get_output_embeddings()).__name__}"
        )
    if head_name in layers and not head:
        weight = layers[head_name].weight
        body = sum(layer.weight.numel() for name, layer in layers.items() if name != head_name)
        rest = body * bits / 8
        size = weight.numel() * weight.element_size()
        if head is False or size < _HEAD * (rest + size):
            del layers[head_name]
    if not layers:
        raise ValueError(
            f"model: expected linear layers whose inputs are a multiple of {group}, given "
            f"{type(model).__name__} without any"
        )
    return layers


def trim(model: Any, texts: Sequence[Any] | None, size: int) -> Any:
    """Copy a causal language model with logits of its `size` most frequent ids only (FR-Spec, arXiv
    2502.14856), for the lowest level of a chain. Where a pass reads mostly the head, as in small
    models of large vocabularies, that makes drafting cheaper.

    The copy reads every id and draws the `size` ids alone. The level above verifies against the
    distribution that the copy draws from, so the chain stays exact. Other ids are never drafted.

    Args:
        model: a Hugging Face model in eval mode, also a copy by `quantize_w4` or the model of a
            GGUF file; it is not changed.
        texts: texts or lists of token ids, of the kind that will be decoded, to count ids in. Ids
            that end a text come first; of equally frequent ids the lower. None: the lowest ids,
            which in vocabularies of byte pairs are about the most frequent.
        size: number of ids, from 1 to the model's.

    Returns:
        The copy; it shares all weights but the head's with `model`.

    Raises:
        TypeError, ValueError: an argument of another type or out of range, or the head is no linear
            layer; the message names the argument.
    """
    arguments.model("model", model)
    head = model.get_output_embeddings()
    if isinstance(head, TrimmedHead):
        raise ValueError("model: expected one with all of its ids, given one that was trimmed")
    vocab_size = int(model.config.get_text_config(decoder=True).vocab_size)
    vocab_size = getattr(head, "out_features", vocab_size)
    size = arguments.integer("size", size, vocab_size, 1)
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    if texts is not None:
        for row in token_ids(model, texts, "texts"):
            counts += torch.bincount(row, minlength=vocab_size)
    ends = [id for id in eos_ids(model) if 0 <= id < vocab_size]  # -1: no id
    counts[ends] = torch.iinfo(torch.int64).max
    drawn = counts.argsort(descending=True, stable=True)[:size].sort().values
    return _with_head(model, head, drawn)


def _with_head(model: Any, head: Any, drawn: Tensor) -> Any:
    path, rows = head_of(model), _rows(model, head, drawn)
    if path is None or rows is None:
        raise ValueError(
            f"model: expected an output head that is a linear layer, given {type(head).__name__}"
        )
    trimmed = parent = shallow(model)
    *above, last = path.split(".")
    for name in above:
        child = shallow(getattr(parent, name))
        setattr(parent, name, child)
        parent = child
    setattr(parent, last, TrimmedHead(rows, drawn.to(model.device), head.out_features))
    return trimmed


def _rows(model: Any, head: Any, drawn: Tensor) -> nn.Module | None:
    """Return a head with the rows `drawn` alone; None: an unknown kind of head."""
    bias = getattr(head, "bias", None)
    bias = None if bias is None else bias.detach()[drawn.to(bias.device)]
    if isinstance(head, BlockLinear):
        return head_rows(model.name_or_path, drawn)
    if isinstance(head, Int4Linear):
        return Int4Linear(Int4Weights(*(x[drawn] for x in head.weights().tensors)), bias)
    if type(head) is not nn.Linear:
        return None
    weight = head.weight.detach()[drawn.to(head.weight.device)]
    linear = nn.Linear(head.in_features, len(drawn), bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear.eval()


def save_w4(copy: Any, folder: str | Path) -> None:
    """Store the 4-bit weights of a CPU copy by `quantize_w4` in a directory (`int4.safetensors`),
    for `load_w4`. Weights shared with its model are not written.

    A byte has two values, the even input in the low nibble; scales and zeros are bfloat16. A few of
    the model's weights are written as well, by which `load_w4` recognises the model.

    Args:
        copy: a copy by `quantize_w4`.
        folder: created if missing.

    Raises:
        TypeError: `copy` is no model, or `folder` no path.
        ValueError: the model has no 4-bit weights, or `folder` is a file.
    """
    arguments.model("copy", copy)
    path = arguments.path("folder", folder)
    if next(weights_of(copy), None) is None:
        raise ValueError(
            f"copy: expected a copy of quantize_w4 on the CPU, given {type(copy).__name__} without "
            "4-bit weights"
        )
    if path.exists() and not path.is_dir():
        raise ValueError(f"folder: expected a directory, given {str(path)!r}, which is a file")
    path.mkdir(parents=True, exist_ok=True)
    write_weights(path / FILE, weights_of(copy), copy.sampled_weights)


def load_w4(model: Any, folder: str | Path) -> Any:
    """Load the copy that `save_w4` has stored, over its model.

    Args:
        model: the model that `quantize_w4` has copied.
        folder: the folder of `save_w4`.

    Returns:
        The copy, as `quantize_w4` returned it.

    Raises:
        TypeError: `model` is no model, or `folder` no path.
        FileNotFoundError: `folder` has no stored copy.
        ValueError: the file has other contents, or is of a model of other layers or weights; the
            message names the file and the field.
    """
    arguments.model("model", model)
    path = arguments.path("folder", folder)
    if not (path / FILE).is_file():
        state = "is a file" if path.is_file() else "has none"
        raise FileNotFoundError(f"folder: expected {FILE} in {path}, which {state}")
    path /= FILE
    stored = read_weights(path)
    layers = quantisable(model, stored.group, head_of(model) in stored.shapes)
    if stored.shapes.keys() != layers.keys():
        other = min(stored.shapes.keys() ^ layers.keys())
        raise ValueError(
            f"model: expected the layers that {path} was made of, which {other} tells apart"
        )
    for name, layer in layers.items():
        shape = stored.shapes[name]
        if shape != layer.weight.shape:
            raise ValueError(
                f"model: expected {name} of {shape}, as in {path}, given "
                f"{tuple(layer.weight.shape)}"
            )
    for name, layer in layers.items():
        if not torch.allclose(stored.samples[name], sample_of(layer), _ROUNDING, _TINY):
            raise ValueError(
                f"model: expected the one that {path} was made of, given one with other weights "
                f"in {name}"
            )
    return with_weights(model, layers, stored.take)


def copy_of(word: str, model: Any, name: str = "model") -> Any:
    """Create or load the copy for a word of `levels.sources.COPIES`; see `stored_w4`."""
    if word == "w4":
        return stored_w4(model, name)
    try:
        return quantize_w8(model)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def stored_w4(model: Any, name: str = "model") -> Any:
    """Create or load the 4-bit copy of a model, rounded to the nearest in groups of 128 inputs, or
    in the largest groups for which no fewer layers can be quantised.

    On the CPU it is stored in ``polyspec_ext/w4`` of the user's cache folder, by a digest of the
    model's shapes and weights; if nothing can be written there, every call creates it. `name` is
    the model's, for messages.
    """
    layers = {group: quantisable(model, group, head=True) for group in _STORED}
    group = max(_STORED, key=lambda size: (len(layers[size]), size))
    if not layers[group]:
        raise ValueError(
            f"{name}: expected linear layers whose inputs are a multiple of {_STORED[-1]}, given "
            f"{type(model).__name__} without any"
        )
    cache = cache_folder() if model.device.type == "cpu" else None
    if cache is not None:
        digest = hashlib.sha256(str(group).encode())
        for path, layer in layers[group].items():
            # All weights: a model that was trained further may differ in a few rows alone.
            weight = layer.weight.detach().cpu().contiguous()
            check = zlib.crc32(weight.view(torch.uint8).numpy().data)
            digest.update(f"{path} {tuple(weight.shape)} {weight.dtype} {check}".encode())
        folder = cache / "w4" / digest.hexdigest()[:16]
        # A file of another release or an incomplete file is replaced.
        with contextlib.suppress(OSError, ValueError):
            return load_w4(model, folder)
    progress.note(f"{name}: rounding its weights to 4 bits, once")
    copy = quantize_w4(model, group)
    if cache is not None:
        with contextlib.suppress(OSError):
            save_w4(copy, folder)
    return copy


# ---- layers --------------------------------------------------------------------------------------


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
    return Int4Weights(*map(torch.cat, zip(*(matrix.tensors for matrix in matrices), strict=True)))


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
            return CudaInt4Linear(joined([matrix.to(device) for matrix in matrices]), bias, device)
        return Int4Linear(joined(matrices), bias)

    twin = replaced(model, lambda module: id(module) in known, make)
    twin.sampled_weights = {name: sample_of(layer) for name, layer in layers.items()}
    return twin


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
    pieces = []
    for rows in weight.detach().cpu().split(_ROWS):
        groups = rows.float().unflatten(1, (-1, INPUTS_8_BITS))
        scales = groups.abs().amax(-1, keepdim=True) / 127
        scales = scales.clamp_max(torch.finfo(torch.float16).max).half()
        # A scale that is too small for float16 is 0, and so are its weights.
        wide = torch.where(scales == 0, torch.inf, scales.float())
        numbers = (groups / wide).round_().clamp_(-127, 127).to(torch.int8)
        blocks = [scales.view(torch.uint8), numbers.view(torch.uint8)]
        pieces.append(torch.cat(blocks, -1).flatten(1))
    return torch.cat(pieces)


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
    indices = order.to(hessian.device)
    by_group = hessian.view(len(order), group, len(order), group)
    damped = torch.empty_like(hessian)
    for row, rows in zip(order.tolist(), damped.view(by_group.shape), strict=True):
        torch.index_select(by_group[row], 1, indices, out=rows)
    damped.diagonal().add_(DAMPING * importance.mean().clamp_min(1e-30))
    factor = torch.linalg.cholesky(damped, upper=True).mT
    importance = importance[order].flatten()
    ordered = weight.unflatten(1, (-1, group)).index_select(1, order.to(weight.device)).flatten(1)
    w4 = joined([_fed_back(rows, importance, factor, group) for rows in ordered.split(_ROWS)])
    back = order.argsort()
    values = w4.values.unflatten(1, (-1, group)).index_select(1, back).flatten(1)
    return Int4Weights(values, w4.scales.index_select(1, back), w4.zeros.index_select(1, back))


def _fed_back(weight: Tensor, importance: Tensor, factor: Tensor, group: int) -> Int4Weights:
    """Round some rows, which do not depend on each other (`with_feedback`)."""
    exact = weight.float()
    owed = torch.zeros_like(exact)  # E L, of the errors so far
    unit = torch.eye(group, device=exact.device)
    groups = []
    for begin in reversed(range(0, exact.shape[1], group)):
        span = slice(begin, begin + group)
        # Row j: compensation of an error of column j in the columns before it.
        feedback = torch.linalg.solve_triangular(factor[span, span], unit, upper=False)
        rest = exact[:, span] + owed[:, span] @ feedback
        # The range of a group is the range of its compensated weights.
        _, scales, zeros = int4.round_to_nearest(rest.cpu(), group, importance[span])
        scale, zero = scales[:, 0].to(rest.device), zeros[:, 0].to(rest.device)
        columns = rest.T.contiguous()
        rounded = torch.empty_like(columns, dtype=torch.uint8)
        for j in reversed(range(group)):
            rounded[j] = ((columns[j] - zero) / scale + 8).round_().clamp_(0, 15)
            value = (rounded[j] - 8.0) * scale + zero
            error = (columns[j] - value) / feedback[j, j]
            columns[:j].addr_(feedback[j, :j], error, alpha=-1)
            columns[j] = value
        groups.append((rounded.T.cpu(), scales, zeros))
        errors = exact[:, span] - columns.T
        with processor.bfloat16_factors():  # 8 bits of an error suffice
            owed[:, :begin].addmm_(errors, factor[span, :begin])
    return Int4Weights(*(torch.cat(tensors[::-1], 1) for tensors in zip(*groups, strict=True)))


# ---- calibration ---------------------------------------------------------------------------------

_LEAST_ROWS = 1024  # minimum inputs per addition, which reads and writes a whole sum
_COLUMNS = 1024


def token_ids(model: Any, calibration: Sequence[Any], name: str = "calibration") -> list[Tensor]:
    """Return texts, or token ids of each text, as int64 tensors; the tokenizer beside the model's
    weights reads texts."""
    calibration = arguments.listed(name, calibration, "texts or of token ids")
    texts = [text for text in calibration if isinstance(text, str)]
    if texts:
        if len(texts) != len(calibration):
            raise TypeError(f"{name}: expected texts or token ids, given both")
        try:
            tokenizer = tokenizer_at(model.name_or_path, local=True)
        except ValueError:
            raise ValueError(
                f"{name}: expected token ids of a model without a tokenizer beside its "
                "weights, given texts"
            ) from None
        calibration = tokenizer(texts)["input_ids"]
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    tokens = []
    for row in calibration:
        ids = arguments.row_integers(name, row)
        if not ids:
            raise ValueError(f"{name}: expected at least 1 token of each text, given none")
        arguments.require_ids(name, ids, vocab_size)
        tokens.append(torch.tensor(ids))
    if not tokens:
        raise ValueError(f"{name}: expected at least one text, given none")
    return tokens


class Hessians:
    """``X^T X`` of the inputs X of linear layers on texts, by the layer's name; layers with the
    same input tensor share a Hessian.

    They are computed on request for a decoder layer at a time, and dropped with the next request
    beyond it: the Hessians of a whole model would be several times its size. The layer's outputs on
    each text are kept meanwhile, so that no layer reads a text twice. Linear layers elsewhere are
    read with the last decoder layer.

    Args:
        layers: linear layers by name, in the model's order.
        texts: int64 tensors of token ids.
    """

    def __init__(
        self, model: Any, layers: Mapping[str, nn.Linear], texts: Sequence[Tensor]
    ) -> None:
        self._model, self._texts = model, texts
        count = model.config.get_text_config(decoder=True).num_hidden_layers
        _, self._blocks = decoder_layers(model, count)
        numbers = {id(x): at for at, block in enumerate(self._blocks) for x in block.modules()}
        self._layers: list[dict[str, nn.Linear]] = [{} for _ in self._blocks]  # by decoder layer
        for name, layer in layers.items():
            self._layers[numbers.get(id(layer), count - 1)][name] = layer
        self._outputs: list[Any] = []  # by text: output of the last decoder layer that has run
        self._read = 0  # number of decoder layers that have run
        self._sums: dict[str, Tensor] = {}
        self._shared: dict[str, str] = {}  # layer -> layer with its sum
        self._last: tuple[str, Tensor] | None = None  # layer and input
        self._rows: dict[str, list[Tensor]] = {}  # inputs that are not in the sums yet

    def of(self, name: str) -> Tensor:
        """Return the Hessian of a layer, ``[K, K]`` float32. KeyError: no text reached the
        layer."""
        while name not in self._shared and self._read < len(self._blocks):
            self._run(self._layers[self._read])
        return self._sums[self._shared[name]]

    @torch.inference_mode()
    def _run(self, layers: Mapping[str, nn.Linear]) -> None:
        """Run the texts through the next decoder layer, the last with the rest of the model."""
        self._sums, self._shared, self._last, self._rows = {}, {}, None, {}
        outputs: list[Any] = []
        hooks = [
            layer.register_forward_pre_hook(lambda _, x, name=name: self._note(name, x[0]))
            for name, layer in layers.items()
        ]

        def stop(module: nn.Module, inputs: Any, *output: Any) -> None:
            outputs.extend(output)  # empty before a module
            raise _Stopped

        head = self._model.get_output_embeddings()
        if self._read < len(self._blocks) - 1:
            hooks.append(self._blocks[self._read].register_forward_hook(stop))
        elif head is not None:  # its output is unused, too
            hooks.append(head.register_forward_pre_hook(stop))
        done = self._blocks[: self._read]
        before = [vars(block).get("forward") for block in done]  # accelerate replaces forward
        try:
            for at, ids in enumerate(progress.bar(self._texts, desc="calibration", leave=False)):
                for block in done:  # only the last layer's output is used
                    block.forward = lambda *_, at=at, **__: self._outputs[at]
                with contextlib.suppress(_Stopped):
                    self._model(input_ids=ids[None].to(self._model.device), use_cache=False)
            self._end()
        finally:
            for hook in hooks:
                hook.remove()
            for block, forward in zip(done, before, strict=True):
                vars(block).pop("forward", None)
                if forward is not None:
                    block.forward = forward
        self._outputs, self._read = outputs, self._read + 1

    def _note(self, name: str, x: Tensor) -> None:
        """Record `x` as an input of layer `name`."""
        last = self._last
        if last is not None and last[1] is x and self._shared.get(name, last[0]) == last[0]:
            self._shared[name] = last[0]
            return
        self._last = name, x
        self._shared[name] = name
        rows = self._rows.setdefault(name, [])
        rows.append(x.detach().flatten(0, -2))
        if sum(map(len, rows)) >= _LEAST_ROWS:
            self._add(name)

    def _end(self) -> None:
        """Add the remaining rows, and mirror the sums."""
        self._last = None
        for name in self._rows:
            self._add(name)
        for total in self._sums.values():
            for at in range(0, len(total), _COLUMNS):
                end = at + _COLUMNS
                total[end:, at:end] = total[at:end, end:].T

    def _add(self, name: str) -> None:
        if not self._rows[name]:
            return
        rows = torch.cat(self._rows[name])
        self._rows[name].clear()
        exact = rows.dtype == torch.bfloat16
        rows = rows.float()
        width = rows.shape[1]
        if name not in self._sums:
            self._sums[name] = torch.zeros(width, width, device=rows.device)
        # The matrix is symmetric: until `_end`, the entries from the diagonal on suffice. (Sums in
        # bfloat16 take no longer, but leave some Hessians without a Cholesky factor.)
        with processor.bfloat16_factors() if exact else contextlib.nullcontext():
            for at in range(0, width, _COLUMNS):
                columns = rows[:, at : at + _COLUMNS]
                self._sums[name][at : at + _COLUMNS, at:].addmm_(columns.T, rows[:, at:])


class _Stopped(Exception):
    """Stop of a pass after the last required decoder layer."""


# ---- files ---------------------------------------------------------------------------------------

# A layer has four tensors: `values`, two to a byte, the even input in the low nibble; `scales` and
# `zeros` of its groups; and a `sample` of the model's weights, to recognise the model. The file's
# metadata has a CRC-32 of every tensor with its name, so that a damaged file is refused.
FILE, FORMAT = "int4.safetensors", "polyspec-int4-4"

_GROUPS = {str(group): group for group in GROUPS}  # by text in the file's metadata
# Bytes: of the header's length field; at most, of the header's text common to all layers, and of
# its text about a tensor but for the layer's name.
_LENGTH, _HEADER, _ENTRY = 8, 128, 192
_DTYPES = {"values": "U8", "scales": "BF16", "zeros": "BF16", "sample": "F32"}


@dataclass(frozen=True)
class Kept:
    """Contents of a file.

    Attributes:
        group: inputs with a common scale and zero.
        shapes, samples: by the layer's name in the model.
    """

    group: int
    shapes: dict[str, tuple[int, int]]
    samples: dict[str, Tensor]
    _parts: dict[str, tuple[Tensor, ...]]  # values, scales and zeros as in the file

    def take(self, name: str) -> Int4Weights:
        """Remove and return the weights of a layer."""
        pairs, scales, zeros = self._parts.pop(name)
        values = torch.stack([pairs & 15, pairs >> 4], -1).flatten(1)
        return Int4Weights(values, scales.float(), zeros.float())


def write_weights(
    location: Path, weights: Iterable[tuple[str, Int4Weights]], samples: Mapping[str, Tensor]
) -> None:
    """Write the weights of the layers in `samples`, at least one, all with the same group size.
    They are taken and written layer by layer: together, a byte for each value, they would be half
    the model's size (the writer of the safetensors package needs all of them at once). The file
    appears when it is complete: other processes may write or read it meanwhile."""
    # Offsets are known after the last tensor: the header is padded with spaces.
    room = _HEADER + sum(len(_DTYPES) * (_ENTRY + len(json.dumps(name))) for name in samples)
    header: dict[str, Any] = {}
    sums: dict[str, str] = {}
    begin = group = 0
    with replacing(location) as whole, whole.open("wb") as file:
        file.seek(_LENGTH + room)
        for name, matrix in weights:
            group = matrix.group
            pairs = matrix.values[:, ::2] | matrix.values[:, 1::2] << 4
            parts = pairs, matrix.scales.bfloat16(), matrix.zeros.bfloat16(), samples[name]
            for (field, kind), tensor in zip(_DTYPES.items(), parts, strict=True):
                content = tensor.contiguous().view(torch.uint8).numpy().tobytes()
                sums[f"{name}.{field}"] = _sum(f"{name}.{field}", content)
                size = file.write(content)
                header[f"{name}.{field}"] = {
                    "dtype": kind,
                    "shape": list(tensor.shape),
                    "data_offsets": [begin, begin + size],
                }
                begin += size
        every = "".join(sums[key] for key in sorted(sums))
        header["__metadata__"] = {"format": FORMAT, "group": str(group), "crc32": every}
        file.seek(0)
        file.write(room.to_bytes(_LENGTH, "little"))
        file.write(json.dumps(header).ljust(room).encode())


def _sum(name: str, content: Any) -> str:
    return f"{zlib.crc32(content, zlib.crc32(name.encode())):08x}"


def read_weights(location: Path) -> Kept:
    """Read a file of `write_weights`. ValueError: the file is damaged, has other contents, or
    numbers that are not finite; names the field."""
    try:
        with safe_open(location, "pt") as file:
            return _read(file, f"folder: {location}")
    except SafetensorError as error:
        raise ValueError(f"folder: expected a safetensors file {location}: {error}") from error
    except OSError as error:
        raise OSError(f"folder: expected a readable file {location}: {error}") from error


def _read(file: Any, name: str) -> Kept:
    about = file.metadata() or {}
    if about.get("format") != FORMAT:
        raise ValueError(f"{name}: expected the format {FORMAT}, given {about.get('format')}")
    group = _GROUPS.get(str(about.get("group")))
    if group is None:
        raise ValueError(
            f"{name}: group: expected one of {', '.join(_GROUPS)}, given {about.get('group')!r:.40}"
        )
    # Only the header, so that unsuitable tensors are not read.
    shapes: dict[str, dict[str, list[int]]] = {}
    for key in file.keys():  # noqa: SIM118
        layer, _, field = key.rpartition(".")
        kind, entry = _DTYPES.get(field), file.get_slice(key)
        if kind is None:
            raise ValueError(f"{name}: expected tensors named {', '.join(_DTYPES)}, given {key!r}")
        if entry.get_dtype() != kind:
            raise ValueError(f"{name}: {key}: expected {kind}, given {entry.get_dtype()}")
        shapes.setdefault(layer, {})[field] = entry.get_shape()
    if not shapes:
        raise ValueError(f"{name}: expected the tensors of at least 1 layer, given none")
    keys, digits = sorted(file.keys()), str(about.get("crc32"))
    if len(digits) != 8 * len(keys):
        raise ValueError(f"{name}: crc32: expected {8 * len(keys)} digits, given {len(digits)}")
    sums = {key: digits[8 * i : 8 * i + 8] for i, key in enumerate(keys)}
    stored = Kept(group, {}, {}, {})
    for layer, by_field in shapes.items():
        _require_shapes(by_field, group, f"{name}: {layer}")
        read = {field: file.get_tensor(f"{layer}.{field}") for field in _DTYPES}
        for field, tensor in read.items():
            key = f"{layer}.{field}"
            given_sum = _sum(key, tensor.view(torch.uint8).numpy().data)
            if given_sum != sums[key]:
                raise ValueError(
                    f"{name}: {key}: expected the CRC-32 {sums[key]}, given {given_sum}: the file "
                    "is damaged"
                )
        _require_finite(read, f"{name}: {layer}")
        outputs, half = by_field["values"]
        stored.shapes[layer], stored.samples[layer] = (outputs, 2 * half), read.pop("sample")
        stored._parts[layer] = tuple(read.values())
    return stored


def _require_shapes(shapes: Mapping[str, list[int]], group: int, name: str) -> None:
    missing = next((field for field in _DTYPES if field not in shapes), None)
    if missing is not None:
        raise ValueError(f"{name}.{missing}: expected a tensor of this name, given none")
    values = shapes["values"]
    if len(values) != 2 or values[0] < 1 or values[1] < 1 or 2 * values[1] % group:
        raise ValueError(
            f"{name}.values: expected shape [N, K / 2] with N >= 1 and K a multiple of {group}, "
            f"given {values}"
        )
    groups = [values[0], 2 * values[1] // group]
    for field, shape in (("scales", groups), ("zeros", groups), ("sample", [SAMPLE])):
        if shapes[field] != shape:
            raise ValueError(f"{name}.{field}: expected shape {shape}, given {shapes[field]}")


def _require_finite(read: Mapping[str, Tensor], name: str) -> None:
    """Refuse weights that are not finite: they lie between zero - 8 scale and zero + 7 scale."""
    reach = read["scales"].float() * 8
    for field, farthest in (("scales", reach), ("zeros", reach.abs() + read["zeros"].abs())):
        beyond = read[field][~torch.isfinite(farthest)]
        if beyond.numel():
            raise ValueError(
                f"{name}.{field}: expected numbers that make finite weights, given "
                f"{float(beyond[0])}"
            )
