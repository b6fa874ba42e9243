"""Copies of read texts: copies found are of the text, and the level had read them."""

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from polyspec_ext.runtime.prefixes import Prefixes

TEXTS = st.lists(st.integers(0, 1), max_size=9)
# A text, and how much of it two levels have read.
READ = st.tuples(TEXTS, st.integers(0, 9), st.integers(0, 9))


def add(kept: Prefixes, text: Sequence[int], lengths: Sequence[int]) -> None:
    def save(level: int, begin: int, end: int) -> Any:
        assert begin < end <= lengths[level - 1]
        return level, tuple(text[:begin]), tuple(text[begin:end])

    lengths = [min(length, len(text)) for length in lengths]
    kept.add(text, lengths, save)


def read(level: int, copies: Sequence[Any]) -> list[int]:
    """Return the text of copies; each continues the earlier copies."""
    text: list[int] = []
    for (own, before, tokens), count in copies:
        assert own == level
        assert list(before) == text
        assert 0 < count <= len(tokens)
        text += tokens[:count]
    return text


@given(st.lists(READ, max_size=12), TEXTS, st.integers(0, 120))
def test_what_is_found_was_read(reads: Any, text: list[int], capacity: int) -> None:
    kept = Prefixes(capacity, 0)
    for given_text, one, other in reads:
        add(kept, given_text, (one, other))
        assert kept.num_tokens <= capacity
    # Every token that takes room can be found.
    texts = [
        read(level, found) for latest, *_ in reads for level, found in kept.find(latest).items()
    ]
    prefixes = {tuple(latest[:end]) for latest in texts for end in range(1, len(latest) + 1)}
    assert kept.num_tokens == len(prefixes)
    for level, copies in kept.find(text).items():
        found = read(level, copies)
        assert found == text[: len(found)]
    if capacity == 120:  # room for all
        for latest, *lengths in reads:
            again = kept.find(latest)
            for level, length in enumerate(lengths, 1):
                assert len(read(level, again.get(level, ()))) >= min(length, len(latest))


def test_no_token_is_kept_twice() -> None:
    kept = Prefixes(4096, 0)
    text = list(range(1000))
    for end in (400, 1000, 700):
        add(kept, text[:end], (end, end))
        add(kept, [*text[: end - 50], 7, 7], (end - 48, 0))
    assert kept.num_tokens == 1000 + 3 * 2
    assert read(2, kept.find(text)[2]) == text


def test_the_least_recently_used_go_first() -> None:
    kept = Prefixes(6, 0)
    add(kept, [0, 0, 1, 1], (4, 4))
    add(kept, [1, 0], (2, 2))
    assert read(1, kept.find([0, 0, 1, 1])[1]) == [0, 0, 1, 1]  # now the latest
    add(kept, [2, 2], (2, 2))
    assert kept.find([1, 0]) == {}
    assert read(1, kept.find([0, 0, 1, 1])[1]) == [0, 0, 1, 1]
    add(kept, [0, 0, 0, 1], (4, 4))
    assert read(1, kept.find([0, 0, 0, 1])[1]) == [0, 0, 0, 1]
    assert read(2, kept.find([0, 0, 1, 1])[2]) == [0, 0, 1, 1]


def test_states_of_whole_texts() -> None:
    kept = Prefixes(6, 2)
    for text in ([1], [1, 2], [1, 2, 3]):
        kept.add_state(text, 1, tuple(text))
    assert kept.find([1]) == {}
    assert kept.find([1, 2, 3, 4]) == {1: [((1, 2, 3), 3)]}
    assert kept.find([1, 2, 9]) == {1: [((1, 2), 2)]}
    # The target's state is no longer than a state from which its drafter can begin.
    add(kept, [1, 2, 3], (0, 3))
    assert kept.find([1, 2, 3, 4], {1: 2})[1] == [((1, 2), 2)]
    assert 1 not in kept.find([1, 9, 9, 9], {1: 2})
