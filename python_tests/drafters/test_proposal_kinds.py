"""Logits in memory that is used again: of levels, and of a user's drafter."""

from typing import Any

import pytest
import torch
import toy
import toy_rows
from toy_rows import Output

import polyspec_ext as ps
from polyspec_ext.drafters import Context, Proposal


class Reusing(toy.ToyLevel):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.output = Output()

    def forward(self, tokens: torch.Tensor, keep: int) -> torch.Tensor:
        return self.output.view(super().forward(tokens, keep))


def test_scores_that_an_observer_keeps() -> None:
    """Logits passed to `observe` stay valid until it returns."""
    kept = []
    for kind in (Reusing, toy.ToyLevel):
        seen: list[torch.Tensor] = []
        chain = ps.Chain([kind(3, 11), kind(3, 12)], [2])
        batch = chain.batch(
            [[0, 1]],
            8,
            temperature=1.0,
            seed=0,
            observe=lambda _, logits, seen=seen: seen.append(logits.clone()),
        )
        batch.complete()
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
    own = OfItsOwn()
    kept = own.logits.clone()
    target, model = toy_rows.make(2)
    switching = ps.SwitchingDrafter([own, ps.DraftModel(model)])
    batch = ps.Chain([target, switching], [2]).batch([[1, 2]], 30, temperature=1.0, eos_token_id=[])
    for number in range(8):
        switching.active = number % 2
        batch.advance()
    assert batch.stats.levels[0].num_draft_tokens == 16
    assert own.logits.equal(kept)


class Sharing(OfItsOwn):
    """Writes its rows of logits, which follow the text, to memory that all forks have. Each fork
    has another vocabulary."""

    def __init__(self, memory: torch.Tensor | None = None, size: int = 20) -> None:
        super().__init__()
        self.memory = self.logits if memory is None else memory
        self.logits = self.memory[..., :size]

    def fork(self) -> Any:
        return Sharing(self.memory, 9)

    def propose(self, context: Context, k: int) -> Proposal:
        generator = torch.Generator().manual_seed(sum(context.tokens))
        self.logits.copy_(torch.randn(self.logits.shape, generator=generator))
        return super().propose(context, k)


@pytest.mark.parametrize("size", [20, 9])
def test_forks_may_share_their_memory_and_not_their_vocabulary(size: int) -> None:
    def texts(prompts: list[list[int]], seeds: list[int], size: int) -> list[list[int]]:
        drafter = Sharing(torch.empty(1, 2, 20), size)
        chain = ps.Chain([*toy_rows.make(1), drafter], [2])
        return chain.generate(prompts, 20, 1.0, seed=seeds, eos_token_id=[]).new_tokens

    prompts, seeds, sizes = [[1], [2, 5], [7]], [3, 4, 5], [size, 9, 9]
    alone = [texts([p], [s], n)[0] for p, s, n in zip(prompts, seeds, sizes, strict=True)]
    assert texts(prompts, seeds, size) == alone
