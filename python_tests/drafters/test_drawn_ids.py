"""Drafters that draw a part of the ids: exact by `target_to_draft`, with no row of all ids."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import toy

import polyspec_ext as ps
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
    """Processors change logits by id; the draw follows the changed logits of the drawn ids."""

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
