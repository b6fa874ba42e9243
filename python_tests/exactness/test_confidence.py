"""Drafts that end where the drafter is unsure (``Chain(confidence=)``): the text keeps the target's
distribution, by enumeration of every draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import toy
import toy_rows

import polyspec_ext as ps
from polyspec_ext import tiny

RULES = ["token", "block"]


def texts(
    made: Sequence[Any], window: Sequence[int], confidence: float, length: int, **options: Any
) -> tuple[Any, int, int]:
    """The exact distribution of `length` tokens behind [0, 1], how many drafts there were in all
    runs, and tokens of them."""
    enumerator = toy.Enumerator()
    sampling = {"temperature": 1.0, **options.pop("sampling", {})}
    chain = ps.Chain(made, window, confidence=confidence, operators=enumerator.operators, **options)
    seen = [0, 0]

    def text() -> list[int]:
        out = chain.generate([0, 1], length, **sampling)
        drafter = out.stats.levels[-1]
        seen[0] += drafter.num_proposals
        seen[1] += drafter.num_proposed_tokens
        own: list[int] = out.sequences[0, 2:].tolist()
        return own

    return toy.chain_distribution(enumerator, text), seen[0], seen[1]


# Vocabulary, levels, windows, tail, new tokens, and which share of the drafter's rows is not sure.
SHAPES = [
    (3, 2, [3], 0, 4, 0.4),
    (2, 2, [4], 0, 5, 0.4),
    (2, 3, [1, 2], 0, 4, 0.7),
    (2, 3, [1, 2], 2, 4, 0.3),
    (2, 4, [1, 1, 2], 2, 4, 0.7),
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("vocab", "count", "window", "tail", "length", "share"), SHAPES)
def test_the_distribution_is_the_targets(
    vocab: int, count: int, window: list[int], tail: int, length: int, share: float, rule: str
) -> None:
    """And drafts are shorter."""
    made = toy.make_levels(count, vocab)
    confidence = float(made[-1].table.softmax(-1).amax(-1).quantile(share))
    found, drafts, tokens = texts(made, window, confidence, length, tail=tail, rule=rule)
    exact = toy.text_distribution(made[0], [0, 1], length)
    assert toy.total_variation(found, exact) < 1e-12
    _, full_drafts, full_tokens = texts(made, window, 0.0, length, tail=tail, rule=rule)
    assert tokens / drafts < full_tokens / full_drafts


@pytest.mark.parametrize("rule", RULES)
def test_with_filters_an_eos_and_unbounded_rounds(rule: str) -> None:
    made = toy.make_levels(3)
    sampling = {"temperature": 1.5, "top_k": 2, "eos_token_id": 1}
    found, _, _ = texts(made, [2, 2], 0.6, 4, rule=rule, rounds=[0], sampling=sampling)
    exact = toy.text_distribution(made[0], [0, 1], 4, temperature=1.5, top_k=2, eos=[1])
    assert toy.total_variation(found, exact) < 1e-12


def test_nobody_is_sure_enough() -> None:
    """Every draft is one token then."""
    made = toy.make_levels(2)
    found, drafts, tokens = texts(made, [3], 1.0, 3)
    assert tokens == drafts
    assert toy.total_variation(found, toy.text_distribution(made[0], [0, 1], 3)) < 1e-12


def test_rows_of_a_batch_are_those_alone() -> None:
    """Whose drafts end elsewhere: a row's draft ends by its own logits."""
    levels = [toy_rows.Rows(12, 3), toy_rows.Rows(12, 4)]
    chain = ps.Chain(levels, [4], confidence=0.3)
    prompts = [[0, 1], [5, 7, 2], [11]]
    seeds = [3, 4, 5]
    options = {"max_new_tokens": 24, "temperature": 1.0}
    together = chain.generate(prompts, seed=seeds, **options)
    alone = [
        chain.generate(prompt, seed=seed, **options)
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    lengths = set()
    for b, one in enumerate(alone):
        n = len(prompts[b]) + 24
        assert together.sequences[b, :n].tolist() == one.sequences[0].tolist()
        rows = together.requests[b].levels[-1], one.stats.levels[-1]
        assert rows[0].num_proposed_tokens == rows[1].num_proposed_tokens
        lengths.add(rows[0].num_proposed_tokens / rows[0].num_proposals)
    assert len(lengths) == 3
    assert all(1 < length < 4 for length in lengths)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"confidence": 1.5}, r"confidence: expected a number in \[0, 1\], given 1.5"),
        ({"confidence": 0.5, "policy": "online"}, "confidence: expected 0 beside a policy"),
        ({"confidence": 0.5, "sync_each_step": False}, "sync_each_step: expected True or None"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ps.Chain([toy_rows.Staying(3, 11), toy_rows.Staying(3, 12)], [2], **changes)


@pytest.mark.parametrize("below", [[], ["prompt-lookup"]])
def test_a_drafter_that_cannot_tell_is_refused(below: list[str]) -> None:
    with pytest.raises(ValueError, match="confidence: expected 0, or a draft model"):
        ps.Chain([toy.ToyLevel(3, 1), *below], confidence=0.5)


def test_greedy_texts_are_plain_decodings() -> None:
    target = toy.ToyLevel(8, 1)
    chain = ps.Chain([target, toy.ToyLevel(8, 2), toy.ToyLevel(8, 3)], [4, 3], confidence=0.4)
    plain = ps.Chain([toy.ToyLevel(8, 1)])
    for first in range(8):
        found, wanted = (one.generate([first], 30).sequences for one in (chain, plain))
        assert torch.equal(found, wanted)


def test_below_an_eagle_head_that_drafts_chains() -> None:
    """A head reads the states of what stands, however short its drafts."""
    target = tiny.levels(["target"], dtype=torch.float32, pack=False)["target"]
    head = ps.Eagle.from_pretrained(tiny.path("eagle3"), target)
    prompt = list(range(1, 9))
    plain = ps.Chain([target]).generate(prompt, 48, eos_token_id=[])
    lengths = []
    for confidence in (0.0, 0.7):
        chain = ps.Chain([target, head], [5], confidence=confidence)
        out = chain.generate(prompt, 48, eos_token_id=[])
        assert torch.equal(out.sequences, plain.sequences)
        drafter = out.stats.levels[-1]
        lengths.append(drafter.num_proposed_tokens / drafter.num_proposals)
    assert lengths[1] < lengths[0]


def test_a_head_that_drafts_trees_is_refused() -> None:
    target = tiny.levels(["target"], dtype=torch.float32, pack=False)["target"]
    head = ps.Eagle.from_pretrained(tiny.path("eagle3"), target, tree=ps.DynamicTree())
    with pytest.raises(ValueError, match="confidence: expected 0, or a draft model or head"):
        ps.Chain([target, head], [5], confidence=0.5)
