"""A tail, tokens of the drafter's behind those that the level below the target has verified: the
text keeps the target's distribution, by enumeration of every draw, and mistakes show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import toy
import toy_rows
from proposal_kinds import FIXED, SAMPLED, Kind, Various, distance, enumerated, text_distributions

import polyspec_ext as ps
from polyspec_ext.runtime.rows import PendingRows, StateRows

RULES = ["token", "block"]
PROMPTS = [[0, 1], [2, 0]]


def tails(
    made: Sequence[Any], window: Sequence[int], tail: int, length: int, **options: Any
) -> Any:
    """The exact distribution of `length` tokens behind [0, 1], and how many tokens of tails were
    verified and accepted in all runs."""
    enumerator = options.pop("enumerator", None) or toy.Enumerator()
    sampling = {"temperature": 1.0, **options.pop("sampling", {})}
    chain = ps.Chain(made, window, tail=tail, operators=enumerator.operators, **options)
    seen = [0, 0]

    def text() -> list[int]:
        out = chain.generate([0, 1], length, **sampling)
        target = out.stats.levels[0]
        seen[0] += target.num_tail_tokens
        seen[1] += target.num_accepted_tail_tokens
        own: list[int] = out.sequences[0, 2:].tolist()
        return own

    return toy.chain_distribution(enumerator, text), seen


def require_target(found: Any, target: toy.ToyLevel, length: int, **options: Any) -> None:
    """Exact, with tails verified and accepted."""
    distribution, (verified, accepted) = found
    exact = toy.text_distribution(target, [0, 1], length, **options)
    assert toy.total_variation(distribution, exact) < 1e-12
    assert 0 < accepted < verified


# Vocabulary, levels, windows, tail, new tokens.
SHAPES = [
    (3, 3, [1, 1], 1, 3),
    (2, 3, [1, 2], 2, 4),
    (2, 3, [2, 1], 1, 4),
    (2, 3, [1, 2], 9, 3),
    (2, 4, [1, 1, 1], 1, 3),
    (2, 4, [2, 1, 1], 1, 4),
    # The level below the target decodes alone, so only tails are drafted.
    (2, 4, [2, 0, 1], 1, 4),
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("vocab", "count", "window", "tail", "length"), SHAPES)
def test_the_distribution_is_the_targets(
    vocab: int, count: int, window: list[int], tail: int, length: int, rule: str
) -> None:
    made = toy.make_levels(count, vocab)
    require_target(tails(made, window, tail, length, rule=rule), made[0], length)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("vocab", "count", "window", "tail", "length"), [*SHAPES[2:5], *SHAPES[6:]]
)
def test_without_host_synchronisation(
    vocab: int, count: int, window: list[int], tail: int, length: int, rule: str
) -> None:
    made = [toy_rows.Staying(vocab, 11 + i) for i in range(count)]
    found = tails(made, window, tail, length, rule=rule, sync_each_step=False)
    require_target(found, made[0], length)


@pytest.mark.parametrize("rule", RULES)
def test_with_filters_and_unbounded_rounds(rule: str) -> None:
    made = toy.make_levels(3)
    sampling = {"temperature": 1.5, "top_k": 2}
    found = tails(made, [1, 1], 1, 4, rule=rule, rounds=[0], sampling=sampling)
    require_target(found, made[0], 4, **sampling)


@pytest.mark.parametrize("rule", RULES)
def test_an_eos_within_the_tail(rule: str) -> None:
    made = toy.make_levels(3)
    found = tails(made, [1, 1], 1, 3, rule=rule, sampling={"eos_token_id": 1})
    require_target(found, made[0], 3, eos=[1])


@pytest.mark.parametrize("rule", RULES)
def test_a_level_below_with_fewer_ids(rule: str) -> None:
    made = [toy.ToyLevel(3, 1), toy.ToyLevel(3, 2), toy.ToyLevel(2, 3)]
    require_target(tails(made, [1, 1], 1, 3, rule=rule), made[0], 3)
    made = [toy.ToyLevel(3, 1), toy.ToyLevel(2, 2), toy.ToyLevel(2, 3)]
    require_target(tails(made, [1, 1], 1, 3, rule=rule), made[0], 3)


@pytest.mark.parametrize("rule", RULES)
def test_with_deterministic_proposals(rule: str) -> None:
    """Also where the drafter gives fewer tokens than asked for, or none."""
    made = toy.make_levels(2)
    drafter = toy.FixedDrafter(lambda tokens, k: [(tokens[-1] + 1) % 3, 0][: min(k, tokens[-1])])
    require_target(tails([*made, drafter], [1, 2], 2, 4, rule=rule), made[0], 4)


class Half(toy_rows.Rows):
    """Logits in bfloat16, which holds none of the drafter's in float32."""

    def forward(self, *args: Any) -> torch.Tensor:  # type: ignore[override]
        return super().forward(*args).to(torch.bfloat16)


KINDS: dict[str, Callable[[int, int], Kind]] = {
    "sampled": lambda request, round: SAMPLED,
    "deterministic": lambda request, round: FIXED,
    "a row each": lambda request, round: (SAMPLED, FIXED)[request % 2],
    "a round each": lambda request, round: (SAMPLED, FIXED)[(request + round) % 2],
    "lengths": lambda request, round: (Kind(most=1), FIXED)[request % 2],
    "dtypes": lambda request, round: (Kind(torch.bfloat16), SAMPLED)[(request + round) % 2],
    "widths": lambda request, round: (Kind(width=2), SAMPLED)[(request + round) % 2],
    "row statistics": lambda request, round: (SAMPLED, Kind(statistics=False))[
        (request + round) % 2
    ],
}


@pytest.mark.parametrize(
    ("middle", "kinds", "rule"),
    [
        *[(toy_rows.Rows, kinds, RULES[i % 2]) for i, kinds in enumerate(KINDS)],
        (Half, "sampled", "token"),
        (Half, "a round each", "block"),
    ],
)
def test_rows_of_a_batch(middle: Any, kinds: str, rule: str) -> None:
    """A row's tail beside other rows' drafts, tails of other kinds, and rows without one."""
    target = toy_rows.Rows(3, 11)
    enumerator, chain = enumerated(
        [target, middle(3, 12), Various(KINDS[kinds])], [1, 1], rule=rule, tail=1
    )
    others = -1 if rule == "token" else 0
    found = text_distributions(enumerator, chain, PROMPTS, 3, others, temperature=1.0)
    assert distance(found, target, PROMPTS, 3, [1.0, 1.0]) < 1e-9


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("stays", [False, True])
def test_rows_that_differ_in_parameters_and_lengths(stays: bool, rule: str) -> None:
    kind, sync = (toy_rows.Staying, False) if stays else (toy_rows.Rows, None)
    made = [kind(2, 11 + i) for i in range(3)]
    enumerator = toy.Enumerator()
    chain = ps.Chain(
        made, [1, 1], tail=1, rule=rule, operators=enumerator.operators, sync_each_step=sync
    )
    prompts, limits, temperatures = [[0, 1], [1], [1, 1, 0]], [3, 3, 5], [1.0, 0.5, 0.0]
    for number in range(3):
        enumerator.only(number)
        found = toy.chain_distribution(
            enumerator, partial(toy.text_of, chain, number, prompts, limits, temperatures)
        )
        exact = toy.text_distribution(
            made[0], prompts[number], limits[number], temperature=temperatures[number]
        )
        assert toy.total_variation(found, exact) < 1e-12


# ---- known mistakes: each must show --------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("mistake", "rule"),
    [
        (distribution_of_the_level_below, "token"),
        (distribution_of_the_level_below, "block"),
        (rows_not_handed_up, "token"),
        (rows_in_the_wrong_place, "token"),
        (tail_depends_on_its_tokens, "token"),
        (tail_depends_on_its_tokens, "block"),
    ],
)
def test_mistakes_are_seen(monkeypatch: pytest.MonkeyPatch, mistake: Any, rule: str) -> None:
    made = toy.make_levels(3, vocab=2, scale=1.5)
    with monkeypatch.context() as patch:
        enumerator = mistake(patch, made)
        got, _ = tails(made, [2, 1], 1, 4, rule=rule, enumerator=enumerator)
    assert abs(sum(got.values()) - 1) < 1e-9
    assert toy.total_variation(got, toy.text_distribution(made[0], [0, 1], 4)) > 1e-3
