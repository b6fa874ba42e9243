"""The chain's bookkeeping, statistics and manners, on toy levels."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import toy

import polyspec_ext as ps
from polyspec_ext.drafters import Context, PromptLookup, Proposal

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


def test_an_older_stream_does_not_touch_the_caches() -> None:
    chain = ps.Chain(toy.make_levels(2, vocab=20), [3])
    old = chain.stream([1], 20)
    first = next(old)
    new = list(chain.stream([1], 20))
    assert new[0] == first
    with pytest.raises(RuntimeError, match="another request"):
        list(old)


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


# ---- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("faulty", [0, 1, 2])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_logits_name_level_and_position_and_leave_the_chain_usable(
    faulty: int, value: float, temperature: float
) -> None:
    made = [Cycle(), Cycle(), Cycle()]
    chain = ps.Chain(made, [4, 2])
    good = chain.generate([0, 1, 2], 12, temperature, seed=0).sequences
    row = made[faulty].row

    def poisoned(prefix: Any) -> torch.Tensor:
        z = row(prefix).clone()
        if len(prefix) == 7:
            z[3] = value
        return z

    made[faulty].row = poisoned  # type: ignore[method-assign]
    with pytest.raises(ps.RequestError, match=f"level {faulty + 1}, position 7") as caught:
        chain.generate([0, 1, 2], 12, temperature, seed=0)
    assert (caught.value.request, caught.value.level, caught.value.position) == (0, faulty + 1, 7)
    made[faulty].row = row  # type: ignore[method-assign]
    assert chain.generate([0, 1, 2], 12, temperature, seed=0).sequences.equal(good)


def test_an_exception_in_a_level_leaves_the_chain_usable() -> None:
    made = toy.make_levels(3, vocab=20)
    chain = ps.Chain(made, [4, 2])
    good = chain.generate([1], 20).sequences
    for level in made:
        forward, calls = level.forward, iter(range(100))

        def failing(
            tokens: torch.Tensor, keep: int, forward: Any = forward, calls: Any = calls
        ) -> torch.Tensor:
            if next(calls) == 2:
                raise MemoryError("out of memory")
            return forward(tokens, keep)

        level.forward = failing  # type: ignore[method-assign]
        with pytest.raises(MemoryError):
            chain.generate([1], 20)
        level.forward = forward  # type: ignore[method-assign]
        assert chain.generate([1], 20).sequences.equal(good)


BAD_CALLS = [
    (
        {"input_ids": torch.zeros(2, 3, dtype=torch.long)},
        ValueError,
        "toy 11: expected one prompt, given 2; ToyLevel has no `supports_batches`",
    ),
    (
        {"input_ids": torch.zeros(2, 3, 1, dtype=torch.long)},
        ValueError,
        r"expected shape \[N\] or \[B, N\], given \[2, 3, 1\]",
    ),
    ({"input_ids": []}, ValueError, "at least 1 token, given 0"),
    ({"input_ids": [3]}, ValueError, r"in \[0, 3\), given 3"),
    ({"input_ids": [-1]}, ValueError, r"in \[0, 3\), given -1"),
    ({"input_ids": torch.zeros(1, 3)}, TypeError, "integer dtype, given torch.float32"),
    ({"input_ids": [0, [1]]}, TypeError, "token ids of one prompt"),
    ({"input_ids": [[0], []]}, ValueError, "at least 1 token, given 0"),
    ({"max_new_tokens": -1}, ValueError, "max_new_tokens: expected an integer in .*, given -1"),
    ({"temperature": -0.1}, ValueError, "temperature: expected .*given -0.1"),
    ({"temperature": math.nan}, ValueError, "temperature: expected .*given nan"),
    ({"top_k": -2}, ValueError, "top_k: expected .*given -2"),
    ({"top_p": 1.5}, ValueError, r"top_p: expected .*\[0, 1\], given 1.5"),
    ({"min_p": -0.5}, ValueError, r"min_p: expected .*\[0, 1\], given -0.5"),
]


@pytest.mark.parametrize(("options", "error", "text"), BAD_CALLS, ids=lambda x: str(x)[:40])
def test_bad_calls(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        ps.Chain(toy.make_levels(2), [2]).generate(**{"input_ids": [0], **options})


def test_bad_chains() -> None:
    made = toy.make_levels(3)
    with pytest.raises(
        ValueError, match="window: expected 2 integers >= 0 for 3 levels, given \\[4\\]"
    ):
        ps.Chain(made, [4])
    with pytest.raises(ValueError, match=r"window: expected an integer in .*, given -1"):
        ps.Chain(made, [4, -1])
    with pytest.raises(ValueError, match="rule: expected 'token' or 'block', given 'typical'"):
        ps.Chain(made, [4, 2], rule="typical")
    with pytest.raises(ValueError, match="at least one model"):
        ps.Chain([])
    with pytest.raises(TypeError, match=r"^levels\[1\]: .*given 3"):
        ps.Chain([made[0], 3], [2])
    with pytest.raises(
        TypeError, match=r"levels\[1\] of 3: expected a model, given the drafter PromptLookup"
    ):
        ps.Chain([made[0], PromptLookup(), made[1]], [2, 2])
    with pytest.raises(
        ValueError, match="expected at most the 3 ids of the target toy 11, given 4"
    ):
        ps.Chain([made[0], toy.ToyLevel(4, 0)], [2])


def test_bad_proposals() -> None:
    target = toy.ToyLevel(3, 1)

    def proposing(tokens: list[int], logits: Any = None, parents: Any = None) -> Any:
        drafter = toy.FixedDrafter(lambda context, k: [])
        drafter.propose = lambda context, k: Proposal(tokens, logits, parents)  # type: ignore[method-assign]
        return ps.Chain([target, drafter], [2])

    with pytest.raises(ValueError, match="fixed drafter: expected at most 2 tokens, given 3"):
        proposing([0, 0, 0]).generate([0], 9)
    with pytest.raises(ValueError, match=r"fixed drafter: expected token ids in \[0, 3\), given 7"):
        proposing([0, 7]).generate([0], 9)
    with pytest.raises(
        ValueError, match=r"expected draft logits of shape \[1, 2, Vd\], given \[1, 1, 3\]"
    ):
        proposing([0, 1], torch.zeros(1, 1, 3)).generate([0], 9)
    with pytest.raises(ValueError, match="given a tree"):
        proposing([0, 1], None, [-1, -1]).generate([0], 9)


def test_prompt_lookup() -> None:
    drafter = PromptLookup(max_ngram=2)
    context = Context([1, 2, 3, 4, 1, 2])
    assert list(drafter.propose(context, 3).tokens) == [3, 4, 1]
    context.valid = 6
    context.tokens += [9]
    assert list(drafter.propose(context, 3).tokens) == []
    # 9 is taken back and replaced: what was learnt from it is gone, the rest stays.
    context.valid = 6
    context.tokens[6:] = [3, 4, 9]
    assert list(drafter.propose(context, 3).tokens) == []
    context.valid = 9
    context.tokens += [1]
    assert list(drafter.propose(context, 2).tokens) == [2, 3]
    context = Context([5, 6, 5])
    assert list(drafter.propose(context, 4).tokens) == [6, 5]
    with pytest.raises(ValueError, match=r"min_ngram: expected an integer in \[1, 1\], given 2"):
        PromptLookup(1, 2)
