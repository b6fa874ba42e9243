"""Suffix matching: what the automaton finds is what a search of the whole text finds."""

from __future__ import annotations

import random

import pytest
import toy
import toy_rows
from proposal_kinds import distance, enumerated, text_distributions

import polyspec_ext as ps
from polyspec_ext.drafters.suffix import SuffixAutomaton


def searched(text: list[int]) -> tuple[int, list[int]]:
    """Length of the longest suffix that occurs earlier, and where such occurrences end."""
    for length in range(len(text) - 1, 0, -1):
        suffix = text[-length:]
        ends = [end for end in range(length, len(text)) if text[end - length : end] == suffix]
        if ends:
            return length, ends
    return 0, []


@pytest.mark.parametrize("letters", [1, 2, 3, 8])
def test_the_automaton_finds_what_a_search_finds(letters: int) -> None:
    """Also behind tokens that were taken back and replaced."""
    chance = random.Random(letters)
    for _ in range(60):
        found, text = SuffixAutomaton(), list[int]()
        for _ in range(40):
            if text and chance.random() < 0.3:
                for _ in range(chance.randint(1, min(6, len(text)))):
                    found.pop()
                    text.pop()
            for _ in range(chance.randint(1, 4)):
                text.append(chance.randrange(letters))
                found.append(text[-1])
            length, ends = searched(text)
            assert found.matches[-1].length == length
            if length:
                assert found.matches[-1].end == ends[-1]  # the latest
        assert found.tokens == text
        again = SuffixAutomaton()
        for token in text:
            again.append(token)
        assert again.matches == found.matches


def test_a_text_that_repeats_one_token_costs_little() -> None:
    """One suffix of every length is known at every place; few of them are kept up to date."""
    found = SuffixAutomaton()
    for _ in range(3000):
        found.append(7)
    assert found.matches[-1].length == 2999
    assert found.matches[-1].end == 2999


def test_proposals() -> None:
    drafter = ps.SuffixMatch()
    context = ps.Context([1, 2, 3, 4, 9, 2, 3])
    assert list(drafter.propose(context, 3).tokens) == [4, 9, 2]
    context.valid = 7
    context.tokens += [8]
    assert list(drafter.propose(context, 3).tokens) == []
    # 8 is taken back and replaced: what was learnt from it is gone, the rest stays.
    context.valid = 7
    context.tokens[7:] = [4]
    assert list(drafter.propose(context, 2).tokens) == [9, 2]
    # The place before is the beginning of a repetition, which goes on.
    assert list(drafter.propose(ps.Context([5, 1, 2, 1, 2]), 5).tokens) == [1, 2, 1, 2, 1]
    long = ps.SuffixMatch(min_length=3)
    assert list(long.propose(ps.Context([1, 2, 5, 1, 2]), 2).tokens) == []
    assert list(long.fork().propose(ps.Context([1, 2, 3, 5, 1, 2, 3]), 2).tokens) == [5, 1]
    with pytest.raises(ValueError, match=r"min_length: expected .*, given 0"):
        ps.SuffixMatch(0)


def test_the_longest_match_wins() -> None:
    """Where hashed n-grams of three tokens only see that 1 2 3 was followed by 9 last."""
    text = [7, 8, 1, 2, 3, 5, 0, 1, 2, 3, 9, 7, 8, 1, 2, 3]
    assert list(ps.PromptLookup().propose(ps.Context(list(text)), 1).tokens) == [9]
    assert list(ps.SuffixMatch().propose(ps.Context(list(text)), 1).tokens) == [5]


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("window", [[3], [3, 2]], ids=str)
def test_the_distribution_stays_the_targets(window: list[int], rule: str) -> None:
    prompts = [[0, 1, 0], [1, 1]]
    made = [toy_rows.Rows(2, 11 + i) for i in range(len(window))]
    enumerator, chain = enumerated([*made, ps.SuffixMatch()], window, rule=rule)
    found = text_distributions(enumerator, chain, prompts, 4, temperature=1.0)
    assert distance(found, made[0], prompts, 4, [1.0, 1.0]) < 1e-12


def test_by_name_and_in_a_batch() -> None:
    target = toy_rows.make(1)[0]
    chain = ps.Chain([target, "suffix"], [6])
    assert isinstance(chain.drafter, ps.SuffixMatch)
    alone = [toy_rows.run(chain, [row]).sequences[0].tolist() for row in toy_rows.ROWS]
    together = toy_rows.run(chain, toy_rows.ROWS)
    for own, text, row in zip(together.sequences.tolist(), alone, toy_rows.ROWS, strict=True):
        assert own[: len(text)] == text, row
    # A target that repeats itself, greedily: its periods are found.
    greedy = ps.Chain([toy.ToyLevel(4, 3), ps.SuffixMatch()], [6]).generate([1], 60)
    assert greedy.sequences.equal(ps.Chain([toy.ToyLevel(4, 3)]).generate([1], 60).sequences)
    assert greedy.stats.levels[0].mean_acceptance_length > 2
