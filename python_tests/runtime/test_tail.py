"""A tail at work: when tokens are drafted and read, windows that follow, and refusals."""

from types import SimpleNamespace
from typing import Any

import pytest
import toy
import toy_rows
from toy_trees import TreeDrafter, TreeLevel

import polyspec_ext as ps
from polyspec_ext.runtime import graphs
from polyspec_ext.runtime.rows import StateRows
from polyspec_ext.stats import LevelStats, Stats, StatsRecorder


def test_a_tail_saves_passes_of_the_level_between() -> None:
    """With three times the same model everything is accepted."""
    made = [toy.ToyLevel(5, 1, name=name) for name in "abc"]
    chain = ps.Chain(made, [3, 2], tail=2)
    out = chain.generate([0, 1], 1 + 3 * 6, eos_token_id=[])
    assert (
        out.sequences[0].tolist() == ps.Chain(made[:1]).generate([0, 1], 19).sequences[0].tolist()
    )
    target, middle, drafter = out.stats.levels
    # Two drafted, a bonus of the middle's, two of the tail, a bonus of the target's; at the end
    # there is room for one token.
    assert target.emitted_per_verification == [6, 6, 6, 1]
    assert (target.num_draft_tokens, target.num_accepted_tokens) == (15, 15)
    assert (target.num_tail_tokens, target.num_accepted_tail_tokens) == (6, 6)
    assert (middle.num_draft_tokens, middle.num_tail_tokens) == (6, 0)
    # Three blocks and three tails.
    assert (drafter.num_proposals, drafter.num_proposed_tokens) == (6, 12)
    assert [level.num_forward_passes for level in out.stats.levels] == [4, 3, 12]


def test_counts_of_a_block() -> None:
    stats = LevelStats()
    for drafted, accepted, of_tail in ((5, 5, 2), (5, 4, 2), (5, 3, 2), (5, 1, 2), (3, 3, 0)):
        stats.verified(drafted, accepted, accepted + 1, of_tail)
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (23, 16)
    assert (stats.num_tail_tokens, stats.num_accepted_tail_tokens) == (8, 3)
    assert stats.to_dict()["num_accepted_tail_tokens"] == 3
    total = Stats([LevelStats()])
    recorder = StatsRecorder(total)
    recorder.follow([Stats([LevelStats()])])
    recorder.verified(0, [[5, 9, 4, 5, 0, 0, 2]], 0.5)
    assert total.levels[0].num_accepted_tail_tokens == 1


def agreeing(kind: type[toy_rows.Rows], count: int) -> list[toy_rows.Rows]:
    """Levels that agree often enough for a tail to be reached."""
    made = [kind(5, 11 + i) for i in range(count)]
    for one in made[1:]:
        one.table = made[0].table + 0.1 * one.table
    return made


@pytest.mark.parametrize("sync", [None, False])
def test_a_round_that_commits_nothing_is_an_error(sync, monkeypatch) -> None:
    """And not the end of the text; the request is named."""
    if sync is None:
        monkeypatch.setattr(StateRows, "next", lambda self, unread: None)
    else:  # the width without tokens pending for the target
        monkeypatch.setattr(graphs, "width_at", lambda plan, place: 4)
    kind = toy_rows.Rows if sync is None else toy_rows.Staying
    chain = ps.Chain(agreeing(kind, 4), [5, 0, 3], tail=2, sync_each_step=sync)
    with pytest.raises(ps.PolyspecError, match=r"^request 1: expected .* token .*, given none"):
        chain.generate([[1], [4, 2, 3]], [0, 20], eos_token_id=[])
    monkeypatch.undo()
    assert chain.generate([1], 20, eos_token_id=[]).stats.num_new_tokens == 20


def test_rows_whose_windows_differ() -> None:
    """Mix a row with a tail after a level that decodes alone, and a row with a busy drafter."""
    windows = [(3, 2, 3), (5, 0, 3), (1, 1, 0), (0, 2, 2), (2, 0, 4)]
    policy = SimpleNamespace(next=lambda report: windows[len(report.text) // 5 % 5])
    texts = []
    for kind, sync in ((toy_rows.Rows, None), (toy_rows.Staying, False)):
        chain = ps.Chain(agreeing(kind, 4), [4, 2, 2], tail=2, policy=policy, sync_each_step=sync)
        out = chain.generate([[1], [4, 2, 3], [3] * 6], 40, 1.0, seed=5, eos_token_id=[])
        assert [own.num_new_tokens for own in out.requests] == [40] * 3
        texts.append(out.sequences)
    assert texts[0].equal(texts[1])


@pytest.mark.parametrize("policy", ["joint", "online"])
def test_windows_that_follow_are_told_of_verified_tokens_only(policy: str) -> None:
    reports: list[Any] = []

    inner: Any = ps.policies.named(policy)

    def noted(report: Any) -> Any:
        reports.append(report)
        return inner.next(report)

    made = toy_rows.make(3)
    chain = ps.Chain(made, [3, 2], tail=2, policy=SimpleNamespace(next=noted))
    out = chain.generate([1], 40, 1.0, seed=1, eos_token_id=[])
    target = out.stats.levels[0]
    steps = [step for report in reports for step in report.steps if step.level == 1]
    # The last round is not reported.
    lengths = target.emitted_per_verification[: len(steps)]
    assert [step.accepted for step in steps] == [
        min(step.tokens, emitted - 1) for step, emitted in zip(steps, lengths, strict=True)
    ]
    of_tails = sum(step.width - step.tokens for step in steps)
    assert 0 < of_tails <= target.num_tail_tokens


def test_what_is_refused() -> None:
    made = toy.make_levels(3)
    assert ps.Chain(made, [2, 2]).tail == 0
    assert "tail" not in repr(ps.Chain(made, [2, 2]))
    assert "tail=3" in repr(ps.Chain(made, [2, 2], tail=3))
    for bad, error in ((-1, ValueError), (1.5, TypeError), (True, TypeError), ([1], TypeError)):
        with pytest.raises(error, match=r"^tail: expected "):
            ps.Chain(made, [2, 2], tail=bad)
    with pytest.raises(ValueError, match=r"^tail: expected 0 for 2 levels, .*, given 1$"):
        ps.Chain(made[:2], [2], tail=1)
    with pytest.raises(ValueError, match=r"^tail: expected 0 for 1 levels, .*, given 1$"):
        ps.Chain(made[:1], tail=1)
    levels = [TreeLevel(3, 11 + i) for i in range(2)]
    drafter = TreeDrafter(toy.ToyLevel(3, 31), [2, 2])
    with pytest.raises(
        ValueError, match=r"^tail: expected 0 with .*, which drafts trees, given 1$"
    ):
        ps.Chain([*levels, drafter], [2, 2], tail=1)
