"""Cheaper copies of models, for levels below them: 4-bit (`quantize_w4`, stored by `save_w4` and
`load_w4`), with fewer ids (`trim`), and with fewer layers (`early_exit`)."""

from __future__ import annotations

import contextlib
import hashlib
import zlib
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import arguments, progress
from ..files import cache_folder
from ..kv_cache import name_of
from ..levels import HuggingFaceLevel
from ..levels.gguf import BlockLinear, head_rows
from ..levels.hugging_face import level_of
from ..levels.models import eos_ids
from ..levels.products import TrimmedHead, is_plain, shallow, with_adapters
from .calibration import Hessians, token_ids, with_feedback
from .weights import (
    FILE,
    GROUPS,
    Int4Linear,
    Int4Weights,
    head_of,
    quantisable,
    read_weights,
    sample_of,
    weights_of,
    with_weights,
    write_weights,
)

__all__ = ["early_exit", "load_w4", "quantize_w4", "save_w4", "trim"]

# Tolerances of a weight between dtypes.
_ROUNDING, _TINY = 2**-8, 2**-24  # relative, absolute
# Minimum share of a head in the bytes that a pass of the copy reads, to quantise it by default.
_HEAD = 0.1
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
    bfloat16 (``Level(copy, shares_cache_with=model)`` shares the cache as well).

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
    layers = _layers(model, group_size, head)
    hessians: Hessians | None = None
    if calibration is not None:
        hessians = Hessians(model, layers, token_ids(model, calibration))
    with progress.bar(total=len(layers), desc="quantisation", leave=False) as bar:

        def rounded(name: str) -> Int4Weights:
            bar.update()
            weight = layers[name].weight.detach()
            if hessians is None:
                return Int4Weights.nearest(weight, group_size)
            return with_feedback(weight, hessians.of(name), group_size)

        return with_weights(model, layers, rounded)


def _layers(model: Any, group: int, head: bool | None) -> dict[str, nn.Linear]:
    """Return the layers to quantise, by name (see `quantize_w4`)."""
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
        size = weight.numel() * weight.element_size()
        if head is False or size < _HEAD * (body / 2 + size):
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
    path, rows = head_of(model), _rows(model, head, drawn)
    if path is None or rows is None:
        raise ValueError(
            f"model: expected an output head that is a linear layer, given {type(head).__name__}"
        )
    return _with(model, path, TrimmedHead(rows, drawn.to(model.device), head.out_features))


def _with(model: Any, path: str, module: nn.Module, config: Any = None) -> Any:
    """Return a copy of `model` with `module` at `path`, on the same parameters; modules above it
    get the configuration `config`, if any."""
    copied = parent = shallow(model)
    *above, last = path.split(".")
    for name in above:
        child = shallow(getattr(parent, name))
        if config is not None and hasattr(child, "config"):
            child.config = config
        setattr(parent, name, child)
        parent = child
    setattr(parent, last, module)
    return copied


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


def early_exit(target: HuggingFaceLevel | Any, layers: int) -> HuggingFaceLevel:
    """Return a draft level with the first `layers` layers of `target`, its final norm and its head
    (Zhang et al., ACL 2024; LayerSkip, Elhoushi et al., ACL 2024).

    It shares the target's weights, as they are packed, and cache: the first k layers write the same
    keys and values as the target's, and the target's next pass overwrites them with the same
    numbers. Acceptance is good for models trained for early exit, poor for others.

    Args:
        target: a level, or its model.
        layers: 1 to the target's number of layers - 1.

    Raises:
        TypeError: the target is no level of a Hugging Face model.
        ValueError: `layers` is out of range; the model's layers are not in a single list; the level
            has no cache to share (`HuggingFaceLevel`).
    """
    model = target.model if isinstance(target, HuggingFaceLevel) else target
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
        raise TypeError(
            f"target: expected a level of a Hugging Face model, given {type(target).__name__}"
        )
    shortened = _first_layers(model, layers)
    owner = target if isinstance(target, HuggingFaceLevel) else level_of(model)
    name = f"{name_of(model)}, {layers} layers"
    return HuggingFaceLevel(shortened, name=name, shares_cache_with=owner, pack=owner.pack)


def _first_layers(model: Any, layers: int) -> Any:
    """Return `model` with only its first `layers` layers, on the same parameters."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    if type(layers) is not int or not 1 <= layers < count:
        raise ValueError(f"layers: expected 1 to {count - 1}, of {count}, given {layers!r}")
    lists = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == count
    ]
    if len(lists) != 1:
        raise ValueError(
            f"target: expected a model with one list of its {count} layers, given {name_of(model)} "
            f"with {len(lists)}"
        )
    config = deepcopy(model.config)
    text = config.get_text_config(decoder=True)
    if getattr(text, "layer_types", None) is not None:
        text.layer_types = text.layer_types[:layers]
    text.num_hidden_layers = layers
    first = torch.nn.ModuleList(list(model.get_submodule(lists[0]))[:layers])
    shortened = _with(model, lists[0], first, text)
    shortened.config = config
    return shortened


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


def _most_layers(model: Any, name: str) -> tuple[int, dict[str, nn.Linear]]:
    """Return the largest group for which no fewer layers can be quantised, and these layers."""
    layers = {group: quantisable(model, group, head=True) for group in _STORED}
    group = max(_STORED, key=lambda size: (len(layers[size]), size))
    if not layers[group]:
        raise ValueError(
            f"{name}: expected linear layers whose inputs are a multiple of {_STORED[-1]}, given "
            f"{type(model).__name__} without any"
        )
    return group, layers[group]


def four_bit_head(network: nn.Module, output: nn.Module) -> Any:
    """Return a 4-bit copy of a head's network, rounded to the nearest; without `lm_head` it has a
    copy of `output`, the target's output head."""
    whole = shallow(network)
    if getattr(network, "lm_head", None) is None and is_plain(output):
        whole.lm_head = output
    group, layers = _most_layers(whole, "w4")
    return with_weights(whole, layers, lambda name: Int4Weights.nearest(layers[name].weight, group))


def trimmed_head(network: nn.Module, output: nn.Module, drawn: Tensor) -> Any:
    """Return a copy of a head's network with the rows `drawn` of its `lm_head`, or of `output`, the
    target's output head."""
    whole, lm_head = shallow(network), getattr(network, "lm_head", None)
    head = output if lm_head is None else lm_head
    whole.lm_head = _rows(network, head, drawn)
    if whole.lm_head is None:
        raise ValueError(
            f"ids: expected an output head that is a linear layer, given {type(head).__name__}"
        )
    return whole


def stored_w4(model: Any, name: str = "model") -> Any:
    """Create or load the 4-bit copy of a model, rounded to the nearest in groups of 128 inputs, or
    in the largest groups for which no fewer layers can be quantised.

    On the CPU it is stored in ``polyspec_ext/w4`` of the user's cache folder, by a digest of the
    model's shapes and weights; if nothing can be written there, every call creates it. `name` is
    the model's, for messages.
    """
    group, layers = _most_layers(model, name)
    cache = cache_folder() if model.device.type == "cpu" else None
    if cache is not None:
        digest = hashlib.sha256(str(group).encode())
        for path, layer in layers.items():
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
