"""Batches: rows that leave and stop, seeds, padding, statistics and errors."""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import reference_rules as reference
import torch
import toy_rows
from toy_rows import ROWS, make, run

import polyspec_ext as ps
from polyspec_ext.tensors import moved


def test_rows_leave_and_the_caches_shrink() -> None:
    levels = make(3)
    chain = ps.Chain(levels, [3, 2])
    batch = chain.batch(
        [[1]] * 8, [3] * 6 + [40] * 2, temperature=1.0, seed=list(range(8)), eos_token_id=[]
    )
    seen: dict[int, list[int]] = {i: [] for i in range(8)}
    while committed := batch.advance():
        for number, tokens in committed:
            seen[number] += tokens
    assert [len(own) for own in seen.values()] == [3] * 6 + [40] * 2
    kept = {len(level.caches) for level in levels}
    assert len(kept) == 1
    assert kept <= {1, 2}  # the last two need not end together
    assert levels[0].most == 8


def test_passes_and_seconds_are_counted_once_for_the_batch() -> None:
    chain = ps.Chain(make(2), [3])
    out = run(chain, ROWS)
    for i, level in enumerate(out.stats.levels):
        each = [stats.levels[i] for stats in out.requests]
        assert level.num_draft_tokens == sum(one.num_draft_tokens for one in each)
        assert level.num_proposed_tokens == sum(one.num_proposed_tokens for one in each)
        assert max(one.num_forward_passes for one in each) <= level.num_forward_passes
        assert level.num_forward_passes < sum(one.num_forward_passes for one in each)
        assert level.seconds < sum(one.seconds for one in each)
        assert level.prefill_seconds > 0
    assert 0 <= out.stats.overhead_seconds < out.stats.decode_seconds
    assert out.stats.num_new_tokens == sum(stats.num_new_tokens for stats in out.requests)


def test_stop_of_an_older_batch_ends_no_row_of_a_newer() -> None:
    chain = ps.Chain(make(3), [3, 2])
    wanted = chain.generate([3], 30, 1.0, seed=0, eos_token_id=[]).sequences[0].tolist()
    older, newer = (
        chain.batch([[n]], 30, temperature=1.0, seed=0, eos_token_id=[]) for n in (1, 3)
    )
    newer.advance()
    older.end(older.rows[0])
    newer.complete()
    assert newer.rows[0].tokens == wanted
    assert older.rows[0].tokens == [1]


def test_without_a_seed_every_call_draws_another_and_reports_it() -> None:
    chain = ps.Chain(make(2), [3])
    options: dict[str, Any] = {"temperature": 1.0, "eos_token_id": []}

    def call(**more: Any) -> ps.Output:
        return chain.generate([[1], [2]], 20, **{**options, **more})

    first, second = call(), call()
    assert not first.sequences.equal(second.sequences)
    for out in (first, second):
        assert out.seeds == ps.row_seeds(out.seeds[0], 2)
        assert call(seed=out.seeds).sequences.equal(out.sequences)
        assert call(seed=out.seeds[0]).sequences.equal(out.sequences)
    torch.manual_seed(0)  # as before the test
    assert call().sequences.equal(first.sequences)
    stream = chain.stream([1], 20, **options)
    text, (seed,) = list(stream), stream.seeds
    assert list(chain.stream([1], 20, **options, seed=seed)) == text
    batch = chain.batch([[1], [2]], 20, **options)
    assert batch.seeds == [row.request.seed for row in batch.rows] != first.seeds
    assert call(seed=[5, 6]).seeds == [5, 6]
    # Where nothing is drawn, as by default, torch's generator stays as it is.
    state = torch.random.get_rng_state()
    assert list(chain.stream([1], 20)) == call(temperature=0.0).new_tokens[0]
    assert call(temperature=0.0).seeds == ps.row_seeds(0, 2)
    assert torch.random.get_rng_state().equal(state)
    assert call(temperature=[0.0, 1.0]).seeds[0] != 0


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_a_row_of_a_batch_with_one_seed_can_be_drawn_alone(seed: int) -> None:
    chain = ps.Chain(make(2), [3])

    def draw(count: int, seed: Any) -> list[list[int]]:
        out = chain.generate([[1]] * count, 12, 1.0, seed=seed, eos_token_id=[])
        rows: list[list[int]] = out.sequences.tolist()
        return rows

    four = draw(4, seed)
    assert len(set(map(tuple, four))) == 4
    assert four == [draw(1, own)[0] for own in ps.row_seeds(seed, 4)]
    assert draw(1, seed) == four[:1]
    assert draw(2, seed) == four[:2]
    # Any number is one seed for all rows, and so is any list of them.
    for number in (np.uint64(seed), torch.tensor(seed, dtype=torch.uint64), np.array(seed, "u8")):
        assert draw(4, number) == four
    own = ps.row_seeds(seed, 4)
    for several in (tuple(own), np.array(own, "u8"), torch.tensor(own, dtype=torch.uint64)):
        assert draw(4, several) == four


def test_row_seeds() -> None:
    """The bits of the documented draw, and none that another row of another batch has."""
    seeds = [*range(40), 2**32, 2**63, 2**64 - 1]
    for seed in seeds[::6]:
        rows = ps.row_seeds(seed, 70)
        draw = reference.philox_draws(seed, 0, level=0)
        assert rows == [seed, *(draw(row, reference.SAMPLE) for row in range(1, 70))]
        assert rows[:5] == ps.row_seeds(seed, 5)
    every = [row for seed in seeds for row in ps.row_seeds(seed, 8)]
    assert len(set(every)) == len(every)
    assert min(every) >= 0
    assert max(every) < 2**64
    assert ps.row_seeds(np.int64(3), torch.tensor(2)) == ps.row_seeds(3, 2)
    assert ps.row_seeds(3, 0) == []


def test_padding() -> None:
    chain = ps.Chain(make(2), [3])
    ids = torch.tensor([[0, 0, 4], [1, 2, 3]])
    mask = torch.tensor([[0, 0, 1], [1, 1, 1]])
    out = chain.generate(
        ids, [2, 5], attention_mask=mask, eos_token_id=[], pad_token_id=17
    ).sequences
    assert out[:, :3].equal(ids)
    assert out[0, 3:5].tolist() == chain.generate([4], 2, eos_token_id=[]).sequences[0, 1:].tolist()
    assert out[0, 5:].tolist() == [17] * 3
    right = chain.generate(ids.flip(1), 2, attention_mask=mask.flip(1), eos_token_id=[]).sequences
    assert right[0, 3:].equal(out[0, 3:5])
    with pytest.raises(ValueError, match="given a gap"):
        chain.generate(ids, 2, attention_mask=torch.tensor([[1, 0, 1], [1, 1, 1]]))
    with pytest.raises(ValueError, match=r"expected the shape of input_ids, .*given rows of \[3\]"):
        chain.generate(ids, 2, attention_mask=torch.tensor([1, 0, 1]))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("at", [3, 4, 5, 6])
@pytest.mark.parametrize("faulty", [0, 1, 2])
def test_a_bad_row_is_named(faulty: int, at: int, value: float) -> None:
    levels = make(3)
    chain = ps.Chain(levels, [4, 2])
    good = run(chain, ROWS).sequences
    row = levels[faulty].row

    def poisoned(prefix: Sequence[int]) -> torch.Tensor:
        z: torch.Tensor = row(prefix).clone()
        if len(prefix) == at and list(prefix[:3]) == [0, 1, 2]:
            z[3] = value
        return z

    levels[faulty].row = poisoned
    with pytest.raises(ps.RequestError) as caught:
        run(chain, ROWS)
    assert (caught.value.request, caught.value.level, caught.value.position) == (5, faulty + 1, at)
    levels[faulty].row = row
    assert run(chain, ROWS).sequences.equal(good)


def test_bad_batches() -> None:
    chain = ps.Chain(make(2), [3])
    with pytest.raises(ValueError, match="expected one prompt to stream, given 2"):
        chain.stream([[1], [2]], 3)

    class Once:
        name = "once"

        def propose(self, context: Any, k: int) -> Any:
            raise NotImplementedError

    with pytest.raises(ValueError, match="once: expected one prompt, given 2; Once has no `fork`"):
        ps.Chain([make(1)[0], Once()], [3]).generate([[1], [2]], 3)


class FirstAlone:
    """Drafts for row 0 at once, and for the others after `later` tokens."""

    def __init__(self, later: int) -> None:
        self.later = later

    def next(self, report: Any) -> list[int]:
        return [2 if report.request == 0 or len(report.text) > self.later else 0]


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("later", [20, 100])
def test_a_level_reads_the_rows_that_it_drafts_for(later: int, sync: bool) -> None:
    read: list[list[int]] = []

    class Counting(toy_rows.Staying):
        def prefill(self, prompts: Any) -> None:
            read.append(list(prompts.counts or [prompts.tokens.shape[1]] * len(prompts.tokens)))
            super().prefill(prompts)

        def read(self, tokens: torch.Tensor, counts: Any) -> None:
            read.append(list(counts))
            super().read(tokens, counts)

    levels = [toy_rows.Staying(20, 11, 1.5), Counting(20, 12, 1.5)]
    chain = ps.Chain(levels, [2], policy=FirstAlone(later), sync_each_step=sync)
    prompts = [[3] * 10, [4] * 12, [5] * 8]
    texts = chain.generate(prompts, 30, 1.0, seed=[1, 2, 3], eos_token_id=[]).new_tokens
    plain = ps.Chain(levels[:1]).generate(prompts, 30, 1.0, seed=[1, 2, 3], eos_token_id=[])
    assert [len(text) for text in texts] == [30] * 3
    late = [[0, 20, 0], [0, 0, 20]]  # each in the round in which its row first drafts
    assert read == [[9, 0, 0], *(late if later == 20 else [])]
    assert later == 20 or texts[1:] == plain.new_tokens[1:]


@pytest.mark.parametrize(
    ("source", "target", "ahead"),
    [("cuda:0", "cpu", False), ("cpu", "cuda:0", False), ("cuda:0", "cuda:1", True)],
)
def test_the_host_waits_for_what_comes_to_it(source: str, target: str, ahead: bool) -> None:
    """A copy to the host's memory that is not waited for is read before it is there."""
    # Records how it is copied, as there may be no device to copy from.
    copied: Any = SimpleNamespace(device=torch.device(source), to=lambda *to, **how: (to, how))
    assert moved(copied, torch.device(target)) == ((torch.device(target),), {"non_blocking": ahead})
    assert moved(copied, copied.device) is copied


@pytest.mark.parametrize("sampling", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=str)
def test_a_filter_of_one_row_stays_beside_rows_without_it(sampling: dict[str, float]) -> None:
    """A row that keeps the likeliest token alone has its greedy text."""
    ((name, value),) = sampling.items()
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}[name]
    chain, prompts = ps.Chain(make(2), [2]), [[1, 2], [1, 2], [3]]
    options: dict[str, Any] = {"eos_token_id": [], name: [off, value, off]}
    out = chain.generate(prompts, 30, temperature=1.0, seed=3, **options)
    plain = chain.generate(prompts, 30, eos_token_id=[])
    assert out.sequences[1].equal(plain.sequences[1])
    assert not out.sequences[0].equal(plain.sequences[0])
