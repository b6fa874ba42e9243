"""Lookups equal a plain search, and a table counts earlier texts."""

import copy
import random
from pathlib import Path

import pytest
import toy_rows

import polyspec_ext as ps
from polyspec_ext.drafters import Proposal
from polyspec_ext.drafters.proposals import cut_at_eos


def searched(text: list[int]) -> tuple[int, list[int]]:
    """Return the length of the longest suffix that occurs earlier, and the ends of its
    occurrences."""
    for length in range(len(text) - 1, 0, -1):
        suffix = text[-length:]
        ends = [end for end in range(length, len(text)) if text[end - length : end] == suffix]
        if ends:
            return length, ends
    return 0, []


@pytest.mark.parametrize("letters", [1, 2, 3, 8])
def test_suffixes_are_those_that_a_search_finds(letters: int) -> None:
    chance = random.Random(letters)
    for _ in range(60):
        least = chance.randint(1, 3)
        drafter, context = ps.SuffixMatch(least).fork(), ps.Context([])
        for _ in range(40):
            text = context.tokens
            if text and chance.random() < 0.3:
                del text[-chance.randint(1, min(6, len(text))) :]
            context.valid = min(context.valid, len(text))
            text += [chance.randrange(letters) for _ in range(chance.randint(1, 4))]
            length, ends = searched(text)
            proposed = list(drafter.propose(context, 2).tokens)
            assert proposed == (
                [*text, *text[ends[-1] :]][ends[-1] :][:2] if length >= least else []
            )
            context.valid = len(text)


def test_a_text_that_repeats_one_token_costs_little() -> None:
    drafter, text = ps.SuffixMatch(), [7] * 30_000
    assert list(drafter.propose(ps.Context(text), 3).tokens) == [7, 7, 7]
    assert list(ps.SuffixMatch(20_000).propose(ps.Context(text[:20_001]), 1).tokens) == [7]


@pytest.mark.parametrize("sizes", [(3, 1), (4, 2)], ids=str)
def test_prompt_lookup_finds_what_a_search_finds(sizes: tuple[int, int]) -> None:
    chance, drafter = random.Random(5), ps.PromptLookup(*sizes)
    context = ps.Context([0])
    for _ in range(400):
        tokens = context.tokens
        expected: list[int] = []
        for size in range(sizes[0], sizes[1] - 1, -1):
            ends = [
                end
                for end in range(size, len(tokens))
                if tokens[end - size : end] == tokens[-size:]
            ]
            if ends and size <= len(tokens):
                expected = tokens[ends[-1] : ends[-1] + 3]
                break
        assert drafter.propose(context, 3).tokens == expected
        context.valid = chance.choice([len(tokens), chance.randint(0, len(tokens))])
        tokens[context.valid :] = [chance.randrange(3) for _ in range(chance.randint(1, 3))]


def proposed(table: ps.NGramTable, tokens: list[int], k: int) -> list[int]:
    return list(table.fork().propose(ps.Context(tokens), k).tokens)


def test_what_followed_most_often() -> None:
    table = ps.NGramTable(max_ngram=2, min_ngram=1, learning=False)
    assert proposed(table, [1, 2], 3) == []
    table.learn([1, 2, 3, 1, 2, 3, 1, 2, 4])
    assert proposed(table, [1, 2], 4) == [3, 1, 2, 3]
    assert proposed(table, [9, 4], 4) == []  # nothing followed 4
    assert proposed(table, [9, 2], 2) == [3, 1]  # 9 2 is not known, and 2 is
    table.learn([2, 4])
    table.learn([1, 2, 4])
    assert proposed(table, [1, 2], 1) == [4]  # twice each: the latest
    assert proposed(table, [], 2) == []


def test_only_so_many_are_kept() -> None:
    table = ps.NGramTable(max_ngram=1, min_ngram=1, max_entries=3)
    table.learn([1, 2, 3, 4])
    table.learn([1, 9])
    assert len(table) == 3
    table.learn([5, 6])  # 2 was not met for longest
    assert proposed(table, [2], 1) == []
    assert [proposed(table, [key], 1) for key in (1, 3, 5)] == [[9], [4], [6]]


def test_a_table_is_kept_in_a_file(tmp_path: Path) -> None:
    table = ps.NGramTable(max_ngram=3, min_ngram=2)
    chain = ps.Chain([toy_rows.make(1)[0], table], [4])
    toy_rows.run(chain, toy_rows.ROWS)
    table.save(tmp_path / "table.json")  # with the texts of the latest batch
    again = ps.NGramTable.load(tmp_path / "table.json")
    assert len(again) == len(table) > 20
    for text in ([1, 2, 7], [8, 9], [3, 3, 3]):
        assert proposed(again, text, 5) == proposed(table, text, 5)
    (tmp_path / "other.json").write_text('{"format": 7}')
    for name in ("other.json", "table.json"):
        if name == "table.json":
            (tmp_path / name).write_text("[1]")
        with pytest.raises(ValueError, match=r"expected a file that NGramTable\.save wrote"):
            ps.NGramTable.load(tmp_path / name)


def test_earlier_outputs_are_learnt() -> None:
    target = toy_rows.make(1)[0]
    chain = ps.Chain([target, "ngram"], [4])
    first = chain.generate([1], 60)
    second = chain.generate([1], 60)  # greedy: the text is known by now
    assert second.sequences.equal(first.sequences)
    assert second.stats.levels[0].mean_acceptance_length > 4
    assert first.stats.levels[0].num_accepted_tokens == 0  # a text without a repetition
    frozen = ps.NGramTable(learning=False)
    chain = ps.Chain([target, frozen], [4])
    for _ in range(2):
        chain.generate([1], 60)
    assert len(frozen) == 0


def test_rows_of_a_batch_do_not_see_each_other() -> None:
    """Each has the tokens that it has alone with the table as it was before."""
    table = ps.NGramTable(max_ngram=2, min_ngram=1)
    target = toy_rows.make(1)[0]
    toy_rows.run(ps.Chain([target, table], [4]), toy_rows.ROWS)
    table.fork()  # the batch is over
    same = [toy_rows.ROWS[0] | {"seed": 50 + i} for i in range(6)]  # so that rows can share texts
    rows = [*toy_rows.ROWS, *same]
    together = toy_rows.run(ps.Chain([target, copy.deepcopy(table)], [4]), rows)
    assert sum(one.levels[0].num_accepted_tokens for one in together.requests) > 5
    for row, own, stats in zip(rows, together.sequences.tolist(), together.requests, strict=True):
        alone = toy_rows.run(ps.Chain([target, copy.deepcopy(table)], [4]), [row])
        text = alone.sequences[0].tolist()
        assert own[: len(text)] == text
        mine, theirs = stats.levels[0], alone.stats.levels[0]
        assert mine.draft_length_histogram == theirs.draft_length_histogram
        assert mine.acceptance_histogram == theirs.acceptance_histogram


def test_a_period_goes_on_behind_the_end_of_the_text() -> None:
    drafter = ps.SuffixMatch()
    assert drafter.propose(ps.Context([7, 1, 2, 1, 2]), 5).tokens == [1, 2, 1, 2, 1]
    assert drafter.propose(ps.Context([7, 3, 3]), 3).tokens == [3, 3, 3]


def test_drafts_end_with_the_first_end_of_a_text() -> None:
    assert cut_at_eos([4, 5, 6, 5], frozenset({5, 9})) == [4, 5]
    assert cut_at_eos([4, 6], frozenset({5})) == [4, 6]


class Watching:
    """Remembers the text of a call with its proposal, as far as the next call keeps it."""

    def __init__(self) -> None:
        self.text: list[int] = []

    def fork(self) -> ps.Drafter:
        return Watching()

    def propose(self, context: ps.Context, k: int) -> Proposal:
        assert context.valid <= len(self.text)
        assert context.tokens[: context.valid] == self.text[: context.valid]
        drafted = [(sum(context.tokens) + i) % toy_rows.VOCAB for i in range(k)]
        self.text = [*context.tokens, *drafted]
        return Proposal(drafted)


def test_a_context_says_how_much_of_the_text_stands() -> None:
    chain = ps.Chain([*toy_rows.make(2), Watching()], [4, 2])
    chain.generate([[1, 2], [3], [4, 5]], 30, 1.0, seed=3, eos_token_id=[])
