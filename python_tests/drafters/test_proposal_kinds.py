"""Every token is verified with the distribution it was drawn from, whatever its neighbours came
from: proposals that are deterministic or sampled, of any dtype and width, with row statistics or
without, side by side in one batch and one after another in one row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import toy
import toy_rows
from proposal_kinds import FIXED, SAMPLED, Kind, Various, distance, enumerated, text_distributions

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
@pytest.mark.parametrize("kinds", ["a round each", "dtypes", "narrow and deterministic"])
def test_rows_of_a_batch_below_a_middle(kinds: str, rule: str) -> None:
    target, middle = toy_rows.Rows(3, 11), toy_rows.Rows(3, 12)
    enumerator, chain = enumerated(
        [target, middle, Various(KINDS[kinds])], [2, 1], rule=rule, rounds=[0]
    )
    found = text_distributions(enumerator, chain, PROMPTS, 3, temperature=1.0)
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
