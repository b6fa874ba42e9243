"""The chain's bookkeeping, on toy levels."""

from __future__ import annotations

from typing import Any

import torch
import toy

import polyspec_ext as ps


class Cycle(toy.ToyLevel):
    """Says 0, 1, 2, ... by position; `wrong` gives other tokens at some positions."""

    def __init__(self, wrong: dict[int, int] | None = None) -> None:
        super().__init__(50, 0)
        self.wrong = wrong or {}

    def row(self, prefix: Any) -> torch.Tensor:
        at = len(prefix)
        row = torch.zeros(50)
        row[self.wrong.get(at, at % 50)] = 15.0
        return row


def test_cache_table() -> None:
    """The cache rules: what every cache keeps after M_1 accepts j of m, and what is read
    next."""
    # C = 3 committed tokens (0 1 2). The drafter goes wrong at position 4, the middle at 6.
    target, middle, drafter = Cycle(), Cycle({6: 40}), Cycle({4: 41})
    chain = ps.Chain([target, middle, drafter], [3, 2], rounds=[0])
    stream = chain.stream([0, 1, 2], 20, eos_token_id=[])
    assert [next(stream) for _ in range(5)] == [3, 4, 5, 6, 7]
    # M_3 draws 3, 41; later 5, 6 behind the correction 4; then it goes on behind M_1's correction
    # 6.
    assert drafter.log[:6] == [
        ("prefill", 2),
        ("forward", ([2], 1)),
        ("forward", ([3], 1)),
        ("forward", ([4], 1)),
        ("forward", ([5], 1)),
        ("forward", ([6], 1)),
    ]
    # M_2 reads root and drafts. It accepts 1 of [3, 41] and keeps C + 1; its correction 4, in no
    # cache yet, comes next. It accepts 1 of [5, 6] and puts 40 behind. M_1 takes [3, 4, 5] and
    # corrects 40: nothing of M_2's is void.
    assert middle.log[:6] == [
        ("prefill", 2),
        ("forward", ([2, 3, 41], 3)),
        ("rollback", 4),
        ("forward", ([4, 5, 6], 3)),
        ("rollback", 6),
        ("forward", ([6, 7, 8], 3)),
    ]
    # M_1 reads root and block, accepts j = 3 of 4 and keeps C + j.
    assert target.log[:3] == [("prefill", 2), ("forward", ([2, 3, 4, 5, 40], 5)), ("rollback", 6)]
