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


class Counted:
    """A chain that counts tokens of tails which were verified and accepted."""

    def __init__(self, *given: Any, **options: Any) -> None:
        self.chain, self.verified, self.accepted = ps.Chain(*given, **options), 0, 0

    def generate(self, *given: Any, **options: Any) -> ps.Output:
        out = self.chain.generate(*given, **options)
        self.verified += out.stats.levels[0].num_tail_tokens
        self.accepted += out.stats.levels[0].num_accepted_tail_tokens
        return out


def gap(
    made: Sequence[Any],
    window: Sequence[int],
    length: int,
    chance: toy.Enumerator,
    sampling: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[float, Counted]:
    """Total variation of `length` tokens behind [0, 1] to the target's, and the chain."""
    chain = Counted(made, window, operators=chance.operators, **options)
    return toy.chain_gap(chance, chain, made[0], [0, 1], length, **(sampling or {})), chain


# Levels, vocabulary, windows, tail, new tokens.
SHAPES = [
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


THREE, HOT = partial(toy.make_levels, 3), {"temperature": 1.5, "top_k": 2}
# By kind: the levels, windows, tail, new tokens, and what is special.
LAWS: dict[str, tuple[Callable[[], Any], list[int], int, int, dict[str, Any]]] = {
    **{f"{s}": (partial(toy.make_levels, *s[:2]), *s[2:], {}) for s in SHAPES},
    **{
        f"{s} at once": (partial(staying, *s[:2]), *s[2:], {"sync_each_step": False})
        for s in [*SHAPES[2:5], *SHAPES[6:]]
    },
    "filters, unbounded rounds": (THREE, [1, 1], 1, 4, {"rounds": [0], "sampling": HOT}),
    "EOS": (THREE, [1, 1], 1, 3, {"sampling": {"eos": [1]}}),
    "fewer ids last": (partial(toy.of_sizes, 3, 3, 2), [1, 1], 1, 3, {}),
    "fewer ids below": (partial(toy.of_sizes, 3, 2, 2), [1, 1], 1, 3, {}),
    "deterministic": (toy.with_lookup, [1, 2], 2, 4, {}),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", LAWS)
def test_the_law_is_the_targets(kind: str, rule: str) -> None:
    """With tails verified and accepted."""
    make, window, tail, length, options = LAWS[kind]
    found, chain = gap(make(), window, length, toy.Enumerator(), rule=rule, tail=tail, **options)
    assert found < 1e-12
    assert 0 < chain.accepted < chain.verified


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
        found, _ = gap(made, [2, 1], 4, enumerator, rule=rule, tail=1)
    assert found > 1e-3
