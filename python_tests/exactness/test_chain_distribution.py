"""The distribution of what a chain emits is the target's, by enumeration of every draw, with tails
(tokens of the drafter's behind those that the level below the target has verified) as well, and
mutations show.

Toy levels; scheduler and operators are the production ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import evidence
import numpy as np
import pytest
import torch
import toy
import toy_rows
from proposal_kinds import FIXED, SAMPLED, Kind, Various, distance, enumerated, text_distributions

import polyspec_ext as ps
from polyspec_ext.drafters import DraftModel
from polyspec_ext.runtime.rows import PendingRows, StateRows
from polyspec_ext.tensors import RowCounts


def gap(
    made: Sequence[Any],
    window: Sequence[int],
    length: int,
    enumerator: toy.Enumerator | None = None,
    sampling: dict[str, Any] | None = None,
    **options: Any,
) -> float:
    """Total variation of `length` tokens behind [0, 1] of the chain to the target's."""
    enumerator = enumerator or toy.Enumerator()
    chain = ps.Chain(made, window, operators=enumerator.operators, **options)
    return toy.chain_gap(enumerator, chain, made[0], [0, 1], length, **(sampling or {}))


# ---- the distribution ----------------------------------------------------------------------------

FILTERS = [
    {"top_k": 2},
    {"top_p": 0.7},
    {"min_p": 0.4},
    {"temperature": 0.5, "top_k": 2, "top_p": 0.9},
]
# Levels, vocabulary, windows, new tokens: some hundred outcomes each.
SHAPES = [
    (2, 3, [1], 4),
    (2, 3, [2], 3),
    (2, 2, [3], 4),
    (3, 3, [1, 1], 3),
    (3, 3, [2, 1], 3),
    (3, 2, [1, 2], 4),
    (3, 2, [2, 2], 4),
    (3, 2, [3, 2], 4),
    (4, 2, [2, 1, 1], 4),
]
# Levels, vocabulary, windows, tail, new tokens.
TAILS = [
    (3, 3, [1, 1], 1, 3),
    (3, 2, [1, 2], 2, 4),
    (3, 2, [2, 1], 1, 4),
    (3, 2, [1, 2], 9, 3),
    (4, 2, [1, 1, 1], 1, 3),
    (4, 2, [2, 1, 1], 1, 4),
    # The level below the target decodes alone, so only tails are drafted.
    (4, 2, [2, 0, 1], 1, 4),
]


def staying(count: int, vocab: int) -> list[Any]:
    return [toy_rows.Staying(vocab, 11 + i) for i in range(count)]


THREE = partial(toy.make_levels, 3)
# By kind: the levels, windows, new tokens, and what is special.
LAWS: dict[str, tuple[Callable[[], Any], list[int], int, dict[str, Any]]] = {
    **{f"{s}": (partial(toy.make_levels, *s[:2]), *s[2:], {}) for s in SHAPES},
    **{
        f"{s} at once": (partial(staying, *s[:2]), *s[2:], {"sync_each_step": False})
        for s in SHAPES[1:6:2]
    },
    **{str(own): (THREE, [2, 1], 3, {"sampling": own}) for own in FILTERS},
    "EOS": (partial(toy.make_levels, 3, 2), [2, 2], 4, {"sampling": {"eos": [1]}}),
    "a smaller draft vocabulary": (partial(toy.of_sizes, 3, 3, 2), [2, 1], 3, {}),
    # Ids past the target's are cut off before the draft is drawn, anywhere in the chain.
    "padded vocabularies": (partial(toy.of_sizes, 2, 3, 4), [2, 1], 3, {"check_vocabulary": False}),
    "deterministic": (toy.with_lookup, [2, 2], 4, {}),
    "plain": (THREE, [0, 2], 3, {}),
    "a middle that is plain": (THREE, [2, 0], 3, {}),
    **{
        f"{s} tail": (partial(toy.make_levels, *s[:2]), s[2], s[4], {"tail": s[3]}) for s in TAILS
    },
    **{
        f"{s} tail at once": (
            partial(staying, *s[:2]), s[2], s[4], {"tail": s[3], "sync_each_step": False},
        )
        for s in [*TAILS[2:5], TAILS[6]]
    },
    "tail, filters, unbounded rounds": (
        THREE, [1, 1], 4,
        {"tail": 1, "rounds": [0], "sampling": {"temperature": 1.5, "top_k": 2}},
    ),
    "tail, EOS": (THREE, [1, 1], 3, {"tail": 1, "sampling": {"eos": [1]}}),
    "tail, fewer ids last": (partial(toy.of_sizes, 3, 3, 2), [1, 1], 3, {"tail": 1}),
    "tail, fewer ids below": (partial(toy.of_sizes, 3, 2, 2), [1, 1], 3, {"tail": 1}),
    "tail, deterministic": (toy.with_lookup, [1, 2], 4, {"tail": 2}),
}  # fmt: skip


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("kind", LAWS)
def test_the_law_is_the_targets(kind: str, rule: str) -> None:
    make, window, length, options = LAWS[kind]
    assert gap(make(), window, length, rule=rule, **options) < 1e-12


class Half(toy_rows.Rows):
    """Logits in bfloat16, which holds none of the drafter's in float32."""

    def forward(self, *args: Any) -> torch.Tensor:  # type: ignore[override]
        return super().forward(*args).to(torch.bfloat16)


KINDS: dict[str, Callable[[int, int], Kind]] = {
    "dtypes": lambda request, round: (Kind(torch.bfloat16), SAMPLED)[(request + round) % 2],
    "widths": lambda request, round: (Kind(width=2), SAMPLED)[(request + round) % 2],
    "lengths": lambda request, round: (Kind(most=1), FIXED)[(request + round) % 2],
    "row statistics": lambda request, round: (SAMPLED, Kind(statistics=False))[
        (request + round) % 2
    ],
}


@pytest.mark.parametrize(
    ("middle", "kinds", "rule"),
    [
        *[(toy_rows.Rows, kinds, ["token", "block"][i % 2]) for i, kinds in enumerate(KINDS)],
        (Half, "lengths", "token"),
    ],
)
def test_tails_of_rows_of_a_batch(middle: Any, kinds: str, rule: str) -> None:
    """A row's tail beside other rows' drafts, tails of other kinds, and rows without one."""
    prompts = [[0, 1], [2, 0]]
    target = toy_rows.Rows(3, 11)
    enumerator, chain = enumerated(
        [target, middle(3, 12), Various(KINDS[kinds])], [1, 1], rule=rule, tail=1
    )
    others = -1 if rule == "token" else 0
    found = text_distributions(enumerator, chain, prompts, 3, others, temperature=1.0)
    assert distance(found, target, prompts, 3, [1.0, 1.0]) < 1e-9


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
        assert gap(made, [2, 2], 4, mistake(patch, made)) > 1e-3


def distribution_of_the_level_below(patch: pytest.MonkeyPatch, made: Any) -> toy.Enumerator:
    """q = p2 for all tokens, also for those of the tail."""

    class Wrong(toy.Enumerator):
        def verify(self, target: Any, tokens: Any, draft: Any = None, **options: Any) -> Any:
            if options["level"] == 1 and draft is not None:
                text, start = made[0].cache, int(options["position"])
                rows = [made[1].row(text[: start + i]) for i in range(len(tokens[0]))]
                draft, options["draft_statistics"] = torch.stack(rows)[None], None
            return super().verify(target, tokens, draft, **options)

    return Wrong()


def rows_not_handed_up(patch: pytest.MonkeyPatch, made: Any) -> toy.Enumerator:
    """The target finds what an earlier round has left where the tail's rows belong."""
    patch.setattr(PendingRows, "append_tail", lambda x, *_: setattr(x, "tail_has_statistics", 0))
    return toy.Enumerator()


def rows_in_the_wrong_place(patch: pytest.MonkeyPatch, made: Any) -> toy.Enumerator:
    """The tail's rows take the place of those of the first tokens."""
    right = PendingRows.append_tail

    def wrong(self: PendingRows, tokens: Any, rows: Any, slots: Any, *rest: Any) -> None:
        right(self, tokens, rows, (slots - slots.min()).clamp_min(0), *rest)
        self.tail_has_statistics = False

    patch.setattr(PendingRows, "append_tail", wrong)
    return toy.Enumerator()


def tail_depends_on_its_tokens(patch: pytest.MonkeyPatch, made: Any) -> toy.Enumerator:
    """A tail of an unlikely token is thrown away (contract C2)."""
    report = StateRows.report

    def wrong(
        self: StateRows, step: Any, tokens: Any, counts: Any, *given: Any, **rest: Any
    ) -> Any:
        if step.tail:
            drawn_from = toy.distribution(made[2].row(self.text(0).tolist()))
            if drawn_from[int(tokens[0, 0])] <= 0.5:
                counts = torch.zeros(1, dtype=torch.int64)
        return report(self, step, tokens, counts, *given, **rest)

    patch.setattr(StateRows, "report", wrong)
    return toy.Enumerator()


TAIL_MISTAKES = [
    (distribution_of_the_level_below, "token"),
    (distribution_of_the_level_below, "block"),
    (rows_not_handed_up, "token"),
    (rows_in_the_wrong_place, "token"),
    (tail_depends_on_its_tokens, "token"),
    (tail_depends_on_its_tokens, "block"),
]


@pytest.mark.parametrize(("mistake", "rule"), TAIL_MISTAKES)
def test_mistakes_of_tails_are_seen(monkeypatch, mistake, rule) -> None:
    made = toy.make_levels(3, vocab=2, scale=1.5)
    with monkeypatch.context() as patch:
        assert gap(made, [2, 1], 4, mistake(patch, made), rule=rule, tail=1) > 1e-3


def test_a_leak_of_a_tenth_is_seen() -> None:
    # FlashInfer's frequency tests ask for a cosine > 0.99, which such a leak passes.
    rng = np.random.default_rng(1)
    p, q = rng.dirichlet(np.ones(30), 2)
    leaky = 0.9 * p + 0.1 * q
    counts = rng.multinomial(100_000, leaky)
    assert counts @ p / np.linalg.norm(counts) / np.linalg.norm(p) > 0.99
    assert evidence.chi_square(counts, p) < evidence.ALPHA
    assert evidence.chi_square(rng.multinomial(100_000, p), p) > evidence.ALPHA
