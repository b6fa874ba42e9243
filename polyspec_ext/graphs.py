"""CUDA graphs of a chain's steps: captured when a shape comes up a second time, then replayed.

A step is a function of tensors that also changes caches in place. Its first call with a new shape
runs as it is, which warms up what libraries set up lazily; its second is captured and replayed;
every later one copies its inputs into the captured ones and replays. What the host keeps beside
the device (how long a cache is by now) is for the caller to book, since no Python runs in a replay.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

import torch

from . import progress as reporting
from .errors import PolyspecError

Inputs = Sequence[torch.Tensor | None]
Outputs = tuple[torch.Tensor | None, ...]
Step = Callable[..., Outputs]


class Recorder(Protocol):
    """How a step becomes a graph. Replaced in tests, which have no device to capture on."""

    def capture(self, step: Step, inputs: Inputs) -> tuple[Callable[[], None], Outputs]:
        """Runs `step` for its effects on the host alone, and returns what does it on the device,
        and the outputs that this writes."""
        ...


class CudaRecorder:
    """`torch.cuda.CUDAGraph`, all in one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, step: Step, inputs: Inputs) -> tuple[Callable[[], None], Outputs]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            torch.cuda.synchronize(self._device)
            with torch.cuda.graph(graph, pool=self._pool):
                outputs = step(*inputs)
        return graph.replay, outputs


class Graphs:
    """Graphs by shape.

    Args:
        recorder: makes them.
        limit: graphs kept; the one longest unused goes first. Each holds its intermediate tensors,
            so this bounds memory.
        progress: a line per capture on standard error, where that is a terminal.
    """

    def __init__(self, recorder: Recorder, *, limit: int = 64, progress: bool = True) -> None:
        if limit < 1:
            raise ValueError(f"limit: expected >= 1, given {limit}")
        self._recorder, self._limit, self._progress = recorder, limit, progress
        self._graphs: OrderedDict[Hashable, _Graph] = OrderedDict()
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self.num_captures = 0
        self.num_replays = 0

    def clear(self) -> None:
        """Forget all graphs and give their memory back."""
        self._graphs.clear()
        self._seen.clear()

    def run(self, key: Hashable, step: Step, inputs: Inputs) -> Outputs:
        """``step(*inputs)``, by a graph where there is one.

        Args:
            key: everything that `step` depends on beside the inputs' values: the step itself, what
                it has closed over, the addresses and sizes of what it changes in place.
            inputs: tensors of fixed meaning; None is part of the shape.

        Returns:
            The outputs, valid until the next call with the same key and shapes.

        Raises:
            PolyspecError: the step cannot be captured; says how to do without.
        """
        shapes = tuple(None if x is None else (tuple(x.shape), x.dtype, x.device) for x in inputs)
        key = (key, shapes)
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
            graph.replay(inputs)
            self.num_replays += 1
            return graph.outputs
        if key not in self._seen:
            self._seen[key] = None
            if len(self._seen) > 4 * self._limit:
                self._seen.popitem(last=False)
            return step(*inputs)
        del self._seen[key]
        graph = self._graphs[key] = self._capture(step, inputs)
        if len(self._graphs) > self._limit:
            self._graphs.popitem(last=False)
        # Capturing ran `step` once for the host; this is the same call on the device.
        graph.replay(inputs)
        return graph.outputs

    def _capture(self, step: Step, inputs: Inputs) -> _Graph:
        own = [None if x is None else x.clone() for x in inputs]
        try:
            replay, outputs = self._recorder.capture(step, own)
        except RuntimeError as error:
            raise PolyspecError(
                f"a step of the chain cannot be captured as a CUDA graph ({error}); pass "
                "graphs=False to the chain to run it as it is"
            ) from error
        self.num_captures += 1
        if self._progress:
            reporting.note(f"polyspec_ext: captured CUDA graph {self.num_captures}")
        return _Graph(own, replay, outputs)


class _Graph:
    def __init__(
        self, inputs: list[torch.Tensor | None], replay: Callable[[], None], outputs: Outputs
    ) -> None:
        self._inputs, self._replay, self.outputs = inputs, replay, outputs

    def replay(self, inputs: Inputs) -> None:
        for own, given in zip(self._inputs, inputs, strict=True):
            if own is not None and given is not None and own.data_ptr() != given.data_ptr():
                own.copy_(given, non_blocking=True)
        self._replay()
