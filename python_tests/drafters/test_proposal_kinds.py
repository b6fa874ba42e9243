"""Every token is verified with the distribution it was drawn from, whatever its neighbours came
from: proposals that are deterministic or sampled, of any dtype and width, with row statistics or
without, side by side in one batch and one after another in one row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import test_batches
import torch
import toy

import polyspec_ext as ps
from polyspec_ext.drafters import Context, Proposal

RULES = ["token", "block"]


@dataclass(frozen=True)
class Kind:
    """What a proposal is like.

    Attributes:
        dtype: of its logits; None: it is deterministic.
        width: of its logits.
        statistics: whether it has row statistics.
        most: tokens at most.
    """

    dtype: torch.dtype | None = torch.float32
    width: int = 3
    statistics: bool = True
    most: int = 99


FIXED = Kind(None)


class Various:
    """A drafter whose proposals are of the kind that `kind` says, by request and round.

    Its float32 logits have digits that no narrower dtype holds. `sample` draws its tokens.
    """

    name = "various"

    def __init__(
        self,
        kind: Callable[[int, int], Kind],
        vocab: int = 3,
        sample: Callable[..., Any] = ps.sample,
    ) -> None:
        self.kind, self.vocab, self.sample = kind, vocab, sample
        self.table = toy.ToyLevel(vocab, 31)
        self.fine = toy.ToyLevel(vocab, 32)
        self.fine.table = self.fine.table * 0.7371

    def fork(self) -> Various:
        return Various(self.kind, self.vocab, self.sample)

    def propose(self, context: Context, k: int) -> Proposal:
        kind = self.kind(context.request, context.round)
        tokens: list[int] = []
        count = min(k, kind.most)
        if kind.dtype is None:
            last = context.tokens[-1]
            return Proposal([(last + 1 + i) % self.vocab for i in range(count)])
        level = self.fine if kind.dtype == torch.float32 else self.table
        rows, statistics = [], []
        for i in range(count):
            row = level.row([*context.tokens, *tokens])[None, : kind.width].to(kind.dtype)
            of = context.sampling
            position = len(context.tokens) + i
            s = self.sample(
                row, of.temperature, of.top_k, of.top_p, of.min_p, context.seed, position,
                context.level, context.round,
            )  # fmt: skip
            tokens.append(int(s.tokens))
            rows.append(row)
            statistics.append(s.statistics)
        return Proposal(
            tokens,
            torch.stack(rows, 1),
            statistics=torch.stack(statistics, 1) if kind.statistics else None,
        )


SAMPLED = Kind()
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


def text_distributions(
    enumerator: toy.Enumerator,
    chain: ps.Chain,
    prompts: list[list[int]],
    length: int,
    others: int = 0,
    **options: Any,
) -> list[dict[tuple[int, ...], float]]:
    """The exact distribution of each row's text; the other rows' draws stay as they are.

    Args:
        enumerator: whose operators the chain has.
    """
    found = []
    for number, prompt in enumerate(prompts):

        def generate(number: int = number, start: int = len(prompt)) -> list[int]:
            seeds = list(range(len(prompts)))
            out = chain.generate(prompts, length, seed=seeds, eos_token_id=[], **options)
            text: list[int] = out.sequences[number, start : start + length].tolist()
            return text

        enumerator.only(number, others)
        found.append(toy.chain_distribution(enumerator, generate))
    return found


def enumerated(
    levels: Sequence[Any],
    window: list[int],
    enumerator: toy.Enumerator | None = None,
    **options: Any,
) -> tuple[toy.Enumerator, ps.Chain]:
    """A chain, and what enumerates its draws, also those of a drafter that draws by itself."""
    enumerator = enumerator or toy.Enumerator()
    if isinstance(levels[-1], Various):
        levels[-1].sample = enumerator.sample
    return enumerator, ps.Chain(levels, window, operators=enumerator.operators, **options)


def distance(
    found: list[dict[tuple[int, ...], float]],
    target: toy.ToyLevel,
    prompts: list[list[int]],
    length: int,
    temperatures: Sequence[float],
) -> float:
    """The largest total variation of a row's text to the target's."""
    return max(
        toy.total_variation(own, toy.text_distribution(target, prompt, length, temperature=t))
        for own, prompt, t in zip(found, prompts, temperatures, strict=True)
    )


PROMPTS = [[0, 1], [2, 0]]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kinds", KINDS)
def test_rows_of_a_batch(kinds: str, rule: str) -> None:
    target = test_batches.Rows(3, 11)
    enumerator, chain = enumerated([target, Various(KINDS[kinds])], [2], rule=rule)
    for others in (0, -1):
        found = text_distributions(enumerator, chain, PROMPTS, 3, others, temperature=1.0)
        assert distance(found, target, PROMPTS, 3, [1.0, 1.0]) < 1e-9


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kinds", ["a round each", "dtypes", "narrow and deterministic"])
def test_rows_of_a_batch_below_a_middle(kinds: str, rule: str) -> None:
    target, middle = test_batches.Rows(3, 11), test_batches.Rows(3, 12)
    enumerator, chain = enumerated(
        [target, middle, Various(KINDS[kinds])], [2, 1], rule=rule, rounds=[0]
    )
    found = text_distributions(enumerator, chain, PROMPTS, 3, temperature=1.0)
    assert distance(found, target, PROMPTS, 3, [1.0, 1.0]) < 1e-9


@pytest.mark.parametrize("rule", RULES)
def test_a_greedy_row_beside_a_sampled_one(rule: str) -> None:
    """The greedy row has more tokens than the sampled one has logits."""
    target = test_batches.Rows(3, 11)
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


def every_kind(request: int, round: int) -> Kind:
    return [
        Kind(width=20), FIXED, Kind(torch.bfloat16, 20, most=2), Kind(width=9), FIXED,
        Kind(torch.float16, 17, statistics=False),
    ][(request + round) % 6]  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("window", [[4], [5, 2]], ids=str)
def test_a_row_is_what_it_is_alone(window: list[int], rule: str) -> None:
    """With the draws that users get; the request's number, which chooses the kind, stays."""
    levels = test_batches.make(len(window))
    drafter = Various(every_kind, 20)
    chain = ps.Chain([*levels, drafter], window, rule=rule)
    prompts = [[i] for i in range(6)]
    options: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "eos_token_id": []}
    together = chain.generate(prompts, 20, seed=list(range(6)), **options)
    for number, prompt in enumerate(prompts):
        drafter.kind = lambda request, round, number=number: every_kind(number, round)
        alone = chain.generate(prompt, 20, seed=number, **options)
        assert together.sequences[number].tolist() == alone.sequences[0].tolist()
        assert together.logprobs[number] == alone.logprobs[0]


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
    target = test_batches.Rows(3, 11, scale=1.5)
    enumerator, chain = enumerated([target, Various(kinds)], [2], Wrong(), rule=rule)
    found = text_distributions(enumerator, chain, PROMPTS, 2, temperature=1.0)
    assert distance(found, target, PROMPTS, 2, [1.0, 1.0]) > 1e-3
