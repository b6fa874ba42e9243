"""The steps of a round that are known before its tokens are."""

from __future__ import annotations

import pytest
from test_graphs import level

import polyspec_ext as ps
from polyspec_ext.runtime.plan import Program, default_rounds, program


def test_programs() -> None:
    assert program([3], [0]) == Program((2, 1), (3,), (3,), (0,))
    assert program([0], [0]) == Program((1,), (0,), (0,), (0,))
    two = program([6, 2], [2, 0])
    assert two is not None
    assert two.steps == (3, 2, 3, 2, 1)
    assert two.most == (6, 2)
    assert (two.width(1), two.width(2), two.width(3)) == (7, 4, 3)
    # A window that is full early bounds what can wait: at most one below it, and a block.
    assert program([2, 4], [3, 0]).most == (6, 4)  # type: ignore[union-attr]
    deep = program([8, 4, 2], [2, 2, 0])
    assert deep is not None
    gather = (4, 3, 4, 3)
    assert deep.steps == (*gather, 2, *gather, 2, 1)
    assert deep.most == (14, 6, 2)
    assert program([4, 0, 3], [2, 0, 0]) is not None
    assert program([4, 3, 3], [2, 0, 0]) is None
    assert program([], []) is None
    assert program([1] * 16, [1] * 16) is None


def test_default_rounds() -> None:
    assert default_rounds([]) == default_rounds([4]) == []
    assert default_rounds([8, 4]) == [2]
    assert default_rounds([5, 3]) == [2]
    assert default_rounds([4, 4]) == [1]
    assert default_rounds([0, 3]) == [1]
    assert default_rounds([3, 0]) == [3]
    assert default_rounds([16, 8, 4]) == [2, 2]
    chain = ps.Chain([level(i, 1, str(i)) for i in range(3)], [8, 4])
    assert chain.rounds == [2]
    for bad in ([], [1, 2], [-1]):
        with pytest.raises(ValueError, match="rounds: expected 1 numbers >= 0 for 3 levels"):
            ps.Chain([level(i, 1, str(i)) for i in range(3)], [8, 4], rounds=bad)
