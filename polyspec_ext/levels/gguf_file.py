"""The header of a GGUF file, and its tensors as they lie in it."""

from __future__ import annotations

import functools
import re
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

# Of values in the header: by their number, what `struct` calls them. 8 is a string, 9 an array.
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32  # of tensors, unless the header says another
_VERSIONS = (2, 3)
_AXES = 4
_AT_ONCE = 1 << 20  # weights that are dequantised together: what they become meanwhile fits a cache
MAGIC = b"GGUF"
# Files of a model that was split, NAME-00001-of-00003.gguf.
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)


@dataclass(frozen=True)
class GgufTensor:
    """A tensor in a file.

    Attributes:
        type: number of its data type, as ``gguf.GGMLQuantizationType`` has them.
        shape: as torch has it: outputs, then inputs.
    """

    type: int
    shape: tuple[int, ...]
    _bytes: np.ndarray

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return int(self._bytes.size)

    def blocks(self) -> torch.Tensor:
        """``[outputs, bytes of a row]`` uint8, a copy."""
        rows = prod(self.shape[:-1])
        return torch.from_numpy(np.array(self._bytes).reshape(rows, -1))

    def dequantised(self) -> torch.Tensor:
        """Its numbers in float32."""
        import gguf

        kind = gguf.GGMLQuantizationType(self.type)
        rows = self._bytes.reshape(prod(self.shape[:-1]), -1)
        if kind == gguf.GGMLQuantizationType.F32:
            rows = rows.view(np.float32)
        elif kind == gguf.GGMLQuantizationType.F16:
            rows = rows.view(np.float16)
        made = np.empty((len(rows), self.shape[-1]), np.float32)
        step = max(1, _AT_ONCE // self.shape[-1])
        for begin in range(0, len(rows), step):
            made[begin : begin + step] = gguf.dequantize(rows[begin : begin + step], kind)
        return torch.from_numpy(made).view(self.shape)


class GgufFile:
    """A model's file whose header is read, or all its files where it was split; tensors are mapped
    into memory.

    Args:
        path: of the file, or of any of the files NAME-00001-of-00003.gguf.

    Attributes:
        path: of the file, or of the first one.
        metadata: the (first) header's values by key. An array of numbers is one of numpy, an array
            of strings a list of bytes.
        tensors: by name, of all files.

    Raises:
        OSError: a file cannot be read.
        ValueError: no GGUF file, one that is cut off or contradicts itself, or a part of a model
            whose other parts are not beside it.
    """

    def __init__(self, path: str | Path) -> None:
        paths = _parts(Path(path))
        files = [_Part(each) for each in paths]
        self.path, self.metadata = paths[0], files[0].metadata
        self.tensors: dict[str, GgufTensor] = {}
        for number, file in enumerate(files):
            # Files that were merged again say 0.
            told = file.metadata.get("split.no", 0), file.metadata.get("split.count", 1) or 1
            if told != (number, len(files)):
                raise ValueError(
                    f"{file.path}: expected part {number + 1} of {len(files)}, as files of a split "
                    f"model are named (NAME-00001-of-0000N.gguf), given split.no {told[0]} and "
                    f"split.count {told[1]}"
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
    """Return the file that holds the header of a model: `path`, or the first of a split one."""
    found = _SPLIT.fullmatch(path.name)
    return path.with_name("{}-00001-of-{}{}".format(*found.group(1, 3, 4))) if found else path


def _parts(path: Path) -> list[Path]:
    """Return all files of a model. ValueError: one is not there."""
    found = _SPLIT.fullmatch(path.name)
    if found is None:
        return [path]
    name, _, count, end = found.groups()
    paths = [path.with_name(f"{name}-{i:05d}-of-{count}{end}") for i in range(1, int(count) + 1)]
    missing = next((each for each in paths if not each.is_file()), None)
    if missing is not None:
        raise ValueError(f"expected all {int(count)} files of a split model, given no {missing}")
    return paths


@functools.cache
def _block_of(kind: int) -> tuple[int, int]:
    """Return the inputs and bytes of a block of this type. ValueError: none of weights."""
    import gguf

    try:
        own = gguf.GGMLQuantizationType(kind)
        inputs, size = gguf.GGML_QUANT_SIZES[own]
        if own not in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16):
            gguf.dequantize(np.zeros((1, size), np.uint8), own)
    except (KeyError, ValueError, NotImplementedError) as error:
        raise ValueError(f"expected a type of weights, given type {kind}") from error
    return inputs, size


class _Part:
    """Read one file, and check its offsets, sizes and types."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r")
        self._view, self._at = self._bytes.data, 0
        try:
            if bytes(self._view[:4]) != MAGIC:
                raise ValueError(f"expected a GGUF file, given {path}, which begins otherwise")
            self._at = 4
            version, tensors, values = self._take("IQQ")
            if version not in _VERSIONS:
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

    def _skip(self, size: int) -> memoryview:
        begin, self._at = self._at, self._at + size
        if self._at > len(self._view):
            raise struct.error(f"its header goes on behind its {len(self._view)} bytes")
        return self._view[begin : self._at]

    def _take(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{form}", self._skip(struct.calcsize(f"<{form}")))

    def _string(self) -> bytes:
        return bytes(self._skip(self._take("Q")[0]))

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string().decode()
        if kind != _ARRAY:
            return self._take(_SCALARS[kind])[0]
        element, count = self._take("IQ")
        if element == _STRING:
            return [self._string() for _ in range(count)]
        form = f"<{_SCALARS[element]}"
        return np.frombuffer(self._skip(count * struct.calcsize(form)), form)

    def _tensors(self, count: int) -> dict[str, GgufTensor]:
        step = self.metadata.get("general.alignment", _ALIGNMENT)
        if type(step) is not int or step < 1 or step & (step - 1):
            raise ValueError(
                f"{self.path}: general.alignment: expected a power of two, given {step}"
            )
        told = []
        for _ in range(count):
            name, (axes,) = self._string().decode(), self._take("I")
            if not 1 <= axes <= _AXES:
                raise ValueError(f"{self.path}: {name}: expected 1 to 4 axes, given {axes}")
            told.append((name, self._take(f"{axes}Q"), *self._take("IQ")))
        begin, expected = -(-self._at // step) * step, 0
        found: dict[str, GgufTensor] = {}
        for name, sizes, kind, offset in told:
            size = self._size(name, kind, sizes)
            if offset != expected or name in found:
                raise ValueError(
                    f"{self.path}: {name}: expected one tensor of this name, at {expected}, behind "
                    f"the one before, given offset {offset}"
                )
            at = begin + offset
            if at + size > len(self._bytes):
                raise ValueError(
                    f"expected a whole GGUF file, given {self.path} of {len(self._bytes)} bytes, "
                    f"where {name} ends at {at + size}"
                )
            found[name] = GgufTensor(kind, sizes[::-1], self._bytes[at : at + size])
            expected = -(-(offset + size) // step) * step
        return found

    def _size(self, name: str, kind: int, sizes: tuple[int, ...]) -> int:
        """Return the bytes of a tensor."""
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
