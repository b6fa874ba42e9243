"""Copies of texts that were read: those found are of the text, and the level had read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from polyspec_ext.serving.prefix import PrefixCache

BLOCK = 2
TEXTS = st.lists(st.integers(0, 1), max_size=9)
# A text, and how much of it two levels have read.
READ = st.tuples(TEXTS, st.integers(0, 9), st.integers(0, 9))


def add(cache: PrefixCache, text: Sequence[int], lengths: Sequence[int]) -> None:
    def save(level: int, begin: int, end: int) -> Any:
        assert end - begin == BLOCK
        assert end <= lengths[level - 1]
        return level, tuple(text[:end])

    cache.add(text, [min(length, len(text)) for length in lengths], save)


@given(st.lists(READ, max_size=12), TEXTS, st.integers(0, 40))
def test_what_is_found_was_read(reads: Any, text: list[int], capacity: int) -> None:
    cache = PrefixCache(capacity, BLOCK)
    for given_text, one, other in reads:
        add(cache, given_text, (one, other))
        assert cache.num_tokens <= capacity
    found = cache.find(text)
    for level, saved in found.items():
        ends = range(BLOCK, len(text) + 1, BLOCK)
        assert saved == [(level, tuple(text[:end])) for end, _ in zip(ends, saved, strict=False)]
    if capacity == 40 and reads:  # room for all of the latest text, at least
        latest, one, other = reads[-1]
        again = cache.find(latest)
        for level, length in enumerate((one, other), 1):
            assert len(again.get(level, [])) >= min(length, len(latest)) // BLOCK


def test_the_least_recently_used_go_first() -> None:
    cache = PrefixCache(3 * BLOCK, BLOCK)
    add(cache, [0, 0, 1, 1], (4, 4))
    add(cache, [1, 0], (2, 2))
    assert len(cache.find([0, 0, 1, 1])[1]) == 2  # now the latest
    add(cache, [1, 1], (2, 2))
    assert cache.find([1, 0]) == {}
    assert len(cache.find([0, 0, 1, 1])[1]) == 2
    add(cache, [0, 1, 0, 1], (4, 4))
    assert len(cache.find([0, 0, 1, 1])[1]) == 1  # a block goes in front of those above it
    assert len(cache.find([0, 1, 0, 1])[1]) == 2
