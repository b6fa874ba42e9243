"""The header of a GGUF file, and its tensors as they lie in it."""

from __future__ import annotations

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
_AT_ONCE = 1 << 20  # weights that are dequantised together: what they become meanwhile fits a cache


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
    """A file whose header is read; tensors are mapped into memory.

    Args:
        path: of the file.

    Attributes:
        metadata: the header's values by key; of an array the number of its elements.
        tensors: by name.

    Raises:
        OSError: it cannot be read.
        ValueError: no GGUF file, or one that is cut off.
    """

    def __init__(self, path: str | Path) -> None:
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r")
        self._view, self._at = self._bytes.data, 0
        try:
            if bytes(self._view[:4]) != b"GGUF":
                raise ValueError(f"expected a GGUF file, given {path}, which begins otherwise")
            self._at = 4
            version, tensors, values = self._take("IQQ")
            if version not in _VERSIONS:
                raise ValueError(f"{path}: expected version 2 or 3 of GGUF, given {version}")
            self.metadata = {self._string(): self._value(self._take("I")[0]) for _ in range(values)}
            self.tensors = self._tensors(tensors)
        except (struct.error, UnicodeDecodeError) as error:
            raise ValueError(f"expected a whole GGUF file, given {path}: {error}") from error
        except KeyError as error:
            raise ValueError(
                f"{path}: expected values of known types, given type {error}"
            ) from error

    def _take(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{form}", self._view, self._at)
        self._at += struct.calcsize(f"<{form}")
        return found

    def _string(self) -> str:
        (length,) = self._take("Q")
        begin, self._at = self._at, self._at + length
        return bytes(self._view[begin : self._at]).decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._take(_SCALARS[kind])[0]
        element, count = self._take("IQ")
        if element == _STRING:
            for _ in range(count):
                (length,) = struct.unpack_from("<Q", self._view, self._at)
                self._at += 8 + length
        else:
            self._at += count * struct.calcsize(f"<{_SCALARS[element]}")
        return count

    def _tensors(self, count: int) -> dict[str, GgufTensor]:
        told = []
        for _ in range(count):
            name, (axes,) = self._string(), self._take("I")
            told.append((name, self._take(f"{axes}Q"), *self._take("IQ")))
        step = self.metadata.get("general.alignment", _ALIGNMENT)
        begin = -(-self._at // step) * step
        # A tensor ends where the next begins, but for what fills up to the alignment.
        return {
            name: GgufTensor(kind, sizes[::-1], self._part(begin + offset, kind, prod(sizes)))
            for name, sizes, kind, offset in told
        }

    def _part(self, begin: int, kind: int, count: int) -> np.ndarray:
        import gguf

        inputs, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        end = begin + count // inputs * size
        if end > len(self._bytes):
            raise ValueError(f"expected a whole GGUF file, given one of {len(self._bytes)} bytes")
        return self._bytes[begin:end]
