"""Windows that are cut behind a draft token, without a row for a bonus: the text has exactly the
target's distribution, by enumeration of every draw."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import toy

DRAFTED, VOCAB, PROMPT = 3, 3, [0, 1]
FORBIDDEN = 2


class Turn:
    """A target that verifies what a drafter has drawn at once, then goes on alone."""

    def __init__(self, enumerator: toy.Enumerator, target: toy.ToyLevel, rule: str) -> None:
        self.enumerator, self.target, self.rule = enumerator, target, rule
        self.drafter = toy.ToyLevel(VOCAB, seed=12, scale=1.5)

    def draft(self) -> tuple[list[int], torch.Tensor]:
        tokens: list[int] = []
        rows = []
        for _ in range(DRAFTED):
            rows.append(self.drafter.row([*PROMPT, *tokens]))
            tokens += self.enumerator.sample(rows[-1][None], 1.0, 0, 1.0, 0.0).tokens.tolist()
        return tokens, torch.stack(rows)

    def verify(self, text: list[int], drafted: list[int], q: torch.Tensor, bonus: bool) -> bool:
        """Add what the target emits to the text. Whether all draft tokens are accepted."""
        count = len(drafted) + bonus
        rows = [self.target.row([*PROMPT, *text, *drafted[:i]]) for i in range(count)]
        options: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        result = self.enumerator.verify(
            torch.stack(rows),
            torch.tensor([*drafted, -1][:count]),
            q[None],
            **options,
            seed=0,
            rule=self.rule,
            offsets=torch.tensor([0, count]),
            draft_len=len(drafted),
            draft_lengths=torch.tensor([len(drafted)]),
        )
        text += [token for token in result.tokens[0].tolist() if token >= 0]
        return int(result.num_accepted) == len(drafted)

    def finish(self, text: list[int]) -> list[int]:
        while len(text) <= DRAFTED:
            row = self.target.row([*PROMPT, *text])
            text += self.enumerator.sample(row[None], 1.0, 0, 1.0, 0.0).tokens.tolist()
        return text


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("cut", range(1, DRAFTED + 1))
def test_the_rest_is_verified_later(rule: str, cut: int) -> None:
    target = toy.ToyLevel(VOCAB, seed=11)
    turn = Turn(toy.Enumerator(), target, rule)

    def generate() -> list[int]:
        text: list[int] = []
        drafted, q = turn.draft()
        if turn.verify(text, drafted[:cut], q[:cut], bonus=False) and cut < DRAFTED:
            turn.verify(text, drafted[cut:], q[cut:], bonus=True)
        return turn.finish(text)

    texts = toy.chain_distribution(turn.enumerator, generate)
    law = toy.text_distribution(target, PROMPT, DRAFTED + 1)
    assert toy.total_variation(texts, law) < 1e-5


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("kept", [True, False])
def test_a_forbidden_token_is_rejected_and_not_dropped(rule: str, kept: bool) -> None:
    """A window ends behind the first forbidden draft token, which the masked row rejects. Without
    that token, and with a bonus in its stead, the text has another distribution."""
    target = toy.ToyLevel(VOCAB, seed=11)
    target.table[..., FORBIDDEN] = -torch.inf
    turn = Turn(toy.Enumerator(), target, rule)

    def generate() -> list[int]:
        text: list[int] = []
        drafted, q = turn.draft()
        cut = drafted.index(FORBIDDEN) + kept if FORBIDDEN in drafted else DRAFTED
        turn.verify(text, drafted[:cut], q[:cut], bonus=not kept)
        return turn.finish(text)

    texts = toy.chain_distribution(turn.enumerator, generate)
    law = toy.text_distribution(target, PROMPT, DRAFTED + 1)
    assert (toy.total_variation(texts, law) < 1e-5) == kept
