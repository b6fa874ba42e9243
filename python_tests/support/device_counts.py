"""Count on the CPU what a chain would launch on a device, upload to it and read back.

Memory of the levels counts as the device's, and so does what operators make of it. Numbers of the
host that meet it in an operator are an upload. A captured step that is replayed is one launch. This
counts what Python does, and says nothing of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from recorder import Recorder
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import polyspec_ext as ps
from polyspec_ext.runtime import graphs
from polyspec_ext.runtime.graphs import Outputs, Run

_READS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")


class Counts(TorchDispatchMode):
    """Counts meanwhile, of the levels of a chain whose batch has begun.

    Attributes:
        launches, uploads, reads: where each happened, by operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ours: dict[int, torch.Tensor] = {}
        self._made_here: dict[int, torch.Tensor] = {}  # by operators that read no tensor
        self.clear()

    def clear(self) -> None:
        self.launches: list[str] = []
        self.uploads: list[str] = []
        self.reads: list[str] = []

    def own(self, tensors: Sequence[torch.Tensor]) -> None:
        """Have the memory of `tensors` be the device's."""
        self._ours.update((_storage(x), x) for x in tensors)

    def owns(self, tensor: torch.Tensor) -> bool:
        return _storage(tensor) in self._ours

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, name = _tensors((args, kwargs)), func.overloadpacket.__name__
        out = func(*args, **(kwargs or {}))
        made = [x for x in _tensors(out) if _storage(x) not in map(_storage, given)]
        if any(map(self.owns, given)):
            # Numbers without dimensions are a kernel's arguments.
            sent = {
                _storage(x): x
                for x in given
                if x.dim() and not self.owns(x) and _storage(x) not in self._made_here
            }
            self.uploads += [f"{name} {list(x.shape)}" for x in sent.values()]
            if made or func._schema.is_mutable:
                self.launches.append(name)
            self.own([*given, *made])
        elif not given:
            self._made_here.update((_storage(x), x) for x in made)
        return out


class CountingRecorder(Recorder):
    """A `Recorder` whose replays are one launch."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = counts

    def capture(self, step: Run) -> tuple[Callable[[], None], Outputs]:
        with _disable_current_modes():
            replay, outputs = super().capture(step)
        self._counts.own([x for x in outputs if x is not None])

        def counted() -> None:
            with _disable_current_modes():
                replay()
            self._counts.launches.append("replay")

        return counted, outputs


@contextmanager
def counting(chain: ps.Chain, counts: Counts) -> Iterator[None]:
    """Count what a chain does meanwhile."""
    for level in chain.levels:
        model, cache = (getattr(level, name) for name in ("model", "cache"))
        states = [x for layer in cache.layers for x in (layer.keys, layer.values)]
        counts.own([*model.parameters(), *model.buffers(), *states])
        counts.own([cache.rows.lengths, cache.rows.base, cache.rows.status])
    sent = graphs.uploaded

    def uploaded(*arguments: Any) -> Any:
        step = sent(*arguments)
        counts.uploads.append("a step")
        counts.own([step.table])
        return step

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "uploaded", uploaded)
        for name in _READS:
            patch.setattr(torch.Tensor, name, _reading(name, counts))
        with counts:
            yield


def _reading(name: str, counts: Counts) -> Callable[..., Any]:
    real: Callable[..., Any] = getattr(torch.Tensor, name)

    def read(self: torch.Tensor, *arguments: Any) -> Any:
        if not counts.owns(self):
            return real(self, *arguments)
        counts.reads.append(f"{name} {list(self.shape)}")
        with _disable_current_modes():  # a copy on the host
            return real(self.clone(), *arguments)

    return read


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
