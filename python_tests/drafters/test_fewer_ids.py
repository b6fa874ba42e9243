"""Drafters of the target's vocabulary below a level with fewer ids, which they draft."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from any_head import head_for
from small_models import make, plain_greedy, rough

import polyspec_ext as ps
from polyspec_ext.drafters import Context, Proposal

V, FEWER = 64, 40
PROMPTS = [[3, 60, 27, 50, 17], [63, 6], [8, 41, 2, 3, 55, 5, 6]]
TREE = ps.DynamicTree(3, 9)


class Repeats(ps.PromptLookup):
    """Checks that its context has the prompt's ids."""

    def fork(self) -> Repeats:
        return Repeats()

    def propose(self, context: Context, k: int) -> Proposal:
        assert any(context.tokens[: len(prompt)] == prompt for prompt in PROMPTS)
        return super().propose(context, k)


def switching(level: Any) -> ps.SwitchingDrafter:
    made = ps.SwitchingDrafter([ps.PromptLookup(), ps.DraftModel(level)])
    made.active = 1
    return made


HEADS = ["eagle", "eagle tree", "eagle 3", "eagle 3 tree", "medusa", "hydra"]
OTHERS: dict[str, Callable[[Any], Any]] = {
    "early exit": lambda target: "early-exit:3",
    "the target's cache": lambda target: ps.Level(
        rough(target.model, 0.1), shares_cache_with=target
    ),
    "a model": lambda target: rough(target.model, 0.1),
    "lookup": lambda target: Repeats(),
    "switching": lambda target: switching(ps.Level(rough(target.model, 0.1))),
}


@pytest.fixture(scope="module")
def model() -> Any:
    return make("llama", 4, vocab=V)


@pytest.mark.parametrize(
    ("kind", "width"), [(kind, 32) for kind in [*HEADS, *OTHERS]] + [(kind, 48) for kind in HEADS]
)
def test_below_a_level_with_fewer_ids(kind: str, width: int, model: Any, tmp_path: Path) -> None:
    """Also with hidden states of another width, so that some tokens have no state."""
    target = ps.HuggingFaceLevel(model)
    middle = make("llama", 1, seed=3, vocab=FEWER, hidden_size=width)
    if kind in HEADS:
        tree = None if kind in ("eagle", "eagle 3") else TREE
        drafter = head_for(target, kind.removesuffix(" tree"), tmp_path, tree)
    else:
        drafter = OTHERS[kind](target)
    chain = ps.Chain([target, middle, drafter], [4, 2])
    for prompts in (PROMPTS, PROMPTS[:1]):
        out = chain.generate(prompts, 16, eos_token_id=[])
        for row, prompt in zip(out.sequences.tolist(), prompts, strict=True):
            text = plain_greedy(model, prompt, 16)
            assert row[: len(text)] == text
    out = chain.generate(PROMPTS, 16, 1.0, seed=5, eos_token_id=[])
    assert [stats.num_new_tokens for stats in out.requests] == [16] * 3
    assert out.stats.levels[1].num_draft_tokens > 0


def test_a_copy_with_fewer_ids_in_the_targets_cache(model: Any) -> None:
    """The copy has read none of the prompt, which has ids unknown to the copy."""
    target = ps.HuggingFaceLevel(model)
    copy = rough(model, 0.05)
    copy.resize_token_embeddings(FEWER)
    chain = ps.Chain([target, ps.Level(copy, shares_cache_with=target)], [3])
    for prompt in PROMPTS:
        out = chain.generate(prompt, 16, eos_token_id=[]).sequences.tolist()
        assert out == [plain_greedy(model, prompt, 16)]
