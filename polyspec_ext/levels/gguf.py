"""Models of GGUF files: every tensor of the file is used, and every weight comes from the file.

Linear layers multiply with the file's own blocks, so that nothing is rounded again, or with their
dequantised weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import progress
from ..ops import blocks, decoder
from ..ops.decoder import Matrix
from . import huge_pages
from .gguf_file import GgufFile, GgufTensor
from .gguf_header import EMBEDDINGS, FAMILIES, HEAD, config_of
from .quantized import QuantizedLinear
from .replacement import is_plain, replaced

_FACTORS = "rope_freqs.weight"  # of each frequency, in files of Llama 3.1 and later


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


def has_blocks(file: GgufFile) -> bool:
    """Return whether a tensor is of a type of `ops.blocks.BLOCK_INPUTS`."""
    return any(tensor.type in blocks.BLOCK_INPUTS for tensor in file.tensors.values())


def gguf_model(file: GgufFile, dtype: torch.dtype, as_blocks: bool = True) -> Any:
    """Return the causal language model of a file on the CPU, in eval mode.

    Args:
        dtype: of activations, and of what is dequantised.
        as_blocks: linear layers and the head whose type is of `ops.blocks.BLOCK_INPUTS` multiply as
            they lie; embeddings, norms and what has another type are dequantised. False: so is all.

    Raises:
        ValueError: another architecture, a value of the header that is missing or would not be
            followed, or a tensor that is missing, unknown or of another shape; names it.
    """
    from transformers import AutoModelForCausalLM

    config = config_of(file, dtype)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    named = _Named(file, config)
    named.require_all(skeleton)
    total = sum(tensor.size for tensor in file.tensors.values())
    with progress.bar(
        total=total, desc=file.path.name, unit="B", unit_scale=True, leave=False
    ) as bar:
        named.read = bar.update
        made = _with_blocks(skeleton, named) if as_blocks else skeleton
        _fill(made, named)
    made.name_or_path = str(file.path)
    return made


def head_rows(path: str | Path, rows: torch.Tensor) -> BlockLinear:
    """The rows `rows`, ``[N]`` int64, of the output head of a file whose head is in blocks."""
    tensors = GgufFile(path).tensors
    tensor = tensors.get(HEAD) or tensors[EMBEDDINGS]
    return BlockLinear([(tensor.blocks()[rows], tensor.type)], tensor.shape[1])


class _Named:
    """Tensors of a file by the names that they have in the model.

    Attributes:
        read: is called with the bytes of every tensor that is read.
    """

    read: Callable[[int], object]

    def __init__(self, file: GgufFile, config: Any) -> None:
        import gguf

        self._family = next(name for name, kind in FAMILIES.items() if kind == config.model_type)
        kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
        self._map = gguf.get_tensor_name_map(kinds[self._family], config.num_hidden_layers)
        self._file, self._tensors = file, file.tensors
        # llama.cpp rotates neighbours, transformers feature i of a head with i + width / 2.
        heads = (config.num_attention_heads, config.num_key_value_heads)
        names = ("q_proj", "k_proj")
        self._turned = dict(zip(names, heads, strict=True)) if self._family == "llama" else {}
        self._frequencies = (config.head_dim // 2,)

    def source(self, name: str) -> str:
        """The file's name of a parameter."""
        if name == "lm_head.weight":
            return HEAD if HEAD in self._tensors else EMBEDDINGS
        found = self._map.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise ValueError(f"expected a model of {self._family} without {name}, given one")
        return str(found)

    def require_all(self, skeleton: nn.Module) -> None:
        """Refuse a file whose tensors are not those of the model, in names and shapes. A bias that
        it does not have is 0."""
        wanted = {self.source(name): p.shape for name, p in skeleton.named_parameters()}
        if self._family == "llama" and _FACTORS in self._tensors:
            wanted[_FACTORS] = torch.Size(self._frequencies)
        for name, shape in wanted.items():
            tensor = self._tensors.get(name)
            if tensor is None and not name.endswith(".bias"):
                raise ValueError(f"expected a tensor {name} in {self._file.path}, given none")
            if tensor is not None and tensor.shape != shape:
                raise ValueError(
                    f"{self._file.path}: {name}: expected shape {list(shape)}, given "
                    f"{list(tensor.shape)}"
                )
        unread = self._tensors.keys() - wanted.keys()
        if unread:
            name = min(unread)
            raise ValueError(
                f"{self._file.path}: expected no tensor {name} in a model of {self._family}, given "
                f"shape {list(self._tensors[name].shape)}"
            )

    def kind(self, name: str) -> int:
        return self._tensors[self.source(name)].type

    def tensor(self, name: str) -> GgufTensor:
        """The tensor of a parameter."""
        found = self._tensors[self.source(name)]
        self.read(found.size)
        return found

    def rows(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Rows of a parameter in the model's order."""
        heads = next((count for part, count in self._turned.items() if f".{part}." in name), None)
        if heads is None:
            return rows
        made: torch.Tensor = rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        return made.contiguous()

    def dequantised(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """A parameter, in the shape and dtype of `like`."""
        if name.endswith(".bias") and self.source(name) not in self._tensors:
            return torch.zeros(like.shape, dtype=like.dtype)
        numbers = self.rows(name, self.tensor(name).dequantised())
        # Gemma multiplies with 1 + weight.
        if self._family.startswith("gemma") and name.endswith("norm.weight"):
            numbers -= 1
        return numbers.to(like.dtype)

    def factors(self) -> torch.Tensor | None:
        """Divisors of the rotations' frequencies, ``[width / 2]``; None: there are none."""
        found = self._tensors.get(_FACTORS)
        return None if found is None else found.dequantised()


def _with_blocks(skeleton: Any, named: _Named) -> Any:
    """A copy in which the linear layers that can multiply with blocks do."""
    known: dict[int, str] = {}
    for name, module in skeleton.named_modules():
        if is_plain(module):
            size = blocks.BLOCK_INPUTS.get(named.kind(f"{name}.weight"))
            if size is not None and module.in_features % size == 0:
                known[id(module)] = name

    def make(siblings: Sequence[nn.Linear]) -> nn.Module:
        names = [known[id(layer)] for layer in siblings]
        weights = [f"{name}.weight" for name in names]
        parts = [
            (named.rows(weight, tensor.blocks()), tensor.type)
            for weight, tensor in ((weight, named.tensor(weight)) for weight in weights)
        ]
        bias = None
        if siblings[0].bias is not None:
            own = zip(names, siblings, strict=True)
            bias = torch.cat([named.dequantised(f"{name}.bias", s.bias) for name, s in own])
        return BlockLinear(parts, siblings[0].in_features, bias)

    return replaced(skeleton, lambda module: id(module) in known, make)


def _fill(made: Any, named: _Named) -> None:
    """All that is still without a value."""
    values: dict[str, nn.Parameter] = {}  # by the file's name: tied ones are one

    def value(name: str, like: torch.Tensor) -> nn.Parameter:
        source = named.source(name)
        if source not in values:
            values[source] = nn.Parameter(named.dequantised(name, like), requires_grad=False)
        return values[source]

    factors = named.factors()
    for path, module in made.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, value(f"{path}.{name}", parameter))
        for name, child in list(module.named_children()):
            if getattr(child, "embed_scale", None) is not None:
                child.embed_scale = torch.tensor(child.scalar_embed_scale)
            # Tables of angles, which the configuration alone tells.
            elif any(own.is_meta for own in child.buffers(recurse=False)):
                remade: Any = type(child)(config=made.config)
                if factors is not None:
                    for table in ("inv_freq", "original_inv_freq"):
                        setattr(remade, table, getattr(remade, table) / factors)
                setattr(module, name, remade)
