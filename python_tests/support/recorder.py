"""A recorder of steps instead of CUDA graphs on the CPU, and caches that behave as on a device.

Like a graph, a recording is the list of operators that the step called, with the same tensors. A
replay calls them again, on this memory and on nothing else, and runs no Python of the step: a
tensor that the step would now find elsewhere is not found. Like a capture, recording has no effect
on the device, and refuses reads of a value on the host.

Tests on a GPU check that CUDA captures the operators.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from polyspec_ext.kv_cache.rollback import RollbackCache
from polyspec_ext.runtime.graphs import Graphs, MemoryKey, Outputs, Run

# Operators that give the host a value.
READS = ("_local_scalar_dense", "nonzero", "equal", "item", "is_nonzero")


class _Call(NamedTuple):
    operator: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    made: list[tuple[int, torch.Tensor]]  # outputs that are neither views nor in-place results

    def again(self) -> None:
        result = self.operator(*self.arguments, **self.options)
        if self.made:
            outputs = [result] if isinstance(result, torch.Tensor) else tensors(result)
            for place, own in self.made:
                own.copy_(outputs[place])


class Recording(TorchDispatchMode):
    """Records the operators in its block, for `undo` and `replay`.

    Args:
        fails_at: the operator of this number is not called and raises.
        undoes: whether `undo` will be called.

    Attributes:
        outside: tensors that the operators used and did not return, by storage.
        trace: calls with memory and numbers: a line per operator. A result is named by its
            operator's number.
    """

    def __init__(self, fails_at: int | None = None, undoes: bool = True) -> None:
        super().__init__()
        self._fails_at, self._undoes = fails_at, undoes
        self._count = 0
        self._calls: list[_Call] = []
        self._inside: dict[int, torch.Tensor] = {}
        self._numbers: dict[int, int] = {}
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.outside: dict[int, torch.Tensor] = {}
        self.trace: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in READS:
            raise RuntimeError(f"operation not permitted when a stream is capturing: {name}")
        if self._count == self._fails_at:
            raise RuntimeError(f"operator {self._fails_at} fails")
        self._count += 1
        options = kwargs or {}
        given = set()
        for tensor in tensors((args, options)):
            storage = storage_of(tensor)
            given.add(storage)
            if storage not in self._inside and storage not in self.outside:
                self.outside[storage] = tensor
                if self._undoes:
                    whole = whole_of(tensor)
                    self._before.append((whole, whole.clone()))
        leaves = [self._named(leaf) for leaf in tree_leaves((args, options))]
        self.trace.append(f"{func} {' '.join(leaves)}")
        result = func(*args, **options)
        made = [
            (place, tensor)
            for place, tensor in enumerate(tensors(result))
            if storage_of(tensor) not in given
        ]
        for _, tensor in made:
            self._inside[storage_of(tensor)] = tensor
            self._numbers.setdefault(storage_of(tensor), len(self._numbers))
        if made or func._schema.is_mutable:  # else it gave a view, which stays
            self._calls.append(_Call(func, args, options, made))
        return result

    def _named(self, leaf: Any) -> str:
        if not isinstance(leaf, torch.Tensor):
            return repr(leaf)
        storage = storage_of(leaf)
        made = self._numbers.get(storage)
        where = f"@{leaf.data_ptr()}" if made is None else f"#{made}"
        return f"{where}{list(leaf.shape)}{leaf.stride()}+{leaf.storage_offset()}{leaf.dtype}"

    def undo(self) -> None:
        for tensor, before in self._before:
            tensor.copy_(before)
        self._before.clear()

    def replay(self) -> None:
        for call in self._calls:
            call.again()


class Recorder:
    """`polyspec_ext.runtime.graphs.Recorder` on the CPU.

    Args:
        fails_at: see `Recording`; of every step.

    Attributes:
        fails_at: see `Recording`.
        latest: the last recording, successful or not.
        tried: number of recordings.
    """

    latest: Recording

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at, self.tried = fails_at, 0

    def capture(self, step: Run) -> tuple[Callable[[], None], Outputs]:
        self.tried += 1
        self.latest = recording = Recording(self.fails_at)
        try:
            with recording:
                outputs = step()
        finally:
            recording.undo()
        return recording.replay, outputs


class WatchedGraphs(Graphs):
    """Graphs of a recorder, and the results of steps.

    Attributes:
        steps: that were run, in any way.
        captures, replays: by kind.
        keys: replays of all keys.
        seen: the key and the recording of every capture.
    """

    def __init__(self, recorder: Any = None) -> None:
        self.recorder = recorder or Recorder()
        super().__init__(self.recorder)
        self.captures: Counter[str] = Counter()
        self.replays: Counter[str] = Counter()
        self.keys: Counter[Any] = Counter()
        self.seen: list[tuple[Any, Recording]] = []
        self.steps = 0

    def run(self, kind: str, key: Sequence[Hashable], step: Run) -> Outputs:
        before = self.num_captures, self.num_replays
        outputs = super().run(kind, key, step)
        self.steps += 1
        self.replays[kind] += self.num_replays - before[1]
        self.keys[tuple(key)] += self.num_replays - before[1]
        if self.num_captures > before[0]:
            self.captures[kind] += 1
            self.seen.append((key, self.recorder.latest))
        return outputs

    def require_named(self, least: int = 1, floats: bool = False) -> None:
        """Find all memory of captured steps, at least `least` tensors, in their keys."""
        assert self.seen
        for key, recording in self.seen:
            used = [x for x in recording.outside.values() if x.is_floating_point() or not floats]
            assert {x.untyped_storage().data_ptr() for x in used} <= addresses(key)
            assert len(used) >= least


@contextmanager
def traces_of_keys(graphs: Graphs) -> Iterator[dict[Any, list[list[str]]]]:
    """Meanwhile no step is replayed: the trace of every one, by its key."""
    traces: dict[Any, list[list[str]]] = {}

    def traced(kind: str, key: Any, step: Run) -> Outputs:
        with Recording(undoes=False) as recording:
            outputs = step()
        traces.setdefault((kind, *key), []).append(recording.trace)
        return outputs

    graphs.run = traced
    yield traces
    del graphs.run


def addresses(key: Any) -> set[int]:
    if isinstance(key, MemoryKey):
        return {one[0] for one in key.tensors} | addresses(key.form)
    return set().union(*map(addresses, key)) if isinstance(key, list | tuple) else set()


class OnADevice(RollbackCache):
    """The same of a head's pairs: attention reads few numbers of slots."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **{**options, "bucket": 32})
        self.rows.on_cpu = False


def on_a_device(model: Any, batch_size: int, **options: Any) -> RollbackCache:
    """A cache with lengths that are written at once and in place, as on CUDA."""
    cache = RollbackCache.for_model(model, batch_size, **options)
    cache.rows.on_cpu = False
    return cache


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """All of the tensor's storage, as bytes."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),))
