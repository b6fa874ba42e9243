"""The operators that the benchmark knows, and how each is called and costed. Peers refer to them by
name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import polyspec_ext as ps
from polyspec_ext.bench import cost
from polyspec_ext.bench.grid import Case
from polyspec_ext.bench.inputs import Feed
from polyspec_ext.bench.timing import Contender


@dataclass(frozen=True)
class Operator:
    """An operator of this package.

    Attributes:
        name: as in ``--operators``.
        verifies: whether the cases have draft tokens.
        ours: makes the contender that peers are compared with.
        bytes: bytes a call must move, given accepted counts [B] (empty without drafts).
    """

    name: str
    verifies: bool
    ours: Callable[[Feed], Contender]
    bytes: Callable[[Case, Sequence[int]], int]


def _sample(feed: Feed) -> Contender:
    logits, filters = feed.target[:, -1], feed.case.filters.given()
    return Contender("polyspec", lambda: ps.sample(logits, **filters, seed=feed.seeds))


def _verify(rule: str, statistics: bool) -> Callable[[Feed], Contender]:
    def make(feed: Feed) -> Contender:
        filters = feed.case.filters.given()
        draft_statistics = feed.statistics if statistics else None
        return Contender(
            "polyspec",
            lambda: ps.verify(
                feed.target, feed.tokens, feed.draft, draft_statistics=draft_statistics, **filters,
                seed=feed.seeds, rule=rule,
            ),
            accepted=lambda result: result.num_accepted,
        )  # fmt: skip

    return make


OPERATORS = {
    operator.name: operator
    for operator in (
        Operator("sample", False, _sample, lambda case, _: cost.sample_bytes(case)),
        Operator("verify-token", True, _verify("token", True), cost.token_rule_bytes),
        Operator(
            "verify-token-bare",  # the draft's distributions are not handed over
            True,
            _verify("token", False),
            lambda case, accepted: cost.token_rule_bytes(case, accepted, statistics=False),
        ),
        Operator("verify-block", True, _verify("block", True), cost.block_rule_bytes),
    )
}
