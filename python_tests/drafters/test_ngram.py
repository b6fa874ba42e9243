"""The table of n-grams: counts of earlier texts, which rows of a batch do not see of each other."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import toy_rows
from proposal_kinds import distance, enumerated, text_distributions

import polyspec_ext as ps


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


def test_arguments() -> None:
    with pytest.raises(ValueError, match=r"min_ngram: expected an integer in \[1, 2\], given 3"):
        ps.NGramTable(2, 3)
    with pytest.raises(ValueError, match=r"max_entries: expected .*, given 0"):
        ps.NGramTable(max_entries=0)


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
    same = [toy_rows.ROWS[0] | {"seed": 50 + i} for i in range(6)]  # what one says, others may
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


@pytest.mark.parametrize("window", [[3], [3, 2]], ids=str)
def test_the_distribution_stays_the_targets(window: list[int]) -> None:
    prompts = [[0, 1, 0], [1, 1]]
    made = [toy_rows.Rows(2, 11 + i) for i in range(len(window))]
    table = ps.NGramTable(2, 1, learning=False)
    table.learn([0, 1, 1, 0, 0, 1, 0])
    enumerator, chain = enumerated([*made, table], window)
    found = text_distributions(enumerator, chain, prompts, 4, temperature=1.0)
    assert distance(found, made[0], prompts, 4, [1.0, 1.0]) < 1e-12
