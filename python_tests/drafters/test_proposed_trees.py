"""Trees from a drafter of one text: chains with it are exact, by enumeration, and it drafts what a
batched drafter of the same trees drafts; what is no tree is named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import toy
from toy_trees import TreeDrafter, TreeEnumerator, TreeLevel

import polyspec_ext as ps

V = 3
PROMPT = [0, 1]


class Proposer:
    """`propose` alone: the trees of `TreeDrafter`, drawn or of the likeliest tokens.

    Args:
        sample: draws the children; None: they are the likeliest ones.
        chains: of two requests every second gets the first path alone, as a chain.
    """

    name, trees = "proposer", True

    def __init__(
        self, table: toy.ToyLevel, widths: Sequence[int], sample: Any = None, chains: bool = False
    ) -> None:
        self.table, self.widths, self.sample, self.chains = table, widths, sample, chains
        self.texts: list[list[int]] = []

    def fork(self) -> Proposer:
        made = Proposer(self.table, self.widths, self.sample, self.chains)
        made.texts = self.texts
        return made

    def propose(self, context: ps.Context, k: int) -> ps.Proposal:
        self.texts.append(list(context.tokens))
        assert 0 <= context.valid < len(context.tokens)
        chain = self.chains and context.request % 2 == 1
        of = context.sampling
        tokens: list[int] = []
        parents: list[int] = []
        rows = {}
        level = [(-1, context.tokens)]
        for width in self.widths[:k]:
            below = []
            for node, before in level:
                row = rows[node + 1] = self.table.row(before)
                if self.sample is None or of.greedy:
                    children = row.argsort(descending=True, stable=True).tolist()[:width]
                else:
                    given = (of.temperature, of.top_k, of.top_p, of.min_p, context.seed)
                    drawn = [self.sample(row[None], *given) for _ in range(1 if chain else width)]
                    children = [int(one.tokens) for one in drawn]
                for child in children[: 1 if chain else width]:
                    below.append((len(tokens), [*before, child]))
                    tokens.append(child)
                    parents.append(node)
            level = below
        if self.sample is None or of.greedy:
            return ps.Proposal(tokens, parents=None if chain else parents)
        nothing = torch.full(
            (self.table.vocab_size,), torch.nan
        )  # rows that no child was drawn from are not read
        count = len(tokens) + (not chain)
        logits = torch.stack([rows.get(row, nothing) for row in range(count)])[None]
        return ps.Proposal(tokens, logits, parents=None if chain else parents)


def distance(
    count: int, window: list[int], widths: list[int], length: int, vocab: int, drawn: bool
) -> float:
    """Total variation of a chain's text to the target's, every draw enumerated."""
    chance = TreeEnumerator()
    levels = [TreeLevel(vocab, 11 + i) for i in range(count)]
    drafter = Proposer(toy.ToyLevel(vocab, 31), widths, chance.sample if drawn else None)
    chain = ps.Chain([*levels, drafter], window, operators=chance.operators)
    found = toy.chain_distribution(
        chance,
        lambda: (
            chain.generate(PROMPT, length, temperature=1.0, eos_token_id=[])
            .sequences[0, len(PROMPT) :]
            .tolist()
        ),
    )
    exact = toy.text_distribution(levels[0].table, PROMPT, length)
    return toy.total_variation(found, exact)


@pytest.mark.parametrize(
    ("count", "window", "widths", "length"),
    [(1, [2], [2, 2], 3), (1, [3], [2, 1, 1], 4), (2, [2, 2], [2, 1], 3)],
    ids=str,
)
def test_the_distribution_is_the_targets(
    count: int, window: list[int], widths: list[int], length: int
) -> None:
    assert distance(count, window, widths, length, V, drawn=False) < 1e-12


@pytest.mark.parametrize(
    ("count", "window", "widths", "length"),
    [(1, [2], [2, 1], 3), (1, [1], [2], 2), (2, [1, 1], [2], 2)],
    ids=str,
)
def test_the_distribution_with_independent_children(
    count: int, window: list[int], widths: list[int], length: int
) -> None:
    assert distance(count, window, widths, length, 2, drawn=True) < 1e-12


@pytest.mark.parametrize("drawn", [False, True])
def test_trees_and_chains_in_one_batch(drawn: bool) -> None:
    """Requests of both kinds, one of them greedy: each gets its own distribution."""
    chance = TreeEnumerator()
    level = TreeLevel(2, 11)
    sample = chance.sample if drawn else None
    drafter = Proposer(toy.ToyLevel(2, 31), [2] if drawn else [2, 1], sample, chains=True)
    chain = ps.Chain([level, drafter], [1 if drawn else 2], operators=chance.operators)
    prompts, limits, temperatures = [PROMPT, [1], [1, 1, 0]], [2, 2, 4], [1.0, 1.0, 0.0]
    for number in range(2):
        chance.only(number)
        found = toy.chain_distribution(
            chance, partial(toy.text_of, chain, number, prompts, limits, temperatures)
        )
        exact = toy.text_distribution(level.table, prompts[number], limits[number])
        assert toy.total_variation(found, exact) < 1e-12


def test_a_batched_drafter_drafts_what_its_capabilities_say() -> None:
    class Straight(TreeDrafter):
        def draft(self, inputs: Any) -> Any:
            return replace(super().draft(inputs), parents=None)

    chain = ps.Chain([TreeLevel(V, 1), Straight(toy.ToyLevel(V, 31), [1])], [1])
    with pytest.raises(ValueError, match=r"^tree: expected a tree .* have `trees`, given a chain"):
        chain.generate(PROMPT, 8)


def test_rows_and_statistics_of_the_operators() -> None:
    """Drawn with `ps.sample`; with its statistics handed up the tokens are the same."""
    table, texts = toy.ToyLevel(V, 31), []

    class Drawing(Proposer):
        statistics = False

        def propose(self, context: ps.Context, k: int) -> ps.Proposal:
            row = self.table.row(context.tokens)[None]
            of, at = context.sampling, len(context.tokens)
            drawn = [
                ps.sample(row, of.temperature, position=at, level=context.level, seed=context.seed,
                          round=context.round, node=node)
                for node in range(2)
            ]  # fmt: skip
            tokens = [int(one.tokens) for one in drawn]
            rows = torch.cat([row, torch.zeros(2, V)])[None]
            known = torch.zeros(1, 3, 2, dtype=torch.int64)
            known[0, 0] = drawn[0].statistics[0]
            return ps.Proposal(tokens, rows, [-1, -1], known if self.statistics else None)

    for known in (False, True):
        drafter = Drawing(table, [2])
        drafter.statistics = known
        chain = ps.Chain([TreeLevel(V, 11), drafter], [1])
        out = chain.generate(PROMPT, 40, temperature=1.0, seed=0, eos_token_id=[])
        texts.append(out.sequences)
    assert texts[0].equal(texts[1])


def test_ids_that_the_level_above_lacks_go_with_what_is_behind_them() -> None:
    """The middle knows three ids, the target four."""

    class Fixed:
        name, trees = "fixed", True

        def propose(self, context: ps.Context, k: int) -> ps.Proposal:
            tokens, parents = [3, 0, 1, 2], [-1, -1, 0, 1]
            shown = 4 if k > 1 else 2
            return ps.Proposal(tokens[:shown], parents=parents[:shown])

    for window in ([2, 2], [4, 2]):
        levels = [TreeLevel(4, 11), TreeLevel(3, 12)]
        out = ps.Chain([*levels, Fixed()], window).generate(PROMPT, 20, eos_token_id=[])
        alone = ps.Chain([toy.ToyLevel(4, 11)]).generate(PROMPT, 20, eos_token_id=[])
        assert out.sequences.equal(alone.sequences)
        assert levels[1].most == 2  # nodes 0 and 2


WRONG: list[tuple[Any, type[Exception], str]] = [
    (ps.Proposal([0, 1], parents=[-1]), ValueError, "as many parents as tokens, 2, given 1"),
    (ps.Proposal([0, 1], parents=[-1, 1]), ValueError, r"the parent of node 1 in \[-1, 1\), given"),
    (ps.Proposal([0, 1], parents=[-1, -2]), ValueError, r"of node 1 in \[-1, 1\), given -2"),
    (ps.Proposal([0, 1, 2], parents=[-1, 0, 1]), ValueError, "a tree of at most 2 levels, given 3"),
    (ps.Proposal([1, 1], parents=[-1, -1]), ValueError, "the children of a node to differ"),
    (ps.Proposal([0, 9], parents=[-1, 0]), ValueError, r"token ids in \[0, 3\), given 9"),
    (ps.Proposal([0], parents=[0.5]), TypeError, r"parents: expected an integer, given 0\.5"),  # type: ignore[list-item]
    (ps.Proposal([0], torch.zeros(1, 1, V), [-1]), ValueError, r"shape \[1, 2, Vd\]"),
    (
        ps.Proposal([0], torch.zeros(1, 2, V), [-1], torch.zeros(1, 1, 2).long()),
        ValueError,
        r"statistics of shape \[1, 2, 2\]",
    ),
]


@pytest.mark.parametrize(("proposal", "error", "text"), WRONG, ids=[text for *_, text in WRONG])
def test_wrong_trees_are_named(proposal: ps.Proposal, error: type[Exception], text: str) -> None:
    class Wrong(Proposer):
        def propose(self, context: ps.Context, k: int) -> ps.Proposal:
            return proposal

    chain = ps.Chain([TreeLevel(V, 1), Wrong(toy.ToyLevel(V, 31), [2])], [2])
    with pytest.raises(error, match=f"^proposer: .*{text}"):
        chain.generate(PROMPT, 8, temperature=1.0)


def test_a_drafter_says_that_it_proposes_trees() -> None:
    class Silent(Proposer):
        trees = False

    chain = ps.Chain([TreeLevel(V, 1), Silent(toy.ToyLevel(V, 31), [2, 2])], [2])
    with pytest.raises(ValueError, match=r"^proposer: expected a chain .* without `trees = True`"):
        chain.generate(PROMPT, 8)
    drafter = Proposer(toy.ToyLevel(V, 31), [2])
    with pytest.raises(ValueError, match="expected a level that reads trees, as proposer drafts"):
        ps.Chain([toy.ToyLevel(V, 1), drafter], [2])
