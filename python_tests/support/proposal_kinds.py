"""A drafter with every kind of proposal, and the exact distributions of a batch's texts."""

from dataclasses import dataclass

import torch
import toy

import polyspec_ext as ps
from polyspec_ext.drafters import Context, Proposal


@dataclass(frozen=True)
class Kind:
    """The form of a proposal.

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
    """A drafter with proposals of kind `kind`, by request and round.

    Its float32 logits have digits that no narrower dtype holds. `sample` draws its tokens.
    """

    name = "various"

    def __init__(self, kind, vocab=3, sample=ps.sample) -> None:
        self.kind, self.vocab, self.sample = kind, vocab, sample
        self.table = toy.ToyLevel(vocab, 31)
        self.fine = toy.ToyLevel(vocab, 32)
        self.fine.table = self.fine.table * 0.7371

    def fork(self) -> ps.Drafter:
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


def text_distributions(enumerator, chain, prompts, length, others=0, **options):
    """Return the exact distribution of each row's text; the other rows' draws are fixed.

    Args:
        enumerator: of the chain's operators.
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


def distance(found, target, prompts, length, temperatures) -> float:
    """The largest total variation of a row's text to the target's."""
    return max(
        toy.total_variation(own, toy.text_distribution(target, prompt, length, temperature=t))
        for own, prompt, t in zip(found, prompts, temperatures, strict=True)
    )
