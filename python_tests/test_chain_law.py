"""The law of what a chain emits is the target's, by enumeration of every draw, and mutations show.

Toy levels; scheduler and operators are the production ones.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import toy
from scipy import stats as scipy_stats

import polyspec_ext as ps
from polyspec_ext.drafters import DraftModel
from polyspec_ext.runtime import batch as request_module
from polyspec_ext.runtime.request import Chunk

ALPHA = 1e-6


def enumerate_chain(
    monkeypatch: pytest.MonkeyPatch, chain: Any, length: int, **options: Any
) -> dict[tuple[int, ...], float]:
    return toy.chain_law(
        toy.Enumerator(monkeypatch),
        lambda: chain.generate([0, 1], length, **options).sequences[0, 2:].tolist(),
    )


# ---- the law -------------------------------------------------------------------------------------

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
    monkeypatch: pytest.MonkeyPatch,
    vocab: int,
    count: int,
    window: list[int],
    length: int,
    rule: str,
) -> None:
    made = toy.make_levels(count, vocab)
    got = enumerate_chain(monkeypatch, ps.Chain(made, window, rule=rule), length, temperature=1.0)
    assert toy.total_variation(got, toy.text_law(made[0], [0, 1], length)) < 1e-12


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("sampling", FILTERS[1:], ids=str)
def test_law_with_filters(
    monkeypatch: pytest.MonkeyPatch, sampling: dict[str, Any], rule: str
) -> None:
    made = toy.make_levels(3)
    options = {"temperature": 1.0, **sampling}
    got = enumerate_chain(monkeypatch, ps.Chain(made, [2, 1], rule=rule), 3, **options)
    assert toy.total_variation(got, toy.text_law(made[0], [0, 1], 3, **options)) < 1e-12


@pytest.mark.parametrize("rule", ["token", "block"])
def test_law_with_eos(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    made = toy.make_levels(3, vocab=2)
    got = enumerate_chain(
        monkeypatch, ps.Chain(made, [2, 2], rule=rule), 4, temperature=1.0, eos_token_id=1
    )
    assert toy.total_variation(got, toy.text_law(made[0], [0, 1], 4, eos=[1])) < 1e-12


@pytest.mark.parametrize("rule", ["token", "block"])
def test_law_with_a_smaller_draft_vocabulary(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    made = [toy.ToyLevel(3, 1), toy.ToyLevel(3, 2), toy.ToyLevel(2, 3)]
    got = enumerate_chain(monkeypatch, ps.Chain(made, [2, 1], rule=rule), 3, temperature=1.0)
    assert toy.total_variation(got, toy.text_law(made[0], [0, 1], 3)) < 1e-12


def test_law_with_a_padded_draft_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids past the target's are cut off before the draft is drawn, in the middle and at the end of
    the chain."""
    made = [toy.ToyLevel(2, 1), toy.ToyLevel(3, 2), toy.ToyLevel(4, 3)]
    chain = ps.Chain(made, [2, 1], check_vocabulary=False)
    got = enumerate_chain(monkeypatch, chain, 3, temperature=1.0)
    assert toy.total_variation(got, toy.text_law(made[0], [0, 1], 3)) < 1e-12


@pytest.mark.parametrize("rule", ["token", "block"])
def test_law_with_deterministic_proposals(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    """Also where the drafter gives fewer tokens than asked for, or none."""
    made = toy.make_levels(2)
    drafter = toy.FixedDrafter(lambda tokens, k: [(tokens[-1] + 1) % 3, 0][: min(k, tokens[-1])])
    got = enumerate_chain(
        monkeypatch, ps.Chain([*made, drafter], [2, 2], rule=rule), 4, temperature=1.0
    )
    assert toy.total_variation(got, toy.text_law(made[0], [0, 1], 4)) < 1e-12


def test_windows_of_zero_decode_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    made = toy.make_levels(3)
    for window in ([0, 2], [2, 0]):
        with monkeypatch.context() as patch:
            got = enumerate_chain(patch, ps.Chain(made, window), 3, temperature=1.0)
        assert toy.total_variation(got, toy.text_law(made[0], [0, 1], 3)) < 1e-12


def test_sampled_frequencies() -> None:
    """With the draws that users get: 4,000 seeds against the exact law."""
    made = toy.make_levels(3, scale=1.5)
    chain = ps.Chain(made, [3, 2])
    exact = toy.text_law(made[0], [0, 1], 3, top_p=0.8)
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


# ---- known mistakes: each must show ----------------------------------------------


def mutant_rows_off_by_one(patch: pytest.MonkeyPatch, made: list[toy.ToyLevel]) -> None:
    take = request_module.PendingLaws.take

    def wrong(self: Any, *args: Any) -> Any:
        chunk = take(self, *args)
        return None if chunk is None else Chunk(chunk.logits.roll(1, dims=1), None)

    patch.setattr(request_module.PendingLaws, "take", wrong)


def mutant_law_of_the_drafter(patch: pytest.MonkeyPatch, made: list[toy.ToyLevel]) -> None:
    """q = p3 at M_1: for level 1's block the rows are the drafter's."""
    verify = request_module.Batch._verify

    def wrong(self: Any, index: int, group: Any) -> Any:
        row, count = group[0]
        if index == 0 and count:
            start = len(row.tokens) - count
            rows = [made[-1].row(row.tokens[: start + i]) for i in range(count)]
            self._pending[0].clear(0)
            self._pending[0].add(0, Chunk(torch.stack(rows)[None], None), count)
        return verify(self, index, group)

    patch.setattr(request_module.Batch, "_verify", wrong)


def mutant_resample_from_the_law(patch: pytest.MonkeyPatch, made: list[toy.ToyLevel]) -> None:
    """M_2 draws from p2 after a rejection and not from the residual."""
    enumerated = toy.Enumerator.verify

    def wrong(
        self: Any, target: torch.Tensor, tokens: torch.Tensor, draft: Any = None, **options: Any
    ) -> Any:
        r = enumerated(self, target, tokens, draft, **options)
        accepted = int(r.num_accepted)
        if options["level"] != 2 or accepted == tokens.shape[1]:
            return r
        r.tokens[0, accepted] = self.choose(toy.law(target[0, accepted]))
        return r

    patch.setattr(toy.Enumerator, "verify", wrong)


def mutant_correction_dropped(patch: pytest.MonkeyPatch, made: list[toy.ToyLevel]) -> None:
    """M_2's last token never reaches M_1, where at least one accepted token does."""
    enumerated = toy.Enumerator.verify

    def wrong(
        self: Any, target: torch.Tensor, tokens: torch.Tensor, draft: Any = None, **options: Any
    ) -> Any:
        r = enumerated(self, target, tokens, draft, **options)
        if options["level"] == 2 and int(r.num_accepted) > 0:
            r = r._replace(num_accepted=r.num_accepted - 1)
        return r

    patch.setattr(toy.Enumerator, "verify", wrong)


def mutant_tail_dropped(patch: pytest.MonkeyPatch, made: list[toy.ToyLevel]) -> None:
    """The drafter throws its last token away where that token was not likely."""
    draft = DraftModel.draft

    def wrong(self: Any, *args: Any) -> Any:
        made = draft(self, *args)
        assert made.logits is not None
        assert made.tokens is not None
        if toy.law(made.logits[0, -1])[made.tokens[0][-1]] <= 0.5:
            made.tokens[0].pop()
            made.counts[0] -= 1
        return made

    patch.setattr(DraftModel, "draft", wrong)


def mutant_target_cache_not_cut(patch: pytest.MonkeyPatch, made: list[toy.ToyLevel]) -> None:
    """The target keeps a rejected token in its cache and never reads the one that replaced it."""
    patch.setattr(made[0], "rollback", lambda lengths: None)


MUTANTS = [
    mutant_rows_off_by_one,
    mutant_law_of_the_drafter,
    mutant_resample_from_the_law,
    mutant_correction_dropped,
    mutant_tail_dropped,
    mutant_target_cache_not_cut,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.__name__)
def test_mutations_are_seen(monkeypatch: pytest.MonkeyPatch, mutant: Any) -> None:
    made = toy.make_levels(3, vocab=2, scale=1.5)
    with monkeypatch.context() as patch:
        mutant(patch, made)
        got = enumerate_chain(patch, ps.Chain(made, [2, 2]), 4, temperature=1.0)
    assert toy.total_variation(got, toy.text_law(made[0], [0, 1], 4)) > 1e-3
