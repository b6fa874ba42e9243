"""Read GGUF files, and map headers to configurations of transformers and tensors to models. A model
uses every tensor of its file and takes every weight from the file.

Linear layers multiply with the file's blocks, so that nothing is rounded again, or with their
dequantised weights. Header values that are not read here are refused by name, because a model that
ignored them would be a different model.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import mmap
import pickle
import re
import struct
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.library import register_fake

from .. import progress
from ..arguments import shown
from ..ops import decoder
from ..ops.decoder import LABEL_BYTES, Matrix
from .models import GGUF_MAGIC
from .products import QuantizedLinear, huge_pages, is_plain, replaced

# ---- files ---------------------------------------------------------------------------------------

# Header value types: number to `struct` format. 8 is a string, 9 an array.
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_AT_ONCE = 1 << 20  # weights of a range, so that temporaries fit a CPU cache
_AROUND = 1 << 16  # bytes, Linux's fault_around_bytes
# Files of a model that was split, NAME-00001-of-00003.gguf.
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)


@dataclass(frozen=True)
class GgufTensor:
    """A tensor in a GGUF file."""

    type: int  # data type, a number of ``gguf.GGMLQuantizationType``
    shape: tuple[int, ...]  # torch's order: outputs, then inputs
    size: int  # bytes
    _file: mmap.mmap
    _offset: int

    def ranges(self) -> Iterator[Tensor]:
        """Map the bytes by ranges of rows, ``[rows, bytes per row]`` uint8, each but the last with
        a multiple of 16 rows. The memory of a range is free again at the next."""
        rows = prod(self.shape[:-1])
        width = self.size // rows
        step = max(16, _AT_ONCE // self.shape[-1] // 16 * 16) * width
        for begin in range(self._offset, self._offset + self.size, step):
            count = min(step, self._offset + self.size - begin)
            read = torch.frombuffer(self._file, dtype=torch.uint8, count=count, offset=begin)
            yield read.view(-1, width)
            # A fault maps the pages around as well.
            page = max(0, begin - _AROUND) // mmap.PAGESIZE * mmap.PAGESIZE
            end = min(len(self._file), begin + count + _AROUND)
            self._file.madvise(mmap.MADV_DONTNEED, page, end - page)

    def blocks(self) -> Tensor:
        """Return a copy of the bytes, ``[rows, bytes per row]`` uint8."""
        return torch.cat([rows.clone() for rows in self.ranges()])

    def dequantised(self) -> Tensor:
        """Return the tensor dequantised to float32."""
        import gguf

        kind = gguf.GGMLQuantizationType(self.type)
        unit = {
            gguf.GGMLQuantizationType.F32: np.float32,
            gguf.GGMLQuantizationType.F16: np.float16,
        }
        values, begin = torch.empty(prod(self.shape[:-1]), self.shape[-1]), 0
        for read in self.ranges():
            rows = read.numpy().view(unit.get(kind, np.uint8))
            values[begin : begin + len(rows)] = torch.from_numpy(gguf.dequantize(rows, kind))
            begin += len(rows)
        return values.view(self.shape)


class GgufFile:
    """A model's GGUF file with its header, or all files of a split model; tensors are read on
    demand. Any file of a split model names all of them.

    Attributes:
        metadata: values of the (first) header by key. Arrays of numbers are numpy arrays, arrays of
            strings lists of bytes.

    Raises:
        OSError: a file cannot be read.
        ValueError: not a GGUF file, a truncated or inconsistent file, or a file of a split model
            without the other files.
    """

    def __init__(self, path: str | Path) -> None:
        paths = _files_of(Path(path))
        files = [_OneFile(shard) for shard in paths]
        self.path, self.metadata = paths[0], files[0].metadata
        self.tensors: dict[str, GgufTensor] = {}
        for number, file in enumerate(files):
            # split.count is 0 in files that were merged again.
            split = file.metadata.get("split.no", 0), file.metadata.get("split.count", 1) or 1
            if split != (number, len(files)):
                raise ValueError(
                    f"{file.path}: expected part {number + 1} of {len(files)}, as files of a split "
                    f"model are named (NAME-00001-of-0000N.gguf), given split.no {split[0]} and "
                    f"split.count {split[1]}"
                )
            twice = self.tensors.keys() & file.tensors.keys()
            if twice:
                raise ValueError(f"{file.path}: expected {min(twice)} in one file, given in two")
            self.tensors |= file.tensors
        count = self.metadata.get("split.tensors.count", len(self.tensors))
        if count != len(self.tensors):
            raise ValueError(
                f"{self.path}: expected {count} tensors, as split.tensors.count says, given "
                f"{len(self.tensors)}"
            )


def first_part(path: Path) -> Path:
    """Return the file with a model's header: `path`, or the first file of a split model."""
    match = _SPLIT.fullmatch(path.name)
    return path.with_name("{}-00001-of-{}{}".format(*match.group(1, 3, 4))) if match else path


def _files_of(path: Path) -> list[Path]:
    match = _SPLIT.fullmatch(path.name)
    if match is None:
        return [path]
    name, _, count, end = match.groups()
    paths = [path.with_name(f"{name}-{i:05d}-of-{count}{end}") for i in range(1, int(count) + 1)]
    missing = next((file for file in paths if not file.is_file()), None)
    if missing is not None:
        raise ValueError(f"expected all {int(count)} files of a split model, given no {missing}")
    return paths


@functools.cache
def _block_of(kind: int) -> tuple[int, int]:
    import gguf

    try:
        type_ = gguf.GGMLQuantizationType(kind)
        inputs, size = gguf.GGML_QUANT_SIZES[type_]
        if type_ not in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16):
            gguf.dequantize(np.zeros((1, size), np.uint8), type_)
    except (KeyError, ValueError, NotImplementedError) as error:
        raise ValueError(f"expected a type of weights, given type {kind}") from error
    return inputs, size


class _OneFile:
    """A GGUF file, with checked offsets, sizes and types."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            # A private mapping, which torch can read without a copy.
            self._file = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._at = len(GGUF_MAGIC)
        try:
            if self._file[: self._at] != GGUF_MAGIC:
                raise ValueError(f"expected a GGUF file, given {path}, which begins otherwise")
            version, tensors, values = self._take("IQQ")
            if version not in (2, 3):
                raise ValueError(f"{path}: expected version 2 or 3 of GGUF, given {version}")
            self.metadata: dict[str, Any] = {}
            for _ in range(values):
                key = self._string().decode()
                if key in self.metadata:
                    raise ValueError(f"{path}: {key}: expected one value, given two")
                self.metadata[key] = self._value(self._take("I")[0])
            self.tensors = self._tensors(tensors)
        except (struct.error, UnicodeDecodeError) as error:
            raise ValueError(f"expected a whole GGUF file, given {path}: {error}") from error
        except KeyError as error:
            raise ValueError(
                f"{path}: expected values of known types, given type {error}"
            ) from error

    def _skip(self, size: int) -> bytes:
        begin, self._at = self._at, self._at + size
        if self._at > len(self._file):
            raise struct.error(f"its header goes on after its {len(self._file)} bytes")
        return self._file[begin : self._at]

    def _take(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{form}", self._skip(struct.calcsize(f"<{form}")))

    def _string(self) -> bytes:
        return self._skip(self._take("Q")[0])

    def _strings(self, count: int) -> list[bytes]:
        # Inlined: vocabularies and merges are hundreds of thousands.
        file, at, strings, length = self._file, self._at, list[bytes](), struct.Struct("<Q")
        for _ in range(count):
            begin = at + length.size
            at = begin + length.unpack_from(file, at)[0]
            if at > len(file):
                break
            strings.append(file[begin:at])
        self._at = at
        self._skip(0)  # raises if a string is cut off
        return strings

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string().decode()
        if kind != _ARRAY:
            return self._take(_SCALARS[kind])[0]
        element, count = self._take("IQ")
        if element == _STRING:
            return self._strings(count)
        form = f"<{_SCALARS[element]}"
        return np.frombuffer(self._skip(count * struct.calcsize(form)), form)

    def _tensors(self, count: int) -> dict[str, GgufTensor]:
        step = self.metadata.get("general.alignment", 32)  # bytes
        if type(step) is not int or step < 1 or step & (step - 1):
            raise ValueError(
                f"{self.path}: general.alignment: expected a power of two, given {step}"
            )
        entries = []
        for _ in range(count):
            name, (axes,) = self._string().decode(), self._take("I")
            if not 1 <= axes <= 4:
                raise ValueError(f"{self.path}: {name}: expected 1 to 4 axes, given {axes}")
            entries.append((name, self._take(f"{axes}Q"), *self._take("IQ")))
        begin, expected = -(-self._at // step) * step, 0
        tensors: dict[str, GgufTensor] = {}
        for name, sizes, kind, offset in entries:
            size = self._size(name, kind, sizes)
            if offset != expected or name in tensors:
                raise ValueError(
                    f"{self.path}: {name}: expected one tensor of this name, at {expected}, behind "
                    f"the one before, given offset {offset}"
                )
            at = begin + offset
            if at + size > len(self._file):
                raise ValueError(
                    f"expected a whole GGUF file, given {self.path} of {len(self._file)} bytes, "
                    f"where {name} ends at {at + size}"
                )
            tensors[name] = GgufTensor(kind, sizes[::-1], size, self._file, at)
            expected = -(-(offset + size) // step) * step
        return tensors

    def _size(self, name: str, kind: int, sizes: tuple[int, ...]) -> int:
        try:
            inputs, size = _block_of(kind)
        except ValueError as error:
            raise ValueError(f"{self.path}: {name}: {error}") from error
        if 0 in sizes or sizes[0] % inputs:
            raise ValueError(
                f"{self.path}: {name}: expected sizes >= 1 and a multiple of {inputs} inputs, "
                f"given {list(sizes[::-1])}"
            )
        return prod(sizes) // inputs * size


# ---- headers -------------------------------------------------------------------------------------

# GGUF architectures, and their model types in transformers.
_NAMES = ("gemma", "gemma2", "gemma3", "llama", "qwen2", "qwen3")
FAMILIES = {name: "gemma3_text" if name == "gemma3" else name for name in _NAMES}
HEAD, EMBEDDINGS = "output.weight", "token_embd.weight"
_CONTROL = 3  # type of control tokens
# Control tokens that end a turn or a text, even without their ids in the header.
_ENDS = (
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>",
    "<end_of_turn>", "<end_of_utterance>", "<EOT>", "[EOT]",
)  # fmt: skip
_LAYERS_27B = {"gemma2": 46, "gemma3": 62}  # with queries scaled by hidden size / heads


def config_of(file: GgufFile, dtype: torch.dtype) -> Any:
    """Return the configuration of a file's model. Sizes come from the file's tensors, so that the
    model is no larger than the file."""
    from transformers import AutoConfig

    header = _Header(file)
    family = header.family
    heads = header.size("attention.head_count")
    rows, hidden = file.tensors[EMBEDDINGS].shape
    header.require("embedding_length", hidden, there=True)
    width = header.size("attention.key_length", max(1, hidden // heads))
    groups = header.size("attention.head_count_kv", heads)
    if heads % groups or width % 2:
        raise ValueError(
            f"{family}.attention: expected a number of heads that is a multiple of head_count_kv, "
            f"of an even width, given {heads}, {groups} and width {width}"
        )
    layers = header.integer("block_count")
    numbers = {name.split(".")[1] for name in file.tensors if name.startswith("blk.")}
    if numbers != {str(i) for i in range(min(layers, len(numbers) + 1))}:
        raise ValueError(
            f"{family}.block_count: expected the number of layers that have tensors, "
            f"{len(numbers)}, given {layers}"
        )
    values: dict[str, Any] = {
        "max_position_embeddings": header.integer("context_length"),
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": header.size("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": width,
        "rms_norm_eps": header.positive("attention.layer_norm_rms_epsilon"),
        "rope_parameters": header.rope(),
        "tie_word_embeddings": HEAD not in file.tensors,
        "bos_token_id": header.token("bos"),
        "pad_token_id": header.token("padding"),
        "eos_token_id": header.ends(),
    }
    for key, expected in (
        ("attention.value_length", width),
        ("rope.dimension_count", width),
        ("vocab_size", rows),
        ("attention.causal", True),
        ("expert_count", 0),
        ("expert_used_count", 0),
        ("nextn_predict_layers", 0),
        ("tensor_data_layout", "Meta AI original pth"),
    ):
        header.require(key, expected)
    if family == "llama":
        biases = [name for name in file.tensors if name.endswith(".bias")]
        values["attention_bias"] = any(".attn_" in name for name in biases)
        values["mlp_bias"] = any(".ffn_" in name for name in biases)
    elif family in _LAYERS_27B:
        values |= header.gemma(layers, hidden // heads if layers == _LAYERS_27B[family] else width)
    if header.unread:
        key = min(header.unread)
        raise ValueError(f"expected a file without {key}, given {shown(file.metadata[key])}")
    return AutoConfig.for_model(FAMILIES[family], vocab_size=rows, dtype=dtype, **values)


class _Header:
    """Values of a header; `unread` has the keys of the architecture that are still to be read."""

    def __init__(self, file: GgufFile) -> None:
        about = file.metadata
        kind = about.get("general.type", "model")
        self.family: str = about.get("general.architecture", "")
        if kind != "model":
            raise ValueError(f"general.type: expected a model, given {shown(kind)}")
        if self.family not in FAMILIES:
            raise ValueError(
                f"general.architecture: expected one of {', '.join(FAMILIES)}, given "
                f"{shown(self.family)}"
            )
        embeddings = file.tensors.get(EMBEDDINGS)
        if embeddings is None or len(embeddings.shape) != 2:
            raise ValueError(f"expected a matrix {EMBEDDINGS} in the file, given none")
        self._values, self._prefix = about, f"{self.family}."
        self.unread = {key for key in about if key.startswith(self._prefix)}
        self._largest = max(size for tensor in file.tensors.values() for size in tensor.shape)
        self._ids = embeddings.shape[0]

    def _of(self, key: str, default: Any = None) -> Any:
        """Return a value, or `default`. An array with equal values for all layers gives that
        value."""
        self.unread.discard(self._prefix + key)
        value, layers = (self._values.get(self._prefix + name) for name in (key, "block_count"))
        if isinstance(value, np.ndarray):
            value = value.tolist()
            if type(layers) is int and len(value) == layers and len({*value}) == 1:
                value = value[0]
        return default if value is None else value

    def _error(self, key: str, expected: object, value: object) -> ValueError:
        return ValueError(f"{self._prefix}{key}: expected {expected}, given {shown(value)}")

    def integer(self, key: str, default: int | None = None, largest: int = 2**31 - 1) -> int:
        value = self._of(key, default)
        if type(value) is not int or not 1 <= value <= largest:
            raise self._error(key, f"an integer in [1, {largest}]", value)
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """Return an integer that is at most the largest dimension of any tensor."""
        return self.integer(key, default, self._largest)

    def positive(self, key: str, default: float | None = None) -> float:
        value = self._of(key, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self._error(key, "a number > 0", value)
        return float(value)

    def require(self, key: str, expected: object, there: bool = False) -> None:
        """Refuse a value other than `expected`, and with `there` a missing value."""
        value = self._of(key)
        if (there or value is not None) and (type(value), value) != (type(expected), expected):
            raise self._error(key, expected, value)

    def rope(self) -> dict[str, Any]:
        """Return the `rope_parameters` of transformers. Without a type, scaling is linear."""
        kind = self._of("rope.scaling.type", "linear")
        if kind not in ("linear", "none"):
            raise self._error("rope.scaling.type", "linear", kind)
        self.require("rope.scaling.attn_factor", 1.0)
        self._of("rope.scaling.finetuned")  # no effect
        factor = self._of("rope.scaling.factor", self._of("rope.scale_linear"))
        parameters: dict[str, Any] = {
            "rope_type": "default",
            "rope_theta": self.positive("rope.freq_base", 10000.0),
        }
        if factor is not None and (type(factor) is not float or not 0 <= factor < math.inf):
            raise self._error("rope.scaling.factor", "a number >= 0", factor)
        if kind == "linear" and factor not in (None, 0.0, 1.0):  # 0: no scaling
            parameters |= {"rope_type": "linear", "factor": factor}
        return parameters

    def gemma(self, layers: int, scale: int) -> dict[str, Any]:
        """Return the additional configuration values of Gemma 2 and 3."""
        rope = self.rope()
        if self.family == "gemma2":
            self.require("attention.sliding_window_pattern", 2)
            self.require("rope.freq_base_swa", rope["rope_theta"])
            return {
                "query_pre_attn_scalar": scale,
                "sliding_window": self.integer("attention.sliding_window", 4096),
                "attn_logit_softcapping": self.positive("attn_logit_softcapping", 50.0),
                "final_logit_softcapping": self.positive("final_logit_softcapping", 30.0),
            }
        self.require("attention.sliding_window_pattern", 6)
        cap, window = self._of("final_logit_softcapping"), self._of("attention.sliding_window")
        local = self.positive("rope.freq_base_swa", 10000.0)
        values = {
            "query_pre_attn_scalar": scale,
            "final_logit_softcapping": self.positive("final_logit_softcapping") if cap else None,
            "rope_parameters": {
                "full_attention": rope,
                "sliding_attention": {"rope_type": "default", "rope_theta": local},
            },
        }
        if window:
            return values | {"sliding_window": self.integer("attention.sliding_window")}
        return values | {"layer_types": ["full_attention"] * layers}

    def token(self, name: str) -> int | None:
        return _special(self._values, name, self._ids)

    def ends(self) -> list[int] | None:
        """Return the ids that end a text, a turn or a message."""
        ids = {self.token(name) for name in ("eos", "eot", "eom")} - {None}
        tokens = self._values.get("tokenizer.ggml.tokens")
        kinds = self._values.get("tokenizer.ggml.token_type")
        if isinstance(tokens, list) and isinstance(kinds, np.ndarray):
            end_texts = {text.encode() for text in _ENDS}
            ids |= {
                i
                for i, (text, kind) in enumerate(zip(tokens, kinds.tolist(), strict=False))
                if kind == _CONTROL and text in end_texts and i < self._ids
            }
        return sorted(i for i in ids if i is not None) or None


def _special(about: dict[str, Any], name: str, count: int) -> int | None:
    # The id of a special token; None: not in the vocabulary of `count` tokens.
    defaults = {"bos": 1, "eos": 2, "unknown": 0}
    default = defaults.get(name) if about.get("tokenizer.ggml.model") == "llama" else None
    number = about.get(f"tokenizer.ggml.{name}_token_id", default)
    return number if type(number) is int and 0 <= number < count else None


# ---- products with blocks ------------------------------------------------------------------------

# Operators on the CPU (polyspec/blocks.hpp). A wrong shape, dtype or type is a RuntimeError that
# names it. Types have the numbers of GGUF files, as in ``gguf.GGMLQuantizationType``.

BLOCK_INPUTS = {2: 32, 3: 32, 6: 32, 7: 32, 8: 32, 12: 256, 13: 256, 14: 256}
"""Inputs of a block, by type: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K."""

# Bytes of a packed block of 16 outputs, by type.
_PACKED_BYTES = {2: 320, 3: 320, 6: 448, 7: 448, 8: 576, 12: 2368, 13: 3392, 14: 3392}

pack_blocks: Callable[[Tensor, Tensor, int, int, int, int], None]
pack_blocks = torch.ops.polyspec.block_pack.default
"""Pack rows of a matrix as `block_product` reads it; no weight changes.

Args:
    packed: [packed_bytes] uint8, written; the layout is that of polyspec/blocks.hpp.
    blocks: [rows, bytes of a row] uint8, contiguous, as they are in the file. A multiple of 16
        rows, or the last rows.
    first: output of the first row, a multiple of 16.
    outputs, inputs: of the matrix; whole blocks of inputs.
    type: of `BLOCK_INPUTS`.
"""

block_rows: Callable[[Tensor, Tensor, int, int, int], Tensor]
block_rows = torch.ops.polyspec.block_rows.default
"""Return weights of some outputs, [N, inputs] float32, as they are dequantised from the file.

Args:
    packed: of `pack_blocks`, for weights [outputs, inputs] of this type.
    rows: [N] int64, contiguous, 0 to outputs - 1.
"""

block_product: Callable[[Tensor, Tensor, int, int], Tensor]
block_product = torch.ops.polyspec.block_product.default
"""Return ``x W^T``, [M, outputs] in the dtype of `x`.

Weights are read once for up to 16 tokens. Activations are rounded to 8 bits, by token and group of
32 inputs (Q6_K: 16); polyspec/blocks.hpp has the bound. Row m is the same, bit for bit, whatever M,
the processor and the number of threads are; where x[m] is not finite it is NaN.

Args:
    x: [M, K] float32, bfloat16 or float16, unit stride along K.
    packed: of `pack_blocks`, for weights [outputs, K] of this type.
    outputs, type: of these weights.
"""


def packed_bytes(outputs: int, inputs: int, type: int) -> int:
    """Return the size of a packed matrix."""
    return -(-outputs // 16) * (inputs // BLOCK_INPUTS[type]) * _PACKED_BYTES[type] + LABEL_BYTES


register_fake("polyspec::block_pack", lambda *_: None)
register_fake(
    "polyspec::block_rows", lambda packed, x, _, n, __: packed.new_empty(len(x), n).float()
)
register_fake("polyspec::block_product", lambda x, _, outputs, *__: x.new_empty(len(x), outputs))

# ---- models --------------------------------------------------------------------------------------

_FACTORS = "rope_freqs.weight"  # divisors of rotary frequencies, in files of Llama 3.1 and later


class BlockLinear(QuantizedLinear):
    """``x W^T + b`` with the blocks of a GGUF file, in the dtype of `x`.

    Args:
        parts: W by ranges of rows.
    """

    def __init__(self, parts: Sequence[Matrix], bias: Tensor | None = None) -> None:
        super().__init__()
        self.in_features = parts[0].inputs
        self.out_features = sum(part.outputs for part in parts)
        self.register_buffer("bias", bias)
        for i, part in enumerate(parts):
            self.register_buffer(f"packed{i}", part.packed)
        self._forms = [(part.outputs, part.kind) for part in parts]

    def product(self, x: Tensor) -> Tensor:
        products = [
            block_product(x, getattr(self, f"packed{i}"), outputs, kind)
            for i, (outputs, kind) in enumerate(self._forms)
        ]
        return products[0] if len(products) == 1 else torch.cat(products, 1)

    def matrices(self) -> Sequence[Matrix]:
        return [
            Matrix(decoder.BLOCKS, outputs, self.in_features, getattr(self, f"packed{i}"), kind)
            for i, (outputs, kind) in enumerate(self._forms)
        ]


class BlockEmbedding(nn.Module):
    """Embeddings with the blocks of a GGUF file.

    Args:
        matrix: the embeddings, by rows.
        scale: factor of all embeddings, a scalar of their dtype.
    """

    packed: Tensor
    scale: Tensor

    def __init__(self, matrix: Matrix, scale: Tensor) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = matrix.outputs, matrix.inputs
        self._kind = matrix.kind
        self.register_buffer("packed", matrix.packed)
        self.register_buffer("scale", scale)

    def forward(self, ids: Tensor) -> Tensor:
        form = self.num_embeddings, self.embedding_dim, self._kind
        rows = block_rows(self.packed, ids.long().flatten().contiguous(), *form)
        return rows.view(*ids.shape, self.embedding_dim).to(self.scale.dtype) * self.scale


def _packed(read: Iterable[Tensor], outputs: int, inputs: int, kind: int) -> Matrix:
    packed, first = huge_pages(packed_bytes(outputs, inputs, kind)), 0
    for rows in read:
        pack_blocks(packed, rows, first, outputs, inputs, kind)
        first += len(rows)
    return Matrix(decoder.BLOCKS, outputs, inputs, packed, kind)


def has_blocks(file: GgufFile) -> bool:
    """Return whether any tensor has a type of `BLOCK_INPUTS`."""
    return any(tensor.type in BLOCK_INPUTS for tensor in file.tensors.values())


def gguf_model(file: GgufFile, dtype: torch.dtype, as_blocks: bool = True) -> Any:
    """Return the causal language model of a file on the CPU, in eval mode.

    Args:
        dtype: of activations and dequantised weights.
        as_blocks: read embeddings from their blocks, and multiply with the blocks of linear layers
            and the head, if their type is in `BLOCK_INPUTS`; dequantise norms and other
            types. False: dequantise all weights.
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
        model = _with_blocks(skeleton, named) if as_blocks else skeleton
        _fill(model, named)
    model.name_or_path = str(file.path)
    return model


def head_rows(path: str | Path, rows: Tensor) -> BlockLinear:
    """Return rows `rows`, ``[N]`` int64, of a file's output head, which is in blocks."""
    tensors = GgufFile(path).tensors
    tensor = tensors.get(HEAD) or tensors[EMBEDDINGS]
    return BlockLinear([_packed([tensor.blocks()[rows]], len(rows), tensor.shape[1], tensor.type)])


class _Named:
    """Tensors of a file by the model's parameter names.

    Attributes:
        read: callback, called with the size in bytes of each tensor that is read.
    """

    read: Callable[[int], object]

    def __init__(self, file: GgufFile, config: Any) -> None:
        import gguf

        self._family = next(name for name, kind in FAMILIES.items() if kind == config.model_type)
        kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
        self._map = gguf.get_tensor_name_map(kinds[self._family], config.num_hidden_layers)
        self._file, self._tensors = file, file.tensors
        # llama.cpp rotates adjacent features, transformers features i and i + width / 2 of a head.
        heads = (config.num_attention_heads, config.num_key_value_heads)
        names = ("q_proj", "k_proj")
        self._turned = dict(zip(names, heads, strict=True)) if self._family == "llama" else {}
        self._frequencies = (config.head_dim // 2,)
        self._matrices: dict[tuple[str, ...], Matrix] = {}

    def source(self, name: str) -> str:
        """Return the tensor name of a parameter in the file."""
        if name == "lm_head.weight":
            return HEAD if HEAD in self._tensors else EMBEDDINGS
        tensor_name = self._map.get_name(name, try_suffixes=(".weight", ".bias"))
        if tensor_name is None:
            raise ValueError(f"expected a model of {self._family} without {name}, given one")
        return str(tensor_name)

    def require_all(self, skeleton: nn.Module) -> None:
        """Refuse a file with tensor names or shapes other than the model's. A missing bias is 0."""
        shapes = {self.source(name): p.shape for name, p in skeleton.named_parameters()}
        if self._family == "llama" and _FACTORS in self._tensors:
            shapes[_FACTORS] = torch.Size(self._frequencies)
        for name, shape in shapes.items():
            tensor = self._tensors.get(name)
            if tensor is None and not name.endswith(".bias"):
                raise ValueError(f"expected a tensor {name} in {self._file.path}, given none")
            if tensor is not None and tensor.shape != shape:
                raise ValueError(
                    f"{self._file.path}: {name}: expected shape {list(shape)}, given "
                    f"{list(tensor.shape)}"
                )
        unread = self._tensors.keys() - shapes.keys()
        if unread:
            name = min(unread)
            raise ValueError(
                f"{self._file.path}: expected no tensor {name} in a model of {self._family}, given "
                f"shape {list(self._tensors[name].shape)}"
            )

    def kind(self, name: str) -> int:
        return self._tensors[self.source(name)].type

    def tensor(self, name: str) -> GgufTensor:
        tensor = self._tensors[self.source(name)]
        self.read(tensor.size)
        return tensor

    def rows(self, name: str, rows: Tensor) -> Tensor:
        """Return rows of a parameter, reordered from the file's order to the model's."""
        heads = self._heads(name)
        if heads is None:
            return rows
        reordered: Tensor = rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        return reordered

    def _heads(self, name: str) -> int | None:
        return self._turned.get(name.split(".")[-2])

    def matrix(self, names: Sequence[str]) -> Matrix:
        """Return parameters of one type in blocks, stacked. Tied parameters share a matrix."""
        key = tuple(map(self.source, names))
        if key not in self._matrices:
            tensors = [self.tensor(name) for name in names]
            read: Iterable[Tensor] = (
                rows
                for name, tensor in zip(names, tensors, strict=True)
                for rows in (
                    [self.rows(name, tensor.blocks())] if self._heads(name) else tensor.ranges()
                )
            )
            if any(tensor.shape[0] % 16 for tensor in tensors[:-1]):
                read = [torch.cat([*read])]
            form = sum(tensor.shape[0] for tensor in tensors), tensors[0].shape[1], tensors[0].type
            self._matrices[key] = _packed(read, *form)
        return self._matrices[key]

    def dequantised(self, name: str, like: Tensor) -> Tensor:
        """Return a parameter dequantised, in the shape and dtype of `like`."""
        if name.endswith(".bias") and self.source(name) not in self._tensors:
            return torch.zeros(like.shape, dtype=like.dtype)
        numbers = self.rows(name, self.tensor(name).dequantised())
        # Gemma multiplies with 1 + weight.
        if self._family.startswith("gemma") and name.endswith("norm.weight"):
            numbers -= 1
        return numbers.to(like.dtype)

    def factors(self) -> Tensor | None:
        """Return the divisors of the rotary frequencies, ``[width / 2]``; None: not in the file."""
        divisors = self._tensors.get(_FACTORS)
        return None if divisors is None else divisors.dequantised()


def _with_blocks(skeleton: Any, named: _Named) -> Any:
    """Return a copy with modules of blocks for embeddings and linear layers of supported types."""
    embeds = skeleton.get_input_embeddings()
    block_layers = {
        id(module): name
        for name, module in skeleton.named_modules()
        if is_plain(module) or module is embeds
        if named.kind(f"{name}.weight") in BLOCK_INPUTS
    }

    def make(siblings: Sequence[Any]) -> nn.Module:
        names = [block_layers[id(layer)] for layer in siblings]
        by_kind = itertools.groupby([f"{name}.weight" for name in names], named.kind)
        parts = [named.matrix([*weights]) for _, weights in by_kind]
        if siblings[0] is embeds:
            scale = getattr(embeds, "scalar_embed_scale", 1.0)
            return BlockEmbedding(parts[0], torch.tensor(scale, dtype=embeds.weight.dtype))
        bias = None
        if siblings[0].bias is not None:
            layers = zip(names, siblings, strict=True)
            bias = torch.cat([named.dequantised(f"{name}.bias", s.bias) for name, s in layers])
        return BlockLinear(parts, bias)

    return replaced(skeleton, lambda module: id(module) in block_layers, make)


def _fill(model: Any, named: _Named) -> None:
    """Set all parameters, embedding scales and rotary tables that have no values yet."""
    values: dict[str, nn.Parameter] = {}  # by tensor name; tied parameters share a value

    def value(name: str, like: Tensor) -> nn.Parameter:
        source = named.source(name)
        if source not in values:
            values[source] = nn.Parameter(named.dequantised(name, like), requires_grad=False)
        return values[source]

    factors = named.factors()
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, value(f"{path}.{name}", parameter))
        for name, child in list(module.named_children()):
            if getattr(child, "embed_scale", None) is not None:
                child.embed_scale = torch.tensor(child.scalar_embed_scale)
            # Rotary tables follow from the configuration alone.
            elif any(buffer.is_meta for buffer in child.buffers(recurse=False)):
                remade: Any = type(child)(config=model.config)
                if factors is not None:
                    for table in ("inv_freq", "original_inv_freq"):
                        setattr(remade, table, getattr(remade, table) / factors)
                setattr(module, name, remade)


# ---- tokenizers ----------------------------------------------------------------------------------


# Types of tokens in `tokenizer.ggml.token_type`.
_UNKNOWN, _USER = 2, 4
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")
_LLAMA3, _QWEN2 = (rf"{_WORDS}|\p{{N}}{{1,3}}{_REST}",), (rf"{_WORDS}|\p{{N}}{_REST}",)
_DIGITS, _GPT2 = (r"\p{N}",), ()
# By `tokenizer.ggml.pre`: expressions that split texts in turn (GPT-2's follows if there are none
# or digits alone), whether words in the vocabulary skip the merges, and whether a text begins with
# BOS by default.
_PRE = {
    name: form
    for names, form in (
        ("llama-bpe llama3 llama-v3 falcon3 pixtral midm-2.0", (_LLAMA3, True, True)),
        ("smaug-bpe dbrx", (_LLAMA3, False, False)),
        ("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez", (_QWEN2, False, False)),
        ("tekken", ((_TEKKEN,), True, True)),
        ("deepseek-coder", (_CODER, False, False)),
        ("smollm starcoder refact command-r codeshell minerva-7b exaone", (_DIGITS, False, False)),
        (
            "gpt-2 phi-2 olmo gigachat a.x-4.0 mellum trillion granite-docling",
            (_GPT2, False, False),
        ),
    )
    for name in names.split()
}
# Header keys that are read here. A header may also have ids of special tokens.
_READ = {
    f"tokenizer.ggml.{key}"
    for key in (
        "model", "pre", "tokens", "scores", "token_type", "merges", "token_type_count",
        "add_bos_token", "add_eos_token", "add_space_prefix",
    )
}  # fmt: skip


_made = weakref.WeakValueDictionary[bytes, Any]()  # tokenizers by digest of their values


def tokenizer_of(file: GgufFile) -> Any:
    """Return the tokenizer of a file's header, which files with equal values share: construction
    takes a second, and a hundred megabytes."""
    values = {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")}
    digest = hashlib.sha256(pickle.dumps(values)).digest()
    tokenizer = _made.get(digest)
    if tokenizer is None:
        tokenizer = _made[digest] = _tokenizer(values)
    return tokenizer


def _tokenizer(about: dict[str, Any]) -> Any:
    from tokenizers import AddedToken, Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    for key, value in about.items():
        beside = key in _READ or key.endswith("_token_id") or value is False
        if key.startswith("tokenizer.ggml.") and not beside:
            raise ValueError(f"expected a header without {key}, given {shown(value)}")
    kind = about.get("tokenizer.ggml.model")
    if kind not in ("llama", "gpt2"):
        raise ValueError(f"tokenizer.ggml.model: expected llama or gpt2, given {shown(kind)}")
    texts = [text.decode() for text in _array(about, "tokens", list)]
    kinds = _array(about, "token_type", np.ndarray).tolist()
    if not texts or len(kinds) != len(texts) or len({*texts}) != len(texts):
        raise ValueError(
            f"tokenizer.ggml.tokens: expected different tokens with a type each, given "
            f"{len(texts)} ({len({*texts})} of them different) and {len(kinds)} types"
        )
    make = _sentencepiece if kind == "llama" else _bytes
    model, components, begins = make(about, texts)
    tokenizer = Tokenizer(model)
    for name, component in components.items():
        setattr(tokenizer, name, component)
    for special, members in ((True, (_CONTROL, _UNKNOWN)), (False, (_USER,))):
        added = [text for text, code in zip(texts, kinds, strict=True) if code in members]
        add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
        add([AddedToken(text, normalized=False, special=special) for text in added])
    names: dict[str, str | None] = {}  # transformers would add default tokens for missing names
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = _special(about, key, len(texts))
        names[f"{name}_token"] = None if number is None else texts[number]
    around = ["$A"]
    if about.get("tokenizer.ggml.add_bos_token", begins):
        around.insert(0, _required(names, "bos_token"))
    if about.get("tokenizer.ggml.add_eos_token", False):
        around.append(_required(names, "eos_token"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=around, special_tokens=[(text, texts.index(text)) for text in around if text != "$A"]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        chat_template=about.get("tokenizer.chat_template"),
        **names,
    )


def _array(about: dict[str, Any], name: str, kind: type) -> Any:
    array = about.get(f"tokenizer.ggml.{name}")
    if not isinstance(array, kind):
        raise ValueError(f"tokenizer.ggml.{name}: expected an array, given {shown(array)}")
    return array


def _required(names: dict[str, str | None], name: str) -> str:
    token = names[name]
    if token is None:
        raise ValueError(f"tokenizer.ggml.{name}_id: expected the id of a token, given none")
    return token


def _sentencepiece(about: dict[str, Any], texts: list[str]) -> tuple[Any, dict[str, Any], bool]:
    """Return a BPE model with merges by score, its normalizer and decoder by name, and True: a text
    begins with BOS by default."""
    from tokenizers import decoders, models, normalizers

    scores = _array(about, "scores", np.ndarray).tolist()
    ids = {text: i for i, text in enumerate(texts)}
    # All pairs of tokens that join to a token, the best scores first.
    pairs = [
        (-score, i, left, text[cut:])
        for i, (text, score) in enumerate(zip(texts, scores, strict=True))
        for cut in range(1, len(text))
        if (left := text[:cut]) in ids and text[cut:] in ids
    ]
    unknown = about.get("tokenizer.ggml.unknown_token_id", 0)
    model = models.BPE(
        ids,
        [(left, right) for *_, left, right in sorted(pairs, key=lambda pair: pair[:2])],
        unk_token=texts[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    prefix = about.get("tokenizer.ggml.add_space_prefix", True)
    spaces: list[Any] = [normalizers.Replace(" ", "▁")]
    back: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        spaces.insert(0, normalizers.Prepend("▁"))
        back.append(decoders.Strip(" ", 1, 0))
    components = {"normalizer": normalizers.Sequence(spaces), "decoder": decoders.Sequence(back)}
    return model, components, True


def _bytes(about: dict[str, Any], texts: list[str]) -> tuple[Any, dict[str, Any], bool]:
    """Return a byte-level BPE model with the file's merges, its pre-tokenizer and decoder by name,
    and whether a text begins with BOS by default."""
    from tokenizers import Regex, decoders, models, pre_tokenizers

    pre = about.get("tokenizer.ggml.pre")
    if pre not in _PRE:
        raise ValueError(f"tokenizer.ggml.pre: expected one of {', '.join(_PRE)}, given {pre!r}")
    cuts, ignore_merges, begins = _PRE[pre]
    merges = [tuple(text.decode().split(" ")) for text in _array(about, "merges", list)]
    ids = {text: i for i, text in enumerate(texts)}
    if not all(len(pair) == 2 and pair[0] + pair[1] in ids for pair in merges):
        raise ValueError("tokenizer.ggml.merges: expected pairs that make tokens, given others")
    model = models.BPE(ids, merges, ignore_merges=ignore_merges)
    use_regex = cuts in (_DIGITS, _GPT2)
    steps: list[Any] = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in cuts]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex))
    components = {"pre_tokenizer": pre_tokenizers.Sequence(steps), "decoder": decoders.ByteLevel()}
    return model, components, begins
