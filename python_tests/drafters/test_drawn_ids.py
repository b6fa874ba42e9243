"""Drafters that draw a part of the ids: exact by `target_to_draft`, with no row of all ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import toy
import toy_rows

import polyspec_ext as ps
from polyspec_ext.levels import IdMap, LevelOutput
from polyspec_ext.runtime.plan import Operators

V, DRAWN, PROMPT = 4, [0, 1, 3], [2, 1]


class Part(ps.DraftModel):
    """A drafter of a toy level that has logits of `DRAWN` only."""

    def __init__(self, operators: Operators, vocab_size: int = V) -> None:
        super().__init__(PartLevel(vocab_size), draw=operators.draw)


class PartLevel(toy.ToyLevel):
    def __init__(self, vocab_size: int = V) -> None:
        super().__init__(vocab_size, 3, scale=1.0)
        self.drawn = torch.tensor(DRAWN)
        self.id_map = IdMap(vocab_size, self.drawn)

    def forward(self, tokens: torch.Tensor, keep: int) -> torch.Tensor:
        return super().forward(tokens, keep)[..., self.drawn]


def gap(chain_of: Any, **sampling: float) -> float:
    """Total variation of three tokens to the target's."""
    chance = toy.Enumerator()
    chain = chain_of(chance.operators)
    return toy.chain_gap(chance, chain, toy.ToyLevel(V, 1), PROMPT, 3, **sampling)


@pytest.mark.parametrize(
    ("middle", "options", "sampling"),
    [
        *(([], {"rule": rule}, own) for rule in ("token", "block") for own in ({}, {"top_p": 0.7})),
        *(([2], {"tail": tail}, {}) for tail in (0, 1)),
    ],
)
def test_the_distribution_is_the_targets(middle: list[int], options: Any, sampling: Any) -> None:
    """With a tail, the target reads rows of both levels below it."""

    def chain(operators: Operators) -> ps.Chain:
        levels = [*(toy.ToyLevel(V, seed) for seed in (1, *middle)), Part(operators)]
        window = [1, 1] if middle else [2]
        return ps.Chain(levels, window, **options, operators=operators)

    assert gap(chain, **sampling) < 1e-6


def test_the_target_is_given_rows_of_the_drawn_ids() -> None:
    seen: list[tuple[int, list[int]]] = []

    def verify(logits: Any, tokens: Any, rows: Any = None, **options: Any) -> Any:
        if rows is not None:
            seen.append((rows.shape[-1], options["target_to_draft"].tolist()))
        return ps.verify(logits, tokens, rows, **options)

    operators = Operators(toy.drawing(ps.sample), verify)
    levels = [toy.ToyLevel(V, 1), Part(operators)]
    chain = ps.Chain(levels, [2], operators=operators)
    chain.generate(PROMPT, 12, temperature=1.0, seed=1)
    assert seen
    assert all(one == (3, [0, 1, -1, 2]) for one in seen)


def test_ids_that_the_level_above_lacks_are_not_drawn() -> None:
    above = toy.ToyLevel(3, 1)
    chain = ps.Chain([above, Part(Operators(), 4)], [3], check_vocabulary=False)
    out = chain.generate(PROMPT, 40, temperature=1.0, seed=2)
    assert set(out.sequences[0].tolist()) <= {0, 1, 2}
    assert out.stats.levels[0].num_accepted_tokens > 0


def test_processors_see_every_id() -> None:
    """They change logits by id; what they leave of the drawn ids is drawn from."""

    class Only:
        def apply(self, logits: torch.Tensor, prefix: torch.Tensor, row: int) -> torch.Tensor:
            assert logits.shape[-1] == V
            return torch.where(torch.arange(V) == 3, logits, -float("inf"))

    chain = ps.Chain([toy.ToyLevel(V, 1), Part(Operators())], [3])
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


# ---- a level between others ----------------------------------------------------------------------


class StayingPart(toy_rows.Staying):
    """A level of batches with logits of `DRAWN` only."""

    def __init__(self, vocab_size: int = V) -> None:
        super().__init__(vocab_size, 3)
        self.capabilities = replace(
            toy_rows.Staying.capabilities, id_map=IdMap(V, torch.tensor(DRAWN))
        )

    def forward(self, block: Any) -> Any:
        return LevelOutput(super().forward(block).logits[..., DRAWN])


def between(operators: Operators, rule: str = "token", sync: bool = True, tail: int = 0) -> Any:
    levels = [toy_rows.Staying(V, 1), StayingPart(), toy_rows.Staying(V, 2)]
    return ps.Chain(levels, [2, 1], rule=rule, sync_each_step=sync, tail=tail, operators=operators)


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(("sync", "tail"), [(True, 0), (True, 1), (False, 0)])
@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.7}], ids=["all", "top-p"])
def test_a_part_between_two_levels(rule, sync, tail, sampling) -> None:
    assert gap(lambda operators: between(operators, rule, sync, tail), **sampling) < 1e-6


def test_rows_of_the_whole_model_are_another_law() -> None:
    """The planted mistake: what is handed up has mass at ids that are never drawn."""
    middle = toy.ToyLevel(V, 3)

    class Whole(toy.Enumerator):
        def verify(self, target: Any, tokens: Any, draft: Any = None, **options: Any) -> Any:
            if options["level"] == 1 and draft is not None:
                missing = draft.isneginf()
                draft = draft.masked_fill(missing, float(middle.table.mean()))
                options["draft_statistics"] = None
            return super().verify(target, tokens, draft, **options)

    chance = Whole()
    chain = between(chance.operators)
    assert toy.chain_gap(chance, chain, toy.ToyLevel(V, 1), PROMPT, 3) > 1e-3


def test_processors_may_forbid_all_that_it_draws() -> None:
    class Only:
        def apply(self, logits: torch.Tensor, prefix: torch.Tensor, row: int) -> torch.Tensor:
            return torch.where(torch.arange(V) == 2, logits, -float("inf"))

    batch = between(Operators()).batch([PROMPT], 6, temperature=1.0, seed=1, processors=Only())
    batch.complete()
    assert batch.rows[0].tokens[len(PROMPT) :] == [2] * 6


@pytest.mark.parametrize("rule", ["token", "block"])
def test_switching_drafters_take_some(rule: str) -> None:
    """Each block has rows of all ids, whichever drafter wrote it."""

    class Turns:
        def __init__(self, drafter: ps.SwitchingDrafter) -> None:
            self.drafter = drafter

        def next(self, report: Any) -> Sequence[int]:
            self.drafter.active = len(report.text) % 2
            return list(report.windows)

    def chain(operators: Operators) -> ps.Chain:
        members = [Part(operators), ps.DraftModel(toy.ToyLevel(V, 2), draw=operators.draw)]
        drafter = ps.SwitchingDrafter(members)
        levels = [toy.ToyLevel(V, 1), drafter]
        return ps.Chain(levels, [2], rule=rule, policy=Turns(drafter), operators=operators)

    assert gap(chain) < 1e-6


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
