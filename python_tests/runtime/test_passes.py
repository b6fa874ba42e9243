"""Captured passes of steps that the host follows: one upload, one replay and one read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import dflash_heads
import pytest
import torch
from any_head import head_for
from captured_chains import PROMPTS, level
from device_rounds import READING
from recorder import OnADevice, Recorder, WatchedGraphs, on_a_device, storage_of, tensors
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

import polyspec_ext as ps
from polyspec_ext.kv_cache.layers import DEVICE_BUCKET
from polyspec_ext.levels import HuggingFaceLevel
from polyspec_ext.runtime import graphs
from polyspec_ext.runtime.graphs import Graphs, Outputs, Run

REPEATING = [[1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 6, 7, 1, 2, 3]]
OPTIONS: dict[str, Any] = {"seed": 5, "eos_token_id": []}


def one(number: int, device: bool, **config: Any) -> Any:
    return level(number, 3 - min(number, 2), f"level {number}", device, **config)


def with_copy(device: bool) -> list[Any]:
    """A target, and a rough copy of it in its cache, as a 4-bit one is."""
    target = one(0, device)
    model = copy.deepcopy(target.model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.02)
    return [target, HuggingFaceLevel(model, name="copy", shares_cache_with=target)]


CHAINS: dict[str, tuple[Callable[[bool], list[Any]], list[int], dict[str, Any]]] = {
    "lookup": (lambda device: [one(0, device), ps.PromptLookup()], [4], {}),
    "suffix": (lambda device: [one(0, device), ps.SuffixMatch()], [9], {"rule": "block"}),
    "a cache that grows": (
        lambda device: [one(0, device, capacity=32, bucket=16), ps.PromptLookup()],
        [4],
        {},
    ),
    "ngram": (lambda device: [one(0, device), ps.NGramTable()], [4], {}),
    "three levels": (lambda on: [one(0, on), one(1, on), ps.PromptLookup()], [5, 3], {}),
    "a copy": (lambda device: [*with_copy(device), ps.PromptLookup()], [5, 3], {}),
    "unbounded": (
        lambda device: [one(i, device) for i in range(3)], [5, 3], {"rounds": [0]}
    ),
    "unbounded copy": (
        lambda device: [*with_copy(device), one(2, device)], [5, 2], {"rounds": [0], "tail": 2}
    ),
    "followed": (lambda device: [one(i, device) for i in range(2)], [4], {}),
}  # fmt: skip


def pair(
    levels: Callable[[bool], list[Any]], window: Sequence[int], **options: Any
) -> tuple[ps.Chain, ps.Chain, WatchedGraphs]:
    """The chain as it is on the CPU, and with captured passes that the host follows."""
    graphs = WatchedGraphs()
    captured = ps.Chain(levels(True), window, graphs=graphs, sync_each_step=True, **options)
    return ps.Chain(levels(False), window, **options), captured, graphs


@pytest.mark.parametrize("name", CHAINS)
def test_texts_are_those_of_passes_that_run_as_they_are(name: str) -> None:
    levels, window, options = CHAINS[name]
    eager, chain, graphs = pair(levels, window, **options)
    for prompts in (REPEATING, PROMPTS, REPEATING):
        for temperature in (0.0, 1.0):
            lengths = [40, 9, 40][: len(prompts)]
            wanted = eager.generate(prompts, lengths, temperature, **OPTIONS)
            got = chain.generate(prompts, lengths, temperature, **OPTIONS)
            assert got.sequences.equal(wanted.sequences)
            for mine, theirs in zip(got.stats.levels, wanted.stats.levels, strict=True):
                assert mine.acceptance_histogram == theirs.acceptance_histogram
    assert graphs.num_replays > 4 * graphs.num_captures > 0
    graphs.require_named()
    for model in chain.levels:
        rows = model.cache.rows  # type: ignore[attr-defined]
        if name not in ("a copy", "unbounded copy"):  # the lengths belong to the levels
            assert rows.lengths.tolist() == rows.host


def test_processors_change_the_logits_of_captured_passes() -> None:
    eager, chain, graphs = pair(lambda device: [one(0, device), one(1, device)], [4])
    texts = []
    for either in (eager, chain):
        model = either.levels[0].model  # type: ignore[attr-defined]
        torch.manual_seed(3)
        texts.append(
            model.generate(
                torch.tensor([PROMPTS[0]]),
                custom_generate=ps.custom_generate,
                chain=either,
                max_new_tokens=40,
                logits_processor=LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3)]),
                do_sample=True,
                eos_token_id=None,
                pad_token_id=0,
            )
        )
    assert texts[0].equal(texts[1])
    assert graphs.num_replays > 4 * graphs.num_captures > 0


HEADS = [
    ("eagle", middle, tree) for middle in ("smaller", "copy", "none") for tree in (False, True)
]
HEADS += [("medusa", "none", 1), ("hydra", "none", 1), ("dflash", "none", 0)]


@pytest.mark.parametrize(("kind", "middle", "tree"), HEADS)
def test_a_head_that_the_host_follows(kind, middle, tree, tmp_path, monkeypatch) -> None:
    """Below a smaller model without states, a copy, or the target; replays count as passes."""
    monkeypatch.setattr("polyspec_ext.drafters.features.RollbackCache", OnADevice)

    def levels(device: bool) -> list[Any]:
        if kind == "dflash":
            variant = dflash_heads.variants()[0]
            model = dflash_heads.target_of(variant)
            place = dflash_heads.save(variant, dflash_heads.weights_of(variant), tmp_path)
            target = HuggingFaceLevel(
                model, new_cache=lambda rows: on_a_device(model, rows, bucket=32, capacity=256)
            )
            return [target, ps.DFlash.from_pretrained(place, target)]
        above = with_copy(device) if middle == "copy" else [one(0, device)]
        if middle == "smaller":
            above.append(one(1, device, hidden_size=16))
        head = head_for(above[0], kind, tmp_path, ps.DynamicTree(3, 9) if tree else None)
        return [*above, head]

    eager, chain, graphs = pair(levels, [3] if middle == "none" else [5, 3])
    for prompts in (REPEATING, PROMPTS):
        for temperature in (0.0, 1.0):
            wanted = eager.generate(prompts, 30, temperature, **OPTIONS)
            got = chain.generate(prompts, 30, temperature, **OPTIONS)
            assert got.sequences.equal(wanted.sequences)
            assert graphs.num_replays > got.stats.levels[0].num_forward_passes / 2
            mine, theirs = got.stats.levels[-1], wanted.stats.levels[-1]
            assert mine.num_proposals == theirs.num_proposals
            assert mine.num_forward_passes == theirs.num_forward_passes
    assert graphs.num_replays > 2 * graphs.num_captures > 0
    if kind not in ("medusa", "hydra"):  # Medusa and Hydra have no network
        assert graphs.replays["a pass of a head"] > 2 * mine.num_proposals


# ---- counts --------------------------------------------------------------------------------------
# Memory of the levels counts as the device's, and so do results of operators on it. Numbers of the
# host that meet it in an operator are an upload. The replay of a captured step is one launch.
# These are counts of Python's calls, and say nothing of a GPU.


class Counts(TorchDispatchMode):
    """Counts, as a context manager, of the levels of a chain with a batch.

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

    def own(self, given: Sequence[torch.Tensor]) -> None:
        """Have their memory be the device's."""
        self._ours.update((storage_of(x), x) for x in given)

    def owns(self, tensor: torch.Tensor) -> bool:
        return storage_of(tensor) in self._ours

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, name = tensors((args, kwargs)), func.overloadpacket.__name__
        out = func(*args, **(kwargs or {}))
        made = [x for x in tensors(out) if storage_of(x) not in map(storage_of, given)]
        if any(map(self.owns, given)):
            # Numbers without dimensions are a kernel's arguments.
            sent = {
                storage_of(x): x
                for x in given
                if x.dim() and not self.owns(x) and storage_of(x) not in self._made_here
            }
            self.uploads += [f"{name} {list(x.shape)}" for x in sent.values()]
            if made or func._schema.is_mutable:
                self.launches.append(name)
            self.own([*given, *made])
        elif not given:
            self._made_here.update((storage_of(x), x) for x in made)
        return out


class CountingRecorder(Recorder):
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
    for own in chain.levels:
        model, cache = (getattr(own, name) for name in ("model", "cache"))
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
        for name in READING:
            patch.setattr(torch.Tensor, name, _reading(name, counts))
        with counts:
            yield


def rounds_of(chain: ps.Chain, counts: Counts, head: Any = None) -> Iterator[list[int]]:
    """Yield the verifications of each level in eight rounds of a text, which `counts` counts."""
    for _ in range(2):
        chain.generate(REPEATING[0], 60, 1.0, **OPTIONS)
    batch = chain.batch(REPEATING[0], 60, temperature=1.0, **OPTIONS)
    if head is not None:  # the first round allocates its cache
        batch.advance()
        cache = head.features.cache
        states = [x for layer in cache.layers for x in (layer.keys, layer.values)]
        counts.own([*head.network.parameters(), *states, cache.rows.lengths, cache.rows.base])
    with counting(chain, counts):
        for number in range(11):
            before = [own.num_verifications for own in batch.stats.levels[:-1]]
            counts.clear()
            batch.advance()
            after = [own.num_verifications for own in batch.stats.levels[:-1]]
            if number > 2:  # parameters reach the device once
                yield [b - a for a, b in zip(before, after, strict=True)]


def _reading(name: str, counts: Counts) -> Callable[..., Any]:
    real: Callable[..., Any] = getattr(torch.Tensor, name)

    def read(self: torch.Tensor, *arguments: Any) -> Any:
        if not counts.owns(self):
            return real(self, *arguments)
        counts.reads.append(f"{name} {list(self.shape)}")
        with _disable_current_modes():  # a copy on the host
            return real(self.clone(), *arguments)

    return read


@pytest.mark.parametrize(
    ("name", "uploads", "launches"), [("lookup", 0, 14), ("three levels", 1, 15), ("a copy", 2, 30)]
)
def test_a_pass_is_one_replay_one_upload_and_one_read(name, uploads, launches) -> None:
    """A verification also launches a dozen small operators, and its results are one upload more. A
    copy in another level's cache needs that level's length."""
    levels, window, options = CHAINS[name]
    counts = Counts()
    graphs = Graphs(CountingRecorder(counts))
    chain = ps.Chain(levels(True), window, graphs=graphs, sync_each_step=True, **options)
    for passes in rounds_of(chain, counts):
        assert counts.launches.count("replay") == sum(passes)
        assert len(counts.reads) == sum(passes), counts.reads
        assert counts.uploads.count("a step") == sum(passes)
        others = [x for x in counts.uploads if x != "a step"]
        assert len(others) <= uploads * sum(passes[1:]), others
        assert len(counts.launches) <= launches * sum(passes), counts.launches


@pytest.mark.parametrize("tree", [None, ps.DynamicTree(3, 9)], ids=["chain", "tree"])
def test_a_head_s_draft_is_few_replays_and_reads(tree, tmp_path, monkeypatch) -> None:
    """A replay and a read for each token of a chain; of a tree two replays and one read."""
    monkeypatch.setattr("polyspec_ext.drafters.features.RollbackCache", OnADevice)
    window, target = 3, one(0, True)
    drafter = head_for(target, "eagle", tmp_path, tree)
    head = drafter._head
    counts = Counts()
    graphs = Graphs(CountingRecorder(counts))
    chain = ps.Chain([target, drafter], [window], graphs=graphs, sync_each_step=True)
    for _ in rounds_of(chain, counts, head):
        assert counts.launches.count("replay") == (1 + window if tree is None else 3)
        assert counts.uploads.count("a step") == 2
        assert len(counts.launches) <= 130
        if tree is None:
            assert counts.reads.count("tolist [1, 1]") == window
        else:
            assert counts.reads.count("cpu [1, 17]") == 1


@pytest.mark.parametrize("rows", [1, 2])
def test_a_text_of_900_tokens_has_four_captures_a_level(rows: int) -> None:
    """Count captures of two spans, with drafts and without."""
    config: dict[str, Any] = {"capacity": 1024, "max_position_embeddings": 2048}

    def levels(device: bool) -> list[Any]:
        return [one(0, device, bucket=DEVICE_BUCKET, **config), ps.PromptLookup()]

    _, chain, graphs = pair(levels, [4])
    out = chain.generate(REPEATING * rows, 900, 1.0, **OPTIONS)
    assert 0 < graphs.num_captures <= 4
    passes = out.stats.levels[0].num_forward_passes
    assert passes > 300
    assert passes - graphs.num_captures - graphs.num_replays <= 2
