"""Captured steps, with a recorder that stands in for a device: a "graph" is the step run again on
the captured inputs, with everything it would book on the host undone, as no Python runs in a
replay.

What this cannot show, that CUDA captures the operators, is checked where there is a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import polyspec_ext as ps
from polyspec_ext.device_rounds import DeviceRounds
from polyspec_ext.graphs import Graphs, Inputs, Outputs, Step
from polyspec_ext.level_hf import HuggingFaceLevel


class Echo:
    """Records by running."""

    def __init__(self, chain: Callable[[], ps.Chain]) -> None:
        self._chain = chain

    def _caches(self) -> list[Any]:
        rounds = self._chain().device_rounds
        assert rounds is not None
        return [level.cache for level in rounds.levels]

    def _changed(self) -> list[torch.Tensor]:
        """What a step changes on the device, beside the slots that the lengths leave out."""
        rounds = self._chain().device_rounds
        assert rounds is not None
        rows = [cache.rows for cache in self._caches()]
        lines = [tensor for one in rounds._lines.values() for tensor in one.tensors]
        return [*(r.lengths for r in rows), *(r.base for r in rows), *lines]

    def _device_only(self, run: Callable[[], Outputs]) -> Outputs:
        rows = [cache.rows for cache in self._caches()]
        kept = [(r.host, r.at, r.bound, r.base_bound, r.span, r.new, r._late) for r in rows]
        outputs = run()
        for r, values in zip(rows, kept, strict=True):
            r.host, r.at, r.bound, r.base_bound, r.span, r.new, r._late = values
        return outputs

    def capture(self, step: Step, inputs: Inputs) -> tuple[Callable[[], None], Outputs]:
        # The host's part happens now, the device's with the first replay.
        changed = self._changed()
        before = [tensor.clone() for tensor in changed]
        outputs = tuple(None if x is None else x.clone() for x in step(*inputs))
        for tensor, old in zip(changed, before, strict=True):
            tensor.copy_(old)

        def replay() -> None:
            for own, new in zip(outputs, self._device_only(lambda: step(*inputs)), strict=True):
                if own is not None and new is not None:
                    own.copy_(new)

        return replay, outputs


def level(seed: int, layers: int, name: str) -> HuggingFaceLevel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    return HuggingFaceLevel(LlamaForCausalLM(config).eval(), name=name, bucket=32, capacity=256)


def make(window: list[int], captured: bool) -> tuple[ps.Chain, Graphs | None]:
    levels = [level(i, 3 - i, f"level {i}") for i in range(len(window) + 1)]
    chain = ps.Chain(levels, window)
    if not captured:
        return chain, None
    graphs = chain.graphs = Graphs(Echo(lambda: chain), progress=False)
    chain.device_rounds = DeviceRounds.of(chain)
    return chain, graphs


PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("window", [[3], [4, 2]], ids=str)
@pytest.mark.parametrize("count", [1, 3])
def test_replays_give_the_same_tokens(window: list[int], count: int, temperature: float) -> None:
    eager, _ = make(window, False)
    chain, graphs = make(window, True)
    assert graphs is not None
    for seed in (5, 6):  # the second batch replays what the first has captured, in the same caches
        options: dict[str, Any] = {
            "temperature": [temperature * (1 + 0.2 * i) for i in range(count)],
            "top_k": [0, 7, 30][:count],
            "seed": seed,
            "max_new_tokens": [50, 33, 41][:count],
            "eos_token_id": [],
        }
        wanted = eager.generate(PROMPTS[:count], **options)
        got = chain.generate(PROMPTS[:count], **options)
        assert got.sequences.equal(wanted.sequences)
        for mine, theirs in zip(got.requests, wanted.requests, strict=True):
            for a, b in zip(mine.levels, theirs.levels, strict=True):
                assert a.acceptance_histogram == b.acceptance_histogram
    assert graphs.num_captures > 0
    assert graphs.num_replays > 2 * graphs.num_captures


def test_graphs_are_bounded_and_the_oldest_goes() -> None:
    runs: list[int] = []

    class Direct:
        def capture(self, step: Step, inputs: Inputs) -> tuple[Callable[[], None], Outputs]:
            return lambda: None, step(*inputs)

    def step(x: torch.Tensor | None) -> Outputs:
        runs.append(0 if x is None else x.shape[0])
        return (x,)

    graphs = Graphs(Direct(), limit=2, progress=False)
    for size in (1, 2, 3):
        for _ in range(3):
            graphs.run("k", step, [torch.zeros(size)])
    assert (graphs.num_captures, graphs.num_replays) == (3, 3)
    assert runs == [1, 1, 2, 2, 3, 3]
    graphs.run("k", step, [torch.zeros(3)])
    graphs.run("k", step, [torch.zeros(1)])  # was dropped: as it is again
    assert (graphs.num_captures, graphs.num_replays) == (3, 4)
    graphs.run("other", step, [torch.zeros(3)])
    graphs.run("k", step, [torch.zeros(3, dtype=torch.int32)])
    graphs.run("k", step, [None])
    assert (graphs.num_captures, graphs.num_replays) == (3, 4)
    with pytest.raises(ValueError, match="limit: expected >= 1, given 0"):
        Graphs(Direct(), limit=0)


def test_a_step_that_cannot_be_captured_says_so() -> None:
    class Refuses:
        def capture(self, step: Step, inputs: Inputs) -> tuple[Callable[[], None], Outputs]:
            raise RuntimeError("operation not permitted when stream is capturing")

    graphs = Graphs(Refuses(), progress=False)
    graphs.run("k", lambda x: (x,), [torch.zeros(1)])
    with pytest.raises(ps.PolyspecError, match="graphs=False"):
        graphs.run("k", lambda x: (x,), [torch.zeros(1)])


def test_graphs_on_the_cpu_are_refused() -> None:
    with pytest.raises(ValueError, match="one CUDA device, given cpu"):
        ps.Chain([level(0, 1, "a"), level(1, 1, "b")], [2], graphs=True)
    assert ps.Chain([level(0, 1, "a"), level(1, 1, "b")], [2]).graphs is None


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("window", [[3], [4, 2], [4, 3, 2]], ids=str)
def test_cuda_graphs_give_the_tokens_of_eager_rounds(window: list[int], count: int) -> None:
    """Replays, the same rounds without graphs, and rounds that the host follows."""

    def chain(graphs: bool) -> ps.Chain:
        levels = [level(i, 3 - min(i, 2), f"level {i}") for i in range(len(window) + 1)]
        return ps.Chain([one.model.cuda() for one in levels], window, graphs=graphs)

    eager, captured, followed = chain(False), chain(True), chain(False)
    assert eager.device_rounds is not None
    assert captured.device_rounds is not None
    followed.device_rounds = None
    for temperature in (0.0, 1.0):
        options: dict[str, Any] = {"temperature": temperature, "seed": 5, "eos_token_id": []}
        for _ in range(3):
            wanted = followed.generate(PROMPTS[:count], 60, **options).sequences
            assert eager.generate(PROMPTS[:count], 60, **options).sequences.equal(wanted)
            assert captured.generate(PROMPTS[:count], 60, **options).sequences.equal(wanted)
    assert captured.graphs is not None
    assert captured.graphs.num_replays > 2 * captured.graphs.num_captures > 0


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("window", [[4], [6, 2], [6, 3, 2]], ids=str)
def test_one_wait_per_round_of_the_target(window: list[int], graphs: bool) -> None:
    """Counted by the profiler; launches per round are printed."""
    from torch.profiler import ProfilerActivity, profile

    levels = [level(i, 3 - min(i, 2), f"level {i}") for i in range(len(window) + 1)]
    chain = ps.Chain([one.model.cuda() for one in levels], window, graphs=graphs)
    for _ in range(3):
        chain.generate(PROMPTS[0], 60, eos_token_id=[])
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        out = chain.generate(PROMPTS[0], 60, eos_token_id=[])
    names = [event.name for event in seen.events()]
    waits = sum(name in ("cudaStreamSynchronize", "cudaDeviceSynchronize") for name in names)
    launches = sum("LaunchKernel" in name or "GraphLaunch" in name for name in names)
    rounds = out.stats.levels[0].num_verifications
    how = "graphs" if graphs else "eager"
    print(
        f"window {window}, {how}: {rounds} rounds of the target, {waits / rounds:.2f} waits and "
        f"{launches / rounds:.1f} launches each"
    )
    assert waits <= rounds + 4  # the prompt's prefill, and the profiler's own
