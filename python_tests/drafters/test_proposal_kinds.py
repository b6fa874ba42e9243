"""Every token is verified with the distribution it was drawn from, whatever its neighbours came
from: proposals that are deterministic or sampled, of any dtype and width, with row statistics or
without, side by side in one batch and one after another in one row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import toy
import toy_rows
from proposal_kinds import FIXED, SAMPLED, Kind, Various, distance, enumerated, text_distributions
from toy_rows import Output

import polyspec_ext as ps
from polyspec_ext.drafters import Context, Proposal

RULES = ["token", "block"]


KINDS: dict[str, Callable[[int, int], Kind]] = {
    "a row each": lambda request, round: (SAMPLED, FIXED)[request % 2],
    "a round each": lambda request, round: (SAMPLED, FIXED)[(request + round) % 2],
    "lengths": lambda request, round: (Kind(most=1), FIXED)[request % 2],
    "dtypes": lambda request, round: (Kind(torch.bfloat16), SAMPLED)[(request + round) % 2],
    "halves": lambda request, round: (Kind(torch.float16), Kind(torch.bfloat16))[request % 2],
    "widths": lambda request, round: (Kind(width=2), SAMPLED)[(request + round) % 2],
    "narrow and deterministic": lambda request, round: (Kind(width=2), FIXED)[request % 2],
    "row statistics": lambda request, round: (SAMPLED, Kind(statistics=False))[
        (request + round) % 2
    ],
}


PROMPTS = [[0, 1], [2, 0]]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kinds", KINDS)
def test_rows_of_a_batch(kinds: str, rule: str) -> None:
    target = toy_rows.Rows(3, 11)
    enumerator, chain = enumerated([target, Various(KINDS[kinds])], [2], rule=rule)
    for others in (0, -1):
        found = text_distributions(enumerator, chain, PROMPTS, 3, others, temperature=1.0)
        assert distance(found, target, PROMPTS, 3, [1.0, 1.0]) < 1e-9


@pytest.mark.parametrize("rule", RULES)
def test_a_greedy_row_beside_a_sampled_one(rule: str) -> None:
    """The greedy row has more tokens than the sampled one has logits."""
    target = toy_rows.Rows(3, 11)
    enumerator, chain = enumerated([target, Various(KINDS["lengths"])], [3], rule=rule)
    found = text_distributions(enumerator, chain, PROMPTS, 3, temperature=[1.0, 0.0])
    assert distance(found, target, PROMPTS, 3, [1.0, 0.0]) < 1e-9


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kinds", ["a round each", "dtypes", "widths", "row statistics"])
def test_rounds_of_one_row(kinds: str, rule: str) -> None:
    made = toy.make_levels(2)
    enumerator, chain = enumerated([*made, Various(KINDS[kinds])], [3, 1], rule=rule)
    found = text_distributions(enumerator, chain, PROMPTS[:1], 3, temperature=1.0)
    assert distance(found, made[0], PROMPTS[:1], 3, [1.0]) < 1e-9


# ---- known mistakes: each must show --------------------------------------------------------------


def of_the_neighbour(draft: torch.Tensor) -> torch.Tensor:
    return draft.roll(1, 0)


def uniform_for_one_hot(draft: torch.Tensor) -> torch.Tensor:
    return draft.masked_fill(draft.isneginf(), 0.0)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("mistake", [of_the_neighbour, uniform_for_one_hot])
def test_mistakes_are_seen(mistake: Callable[[torch.Tensor], torch.Tensor], rule: str) -> None:
    class Wrong(toy.Enumerator):
        def verify(self, target: Any, tokens: Any, draft: Any = None, **options: Any) -> Any:
            draft = None if draft is None else mistake(draft)
            return super().verify(target, tokens, draft, **{**options, "draft_statistics": None})

    # The neighbour's must have probability for every token.
    kinds = KINDS["dtypes" if mistake is of_the_neighbour else "a row each"]
    target = toy_rows.Rows(3, 11, scale=1.5)
    enumerator, chain = enumerated([target, Various(kinds)], [2], Wrong(), rule=rule)
    found = text_distributions(enumerator, chain, PROMPTS, 2, temperature=1.0)
    assert distance(found, target, PROMPTS, 2, [1.0, 1.0]) > 1e-3


# ---- buffers that every pass writes anew ---------------------------------------------------------


class Reusing(toy.ToyLevel):
    """A toy level of one row."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.output = Output()

    def forward(self, tokens: torch.Tensor, keep: int) -> torch.Tensor:
        return self.output.view(super().forward(tokens, keep))


def levels(count: int, reusing: Sequence[int], one: Any, other: Any, vocab: int) -> list[Any]:
    return [(one if i in reusing else other)(vocab, 11 + i) for i in range(count)]


class ReusingDrafter(Various):
    """A drafter whose forks have one buffer for all their logits."""

    def __init__(self) -> None:
        super().__init__(lambda request, round: SAMPLED)
        self.output = Output()

    def fork(self) -> ReusingDrafter:
        return copy.copy(self)

    def propose(self, context: Context, k: int) -> Proposal:
        made = super().propose(context, k)
        assert made.logits is not None
        made.logits = self.output.view(made.logits)
        return made


@pytest.mark.parametrize("rule", RULES)
def test_drafters_of_a_batch(rule: str) -> None:
    target, prompts = toy_rows.Rows(3, 11), [[0, 1], [2, 0]]
    enumerator, chain = enumerated([target, ReusingDrafter()], [2], rule=rule)
    found = text_distributions(enumerator, chain, prompts, 3, temperature=1.0)
    assert distance(found, target, prompts, 3, [1.0, 1.0]) < 1e-9


def test_scores_that_an_observer_keeps() -> None:
    """Logits passed to `observe` stay valid until it returns."""
    kept = []
    for kind in (Reusing, toy.ToyLevel):
        seen: list[torch.Tensor] = []
        chain = ps.Chain([kind(3, 11), kind(3, 12)], [2])
        batch = chain.batch(
            [[0, 1]],
            8,
            1.0,
            seed=0,
            observe=lambda _, logits, seen=seen: seen.append(logits.clone()),
        )
        while batch.advance():
            pass
        kept.append(torch.cat(seen))
    assert kept[0].equal(kept[1])


class OfItsOwn:
    """Draws from rows of logits that it keeps."""

    name = "of its own"

    def __init__(self) -> None:
        self.logits = torch.randn(1, 2, 20, generator=torch.Generator().manual_seed(3))

    def propose(self, context: Context, k: int) -> Proposal:
        drawn = [
            ps.sample(
                self.logits[:, i], context.sampling.temperature, seed=context.seed,
                position=len(context.tokens) + i, level=context.level, round=context.round,
            )
            for i in range(k)
        ]  # fmt: skip
        statistics = torch.stack([one.statistics for one in drawn], 1)
        return Proposal([int(one.tokens) for one in drawn], self.logits[:, :k], None, statistics)


def test_a_switch_leaves_the_rows_of_others_alone() -> None:
    """A model that drafts next does not write its rows where a user's were."""
    own = OfItsOwn()
    kept = own.logits.clone()
    target, model = toy_rows.make(2)
    switching = ps.SwitchingDrafter([own, ps.DraftModel(model)])
    batch = ps.Chain([target, switching], [2]).batch([[1, 2]], 30, 1.0, eos_token_id=[])
    for number in range(8):
        switching.active = number % 2
        batch.advance()
    assert batch.stats.levels[0].num_draft_tokens == 16
    assert own.logits.equal(kept)
