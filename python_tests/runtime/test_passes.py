"""Captured passes of steps that the host follows (their counts: levels/test_cuda_chains.py)."""

import copy
from collections.abc import Callable
from typing import Any

import dflash_heads
import pytest
import torch
from any_head import head_for
from captured_chains import PROMPTS, level
from device_rounds import same
from recorder import OnADevice, WatchedGraphs, on_a_device
from toy_policies import Listed

import polyspec_ext as ps
from polyspec_ext.levels import HuggingFaceLevel

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


def pair(levels, window, **options) -> tuple[ps.Chain, ps.Chain, WatchedGraphs]:
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
            same(chain.generate(prompts, lengths, temperature, **OPTIONS), wanted)
    assert graphs.num_replays > 4 * graphs.num_captures > 0
    graphs.require_named()
    for model in chain.levels:
        rows = model.cache.rows
        if name not in ("a copy", "unbounded copy"):  # the lengths belong to the levels
            assert rows.lengths.tolist() == rows.host


def test_rules_change_the_logits_of_captured_passes() -> None:
    eager, chain, graphs = pair(lambda device: [one(0, device), one(1, device)], [4])
    rules = ps.LogitsRules(repetition_penalty=1.3)
    same(*(each.generate(PROMPTS[0], 40, 1.0, rules=rules, **OPTIONS) for each in (chain, eager)))
    assert graphs.num_replays > 4 * graphs.num_captures > 0


HEADS = [
    ("eagle", middle, tree)
    for middle in ("smaller", "copy", "none", "late")
    for tree in (False, True)
]
HEADS += [("medusa", "none", 1), ("hydra", "none", 1), ("dflash", "none", 0)]


@pytest.mark.parametrize(("kind", "middle", "tree"), HEADS)
def test_a_head_that_the_host_follows(kind, middle, tree, tmp_path, monkeypatch) -> None:
    """Below a smaller model without states, a copy, or the target, after every pass or every
    second; replays count as passes."""
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

    late = {"policy": Listed([[3], [0]])} if middle == "late" else {}
    eager, chain, graphs = pair(levels, [5, 3] if middle in ("smaller", "copy") else [3], **late)
    for prompts in (REPEATING, PROMPTS):
        for temperature in (0.0, 1.0):
            wanted = eager.generate(prompts, 30, temperature, **OPTIONS)
            got = chain.generate(prompts, 30, temperature, **OPTIONS)
            same(got, wanted)
            assert graphs.num_replays > got.stats.levels[0].num_forward_passes / 2
            mine, theirs = (out.stats.levels[-1] for out in (got, wanted))
            assert mine.num_forward_passes == theirs.num_forward_passes
    assert graphs.num_replays > 2 * graphs.num_captures > 0
    if kind not in ("medusa", "hydra"):  # Medusa and Hydra have no network
        assert graphs.replays["a pass of a head"] > 2 * mine.num_proposals
