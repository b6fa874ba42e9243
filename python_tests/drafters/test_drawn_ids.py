"""Drafters that draw a part of the ids, by `target_to_draft`, and levels that have no more."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from any_head import head_for
from small_models import make, plain_greedy, rough

import polyspec_ext as ps
from polyspec_ext.drafters import Context, Proposal
from polyspec_ext.levels import IdMap
from polyspec_ext.runtime.plan import Operators

V, DRAWN, PROMPT = 4, [0, 1, 3], [2, 1]


class PartLevel(toy.ToyLevel):
    """A level with logits of `DRAWN` only."""

    def __init__(self, vocab_size: int = V) -> None:
        super().__init__(vocab_size, 3, scale=1.0)
        self.drawn = torch.tensor(DRAWN)
        self.id_map = IdMap(vocab_size, self.drawn)

    def forward(self, tokens: torch.Tensor, keep: int) -> torch.Tensor:
        return super().forward(tokens, keep)[..., self.drawn]


def test_the_target_is_given_rows_of_the_drawn_ids() -> None:
    seen: list[tuple[int, list[int]]] = []

    def verify(logits: Any, tokens: Any, rows: Any = None, **options: Any) -> Any:
        if rows is not None:
            seen.append((rows.shape[-1], options["target_to_draft"].tolist()))
        return ps.verify(logits, tokens, rows, **options)

    operators = Operators(toy.drawing(ps.sample), verify)
    levels = [toy.ToyLevel(V, 1), ps.DraftModel(PartLevel(), draw=operators.draw)]
    chain = ps.Chain(levels, [2], operators=operators)
    chain.generate(PROMPT, 12, temperature=1.0, seed=1)
    assert seen
    assert all(one == (3, [0, 1, -1, 2]) for one in seen)


def test_processors_see_every_id() -> None:
    class Only:
        def apply(self, logits: torch.Tensor, prefix: torch.Tensor, row: int) -> torch.Tensor:
            assert logits.shape[-1] == V
            return torch.where(torch.arange(V) == 3, logits, -float("inf"))

    chain = ps.Chain([toy.ToyLevel(V, 1), ps.DraftModel(PartLevel())], [3])
    batch = chain.batch([PROMPT], 6, temperature=1.0, seed=1, processors=Only())
    batch.complete()
    assert batch.rows[0].tokens[len(PROMPT) :] == [3] * 6
    assert batch.rows[0].stats.levels[0].num_accepted_tokens >= 4


def test_a_drafter_without_a_common_id_is_refused() -> None:
    part = PartLevel(6)
    part.drawn = torch.tensor([4, 5])
    part.id_map = IdMap(6, part.drawn)
    for drafter in (part, ps.DraftModel(part)):
        with pytest.raises(ValueError, match="expected a level that draws some id of toy 1"):
            ps.Chain([toy.ToyLevel(3, 1), drafter], [2], check_vocabulary=False)


def test_the_target_draws_all() -> None:
    with pytest.raises(ValueError, match=r"draws all of its 4 ids, given one that draws 3"):
        ps.Chain([PartLevel(), toy.ToyLevel(V, 2)], [2])


@pytest.mark.parametrize(
    "drawn",
    [
        torch.tensor([1, 1, 2]), torch.tensor([2, 1]), torch.tensor([-1, 2]), torch.tensor([1, 4]),
        torch.tensor([]), torch.tensor([[1, 2]]), torch.tensor([1.0, 2.0]),
    ],
)  # fmt: skip
def test_maps_of_something_else(drawn: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"drawn: expected (int64 \[Vd\]|increasing ids)"):
        IdMap(V, drawn)


# ---- drafters of all ids below a level with fewer, which they draft ------------------------------

VOCAB, FEWER = 64, 40
PROMPTS = [[3, 60, 27, 50, 17], [63, 6], [8, 41, 2, 3, 55, 5, 6]]
TREE = ps.DynamicTree(3, 9)


class Repeats(ps.PromptLookup):
    """Checks that its context has the prompt's ids."""

    def fork(self) -> Any:
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
    return make("llama", 4, vocab=VOCAB)


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
