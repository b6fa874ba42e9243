"""The EAGLE drafter in chains: below copies in one cache, its trees, and other widths."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_heads import Reference, Variant, save, weights_of
from small_models import make
from told import draft_input, drawn_from, prompts, told
from toy_trees import likeliest_tree

import polyspec_ext as ps
from polyspec_ext.tensors import RowCounts

FIRST = Variant("first", hidden=32, vocab=64, own_head=False)
THIRD = Variant(
    "third", version=3, hidden=32, vocab=64, draft_vocab=50, own_head=True, aux=(0, 1, 3)
)


@pytest.fixture(scope="module")
def target() -> Any:
    return make("llama", 4, vocab=64)


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("v", [FIRST, THIRD], ids=lambda v: v.name)
def test_trees_are_those_of_the_plain_forward_pass(v, even, target, tmp_path) -> None:
    k, total, weights = 3, 11, weights_of(v, 4)
    drafter = ps.Eagle.from_pretrained(
        save(v, weights, tmp_path), target, tree=ps.DynamicTree(k, total)
    )
    reference = Reference(v, weights, target)
    layers = drafter.capabilities.hidden_layers
    generator = torch.Generator().manual_seed(2)
    texts = [[3, 9, 27, 17, 4], [5, 6, 40, *([8, 2] if even else [])]]
    features = [torch.randn(len(t) - 1, 32 * len(layers), generator=generator) for t in texts]
    drafter.prefill(prompts(2))
    hidden = told(layers, features, [0, 0])
    for lengths in ([3, 2], [2, 3]):
        block = drafter.draft(draft_input(texts, lengths, hidden))
        assert block.rows is None
        for b, depth in enumerate(lengths):
            pairs = [
                (token, reference.fused(f))
                for token, f in zip(texts[b][1:], features[b].double(), strict=True)
            ]
            wanted = tree_of(reference, pairs, k, depth, total)
            found: list[tuple[int, ...]] = []
            for i in range(int(block.counts[b])):
                parent = int(block.parents[b, i])
                found.append((*(found[parent] if parent >= 0 else ()), int(block.tokens[b, i])))
            assert set(found) == wanted
        new = [torch.randn(1, 32 * len(layers), generator=generator) for _ in texts]
        hidden = told(layers, new, [len(text) - 1 for text in texts])
        features = [torch.cat(both) for both in zip(features, new, strict=True)]
        texts = [[*text, 7] for text in texts]


def tree_of(reference, pairs, k, depth, total) -> set[tuple[int, ...]]:
    @functools.cache
    def behind(path: tuple[int, ...]) -> tuple[list[Any], torch.Tensor, torch.Tensor]:
        line = pairs
        if path:
            above, _, state = behind(path[:-1])
            line = [*above, (path[-1], state)]
        return line, *reference.behind(line)

    return likeliest_tree(lambda path: behind(path)[1], k, depth, total)


@pytest.mark.parametrize("v", [FIRST, THIRD], ids=lambda v: v.name)
def test_behind_tokens_whose_states_are_not_told(v: Variant, target: Any, tmp_path: Path) -> None:
    """Tokens of a level of another width follow the head's states until states come."""
    weights = weights_of(v, 4)
    drafter = ps.Eagle.from_pretrained(save(v, weights, tmp_path), target)
    reference = Reference(v, weights, target)
    layers = drafter.capabilities.hidden_layers
    generator = torch.Generator().manual_seed(3)

    def states(count: int) -> torch.Tensor:
        return torch.randn(count, 32 * len(layers), generator=generator)

    known = [states(4), states(2)]
    texts = [[3, 9, 27, 17, 4], [5, 6, 40]]
    drafter.prefill(prompts(2))

    def check(hidden: Any) -> None:
        block = drafter.draft(draft_input(texts, [2, 1], hidden))
        for b, text in enumerate(texts):
            pairs: list[Any] = [
                (token, reference.fused(f))
                for token, f in zip(text[1:], known[b].double(), strict=False)
            ]
            for token in text[len(pairs) + 1 :]:
                pairs.append((token, reference.behind(pairs)[1]))
            wanted = reference.behind(pairs)[0].nan_to_num(0, 0, 0)
            found = drawn_from(drafter, block, b)[0].nan_to_num(0, 0, 0)
            assert (found - wanted).abs().max() < 1e-3

    check(told(layers, known, [0, 0]))
    texts = [[*texts[0], 7, 12], [*texts[1], 8]]
    check(None)
    texts = [[*texts[0], 1], [*texts[1], 2, 30, 31]]
    check(None)
    drafter.rollback(RowCounts([len(texts[0]) - 1, len(texts[1])]))
    texts = [[*texts[0][:-1], 9], [*texts[1], 4]]
    new = [states(3), states(2)]
    hidden = told(layers, new, [4, 2])
    known = [torch.cat(both) for both in zip(known, new, strict=True)]
    check(hidden)


def test_a_target_without_the_states_is_named(target: Any, tmp_path: Path) -> None:
    drafter = ps.Eagle.from_pretrained(save(FIRST, weights_of(FIRST, 4), tmp_path), target)
    wide = make("llama", 1, seed=1, vocab=64, hidden_size=64)
    with pytest.raises(ValueError, match=r"^small: expected hidden states of 32 values.*given 64$"):
        ps.Chain([ps.HuggingFaceLevel(wide, name="small"), drafter])
    drafter = ps.Eagle.from_pretrained(save(THIRD, weights_of(THIRD, 4), tmp_path), target)
    early = ps.early_exit(ps.HuggingFaceLevel(target), 2)
    with pytest.raises(ValueError, match=r"expected hidden states of layer 3, .* given 2 layers"):
        ps.Chain([ps.HuggingFaceLevel(early.model), drafter], [3])
