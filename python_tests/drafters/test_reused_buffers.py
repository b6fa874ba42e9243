"""Levels and drafters that return views of one buffer, which every pass writes anew, as captured
graphs and engines with bound outputs do: what is still to be used has been copied by then.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import proposal_kinds
import pytest
import torch
import toy
import toy_rows
from toy_rows import Output

import polyspec_ext as ps
from polyspec_ext.drafters import Context, Proposal

RULES = ["token", "block"]


class Reusing(toy.ToyLevel):
    """A toy level of one row."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.output = Output()

    def forward(self, tokens: torch.Tensor, keep: int) -> torch.Tensor:
        return self.output.view(super().forward(tokens, keep))


class ReusingRows(toy_rows.Rows):
    """A toy level of a batch."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.output = Output()

    def forward(self, *args: Any) -> torch.Tensor:  # type: ignore[override]
        return self.output.view(super().forward(*args))


def levels(count: int, reusing: Sequence[int], one: Any, other: Any, vocab: int) -> list[Any]:
    return [(one if i in reusing else other)(vocab, 11 + i) for i in range(count)]


# Windows, rounds, new tokens, vocabulary. No bound on the rounds has a level run often before what
# it has handed up is verified.
SHAPES: list[tuple[list[int], list[int] | None, int, int]] = [
    ([2], None, 3, 3),
    ([2, 1], None, 3, 3),
    ([3, 1], [0], 4, 2),
    ([3, 2], [2], 4, 2),
    ([2, 1, 1], [0, 0], 4, 2),
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("window", "rounds", "length", "vocab"), SHAPES, ids=str)
def test_one_row(
    window: list[int], rounds: list[int] | None, length: int, vocab: int, rule: str
) -> None:
    count = len(window) + 1
    every = [(i,) for i in range(count)] + [tuple(range(count))]
    alone = rule == "token" and sum(window) < 5 and count < 4  # else all levels at once
    for reusing in every if alone else every[-1:]:
        made = levels(count, reusing, Reusing, toy.ToyLevel, vocab)
        enumerator, chain = proposal_kinds.enumerated(made, window, rule=rule, rounds=rounds)
        found = toy.chain_distribution(
            enumerator,
            lambda chain=chain: chain.generate([0, 1], length, 1.0).sequences[0, 2:].tolist(),
        )
        assert toy.total_variation(found, toy.text_distribution(made[0], [0, 1], length)) < 1e-9, (
            reusing
        )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("window", [[2], [3, 1]], ids=str)
def test_rows_of_a_batch(window: list[int], rule: str) -> None:
    """Rows out of step: what one has handed up waits while a level reads for another."""
    count, prompts = len(window) + 1, [[0, 1], [1, 1]]
    made = levels(count, range(count), ReusingRows, None, 2)
    enumerator, chain = proposal_kinds.enumerated(made, window, rule=rule, rounds=[0] * (count - 2))
    for others in (0, -1):
        found = proposal_kinds.text_distributions(
            enumerator, chain, prompts, 4, others, temperature=1.0
        )
        assert proposal_kinds.distance(found, made[0], prompts, 4, [1.0, 1.0]) < 1e-9


class ReusingDrafter(proposal_kinds.Various):
    """A drafter whose forks have one buffer for all their logits."""

    def __init__(self) -> None:
        super().__init__(lambda request, round: proposal_kinds.SAMPLED)
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
    enumerator, chain = proposal_kinds.enumerated([target, ReusingDrafter()], [2], rule=rule)
    found = proposal_kinds.text_distributions(enumerator, chain, prompts, 3, temperature=1.0)
    assert proposal_kinds.distance(found, target, prompts, 3, [1.0, 1.0]) < 1e-9


def test_scores_that_an_observer_keeps() -> None:
    """What `observe` is given stands until it returns."""
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
