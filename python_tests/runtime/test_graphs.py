"""Captured steps: they return the tokens of uncaptured steps, also where memory has moved, a cache
is gone or a step cannot be captured. On the CPU, with a recorder instead of CUDA graphs
(`recorder.py`), and on a GPU where there is one."""

import gc
import random
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from captured_chains import PROMPTS, level, make, models
from recorder import READS, Recorder, WatchedGraphs, traces_of_keys

import polyspec_ext as ps
from polyspec_ext.kv_cache.layers import DEVICE_BUCKET
from polyspec_ext.levels import HuggingFaceLevel
from polyspec_ext.levels.base import LevelCapabilities
from polyspec_ext.policies import RoundReport
from polyspec_ext.runtime.graphs import CudaRecorder, Graphs, MemoryKey, Outputs, Run

OPTIONS: dict[str, Any] = {"temperature": 1.0, "seed": 5, "eos_token_id": []}


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("window", [[3], [4, 2]], ids=str)
def test_a_text_of_900_tokens_has_two_captures_a_step(window: list[int], rows: int) -> None:
    graphs = WatchedGraphs()
    options: dict[str, Any] = {"capacity": 1024, "max_position_embeddings": 2048}
    chain, _ = make(window, True, graphs=graphs, bucket=DEVICE_BUCKET, **options)
    options = {"temperature": 1.0, "seed": [5, 6][:rows], "eos_token_id": []}
    chain.generate(PROMPTS[:rows], 900, **options)
    kinds = len(window) + 1
    assert len(graphs.captures) == kinds
    assert all(count <= 2 for count in graphs.captures.values())
    assert graphs.steps - graphs.num_captures - graphs.num_replays <= 2 * kinds
    assert graphs.steps > 200 * kinds
    captures = graphs.num_captures
    chain.generate(PROMPTS[:rows], 900, **options)
    assert graphs.num_captures <= captures + 1  # the target alone with its last token


def test_a_policy_captures_few_sizes() -> None:
    """Windows of 1 to 12 and 1 to 6 are 72 pairs; drafts and verifications have few sizes."""

    options: dict[str, Any] = {"capacity": 512, "max_position_embeddings": 512, "bucket": 512}
    graphs = WatchedGraphs()
    chain, _ = make([6, 3], True, graphs=graphs, policy=by_text(12, 6, least=1), **options)
    eager, _ = make([6, 3], False, policy=by_text(12, 6, least=1), **options)
    sampled: dict[str, Any] = {"temperature": 1.0, "seed": 5, "eos_token_id": []}
    for _ in range(2):
        out = chain.generate(PROMPTS[0], 300, **sampled)
    assert out.sequences.equal(eager.generate(PROMPTS[0], 300, **sampled).sequences)
    assert graphs.captures["a draft"] <= 7
    assert graphs.captures["the verification of level 1"] <= 7
    assert 0 < graphs.captures["the verification of level 0"] <= 4


# ---- which memory a graph is for -----------------------------------------------------------------


def by_text(*largest: int, least: int = 0) -> Any:
    """A `WindowPolicy`: windows up to `largest`, at random, by the row's text alone."""

    def windows(report: RoundReport) -> list[int]:
        chance = random.Random(str((report.request, list(report.text))))
        return [chance.randint(least, window) for window in largest]

    return SimpleNamespace(next=windows)


@pytest.mark.parametrize(
    ("window", "largest", "tail", "temperature"),
    [
        ([5, 3], (5, 3), 0, 0.0),
        ([4, 2], (9, 4), 2, 1.0),
        ([4, 3, 2], (4, 3, 2), 0, 1.0),
        ([5, 0, 3], (6, 1, 3), 2, 1.0),
    ],
    ids=str,
)
def test_equal_keys_are_equal_steps(window, largest, tail, temperature) -> None:
    """Nothing that a step reads is missing from its key. With [W, 0, k] only tails are drafted."""
    eager, _ = make(window, False, policy=by_text(*largest), tail=tail)
    chain, graphs = make(window, True, policy=by_text(*largest), tail=tail)
    with traces_of_keys(graphs) as traces:
        for seed in (1, 2):
            given = (PROMPTS, [30, 17, 3], temperature)
            out = chain.generate(*given, seed=seed, eos_token_id=[])
            wanted = eager.generate(*given, seed=seed, eos_token_id=[])
            assert out.sequences.equal(wanted.sequences)
    assert out.stats.levels[0].num_tails > 0 or not tail
    assert sum(len(one) > 1 for one in traces.values()) > 2 * len(window)
    for first, *others in traces.values():
        assert all(other == first for other in others)


@pytest.mark.parametrize("window", [[3], [4, 2]], ids=str)
def test_rows_that_end_stay_where_the_graphs_are(window: list[int]) -> None:
    """Graphs of the batch serve until its last row ends, by its length, an EOS or `stop`."""
    eager, (chain, graphs) = make(window, False)[0], make(window, True)
    prompts = [*PROMPTS, [1, 2], [3, 4]]
    eos: list[list[int]] = [[], [], list(range(0, 40, 3)), [], []]
    for _ in range(3):
        texts, slots = [], []
        for one in (eager, chain):
            batch = one.batch(
                prompts, [60, 4, 60, 60, 9], temperature=1.0, seed=6, eos_token_id=eos
            )
            least = len(prompts)
            captures = graphs.num_captures
            for i in range(1000):
                if i == 2:
                    batch.end(batch.rows[3])
                if not batch.advance():
                    break
                least = min(least, len(one.engine.slots))
            texts.append([row.tokens for row in batch.rows if row.number != 3])
            slots.append(least)
            stopped = batch.rows[3]
            assert stopped.ended
            assert len(stopped.logprobs) < 60
        assert texts[0] == texts[1]
        assert slots == [1, 5]  # rows leave step by step, and the others are copied
        assert len(batch.rows[2].logprobs) < 60
    assert graphs.num_captures == captures  # the last batch found all of its graphs
    assert graphs.num_replays > graphs.num_captures > 0


class OnHost(HuggingFaceLevel):
    """A level with lengths on the host."""

    @property
    def capabilities(self) -> LevelCapabilities:
        return replace(super().capabilities, keeps_lengths=False)


def test_rows_that_end_leave_where_steps_are_not_captured() -> None:
    """Graphs are at hand, but no level can have its passes captured."""
    graphs = Graphs(Recorder())
    target = OnHost(level(0, 2, "target").model)
    chain = ps.Chain([target, ps.PromptLookup()], [4], graphs=graphs)
    eager = ps.Chain([level(0, 2, "target"), ps.PromptLookup()], [4])
    wanted = eager.generate(PROMPTS, [40, 3, 3], **OPTIONS)
    batch = chain.batch(PROMPTS, [40, 3, 3], **OPTIONS)
    batch.complete()
    for row, tokens in zip(batch.rows, wanted.sequences.tolist(), strict=True):
        assert row.tokens == tokens[: len(row.tokens)]
    assert len(chain.engine.slots) == 1
    assert graphs.num_captures == 0


def test_a_cache_s_graphs_go_when_it_goes() -> None:
    chain, graphs = make([3], True)
    chain.generate(PROMPTS[:1], 30, **OPTIONS)
    old = weakref.ref(chain.levels[0].cache)
    first = len(graphs)
    assert first == graphs.num_captures > 0
    gc.disable()
    try:
        chain.generate([*PROMPTS, *PROMPTS], 30, **OPTIONS)  # too many for the memory of one
        assert old() is None
        assert len(graphs) == graphs.num_captures - first > 0
        # With the last reference, not when garbage is collected next.
        last = [weakref.ref(one.cache) for one in models(chain)]
        for one in models(chain):
            one.adopt(None)
        assert [cache() for cache in last] == [None, None]
        assert len(graphs) == 0
    finally:
        gc.enable()


class Owner:
    """An object with memory that a step uses."""


def test_the_same_address_of_another_owner_is_another_place() -> None:
    memory = torch.zeros(3)
    one, two = Owner(), Owner()
    assert MemoryKey(one, [memory]) == MemoryKey(one, [memory])
    assert hash(MemoryKey(one, [memory])) == hash(MemoryKey(two, [memory]))
    assert MemoryKey(one, [memory]) != MemoryKey(two, [memory])
    assert MemoryKey(one, [memory]) != MemoryKey(one, [memory], 1)
    assert MemoryKey(one, [memory]) != MemoryKey(one, [memory[:2]])
    assert MemoryKey(one, [memory]) != MemoryKey(one, [memory.view(torch.int32)])
    assert MemoryKey(one, [memory]) != MemoryKey(one, [memory, memory])
    assert MemoryKey(one, [memory.view(1, 3)]) != MemoryKey(one, [memory.expand(1, 3)[:, :0]])
    graphs = Graphs(Recorder())

    def step() -> Outputs:
        return (memory.add_(1),)

    for expected in (1, 2, 3):
        (out,) = graphs.run("k", [MemoryKey(one, [memory])], step)
        assert out.tolist() == memory.tolist() == [expected] * 3
    assert (graphs.num_captures, graphs.num_replays, len(graphs)) == (1, 1, 1)
    graphs.run("k", [MemoryKey(two, [memory])], step)
    assert (graphs.num_captures, graphs.num_replays) == (1, 1)
    del one
    assert len(graphs) == 0
    graphs.run("k", [MemoryKey(two, [memory])], step)
    assert (graphs.num_captures, len(graphs)) == (2, 1)
    forgotten = weakref.ref(graphs)
    del graphs  # though an owner is still there
    assert forgotten() is None


def test_graphs_are_bounded_and_the_oldest_goes() -> None:
    runs: list[object] = []

    direct = SimpleNamespace(capture=lambda step: ((lambda: None), step()))

    def run(kind: str, *key: object) -> None:
        graphs.run(kind, key, lambda: (runs.append(key),))

    graphs = Graphs(direct, limit=2)
    for size in (1, 2, 3):
        for _ in range(3):
            run("k", size)
    assert (graphs.num_captures, graphs.num_replays) == (3, 3)
    assert runs == [(1,), (1,), (2,), (2,), (3,), (3,)]
    run("k", 3)
    run("k", 1)  # was dropped: captured again
    assert (graphs.num_captures, graphs.num_replays, len(graphs)) == (4, 4, 2)
    run("other", 3)
    run("k", 3, 7)
    run("k", None)
    assert (graphs.num_captures, graphs.num_replays) == (4, 4)
    with pytest.raises(ValueError, match="limit: expected >= 1, given 0"):
        Graphs(direct, limit=0)


# ---- steps that cannot be captured ---------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 60, 150])
def test_a_capture_that_fails_is_a_warning_and_the_eager_path(at: int) -> None:
    recorder = Recorder(fails_at=at)
    eager, (chain, graphs) = make([4, 2], False)[0], make([4, 2], True, recorder)
    wanted = eager.generate(PROMPTS, 60, **OPTIONS).sequences
    with pytest.warns(RuntimeWarning, match="cannot be captured as a CUDA graph") as caught:
        assert chain.generate(PROMPTS, 60, **OPTIONS).sequences.equal(wanted)
    # One for each kind of step, which say why, however many keys there were, of which no more than
    # two are tried.
    messages = {str(one.message) for one in caught}
    assert len(messages) == len(caught) == 3
    assert all(message.endswith(f"operator {at} fails") for message in messages)
    assert len(messages) < recorder.tried <= 2 * len(messages)
    for one in models(chain):
        cache = one.cache
        assert cache.lengths.tolist() == cache.rows.host
        assert cache.rows.capacity == 256  # a step that ran twice on the host grew nothing
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            tried = recorder.tried
            assert chain.generate(PROMPTS, 60, **OPTIONS).sequences.equal(wanted)
    assert recorder.tried == tried  # none was tried again
    assert (graphs.num_captures, graphs.num_replays, len(graphs)) == (0, 0, 0)


def test_a_cache_whose_layers_differ_in_room_is_not_captured() -> None:
    """As growing leaves it that ran out of memory: the next pass grows the rest of it."""
    alone = level(0, 2, "alone", True, capacity=32, bucket=4)
    with torch.inference_mode():
        alone.prefill(torch.arange(20)[None])
        assert alone.reserve_span(32) is not None
        last = alone.cache.layers[-1]
        last.values = last.values[:, :, :24].clone()
        assert alone.reserve_span(32) is None


def test_failures_that_do_not_follow_each_other_do_not_add_up() -> None:
    class Unsteady(Recorder):
        refuses = False

        def capture(self, step: Any) -> Any:
            self.refuses = not self.refuses
            if self.refuses:
                raise RuntimeError("now and then")
            return super().capture(step)

    graphs, memory, owner = Graphs(Unsteady()), torch.zeros(1), Owner()
    for number in range(3):
        for _ in range(3):
            key = [number, MemoryKey(owner, [memory])]
            graphs.run("a", key, lambda: (memory.add_(1),))
    assert graphs.num_captures == 3


def test_a_capture_that_fails_restores_the_stream() -> None:
    """Ending a capture that has failed fails as well, before it restores the current stream."""
    current, one = ["the caller's"], torch.ones(1)

    @contextmanager
    def graph(*_: Any, **__: Any) -> Iterator[None]:
        current.append("the capture's")
        try:
            yield
        except RuntimeError:
            raise RuntimeError("due to a previous error") from None
        current.pop()

    cuda = MagicMock(graph=graph, current_stream=lambda device: current[-1])
    cuda.set_stream = current.append
    recorder = CudaRecorder(torch.device("cuda", 0), cuda)
    assert recorder.capture(lambda: (one,))[1] == (one,)

    def fails() -> Outputs:
        assert current[-1] == "the capture's"
        raise RuntimeError("not permitted")

    with pytest.raises(RuntimeError, match="due to a previous error"):
        recorder.capture(fails)
    assert (current[-1], cuda.graph_pool_handle.call_count) == ("the caller's", 2)


def test_the_warning_says_what_went_wrong_first() -> None:
    """Ending a capture that has failed fails as well."""

    class Ends:
        def capture(self, step: Run) -> tuple[Callable[[], None], Outputs]:
            try:
                raise RuntimeError("not permitted")
            finally:
                raise RuntimeError("due to a previous error")

    graphs = Graphs(Ends())
    one = torch.ones(1)
    for _ in range(2):
        assert graphs.run("the step", [], lambda: (one,)) == (one,)
    with pytest.warns(RuntimeWarning, match=r"^the step cannot be captured .*: not permitted$"):
        assert graphs.run("the step", [], lambda: (one,)) == (one,)
    assert graphs.run("the step", [], lambda: (one,)) == (one,)


ROPES: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "longrope": {
        "rope_type": "longrope",
        "factor": 2.0,
        "short_factor": [1.0] * 4,
        "long_factor": [3.0] * 4,
        "original_max_position_embeddings": 128,
    },
}


@pytest.mark.parametrize("kind", list(ROPES))
def test_positions_that_are_read_on_the_host(kind: str) -> None:
    """Frequencies that transformers reads on the host: no capture, and the same tokens."""
    rope = {"rope_theta": 10000.0, **ROPES[kind]}
    eager = make([4, 2], False, rope_parameters=rope)[0]
    chain, graphs = make([4, 2], True, rope_parameters=rope)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        for _ in range(2):
            wanted = eager.generate(PROMPTS, 60, **OPTIONS).sequences
            assert chain.generate(PROMPTS, 60, **OPTIONS).sequences.equal(wanted)
    messages = [str(one.message) for one in caught if "CUDA graph" in str(one.message)]
    assert len(messages) == (0 if graphs.num_captures else 3)
    assert all(message.endswith(tuple(READS)) for message in messages)
    if kind == "dynamic":
        assert messages


def test_graphs_on_the_cpu_are_refused() -> None:
    with pytest.raises(ValueError, match="one CUDA device, given cpu"):
        ps.Chain([level(0, 1, "a"), level(1, 1, "b")], [2], graphs=True)
    assert ps.Chain([level(0, 1, "a"), level(1, 1, "b")], [2]).engine.graphs is None


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("window", [[], [3], [4, 2], [4, 3, 2]], ids=str)
def test_cuda_graphs_give_the_tokens_of_eager_rounds(window: list[int], count: int) -> None:
    def chain(graphs: bool, sync_each_step: bool) -> ps.Chain:
        levels = [level(i, 3 - min(i, 2), f"level {i}") for i in range(len(window) + 1)]
        cuda = [one.model.cuda() for one in levels]
        return ps.Chain(cuda, window, graphs=graphs, sync_each_step=sync_each_step)

    eager, captured, followed = chain(False, False), chain(True, False), chain(False, True)
    for temperature in (0.0, 1.0):
        options: dict[str, Any] = {"temperature": temperature, "seed": 5, "eos_token_id": []}
        for _ in range(3):
            wanted = followed.generate(PROMPTS[:count], 60, **options).sequences
            assert eager.generate(PROMPTS[:count], 60, **options).sequences.equal(wanted)
            assert captured.generate(PROMPTS[:count], 60, **options).sequences.equal(wanted)
    graphs = captured.engine.graphs
    assert graphs.num_replays > 2 * graphs.num_captures > 0


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("window", [[], [4], [6, 2], [6, 3, 2]], ids=str)
def test_one_wait_per_round_of_the_target(window: list[int], graphs: bool) -> None:
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
    assert waits <= rounds + 4  # the prompt's prefill, and the profiler's waits
