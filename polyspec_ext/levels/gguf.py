"""Models of GGUF files whose linear layers multiply with the file's own blocks: the level is the
file's model, and nothing is rounded again.

Of the families of Llama, Qwen2 and Qwen3, whose modules `transformers` has. Every other file is
dequantised as a whole (`sources`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..ops import blocks, decoder
from ..ops.decoder import Matrix
from . import huge_pages
from .gguf_file import GgufFile, GgufTensor
from .quantized import QuantizedLinear
from .replacement import is_plain, replaced

_FAMILIES = ("llama", "qwen2", "qwen3")
_HEAD, _EMBEDDINGS = "output.weight", "token_embd.weight"
_FACTORS = "rope_freqs.weight"  # of each frequency, in files of Llama 3.1 and later
# What a configuration of transformers calls the header's values; {} is the family.
_CONFIG = {
    "{}.context_length": "max_position_embeddings",
    "{}.block_count": "num_hidden_layers",
    "{}.embedding_length": "hidden_size",
    "{}.feed_forward_length": "intermediate_size",
    "{}.attention.head_count": "num_attention_heads",
    "{}.attention.head_count_kv": "num_key_value_heads",
    "{}.attention.key_length": "head_dim",
    "{}.attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "{}.rope.freq_base": "rope_theta",
    "tokenizer.ggml.bos_token_id": "bos_token_id",
    "tokenizer.ggml.eos_token_id": "eos_token_id",
    "tokenizer.ggml.padding_token_id": "pad_token_id",
}


class BlockLinear(QuantizedLinear):
    """``x W^T + b`` with the blocks of a GGUF file, ``[.., in]`` to ``[.., out]``, in the dtype of
    `x`.

    Args:
        parts: one below the other: blocks ``[outputs, bytes of a row]`` uint8 and their type
            (`ops.blocks`). Those of one type become one product.
    """

    def __init__(
        self,
        parts: Sequence[tuple[torch.Tensor, int]],
        inputs: int,
        bias: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.in_features = inputs
        self.out_features = sum(len(rows) for rows, _ in parts)
        self.register_buffer("bias", bias)
        self._forms = []  # outputs and type of each product
        for i, (kind, same) in enumerate(itertools.groupby(parts, lambda part: part[1])):
            each = [rows for rows, _ in same]
            whole = each[0] if len(each) == 1 else torch.cat(each)
            packed = blocks.pack(whole, inputs, kind)
            self.register_buffer(f"packed{i}", huge_pages.kept(packed))
            self._forms.append((len(whole), kind))

    def product(self, x: torch.Tensor) -> torch.Tensor:
        made = [
            blocks.product(x, getattr(self, f"packed{i}"), outputs, kind)
            for i, (outputs, kind) in enumerate(self._forms)
        ]
        return made[0] if len(made) == 1 else torch.cat(made, 1)

    def matrices(self) -> Sequence[Matrix]:
        return [
            Matrix(decoder.BLOCKS, outputs, self.in_features, getattr(self, f"packed{i}"), kind)
            for i, (outputs, kind) in enumerate(self._forms)
        ]


def block_model(path: str | Path, dtype: torch.dtype) -> Any:
    """The causal language model of a GGUF file on the CPU, in eval mode.

    Linear layers and the head whose type is of `ops.blocks.BLOCK_INPUTS` multiply as they lie;
    embeddings, norms and what has another type are dequantised.

    Args:
        dtype: of activations, and of what is dequantised.

    Returns:
        The model; where it must be dequantised as a whole, a sentence that says why.

    Raises:
        OSError, ValueError: no whole GGUF file, or one with rotations that are not known here.
        ImportError: the package gguf is missing.
    """
    file = GgufFile(path)
    family = file.metadata.get("general.architecture")
    if family not in _FAMILIES:
        return f"architecture {family}"
    if _EMBEDDINGS not in file.tensors:  # an adapter, or a part of a model
        raise ValueError(f"expected a tensor {_EMBEDDINGS} in the file, given none")
    if not any(tensor.type in blocks.BLOCK_INPUTS for tensor in file.tensors.values()):
        return "no tensor in blocks"
    skeleton = _skeleton(file, family, dtype)
    named = _Named(file, family, skeleton.config)
    read = {_FACTORS, *(named.source(name) for name, _ in skeleton.named_parameters())}
    unread = file.tensors.keys() - read
    if unread:
        return f"tensors that {type(skeleton).__name__} has no place for: {min(unread)}"
    made = _with_blocks(skeleton, named)
    _fill(made, named, dtype)
    scale_rotations(made, file)
    made.name_or_path = str(path)
    return made


def scale_rotations(model: Any, file: GgufFile) -> None:
    """Has the rotations of a model that was made of `file` follow it, where transformers does not
    read what the file says of them. Scalings in the header are refused: a model that left them out
    would be another one.

    Args:
        model: of transformers, with tables of frequencies for its base and width alone.

    Raises:
        ValueError: the header asks for a scaling that is not known here, or has factors of another
            number than the model has frequencies; names what was expected and what came.
    """
    key = f"{file.metadata.get('general.architecture')}.rope.scaling.type"
    kind = file.metadata.get(key, "none")
    if kind != "none":
        raise ValueError(f"expected a file without {key}, given {kind}")
    tensor = file.tensors.get(_FACTORS)
    if tensor is None:
        return
    factors = tensor.dequantised()
    for module in model.modules():
        for name in ("inv_freq", "original_inv_freq"):
            frequencies = getattr(module, name, None)
            if not isinstance(frequencies, torch.Tensor):
                continue
            if frequencies.shape != factors.shape:
                raise ValueError(
                    f"{_FACTORS}: expected shape {list(frequencies.shape)}, as the model has "
                    f"frequencies, given {list(factors.shape)}"
                )
            setattr(module, name, frequencies / factors.to(frequencies))


def head_rows(path: str | Path, rows: torch.Tensor) -> BlockLinear:
    """The rows `rows`, ``[N]`` int64, of the output head of a file whose head is in blocks."""
    tensors = GgufFile(path).tensors
    tensor = tensors.get(_HEAD) or tensors[_EMBEDDINGS]
    return BlockLinear([(tensor.blocks()[rows], tensor.type)], tensor.shape[1])


class _Named:
    """Tensors of a file by the names that they have in the model."""

    def __init__(self, file: GgufFile, family: str, config: Any) -> None:
        import gguf

        kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
        self._map = gguf.get_tensor_name_map(kinds[family], config.num_hidden_layers)
        self._tensors = file.tensors
        # llama.cpp rotates neighbours, transformers feature i of a head with i + width / 2.
        heads = (config.num_attention_heads, config.num_key_value_heads)
        names = ("q_proj", "k_proj")
        self._turned = dict(zip(names, heads, strict=True)) if family == "llama" else {}

    def source(self, name: str) -> str:
        """The file's name of a parameter."""
        found = self._map.get_name(name, try_suffixes=(".weight", ".bias"))
        return _EMBEDDINGS if found == _HEAD and _HEAD not in self._tensors else str(found)

    def tensor(self, name: str) -> GgufTensor:
        """Of a parameter, which the file must have."""
        found = self._tensors.get(self.source(name))
        if found is None:
            raise ValueError(f"expected a tensor {self.source(name)} in the file, given none")
        return found

    def rows(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Rows of a parameter in the model's order."""
        heads = next((count for part, count in self._turned.items() if f".{part}." in name), None)
        if heads is None:
            return rows
        made: torch.Tensor = rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        return made.contiguous()


def _skeleton(file: GgufFile, family: str, dtype: torch.dtype) -> Any:
    """The model without its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {
        name: file.metadata[key]
        for form, name in _CONFIG.items()
        if (key := form.format(family)) in file.metadata
    }
    config = AutoConfig.for_model(
        family,
        vocab_size=file.tensors[_EMBEDDINGS].shape[0],
        tie_word_embeddings=_HEAD not in file.tensors,
        dtype=dtype,
        **values,
    )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def _with_blocks(skeleton: Any, named: _Named) -> Any:
    """A copy in which the linear layers that can multiply with blocks do."""
    known: dict[int, str] = {}
    for name, module in skeleton.named_modules():
        if is_plain(module):
            tensor = named.tensor(f"{name}.weight")
            size = blocks.BLOCK_INPUTS.get(tensor.type)
            if size is not None and module.in_features % size == 0:
                known[id(module)] = name

    def make(siblings: Sequence[nn.Linear]) -> nn.Module:
        names = [known[id(layer)] for layer in siblings]
        weights = [f"{name}.weight" for name in names]
        parts = [
            (named.rows(weight, tensor.blocks()), tensor.type)
            for weight, tensor in ((weight, named.tensor(weight)) for weight in weights)
        ]
        bias, dtype = None, siblings[0].weight.dtype
        if siblings[0].bias is not None:
            bias = torch.cat([_dequantised(named, f"{name}.bias", dtype) for name in names])
        return BlockLinear(parts, siblings[0].in_features, bias)

    return replaced(skeleton, lambda module: id(module) in known, make)


def _dequantised(named: _Named, name: str, dtype: torch.dtype) -> torch.Tensor:
    return named.rows(name, named.tensor(name).dequantised()).to(dtype)


def _fill(made: Any, named: _Named, dtype: torch.dtype) -> None:
    """All that is still without a value."""
    values: dict[str, nn.Parameter] = {}  # by the file's name: tied ones are one

    def value(name: str) -> nn.Parameter:
        source = named.source(name)
        if source not in values:
            tensor = _dequantised(named, name, dtype)
            values[source] = nn.Parameter(tensor, requires_grad=False)
        return values[source]

    for path, module in made.named_modules():
        for name, _ in list(module.named_parameters(recurse=False)):
            setattr(module, name, value(f"{path}.{name}"))
        for name, child in list(module.named_children()):
            # Tables of angles, which the configuration alone tells.
            if any(own.is_meta for own in child.buffers(recurse=False)):
                remade: Callable[..., nn.Module] = type(child)
                setattr(module, name, remade(config=made.config))
