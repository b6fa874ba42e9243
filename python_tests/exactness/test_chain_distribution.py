"""The distribution of what a chain emits is the target's, by enumeration of every draw, and
mutations show.

Toy levels; scheduler and operators are the production ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import toy
import toy_rows
from scipy import stats as scipy_stats

import polyspec_ext as ps
from polyspec_ext.drafters import DraftModel
from polyspec_ext.tensors import RowCounts

ALPHA = 1e-6


def enumerate_chain(
    made: Sequence[Any],
    window: Sequence[int],
    length: int,
    enumerator: toy.Enumerator | None = None,
    sampling: dict[str, Any] | None = None,
    **options: Any,
) -> dict[tuple[int, ...], float]:
    """The exact distribution of `length` tokens behind [0, 1] of the chain with these levels."""
    enumerator = enumerator or toy.Enumerator()
    chain = ps.Chain(made, window, operators=enumerator.operators, **options)
    given = {"temperature": 1.0, **(sampling or {})}
    return toy.chain_distribution(
        enumerator, lambda: chain.generate([0, 1], length, **given).sequences[0, 2:].tolist()
    )


# ---- the distribution ----------------------------------------------------------------------------

FILTERS = [
    {},
    {"top_k": 2},
    {"top_p": 0.7},
    {"min_p": 0.4},
    {"temperature": 0.5, "top_k": 2, "top_p": 0.9},
]
# Vocabulary, levels, windows, new tokens: some hundred outcomes each.
SHAPES = [
    (3, 2, [1], 4),
    (3, 2, [2], 3),
    (2, 2, [3], 4),
    (3, 3, [1, 1], 3),
    (3, 3, [2, 1], 3),
    (2, 3, [1, 2], 4),
    (2, 3, [2, 2], 4),
    (2, 3, [3, 2], 4),
    (2, 4, [2, 1, 1], 4),
]


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(("vocab", "count", "window", "length"), SHAPES)
def test_law_is_the_targets(
    vocab: int, count: int, window: list[int], length: int, rule: str
) -> None:
    made = toy.make_levels(count, vocab)
    got = enumerate_chain(made, window, length, rule=rule)
    assert toy.total_variation(got, toy.text_distribution(made[0], [0, 1], length)) < 1e-12


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(("vocab", "count", "window", "length"), SHAPES[1:8:2])
def test_law_without_host_synchronisation(
    vocab: int, count: int, window: list[int], length: int, rule: str
) -> None:
    made = [toy_rows.Staying(vocab, 11 + i) for i in range(count)]
    got = enumerate_chain(made, window, length, rule=rule, sync_each_step=False)
    assert toy.total_variation(got, toy.text_distribution(made[0], [0, 1], length)) < 1e-12


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("sampling", FILTERS[1:], ids=str)
def test_law_with_filters(sampling: dict[str, Any], rule: str) -> None:
    made = toy.make_levels(3)
    got = enumerate_chain(made, [2, 1], 3, rule=rule, sampling=sampling)
    assert toy.total_variation(got, toy.text_distribution(made[0], [0, 1], 3, **sampling)) < 1e-12


@pytest.mark.parametrize("rule", ["token", "block"])
def test_law_with_eos(rule: str) -> None:
    made = toy.make_levels(3, vocab=2)
    got = enumerate_chain(made, [2, 2], 4, rule=rule, sampling={"eos_token_id": 1})
    assert toy.total_variation(got, toy.text_distribution(made[0], [0, 1], 4, eos=[1])) < 1e-12


@pytest.mark.parametrize("rule", ["token", "block"])
def test_law_with_a_smaller_draft_vocabulary(rule: str) -> None:
    made = [toy.ToyLevel(3, 1), toy.ToyLevel(3, 2), toy.ToyLevel(2, 3)]
    got = enumerate_chain(made, [2, 1], 3, rule=rule)
    assert toy.total_variation(got, toy.text_distribution(made[0], [0, 1], 3)) < 1e-12


def test_law_with_a_padded_draft_vocabulary() -> None:
    """Ids past the target's are cut off before the draft is drawn, in the middle and at the end of
    the chain."""
    made = [toy.ToyLevel(2, 1), toy.ToyLevel(3, 2), toy.ToyLevel(4, 3)]
    got = enumerate_chain(made, [2, 1], 3, check_vocabulary=False)
    assert toy.total_variation(got, toy.text_distribution(made[0], [0, 1], 3)) < 1e-12


@pytest.mark.parametrize("rule", ["token", "block"])
def test_law_with_deterministic_proposals(rule: str) -> None:
    """Also where the drafter gives fewer tokens than asked for, or none."""
    made = toy.make_levels(2)
    drafter = toy.FixedDrafter(lambda tokens, k: [(tokens[-1] + 1) % 3, 0][: min(k, tokens[-1])])
    got = enumerate_chain([*made, drafter], [2, 2], 4, rule=rule)
    assert toy.total_variation(got, toy.text_distribution(made[0], [0, 1], 4)) < 1e-12


def test_windows_of_zero_decode_plainly() -> None:
    made = toy.make_levels(3)
    for window in ([0, 2], [2, 0]):
        got = enumerate_chain(made, window, 3)
        assert toy.total_variation(got, toy.text_distribution(made[0], [0, 1], 3)) < 1e-12


# ---- a level that goes back to a checkpoint ------------------------------------------------------


class Checkpoints(toy.ToyLevel):
    """A toy level that goes back to a checkpoint; it has one every `every` tokens."""

    every = 3

    def rollback(self, lengths: Sequence[int]) -> list[int]:  # type: ignore[override]
        kept = lengths[0] // self.every * self.every
        super().rollback([kept])
        return [kept]


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("every", [2, 99])  # with 99 it begins from an empty cache again
@pytest.mark.parametrize(
    ("window", "rounds", "length"), [([2], None, 4), ([2, 2], None, 4), ([2, 1], [0], 4)], ids=str
)
def test_law_with_levels_that_keep_fewer_tokens(
    window: list[int], rounds: list[int] | None, length: int, every: int, rule: str
) -> None:
    made = [Checkpoints(2, 11 + i) for i in range(len(window) + 1)]
    for level in made:
        level.every = every
    got = enumerate_chain(made, window, length, rule=rule, rounds=rounds)
    assert toy.total_variation(got, toy.text_distribution(made[0], [0, 1], length)) < 1e-12
    for level in made[:2]:  # a drafter of one token never goes back
        lengths = [kept for kind, kept in level.log if kind == "rollback"]
        assert lengths
        assert all(kept % every == 0 for kept in lengths)


def test_sampled_frequencies() -> None:
    """With the draws that users get: 4,000 seeds against the exact distribution."""
    made = toy.make_levels(3, scale=1.5)
    chain = ps.Chain(made, [3, 2])
    exact = toy.text_distribution(made[0], [0, 1], 3, top_p=0.8)
    counts = dict.fromkeys(exact, 0)
    runs = 4000
    for seed in range(runs):
        text = tuple(
            chain.generate([0, 1], 3, temperature=1.0, top_p=0.8, seed=seed)
            .sequences[0, 2:]
            .tolist()
        )
        assert text in counts, f"{text} has probability 0"
        counts[text] += 1
    big = [text for text in exact if runs * exact[text] >= 5]
    seen = [counts[text] for text in big]
    wanted = [runs * exact[text] for text in big]
    seen.append(runs - sum(seen))
    wanted.append(runs - sum(wanted))
    if wanted[-1] < 1:  # nothing worth a cell of its own is left
        seen[-2:], wanted[-2:] = [seen[-2] + seen[-1]], [wanted[-2] + wanted[-1]]
    assert scipy_stats.chisquare(seen, wanted).pvalue > ALPHA


# ---- known mistakes: each must show --------------------------------------------------------------

Levels = list[toy.ToyLevel]


def rows_off_by_one(patch: pytest.MonkeyPatch, made: Levels) -> toy.Enumerator:
    class Wrong(toy.Enumerator):
        def verify(
            self, target: torch.Tensor, tokens: torch.Tensor, draft: Any = None, **options: Any
        ) -> Any:
            draft = None if draft is None else draft.roll(1, dims=1)
            return super().verify(target, tokens, draft, **{**options, "draft_statistics": None})

    return Wrong()


def distribution_of_the_drafter(patch: pytest.MonkeyPatch, made: Levels) -> toy.Enumerator:
    """q = p3 at M_1: for level 1's block the rows are the drafter's."""

    class Wrong(toy.Enumerator):
        def verify(
            self, target: torch.Tensor, tokens: torch.Tensor, draft: Any = None, **options: Any
        ) -> Any:
            if options["level"] == 1 and draft is not None:
                text, start = made[0].cache, int(options["position"])
                assert text[start:] == tokens[0].tolist()
                rows = [made[-1].row(text[: start + i]) for i in range(len(tokens[0]))]
                draft, options["draft_statistics"] = torch.stack(rows)[None], None
            return super().verify(target, tokens, draft, **options)

    return Wrong()


def resample_from_the_distribution(patch: pytest.MonkeyPatch, made: Levels) -> toy.Enumerator:
    """M_2 draws from p2 after a rejection and not from the residual."""

    class Wrong(toy.Enumerator):
        def verify(
            self, target: torch.Tensor, tokens: torch.Tensor, draft: Any = None, **options: Any
        ) -> Any:
            r = super().verify(target, tokens, draft, **options)
            accepted = int(r.num_accepted)
            if options["level"] != 2 or accepted == tokens.shape[1]:
                return r
            r.tokens[0, accepted] = self.choose(toy.distribution(target[0, accepted]))
            return r

    return Wrong()


def correction_dropped(patch: pytest.MonkeyPatch, made: Levels) -> toy.Enumerator:
    """M_2's last token never reaches M_1, where at least one accepted token does."""

    class Wrong(toy.Enumerator):
        def verify(
            self, target: torch.Tensor, tokens: torch.Tensor, draft: Any = None, **options: Any
        ) -> Any:
            r = super().verify(target, tokens, draft, **options)
            if options["level"] == 2 and int(r.num_accepted) > 0:
                r = r._replace(num_accepted=r.num_accepted - 1)
            return r

    return Wrong()


def typical_acceptance(patch: pytest.MonkeyPatch, made: Levels) -> toy.Enumerator:
    """M_1 accepts whatever is likely enough, and draws the token behind it from p1."""

    class Wrong(toy.Enumerator):
        def verify(
            self, target: torch.Tensor, tokens: torch.Tensor, draft: Any = None, **options: Any
        ) -> Any:
            if options["level"] != 1:
                return super().verify(target, tokens, draft, **options)
            statistics, taken = [toy.distribution(row) for row in target[0]], 0
            emitted: list[int] = tokens[0].tolist()
            while taken < len(emitted) and statistics[taken][emitted[taken]] > 0.3:
                taken += 1
            emitted = [*emitted[:taken], self.choose(statistics[taken])]
            r = ps.verify(target, tokens, draft, **options)
            r.tokens[0, : taken + 1] = torch.tensor(emitted)
            r.num_accepted[0] = taken
            return r

    return Wrong()


def tail_dropped(patch: pytest.MonkeyPatch, made: Levels) -> toy.Enumerator:
    """The drafter throws its last token away where that token was not likely."""
    draft = DraftModel.draft

    def wrong(self: DraftModel, inputs: Any) -> Any:
        block = draft(self, inputs)
        assert block.rows is not None
        count = block.tokens.shape[1]
        if toy.distribution(block.rows.logits[0, count - 1])[int(block.tokens[0, -1])] <= 0.5:
            block.counts = torch.tensor([count - 1])
            if count > 1:  # the last but one is read with the next draft
                self.rollback(RowCounts([len(made[-1].cache) - 1]))
        return block

    patch.setattr(DraftModel, "draft", wrong)
    return toy.Enumerator()


def target_cache_not_cut(patch: pytest.MonkeyPatch, made: Levels) -> toy.Enumerator:
    """The target keeps a rejected token in its cache and never reads the one that replaced it."""
    patch.setattr(made[0], "rollback", lambda lengths: None)
    return toy.Enumerator()


def checkpoint_not_said(patch: pytest.MonkeyPatch, made: Levels) -> toy.Enumerator:
    """The target goes back further than it says, and is never given what it has forgotten."""
    rollback = made[0].rollback
    patch.setattr(made[0], "rollback", lambda lengths: rollback([lengths[0] - 1]))
    return toy.Enumerator()


MISTAKES = [
    rows_off_by_one,
    distribution_of_the_drafter,
    resample_from_the_distribution,
    correction_dropped,
    typical_acceptance,
    tail_dropped,
    target_cache_not_cut,
    checkpoint_not_said,
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.__name__)
def test_mistakes_are_seen(monkeypatch: pytest.MonkeyPatch, mistake: Any) -> None:
    made = toy.make_levels(3, vocab=2, scale=1.5)
    with monkeypatch.context() as patch:
        got = enumerate_chain(made, [2, 2], 4, mistake(patch, made))
    assert abs(sum(got.values()) - 1) < 1e-9
    assert toy.total_variation(got, toy.text_distribution(made[0], [0, 1], 4)) > 1e-3
