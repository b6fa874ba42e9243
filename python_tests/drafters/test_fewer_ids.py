"""Drafters of the target's vocabulary below a level with fewer ids, which they draft."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from eagle_heads import Variant, save, weights_of
from last_state_heads import hydra, medusa, save_hydra, save_medusa
from small_models import make, plain_greedy, rough

import polyspec_ext as ps
from polyspec_ext.drafters import Context, Proposal

V, FEWER = 64, 40
PROMPTS = [[3, 60, 27, 50, 17], [63, 6], [8, 41, 2, 3, 55, 5, 6]]
FIRST = Variant("first", hidden=32, vocab=V)
THIRD = Variant(
    "third", version=3, hidden=32, vocab=V, draft_vocab=50, own_head=True, aux=(0, 1, 2)
)
TREE = ps.DynamicTree(3, 9)


class Repeats(ps.PromptLookup):
    """Sees that its context is the text as it was given."""

    def fork(self) -> Repeats:
        return Repeats()

    def propose(self, context: Context, k: int) -> Proposal:
        assert any(context.tokens[: len(prompt)] == prompt for prompt in PROMPTS)
        return super().propose(context, k)


def switching(level: Any) -> ps.SwitchingDrafter:
    made = ps.SwitchingDrafter([ps.PromptLookup(), ps.DraftModel(level)])
    made.active = 1
    return made


KINDS: dict[str, Callable[[Any, Path], Any]] = {
    "eagle1": lambda target, place: ps.Eagle.from_pretrained(
        save(FIRST, weights_of(FIRST, 4), place), target
    ),
    "eagle1 tree": lambda target, place: ps.Eagle.from_pretrained(
        save(FIRST, weights_of(FIRST, 4), place), target, tree=TREE
    ),
    "eagle3": lambda target, place: ps.Eagle.from_pretrained(
        save(THIRD, weights_of(THIRD, 4), place), target
    ),
    "eagle3 tree": lambda target, place: ps.Eagle.from_pretrained(
        save(THIRD, weights_of(THIRD, 4), place), target, tree=TREE
    ),
    "medusa": lambda target, place: ps.Medusa.from_pretrained(
        save_medusa(medusa(), place), target, tree=TREE
    ),
    "hydra": lambda target, place: ps.Hydra.from_pretrained(
        save_hydra(hydra(), place), target, tree=TREE
    ),
    "early exit": lambda target, place: "early-exit:3",
    "the target's cache": lambda target, place: ps.Level(
        rough(target.model, 0.1), shares_cache_with=target
    ),
    "a model": lambda target, place: rough(target.model, 0.1),
    "lookup": lambda target, place: Repeats(),
    "switching": lambda target, place: switching(ps.Level(rough(target.model, 0.1))),
}


@pytest.fixture(scope="module")
def model() -> Any:
    return make("llama", 4, vocab=V)


@pytest.mark.parametrize(
    ("kind", "width"), [(kind, 32) for kind in KINDS] + [(kind, 48) for kind in [*KINDS][:6]]
)
def test_below_a_level_with_fewer_ids(kind: str, width: int, model: Any, tmp_path: Path) -> None:
    """Also with hidden states of another width, so that some tokens have no state."""
    target = ps.HuggingFaceLevel(model)
    middle = make("llama", 1, seed=3, vocab=FEWER, hidden_size=width)
    chain = ps.Chain([target, middle, KINDS[kind](target, tmp_path)], [4, 2])
    for prompts in (PROMPTS, PROMPTS[:1]):
        out = chain.generate(prompts, 16, eos_token_id=[])
        for row, prompt in zip(out.sequences.tolist(), prompts, strict=True):
            text = plain_greedy(model, prompt, 16)
            assert row[: len(text)] == text
    out = chain.generate(PROMPTS, 16, 1.0, seed=5, eos_token_id=[])
    assert [stats.num_new_tokens for stats in out.requests] == [16] * 3
    assert out.stats.levels[1].num_draft_tokens > 0


def test_a_copy_with_fewer_ids_in_the_targets_cache(model: Any) -> None:
    """It has read none of the prompt itself, whose other ids it does not know."""
    target = ps.HuggingFaceLevel(model)
    copy = rough(model, 0.05)
    copy.resize_token_embeddings(FEWER)
    chain = ps.Chain([target, ps.Level(copy, shares_cache_with=target)], [3])
    for prompt in PROMPTS:
        out = chain.generate(prompt, 16, eos_token_id=[]).sequences.tolist()
        assert out == [plain_greedy(model, prompt, 16)]
