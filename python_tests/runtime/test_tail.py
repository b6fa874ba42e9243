"""A tail at work: what is drafted and read when, the same tokens and counts by every executor, and
what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import toy
import toy_rows
from captured_chains import PROMPTS, level
from device_rounds import same
from recorder import Recorder
from small_models import PROMPT, make, plain_greedy, rough
from toy_trees import TreeDrafter, TreeLevel

import polyspec_ext as ps
from polyspec_ext.drafters import PromptLookup
from polyspec_ext.runtime.graphs import Graphs
from polyspec_ext.runtime.plan import RoundPlan
from polyspec_ext.runtime.state import StateRows
from polyspec_ext.stats import LevelStats, Stats, StatsRecorder


def passes(level: toy.ToyLevel) -> list[int]:
    """Tokens read by each pass of a toy level."""
    return [len(what[0]) for kind, what in level.log if kind == "forward"]


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


def test_the_level_between_catches_up_in_its_next_pass() -> None:
    made = [toy.ToyLevel(5, 1, name=name) for name in "abc"]
    chain = ps.Chain(made, [3, 2], tail=2)
    batch = chain.batch([[0, 1]], 13, eos_token_id=[])
    while batch.advance():
        for one in made:
            assert one.cache == batch.rows[0].tokens[: len(one.cache)]
    # The last token of the prompt and two drafted; then what it emitted last, the tail and the
    # target's bonus in front of these.
    assert passes(made[1]) == [3, 1 + 2 + 1 + 2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_caches_hold_the_text(temperature: float) -> None:
    made = toy.make_levels(4, vocab=3)
    for one in made[1:]:  # they agree often enough
        one.table = made[0].table + 0.1 * one.table
    chain = ps.Chain(made, [2, 2, 1], tail=1)
    batch = chain.batch([[0, 1]], 80, temperature, seed=5, eos_token_id=[])
    while batch.advance():
        for one in made:
            assert one.cache == batch.rows[0].tokens[: len(one.cache)]
    target, *below = batch.stats.levels
    assert target.num_accepted_tail_tokens > 0
    assert all(own.num_tail_tokens == 0 for own in below)


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


def chains(window: list[int], tail: int, **options: Any) -> list[ps.Chain]:
    """The same chain step by step, without host synchronisation, and with captured steps."""
    made = []
    for captured in (None, False, True):
        levels = [
            level(i, 3 - min(i, 2), f"level {i}", captured is True) for i in range(len(window) + 1)
        ]
        graphs = Graphs(Recorder(), progress=False) if captured else None
        sync = None if captured is None else False
        made.append(
            ps.Chain(levels, window, tail=tail, sync_each_step=sync, graphs=graphs, **options)
        )
    return made


@pytest.mark.parametrize(
    ("window", "rounds", "tail", "rule"),
    [
        ([4, 2], [3], 1, "token"),
        ([6, 3], [2], 9, "block"),
        ([4, 3, 2], [2, 1], 2, "token"),
        ([3, 0], [3], 2, "token"),
        ([5, 0, 3], [5, 1], 2, "token"),
        ([2, 2, 2], [1, 1], 2, "block"),
    ],
    ids=str,
)
def test_every_executor_does_the_same(
    window: list[int], rounds: list[int], tail: int, rule: str
) -> None:
    """Rows whose window is full early have their tail with another row's draft."""
    made = chains(window, tail, rounds=rounds, rule=rule)
    for count, temperature, eos in [(3, 0.0, [7, 11]), (3, 1.0, [7, 11])]:
        options: dict[str, Any] = {
            "temperature": [temperature * (1 + 0.2 * i) for i in range(count)],
            "top_k": [0, 7, 30][:count],
            "seed": 5 + count,
            "max_new_tokens": [40, 23, 31][:count],
            "eos_token_id": eos,
        }
        wanted, *others = [chain.generate(PROMPTS[:count], **options) for chain in made]
        for got in others:
            same(got, wanted)
        assert (wanted.stats.levels[0].num_tail_tokens > 0) == (window[-1] > 0)
    graphs = made[2].engine.graphs
    assert graphs is not None
    assert graphs.num_replays > 0


def agreeing(kind: type[toy_rows.Rows], count: int) -> list[toy_rows.Rows]:
    """Levels that agree often enough for a tail to be reached."""
    made = [kind(5, 11 + i) for i in range(count)]
    for one in made[1:]:
        one.table = made[0].table + 0.1 * one.table
    return made


# Windows of 0 at every place; and texts that end within a round, so that there is no room left for
# a draft in front of the tail.
WINDOWS = [*itertools.product((0, 1, 3), repeat=3), (5, 0, 3), (2, 1, 0, 2), (1, 3, 0, 5)]


@pytest.mark.parametrize("tail", [1, 3])
def test_texts_have_their_full_length(tail: int) -> None:
    limits = [9, 14, 3]
    options: dict[str, Any] = {"temperature": [0.0, 1.0, 1.0], "seed": [1, 2, 3]}
    for window, rounds in itertools.product(WINDOWS, (None, 1)):
        count = len(window) + 1
        bounds = None if rounds is None else [rounds] * (count - 2)
        texts = []
        for kind, sync in ((toy_rows.Rows, None), (toy_rows.Staying, False)):
            made = agreeing(kind, count)
            chain = ps.Chain(made, window, tail=tail, rounds=bounds, sync_each_step=sync)
            out = chain.generate([[1], [4, 2, 3], [3, 0]], limits, eos_token_id=[], **options)
            assert [own.num_new_tokens for own in out.requests] == limits, (window, rounds)
            texts.append(out.sequences)
        assert texts[0].equal(texts[1]), (window, rounds)


@pytest.mark.parametrize("sync", [None, False])
def test_a_round_that_commits_nothing_is_an_error(
    sync: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not the end of the text; the request is named."""
    if sync is None:
        monkeypatch.setattr(StateRows, "next", lambda self, unread: None)
    else:  # the width without what is pending for the target
        monkeypatch.setattr(RoundPlan, "width_at", lambda self, place: 4)
    kind = toy_rows.Rows if sync is None else toy_rows.Staying
    chain = ps.Chain(agreeing(kind, 4), [5, 0, 3], tail=2, sync_each_step=sync)
    with pytest.raises(ps.PolyspecError, match=r"^request 1: expected .* token .*, given none"):
        chain.generate([[1], [4, 2, 3]], [0, 20], eos_token_id=[])
    monkeypatch.undo()
    assert chain.generate([1], 20, eos_token_id=[]).stats.num_new_tokens == 20


class Windows:
    """A policy that goes through windows, as far as the row's text is long."""

    def __init__(self, *windows: tuple[int, ...]) -> None:
        self._windows = windows

    def next(self, report: ps.policies.RoundReport) -> tuple[int, ...]:
        return self._windows[len(report.text) // 5 % len(self._windows)]


def test_rows_whose_windows_differ() -> None:
    """One has a tail behind a level that decodes alone, beside one whose drafter is at work."""
    policy = Windows((3, 2, 3), (5, 0, 3), (1, 1, 0), (0, 2, 2), (2, 0, 4))
    texts = []
    for kind, sync in ((toy_rows.Rows, None), (toy_rows.Staying, False)):
        chain = ps.Chain(agreeing(kind, 4), [4, 2, 2], tail=2, policy=policy, sync_each_step=sync)
        out = chain.generate([[1], [4, 2, 3], [3] * 6], 40, 1.0, seed=5, eos_token_id=[])
        assert [own.num_new_tokens for own in out.requests] == [40] * 3
        texts.append(out.sequences)
    assert texts[0].equal(texts[1])


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("window", [[3, 2], [4, 3, 2]], ids=str)
def test_a_row_is_what_it_is_alone(window: list[int], rule: str) -> None:
    chain = ps.Chain(toy_rows.make(len(window) + 1), window, tail=2, rule=rule)
    together = toy_rows.run(chain, toy_rows.ROWS)
    assert together.stats.levels[0].num_tail_tokens > 0
    for number, row in enumerate(toy_rows.ROWS):
        alone = toy_rows.run(chain, [row])
        length = len(row["prompt"]) + alone.stats.num_new_tokens
        text = together.sequences[number].tolist()[:length]
        assert text == alone.sequences[0].tolist()[:length]
        mine, own = together.requests[number].levels[0], alone.stats.levels[0]
        assert mine.num_accepted_tail_tokens == own.num_accepted_tail_tokens


@pytest.mark.parametrize("shared", [0, 1, 2])
def test_greedy_text_is_the_targets(shared: int) -> None:
    """Also where the levels below write their keys behind the target's."""
    target = make("llama")
    owner = ps.Level(target)
    copies = [rough(target, 0.005, seed=i) for i in (1, 2)]
    below = [
        ps.Level(model, shares_cache_with=owner) if i < shared else ps.Level(model)
        for i, model in enumerate(copies)
    ]
    chain = ps.Chain([owner, *below], [4, 2], tail=2)
    accepted = 0
    for prompt in (PROMPT, PROMPT[:3]):
        out = chain.generate(prompt, 30, eos_token_id=[])
        assert out.sequences[0].tolist() == plain_greedy(target, prompt, 30)
        accepted += out.stats.levels[0].num_accepted_tail_tokens
    assert accepted > 0


def test_below_prompt_lookup() -> None:
    target = make("llama")
    chain = ps.Chain([ps.Level(target), ps.Level(rough(target)), PromptLookup()], [4, 3], tail=3)
    out = chain.generate(PROMPT * 3, 40, eos_token_id=[])
    assert out.sequences[0].tolist() == plain_greedy(target, PROMPT * 3, 40)
    assert out.stats.levels[0].num_tail_tokens > 0


@pytest.mark.parametrize("policy", ["joint", "online"])
def test_windows_that_follow_are_told_of_verified_tokens_only(policy: str) -> None:
    reports: list[Any] = []

    class Watched:
        def __init__(self) -> None:
            self.inner = ps.policies.named(policy)

        def next(self, report: Any) -> Any:
            reports.append(report)
            return self.inner.next(report)

    made = toy_rows.make(3)
    chain = ps.Chain(made, [3, 2], tail=2, policy=Watched())
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
            ps.Chain(made, [2, 2], tail=bad)  # type: ignore[arg-type]
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
