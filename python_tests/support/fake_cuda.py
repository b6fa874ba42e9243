"""CUDA without a GPU: tensors on ``cuda`` without numbers, and launches; no kernel runs."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from polyspec_ext import _C
from polyspec_ext.levels import products

# Operations that launch nothing: they allocate, look at a tensor in another way or ask about it.
_NOTHING = frozenset((
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "chunk", "detach", "device", "empty",
    "empty_like", "empty_strided", "expand", "is_set_to", "lift_fresh", "narrow", "new_empty",
    "new_empty_strided", "permute", "reshape", "select", "slice", "split", "split_with_sizes",
    "squeeze", "t", "transpose", "unbind", "unsqueeze", "view",
))  # fmt: skip
# c10's guards of devices, by the number of the device's type.
_GUARDS, _CUDA, _META = "_ZN3c104impl26device_guard_impl_registryE", 1, 14
SPAN = 512  # keys of one launch (`ops.decoder`)


class HostRead(Exception):
    """The host waits for numbers of a device, which has none here."""


class Launches(TorchDispatchMode):
    """Count the launches of operations on CUDA tensors.

    Args:
        fakes: makes tensors of the host that meet them fake; None: the outer counter does.
        zeros: a read gives zeros, and no `HostRead`.

    Attributes:
        counts: launches by the name of the operation.
        reads: operations that have the host wait for a device's numbers.
        uploads: copies of numbers of the host.
    """

    def __init__(self, fakes: FakeTensorMode | None = None, zeros: bool = False) -> None:
        super().__init__()
        self._fakes, self._zeros = fakes, zeros
        self.counts: Counter[str] = Counter()
        self.reads: list[str] = []
        self.uploads: list[str] = []

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        given = torch.utils._pytree.tree_leaves((args, kwargs or {}))
        if not any(map(_is_fake, given)):
            with unset_fake_temporarily():
                return func(*args, **(kwargs or {}))
        if func.namespace == "aten" and func._can_decompose():  # in inference mode they come whole
            with self:
                return func.decompose(*args, **(kwargs or {}))
        if self._fakes is not None:
            args, kwargs = torch.utils._pytree.tree_map(self._without_numbers, (args, kwargs))
        if name == "is_set_to":  # which fake tensors do not know
            return _same(*args)
        if name in ("_local_scalar_dense", "nonzero"):
            self._read(name)
            return 0
        made = func(*args, **(kwargs or {}))
        tensors = [x for x in torch.utils._pytree.tree_leaves((args, made)) if _on_cuda(x)]
        if name in ("_to_copy", "copy_") and tensors:
            source = args[1 if name == "copy_" else 0]
            if not _on_cuda(made):
                self._read(f"{name} {list(source.shape)}")
                with unset_fake_temporarily():
                    return torch.zeros(made.shape, dtype=made.dtype)
            if not _on_cuda(source):
                self.uploads.append(f"{name} {list(source.shape)}")
                return made
        if tensors and name not in _NOTHING:
            more = name == "attention" and args[1].shape[2] > SPAN
            more = more or ("int4_" in name and "product" in name and 32 < len(args[0]) <= 64)
            norm = {"int4_layer_product": 5, "int4_rotary_product": 4}.get(name)
            if norm is not None:  # by itself
                more += args[norm] is not None and len(args[0]) > 8
            if name == "int4_rotary_product":  # heads by themselves
                in_product = args[7].shape[1] in (64, 128, 256, 512) and args[16] is None
                more += not in_product or len(args[0]) > 32
            self.counts[name] += 1 + more
        return made

    def _read(self, what: str) -> None:
        self.reads.append(what)
        if not self._zeros:
            raise HostRead(what)

    def _without_numbers(self, x: Any) -> Any:
        real = isinstance(x, torch.Tensor) and not isinstance(x, FakeTensor)
        return self._fakes.from_tensor(x) if self._fakes is not None and real else x


def _on_cuda(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == "cuda"


def _is_fake(x: Any) -> bool:
    return isinstance(x, FakeTensor) or (isinstance(x, torch.device) and x.type == "cuda")


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    places = [
        (x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride()) for x in (one, other)
    ]
    return places[0] == places[1]


def _guard() -> None:
    """Have tensors on ``cuda`` need no driver, where torch was built without: the guard of devices
    without numbers, which does nothing, becomes theirs."""
    if torch.version.cuda is None:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        registry = (ctypes.c_void_p * 20).in_dll(library, _GUARDS)
        registry[_CUDA] = registry[_META]


@contextmanager
def launches(zeros: bool = False) -> Iterator[Launches]:
    """Create fake tensors in the block, and count launches. `zeros`: of `Launches`."""
    _guard()
    built = {**_C.build_info(), "cuda": True}
    with (
        mock.patch.object(_C, "build_info", return_value=built),
        # Of tensors without numbers no class is plain.
        mock.patch.object(products, "is_plain_tensor", return_value=True),
        FakeTensorMode() as fakes,
        Launches(fakes, zeros) as counted,
    ):
        yield counted
