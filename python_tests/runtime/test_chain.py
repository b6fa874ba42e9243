"""The chain's bookkeeping, statistics and manners, on toy levels."""

from __future__ import annotations

import math
from typing import Any

import torch
import toy

import polyspec_ext as ps

# ---- bookkeeping ---------------------------------------------------------------------------------


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


def test_stream_yields_what_generate_returns() -> None:
    chain = ps.Chain(toy.make_levels(3, vocab=20), [4, 2])
    whole = chain.generate([1, 2], 25, temperature=0.7, seed=3).sequences[0, 2:].tolist()
    stream = chain.stream(torch.tensor([[1, 2]]), 25, temperature=0.7, seed=3)
    assert list(stream) == whole
    assert stream.stats.num_new_tokens == 25
    assert list(stream) == []


# ---- statistics ----------------------------------------------------------------------------------


def test_statistics() -> None:
    target, middle, drafter = Cycle(), Cycle({6: 40}), Cycle({4: 41, 9: 42})
    out = ps.Chain([target, middle, drafter], [3, 2]).generate([0, 1, 2], 9, eos_token_id=[])
    for level, toy_level in zip(out.stats.levels, (target, middle, drafter), strict=True):
        assert level.num_forward_passes == sum(kind == "forward" for kind, _ in toy_level.log)
        assert level.seconds > 0
        assert level.prefill_seconds > 0
    first = out.stats.levels[0]
    assert first.num_emitted_tokens == out.stats.num_new_tokens == 9
    for level in out.stats.levels[:2]:
        histogram = level.acceptance_histogram
        assert sum(histogram) == level.num_drafts <= level.num_verifications
        assert sum(a * n for a, n in enumerate(histogram)) == level.num_accepted_tokens
        assert sum(level.num_accepted_tokens_per_pos) == level.num_accepted_tokens
        assert level.mean_acceptance_length == 1 + level.num_accepted_tokens / level.num_drafts
        assert level.draft_acceptance_rate == level.num_accepted_tokens / level.num_draft_tokens
    assert out.stats.levels[2].num_proposed_tokens >= out.stats.levels[1].num_draft_tokens
    assert math.isnan(out.stats.levels[2].mean_acceptance_length)
    assert out.stats.tokens_per_second == 9 / out.stats.decode_seconds
    assert 0 <= out.stats.overhead_seconds < out.stats.decode_seconds
    plain = out.stats.to_dict()
    assert plain["levels"][0]["acceptance_histogram"] == first.acceptance_histogram
    assert plain["levels"][2]["mean_acceptance_length"] is None
