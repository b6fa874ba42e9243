"""The planner on levels with passes of a known time, by a clock that only passes move."""

import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toy import ToyLevel, distribution
from toy_rows import Rows
from toy_trees import TreeDrafter, TreeLevel

import polyspec_ext as ps
from polyspec_ext.drafters import Context, Proposal
from polyspec_ext.drafters.base import DraftBlock, DraftInput
from polyspec_ext.levels import IdMap
from polyspec_ext.levels.base import InputBlock, LevelOutput
from polyspec_ext.planning import measure, planner
from polyspec_ext.planning.measure import Part, Setting, Workload
from polyspec_ext.planning.store import Store
from polyspec_ext.sampling import Sampling

PROMPTS = [[1, 2, 3], [4, 5], [6], [7, 1, 1, 8]]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    own = Clock()
    monkeypatch.setattr(time, "perf_counter", own)
    return own


class Slow(ToyLevel):
    """The target of seed 0 with noise; a pass takes `seconds` and a little by token.

    Args:
        each: seconds by token of a prompt.
        attends: share of `seconds` by token of the text.
    """

    def __init__(
        self, clock: Clock, name: str, seconds: float, noise: float, each: float = 0.0,
        attends: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(12, 0, scale=2.0, name=name)
        self.table = self.table + ToyLevel(12, len(name), scale=noise).table
        self.clock, self.seconds, self.each, self.attends = clock, seconds, each, attends

    def prefill(self, tokens: torch.Tensor) -> None:
        self.clock.now += self.each * tokens.shape[1]
        super().prefill(tokens)

    def forward(self, tokens: torch.Tensor, keep: int) -> torch.Tensor:
        more = 0.02 * tokens.shape[1] + self.attends * len(self.cache)
        self.clock.now += self.seconds * (1 + more)
        return super().forward(tokens, keep)


def levels(clock: Clock) -> list[Any]:
    return [
        Slow(clock, "target", 0.1, 0.0),
        Slow(clock, "small", 0.004, 1.4),
        Slow(clock, "middle", 0.02, 0.35),
    ]


def error_of(one: planner.Candidate) -> float:
    """Predicted over measured tokens per second, less 1."""
    return one.predicted_tokens_per_second / one.measured_tokens_per_second - 1


def ran_again(plan, some, prompts) -> list[planner.Candidate]:
    """Return the candidates with their times, as `verify` runs them."""
    rows = measure.representative(prompts, plan.request.batch)
    runner = measure.Runner(plan.parts, rows[: len(plan.measured.prompts)], plan.request)
    return planner.with_rates(some, runner, 1)


def as_predicted(plan, near, far=0.1, prompts=PROMPTS) -> list[planner.Candidate]:
    """Return all candidates, which run as predicted. Greedy texts of two levels are replayed
    exactly; the first round of a text has more to read.

    Args:
        near, far: largest errors of the rates of up to two levels, and of more.
    """
    ran = ran_again(plan, plan.candidates, prompts)
    for one in ran:
        two = len(one.parts) < 3
        assert error_of(one) == pytest.approx(0, abs=near if two else far), one
        assert not two or one.length == pytest.approx(one.measured_length), one
    return ran


@pytest.mark.parametrize("count", [2, 3])
def test_what_is_predicted_is_what_runs(clock: Clock, count: int) -> None:
    given = [*levels(clock)[:count], *(["prompt-lookup"] if count == 2 else [])]
    plan = ps.plan(given, PROMPTS, 60, seconds=1e9, verify=True)
    # The models in order of their times, and all chains of them.
    names = [part.name for part in plan.parts]
    assert names == (["target", "middle", "small"] if count == 3 else [*names[:2], "prompt lookup"])
    assert len({one.parts for one in plan.candidates}) == len(plan.candidates) == 4
    ran = as_predicted(plan, 0.02)
    rates = [one.measured_tokens_per_second or 0.0 for one in ran]
    best = plan.recommended.measured_tokens_per_second
    assert best >= 0.97 * max(rates)
    assert plan.speculate
    assert ran[0].measured_tokens_per_second != ran[0].measured_decode_tokens_per_second
    text = plan.chain().generate(PROMPTS[0], 60).sequences
    assert text.equal(ps.Chain([plan.parts[0].thing]).generate(PROMPTS[0], 60).sequences)


@pytest.mark.parametrize("reads_slowly", [False, True])
def test_prefills_count(clock: Clock, reads_slowly: bool) -> None:
    """A level that takes long to read prompts does not pay; rates are of whole calls."""
    given = [
        Slow(clock, "target", 0.1, 0.0),
        Slow(clock, "small", 0.004, 2.5),
        Slow(clock, "middle", 0.01, 0.3, 0.05 * reads_slowly),
    ]
    prompts = [[n, *[n + 1] * (10 + 4 * n)] for n in range(3)]
    plan = ps.plan(given, prompts, 16, seconds=1e9)
    for one in as_predicted(plan, 0.05, prompts=prompts):
        decode = one.measured_decode_tokens_per_second
        assert decode == pytest.approx(one.predicted_decode_tokens_per_second, rel=0.1)
    best = max(plan.candidates, key=lambda one: one.predicted_decode_tokens_per_second)
    assert "middle" in best.levels
    assert ("middle" in plan.recommended.levels) != reads_slowly
    middle = [part.name for part in plan.parts].index("middle")
    if reads_slowly:
        assert plan.measured.prefill[middle].at(15) == pytest.approx(0.05 * 14, rel=0.01)


# Few are long, and none has the mean length.
SIZES = (4, 6, 150, 5, 3, 7, 5, 110, 6)
UNEVEN = [[n % 12, *[(n + 5) % 12] * size] for n, size in enumerate(SIZES)]


def test_prompts_that_there_is_no_time_for(clock: Clock) -> None:
    longer = 0.002, 0.01
    given = [Slow(clock, "target", 0.1, 0.0, *longer), Slow(clock, "middle", 0.02, 0.35, *longer)]
    plan = ps.plan(given, UNEVEN, 30, seconds=90)
    found = plan.measured
    assert 5 < len(found.prompts) <= len(UNEVEN)
    assert set(found.prompts) <= set(map(len, UNEVEN))
    every = ps.plan(given, UNEVEN, 30, seconds=1e9)
    assert found.spent < 0.4 * every.measured.spent
    as_predicted(plan, 0.1, prompts=UNEVEN)


class SlowRows(Rows):
    """`Slow` in batches: a pass takes longer by the row, and by the width of the block."""

    def __init__(self, clock: Clock, name: str, seconds: float, noise: float) -> None:
        super().__init__(12, 0, scale=2.0, name=name)
        self.table = self.table + ToyLevel(12, len(name), scale=noise).table
        self.clock, self.seconds = clock, seconds

    def prefill(self, tokens: torch.Tensor, counts: Sequence[int] | None = None) -> None:
        self.clock.now += self.seconds * (1 + 0.01 * tokens.numel())
        super().prefill(tokens, counts)

    def forward(self, tokens, keep, counts=None, first=None) -> torch.Tensor:
        self.clock.now += self.seconds * self.cost(*tokens.shape)
        return super().forward(tokens, keep, counts, first)

    def cost(self, batch: int, width: int) -> float:
        return (1 + 0.1 * batch) * (1 + 0.02 * width)


def test_batches_are_planned(clock: Clock) -> None:
    """Rows wait for the row with the most to read; complete rows leave."""
    given = [
        SlowRows(clock, "target", 0.1, 0.0),
        SlowRows(clock, "small", 0.004, 1.4),
        SlowRows(clock, "middle", 0.02, 0.35),
    ]
    prompts = [[a, b] for a in range(5) for b in (1, 7)]
    plan = ps.plan(given, prompts, 40, batch=4, seconds=1e9)
    alone = ps.plan(given[:1], prompts, 40, seconds=1e9)
    as_predicted(plan, 0.03, prompts=prompts)
    # Four rows of the target alone take 1.4 / 1.1 of the time of one.
    assert plan.plain.predicted_decode_tokens_per_second == pytest.approx(
        alone.plain.predicted_decode_tokens_per_second * 4 * 1.1 / 1.4, rel=0.02
    )
    text = plan.chain().generate(prompts[:4], 40).sequences
    assert text.equal(ps.Chain([plan.parts[0].thing]).generate(prompts[:4], 40).sequences)


def test_windows_are_the_best_of_all(clock: Clock) -> None:
    target, small, middle = levels(clock)
    parts = [Part(level, level.name, True) for level in (target, middle, small)]
    found = measure.measure(parts, PROMPTS, Workload(60), limit=1e9)
    for chain in ((0, 1), (0, 2), (0, 1, 2)):
        setting = planner.best_setting(found, chain)
        best = planner.predict(found, setting).tokens_per_second
        for size, inner in itertools.product((1, 3, 5, 8, 12), (1, 2, 4)):
            other = (size, inner)[: len(setting.windows)]
            bound = tuple(-(-a // (b + 1)) for a, b in itertools.pairwise(other))
            rival = planner.predict(found, Setting(chain, other, bound)).tokens_per_second
            assert rival <= best * 1.005


def test_texts_too_short_for_a_level_to_draft_are_refused_by_its_name(clock: Clock) -> None:
    with pytest.raises(ValueError, match=r"max_new_tokens: expected .* given 2, with which small"):
        ps.plan(levels(clock), PROMPTS[:1], 2, seconds=1e9)


def test_a_window_above_may_be_longer_than_any_draft(clock: Clock) -> None:
    """Where the target takes all that a middle hands up."""
    parts = [
        Part(Slow(clock, name, seconds, noise), name, True)
        for name, seconds, noise in (("target", 0.3, 0.0), ("copy", 0.02, 0.0), ("small", 0.004, 1))
    ]
    found = measure.measure(parts, PROMPTS, Workload(150), limit=1e9)
    windows = planner.best_setting(found, (0, 1, 2), tails=False).windows
    assert windows[0] > planner.MOST >= windows[1]


def tailed(clock: Clock) -> list[Any]:
    """A middle that takes nearly as long as the target, and a drafter that is worth no less."""
    return [
        Slow(clock, "target", 0.1, 0.0),
        Slow(clock, "small", 0.002, 0.5),
        Slow(clock, "middle", 0.07, 0.35),
    ]


@pytest.mark.parametrize("kind", ["model", "prompt lookup"])
def test_tails_are_predicted_as_they_run(clock: Clock, kind: str) -> None:
    given = tailed(clock)
    if kind != "model":
        given[1] = ps.PromptLookup()
    plan = ps.plan(given, PROMPTS, 60, seconds=1e9)
    (three,) = [one for one in plan.candidates if len(one.parts) == 3]
    some = [
        planner.candidate(plan.measured, plan.parts, Setting(three.parts, (4, 3), (0,), tail))
        for tail in range(4)
    ]
    ran = ran_again(plan, some, PROMPTS)
    for one in ran:
        assert one.length == pytest.approx(one.measured_length, rel=0.06), one
        assert abs(error_of(one)) < 0.06, one
    if kind == "model":  # a longer window of looked-up tokens gains nothing here
        assert some[0].length < some[-1].length


def test_a_tail_is_chosen_where_it_pays(clock: Clock) -> None:
    plan = ps.plan(tailed(clock), PROMPTS, 60, seconds=1e9)
    (three,) = [one for one in plan.candidates if len(one.parts) == 3]
    found = plan.measured
    rates = [
        planner.predict(found, three.setting._replace(tail=tail)).tokens_per_second
        for tail in range(three.windows[-1] + 1)
    ]
    assert three.tail == max(range(len(rates)), key=rates.__getitem__) > 0
    assert three.predicted_decode_tokens_per_second == pytest.approx(max(rates))
    assert planner.best_setting(found, three.parts, tails=False).tail == 0
    assert plan.chain(three).tail == three.tail
    windows = ",".join(map(str, three.windows))
    assert f"window {windows} tail {three.tail} rounds" in str(plan)
    report = json.loads(json.dumps(plan.to_dict()))
    assert [one["tail"] for one in report["candidates"]] == [one.tail for one in plan.candidates]


def test_plain_decoding_wins_where_drafts_are_dear(clock: Clock) -> None:
    target = Slow(clock, "target", 0.1, 0.0)
    plan = ps.plan([target, Slow(clock, "as slow", 0.09, 3.0)], PROMPTS, 40, seconds=1e9)
    assert not plan.speculate
    assert plan.recommended.levels == ("target",)
    assert str(plan).startswith("do not speculate: target alone")
    assert plan.recommended.predicted_tokens_per_second == pytest.approx(1 / 0.102, rel=0.01)
    assert plan.chain().window == []


@pytest.mark.parametrize(
    "rows", [{"temperature": 0.7, "top_k": 5, "top_p": 0.8}, {"min_p": 0.2}, {}]
)
def test_distributions_are_those_of_the_operators(rows: dict[str, Any]) -> None:
    logits = ToyLevel(30, 3, scale=3.0).table[0]
    request = Workload(sampling=Sampling(**rows))
    wanted = [distribution(row, **{"temperature": 1.0, **rows}) for row in logits]
    found = measure.processed(logits, request)
    assert found.numpy() == pytest.approx(torch.tensor(wanted).numpy(), abs=1e-5)
    greedy = measure.processed(logits, Workload())
    assert greedy.argmax(-1).equal(logits.argmax(-1))
    assert greedy.sum() == len(logits)


class Guess:
    """Samples from a fixed distribution: only the results of its rounds are known."""

    name = "guess"

    def propose(self, context: Context, k: int) -> Proposal:
        logits = torch.zeros(1, k, 12)
        drawn = [
            int(
                ps.sample(
                    logits[0, j : j + 1], seed=context.seed, level=context.level,
                    position=len(context.tokens) + j, round=context.round,
                ).tokens
            )
            for j in range(k)
        ]  # fmt: skip
        return Proposal(drawn, logits)


def test_a_drafter_that_samples_is_observed(clock: Clock) -> None:
    target = Slow(clock, "target", 0.1, 0.0)
    target.table = target.table / 8  # nearly uniform, as the guesses
    given = [target, Guess()]
    prompts = [[n] for n in range(12)]
    plan = ps.plan(given, prompts, 200, temperature=1.0, seconds=1e9, verify=True, repeats=1)
    (one,) = [c for c in plan.candidates if c.windows]
    assert one.measured_length == pytest.approx(one.length, rel=0.15)
    assert one.length > 1.5


def test_a_level_in_anothers_cache_may_stand_in_the_middle(clock: Clock) -> None:
    """Its distribution cannot be read apart, only how much of its tokens is accepted."""
    given = levels(clock)
    given[2].reads_apart = False
    plan = ps.plan(given, PROMPTS, 60, seconds=1e9)
    assert [part.name for part in plan.parts] == ["target", "middle", "small"]
    (three,) = [one for one in plan.candidates if len(one.parts) == 3]
    (ran,) = ran_again(plan, [three], PROMPTS)
    # One acceptance for all positions, where the levels agree in some more than in others.
    assert ran.measured_length == pytest.approx(three.length, rel=0.15)
    assert error_of(ran) == pytest.approx(0, abs=0.25)
    assert three.length > 2


class SlowTreeLevel(TreeLevel):
    """A target that reads trees; a pass takes 0.1 s and 2 ms for each token."""

    def __init__(self, clock, name="target", seconds=0.1, noise=0.0, each=0.002) -> None:
        super().__init__(12, 0, name)
        self.table.table = self.table.table + ToyLevel(12, 7, scale=noise).table
        self.clock, self.seconds, self.each = clock, seconds, each

    def forward(self, block: InputBlock) -> LevelOutput:
        self.clock.now += self.seconds + self.each * block.tokens.shape[1]
        return super().forward(block)


class SlowTreeDrafter(TreeDrafter):
    """Trees of a noisy copy of the target; 5 ms for each level."""

    def __init__(self, clock: Clock, widths: Sequence[int]) -> None:
        table = ToyLevel(12, 0)
        table.table = table.table + ToyLevel(12, 5, scale=0.5).table
        super().__init__(table, widths, hidden_layers=(0,))
        self.clock = clock

    def _check_states(self, inputs: DraftInput) -> None:
        pass

    def draft(self, inputs: DraftInput) -> DraftBlock:
        self.clock.now += 5e-3 * min(max(inputs.lengths), len(self.widths))
        return super().draft(inputs)


def test_trees_are_planned_by_their_depth(clock: Clock) -> None:
    """A tree's verification takes the time of all its nodes, and no tree is deeper than it is."""
    drafter = SlowTreeDrafter(clock, (3, 2, 2))
    prompts = [[n, m] for n in range(6) for m in (1, 5)]
    plan = ps.plan([SlowTreeLevel(clock), drafter], prompts, 40, seconds=1e9)
    (tree,) = [one for one in plan.candidates if one.windows]
    (ran,) = ran_again(plan, [tree], prompts)
    assert tree.length == pytest.approx(ran.measured_length, rel=0.06)
    assert error_of(ran) == pytest.approx(0, abs=0.06)
    assert plan.measured.proposals[0, 1].counts.max() == 3
    assert plan.recommended is tree
    # Its nodes are no chain's tokens: plain decoding's times do not know them.
    assert set(plan.measured.verify[0, 0].seconds) == {0}
    times = plan.measured.verify[0, 1]
    assert times.at(3) == pytest.approx(0.1 + 2e-3 * (1 + 3 + 6 + 12), rel=0.05)


def test_trees_below_any_model_have_times_of_their_own(clock: Clock) -> None:
    """Also where a model reads chains alone, below which no tree is planned."""
    target, large, small = (
        SlowTreeLevel(clock, name, seconds, noise)
        for name, seconds, noise in (("target", 0.1, 0.0), ("large", 0.03, 0.4), ("small", 0.01, 1))
    )
    chains = Slow(clock, "chains", 0.02, 0.5)
    drafters = [ps.DraftModel(SlowTreeLevel(clock, "d", 2e-3, 2.0), paths=k) for k in (2, 4)]
    given = [target, large, chains, small, *drafters, "suffix"]
    plan = ps.plan(given, PROMPTS, 24, temperature=1.0, seconds=1e9)
    assert [part.name for part in plan.parts[1:4]] == ["large", "chains", "small"]
    assert {pair for pair in plan.measured.verify if pair[1]} == {
        (above, below) for above in (0, 1, 3) for below in (4, 5)
    }
    # At three levels a tree of four paths has more nodes.
    two, four = (plan.measured.verify[0, n].at(3) for n in (4, 5))
    assert four > two + 2e-3
    found = {one.parts for one in plan.candidates}
    assert {(0, 1, 4), (0, 1, 3, 5), (0, 2, 6), (0, 2, 3, 4)} < found
    assert not any(2 in one[-2:-1] and one[-1] in (4, 5) for one in found)
    assert "verify trees of d, 4 paths" in str(plan)


def test_a_head_drafts_below_the_target_it_reads(clock: Clock) -> None:
    target, middle, copy = (Part(SlowTreeLevel(clock, str(n)), str(n), True) for n in range(3))
    copy.thing.reads_apart = False
    head = Part(SlowTreeDrafter(clock, (2,)), "head", False)
    found = list(planner.chains([target, copy, middle, head]))
    assert (0, 3) in found
    assert (0, 1, 3) in found
    assert (0, 2, 3) not in found
    assert (0, 1, 2, 3) not in found
    assert (0, 1, 2) in found


class Trimmed(Slow):
    """Draws its higher ids alone."""

    id_map = IdMap(12, torch.arange(5, 12))

    def forward(self, tokens: torch.Tensor, keep: int) -> torch.Tensor:
        return super().forward(tokens, keep)[..., 5:]


def test_a_draft_with_fewer_ids_may_be_anywhere_and_is_measured_by_them(clock: Clock) -> None:
    target, small, middle = levels(clock)
    given = [target, Trimmed(clock, "trimmed", 0.01, 0.0), small, middle, "prompt-lookup"]
    plan = ps.plan(given, PROMPTS, 60, seconds=1e9)
    assert [part.name for part in plan.parts[:4]] == ["target", "middle", "trimmed", "small"]
    assert {(0, 1, 2), (0, 2, 3), (0, 2, 4)} < set(planner.chains(plan.parts))
    accepted = plan.measured.accept[0, 2]
    assert set(accepted.tolist()) == {0.0, 1.0}  # as its distribution is the target's
    some = [one for one in plan.candidates if one.parts in ((0, 2), (0, 2, 3), (0, 2, 4))]
    assert len(some) == 3
    for one in ran_again(plan, some, PROMPTS):
        exact = len(one.parts) == 2
        assert one.length == pytest.approx(one.measured_length, rel=1e-6 if exact else 0.15)
        assert error_of(one) == pytest.approx(0, abs=0.02 if exact else 0.15)


def test_chains_have_at_most_four_levels(clock: Clock) -> None:
    """The windows of longer chains would take minutes to choose."""
    models = [Part(level, f"{n}", True) for n in range(5) for level in levels(clock)[:1]]
    lookup = Part(ps.SuffixMatch(), "suffix", False)
    found = list(planner.chains([*models, lookup]))
    assert max(map(len, found)) == 4
    assert (0, 1, 2, 3) in found
    assert (0, 1, 2, 5) in found
    assert len(found) == len(set(found)) == 1 + 4 + 6 + 4 + 1 + 4 + 6


@pytest.mark.parametrize("eos", [3, 8])
def test_texts_that_end_with_an_eos(clock: Clock, eos: int) -> None:
    """No level knows that the text ends before it is proposed: windows are asked for as ever."""
    given = [*levels(clock)[:2], "prompt-lookup"]
    plan = ps.plan(given, PROMPTS, 60, eos_token_id=eos, seconds=1e9)
    assert len(plan.measured.remaining) < 60 * len(plan.measured.prompts)
    as_predicted(plan, 0.05)


class Uneven(Slow):
    """Passes take as long on average as `steady` passes, now and then much longer."""

    def __init__(self, clock: Clock, name: str, seconds: float, noise: float, seed: int) -> None:
        super().__init__(clock, name, seconds, noise)
        self.generator, self.steady = np.random.default_rng([seed, len(name)]), False

    def forward(self, tokens: torch.Tensor, keep: int) -> torch.Tensor:
        spread, far, often = 0.3, 3.0, 0.03
        factor = 1 + spread * self.generator.uniform(-1, 1)
        factor += far * (self.generator.random() < often)
        if self.steady:
            factor = 1 + far * often
        before = self.clock.now
        found = super().forward(tokens, keep)
        self.clock.now += (factor - 1) * (self.clock.now - before)
        return found


def slower(monkeypatch: pytest.MonkeyPatch, factors: dict[str, float]) -> None:
    """Levels are, once their steps have been measured."""

    def measured(*given: Any, **options: Any) -> measure.Measured:
        found = measure.measure(*given, **options)
        for part in given[0]:
            if part.name in factors:
                part.thing.seconds *= factors[part.name]
        return found

    monkeypatch.setattr(planner, "measure", measured)


def test_what_comes_first_has_been_run(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    slower(monkeypatch, {"small": 20.0})
    plan = ps.plan(levels(clock), PROMPTS, 60, seconds=1e9, trials=1)
    assert plan.recommended.levels == ("target", "middle")
    first, *more = [parts for parts in plan.measured.trials if len(parts) > 1]
    assert 2 in first  # the small one's chain looked best
    assert plan.recommended.parts in more


def test_a_machine_that_changes_changes_all_predictions(clock, monkeypatch) -> None:
    """Measured steps are charged with the times of trials, also in chains not run."""

    slower(monkeypatch, {"target": 1.25, "middle": 1.25, "small": 1.25})
    plan = ps.plan([*levels(clock), "prompt-lookup"], PROMPTS, 60, seconds=1e9)
    assert 5 <= len(plan.measured.trials) < len(plan.candidates) == 8
    assert plan.candidates[0].parts in plan.measured.trials
    as_predicted(plan, 0.02, 0.12)


def test_the_uncertainty_is_that_of_the_trial(clock: Clock) -> None:
    """Run rounds of one token each, with times spread as in `Uneven`."""
    plan = ps.plan([Uneven(clock, "target", 0.1, 0.0, 1)], PROMPTS, 100, seconds=1e9)
    rounds = 2 * len(PROMPTS) * 100
    spread = (0.3**2 / 3 + 3.0**2 * 0.03 * 0.97) ** 0.5 / 1.09
    assert plan.plain.uncertainty == pytest.approx(2 * spread / rounds**0.5, rel=0.3)
    # Of the texts' spread, and of steps, where nothing was tried.
    untried = replace(plan.measured, trials={})
    one = planner.candidate(untried, plan.parts, Setting((0,)))
    assert one.uncertainty != pytest.approx(plan.plain.uncertainty, rel=1e-6)
    steady = ps.plan([Slow(clock, "target", 0.1, 0.0)], PROMPTS, 20, seconds=1e9)
    assert steady.plain.uncertainty < 1e-3


def test_as_many_chains_are_tried_as_one_likes(clock: Clock) -> None:
    given = [*levels(clock), "prompt-lookup"]
    for count, wanted in ((0, 2), (1, 2), (None, 8)):
        plan = ps.plan(given, PROMPTS, 30, seconds=1e9, trials=count)
        assert len(plan.candidates) == 8
        # Besides plain decoding; the recommended chain always has a trial.
        assert len(plan.measured.trials) == wanted
        assert plan.recommended.parts in plan.measured.trials


def again(*_: Any, **__: Any) -> Any:
    raise AssertionError("measured again")


def test_a_plan_is_kept(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    monkeypatch.setattr(planner, "default_store", lambda: store)
    given = [*levels(clock)[:2], Slow(clock, "middle", 0.02, 0.2)]
    first = ps.Chain.planned(given, PROMPTS, 60, seconds=1e9)
    with monkeypatch.context() as patch:
        patch.setattr(planner, "measure", again)
        second = ps.Chain.planned(given, PROMPTS, 60)
        for name in ("names", "window", "rounds", "rule", "tail"):
            assert getattr(second, name) == getattr(first, name), name
        assert second.tail > 0
        assert second.prediction == first.prediction
        assert second.prediction.tokens_per_second > 1 / 0.102
        assert 0 < second.prediction.uncertainty < 1
        assert ps.Chain(given).prediction is None
        with pytest.raises(AssertionError, match="measured again"):
            ps.Chain.planned(given, PROMPTS, 61)
    plan = ps.plan(given, PROMPTS, 60, seconds=1e9)
    assert plan.recommended.windows == tuple(first.window)


class Arithmetic(SlowRows):
    """A pass of more than eight tokens of all rows takes as much longer as it has more of them."""

    def cost(self, batch: int, width: int) -> float:
        return max(1.0, batch * width / 8)


def test_windows_shrink_in_larger_batches(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """To plain decoding: a plain pass reads as many tokens at no cost."""
    given = [Arithmetic(clock, "target", 0.1, 0.0), Arithmetic(clock, "small", 0.004, 0.25)]
    prompts = [[a, b] for a in range(6) for b in (1, 3, 5, 7)]
    for batch, windows in ((1, {5, 6, 7}), (3, {1, 2}), (8, {0})):
        chain = ps.Chain.planned(given, prompts, 40, batch=batch, seconds=1e9)
        assert sum(chain.window) in windows
        assert chain.prediction.batch == batch
    monkeypatch.setattr(planner, "measure", again)
    assert not ps.Chain.planned(given, prompts, 40, batch=8).window
    with pytest.raises(AssertionError, match="measured again"):
        ps.Chain.planned(given, prompts, 40, batch=4)


@pytest.mark.parametrize(("seconds", "most"), [(20, 27), (200, 180)])
def test_slow_models_are_measured_in_the_time_that_there_is(clock, seconds, most) -> None:
    """A text takes 6 to 26 seconds: of chains that are only timed, a part is enough."""
    given = [*levels(clock), "prompt-lookup"]
    began = clock.now
    plan = ps.plan(given, PROMPTS[:2], 60, seconds=seconds)
    assert clock.now - began < most
    whole = ps.plan(given, PROMPTS[:2], 60, seconds=1e9)
    for one, other in ((plan.plain, whole.plain), (plan.recommended, whole.recommended)):
        assert one.predicted_tokens_per_second == pytest.approx(
            other.predicted_tokens_per_second, rel=0.1
        )


def test_bad_input() -> None:
    with pytest.raises(TypeError, match=r"levels\[0\]: expected a model, given PromptLookup"):
        ps.plan([ps.PromptLookup()], PROMPTS)
    with pytest.raises(ValueError, match="prompts"):
        ps.plan([ToyLevel(5, 0)], [[9]])
    for ends in (5, "x", [[1], [2]]):
        with pytest.raises((TypeError, ValueError), match=r"^eos_token_id: expected"):
            ps.plan([ToyLevel(5, 0)], PROMPTS, eos_token_id=ends)
