"""Captured passes of steps that the host follows: they give the texts of passes that run as they
are, and a step is one upload, one replay and one read. On the CPU, with a recorder that stands in
for CUDA graphs (`recorder.py`)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from captured_chains import PROMPTS, level
from device_counts import CountingRecorder, Counts, counting
from eagle_heads import Variant, save, weights_of
from recorder import Recorder, addresses, keys_of_captures
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

import polyspec_ext as ps
from polyspec_ext.drafters import NGramTable, PromptLookup, SuffixMatch
from polyspec_ext.kv_cache.lengths import DEVICE_BUCKET
from polyspec_ext.levels import HuggingFaceLevel
from polyspec_ext.runtime.graphs import Graphs

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
    "lookup": (lambda device: [one(0, device), PromptLookup()], [4], {}),
    "suffix": (lambda device: [one(0, device), SuffixMatch()], [9], {"rule": "block"}),
    "a cache that grows": (
        lambda device: [one(0, device, capacity=32, bucket=16), PromptLookup()],
        [4],
        {},
    ),
    "ngram": (lambda device: [one(0, device), NGramTable()], [4], {}),
    "three levels": (lambda device: [one(0, device), one(1, device), PromptLookup()], [5, 3], {}),
    "a copy": (lambda device: [*with_copy(device), PromptLookup()], [5, 3], {}),
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
) -> tuple[ps.Chain, ps.Chain, Recorder]:
    """The chain as it is on the CPU, and with captured passes that the host follows."""
    recorder = Recorder()
    graphs = Graphs(recorder, progress=False)
    captured = ps.Chain(levels(True), window, graphs=graphs, sync_each_step=True, **options)
    return ps.Chain(levels(False), window, **options), captured, recorder


@pytest.mark.parametrize("name", CHAINS)
def test_texts_are_those_of_passes_that_run_as_they_are(name: str) -> None:
    levels, window, options = CHAINS[name]
    eager, chain, recorder = pair(levels, window, **options)
    graphs = chain.engine.graphs
    assert graphs is not None
    with keys_of_captures(graphs, recorder) as seen:
        for prompts in (REPEATING, PROMPTS, REPEATING):
            for temperature in (0.0, 1.0):
                wanted = eager.generate(
                    prompts, [40, 9, 40][: len(prompts)], temperature, **OPTIONS
                )
                got = chain.generate(prompts, [40, 9, 40][: len(prompts)], temperature, **OPTIONS)
                assert got.sequences.equal(wanted.sequences)
                for mine, theirs in zip(got.stats.levels, wanted.stats.levels, strict=True):
                    assert mine.acceptance_histogram == theirs.acceptance_histogram
    assert graphs.num_replays > 4 * graphs.num_captures > 0
    for key, recording in seen:  # and a key names all memory that its pass used
        used = {x.untyped_storage().data_ptr() for x in recording.outside.values()}
        assert used <= addresses(key)
    for model in chain.levels:
        rows = model.cache.rows  # type: ignore[attr-defined]
        if name not in ("a copy", "unbounded copy"):  # whose lengths are each level's
            assert rows.lengths.tolist() == rows.host


def test_processors_change_the_logits_of_captured_passes() -> None:
    eager, chain, _ = pair(lambda device: [one(0, device), one(1, device)], [4])
    graphs = chain.engine.graphs
    assert graphs is not None
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


@pytest.mark.parametrize("tree", [None, ps.DynamicTree(3, 9)], ids=["chain", "tree"])
@pytest.mark.parametrize("middle", ["smaller", "copy", "none"])
def test_a_head_that_the_host_follows(middle: str, tree: Any, tmp_path: Path) -> None:
    """Below a smaller model, which has no states for it; below a copy, and the target itself."""
    variant = Variant("first", hidden=32, vocab=40)
    place = save(variant, weights_of(variant, 3), tmp_path)

    def levels(device: bool) -> list[Any]:
        above = with_copy(device) if middle == "copy" else [one(0, device)]
        if middle == "smaller":
            above.append(one(1, device, hidden_size=16))
        return [*above, ps.Eagle.from_pretrained(place, above[0], tree=tree)]

    eager, chain, _ = pair(levels, [3] if middle == "none" else [5, 3])
    graphs = chain.engine.graphs
    assert graphs is not None
    for prompts in (REPEATING, PROMPTS):
        for temperature in (0.0, 1.0):
            wanted = eager.generate(prompts, 30, temperature, **OPTIONS)
            got = chain.generate(prompts, 30, temperature, **OPTIONS)
            assert got.sequences.equal(wanted.sequences)
            passes = got.stats.levels[0].num_forward_passes
            assert graphs.num_replays > passes / 2
    assert graphs.num_replays > 2 * graphs.num_captures > 0


# ---- counts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "uploads", "launches"), [("lookup", 0, 14), ("three levels", 1, 15), ("a copy", 2, 30)]
)
def test_a_pass_is_one_replay_one_upload_and_one_read(
    name: str, uploads: int, launches: int
) -> None:
    """Beside these a verification launches a dozen small operators, and what it hands up is one
    upload more. A copy in another level's cache is told that level's length."""
    levels, window, options = CHAINS[name]
    counts = Counts()
    graphs = Graphs(CountingRecorder(counts), progress=False)
    chain = ps.Chain(levels(True), window, graphs=graphs, sync_each_step=True, **options)
    for _ in range(2):
        chain.generate(REPEATING[0], 60, 1.0, **OPTIONS)
    batch = chain.batch(REPEATING[0], 60, 1.0, **OPTIONS)
    with counting(chain, counts):
        for _ in range(3):  # parameters reach the device once
            batch.advance()
        for _ in range(8):
            before = [own.num_verifications for own in batch.stats.levels[:-1]]
            counts.clear()
            batch.advance()
            after = [own.num_verifications for own in batch.stats.levels[:-1]]
            passes = [b - a for a, b in zip(before, after, strict=True)]
            assert counts.launches.count("replay") == sum(passes)
            assert len(counts.reads) == sum(passes), counts.reads
            assert counts.uploads.count("a step") == sum(passes)
            others = [x for x in counts.uploads if x != "a step"]
            assert len(others) <= uploads * sum(passes[1:]), others
            assert len(counts.launches) <= launches * sum(passes), counts.launches


def test_a_text_of_900_tokens_has_four_captures_a_level() -> None:
    """Count captures of two spans, with drafts and without."""
    config: dict[str, Any] = {"capacity": 1024, "max_position_embeddings": 2048}

    def levels(device: bool) -> list[Any]:
        return [one(0, device, bucket=DEVICE_BUCKET, **config), PromptLookup()]

    _, chain, _ = pair(levels, [4])
    graphs = chain.engine.graphs
    assert graphs is not None
    out = chain.generate(REPEATING[0], 900, 1.0, **OPTIONS)
    assert 0 < graphs.num_captures <= 4
    passes = out.stats.levels[0].num_verifications
    assert passes > 300
    assert passes - graphs.num_captures - graphs.num_replays <= 2
