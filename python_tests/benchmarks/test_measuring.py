"""The measuring loop that the generation benchmarks share, and its verdict on texts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.differences import Verdict, verdict
from benchmarks.generation_calls import Answer, Request
from benchmarks.measuring import Contender, Spent, Step, interleaved, measure, ratios


@pytest.mark.parametrize("count", [1, 2, 4])
def test_everybody_has_every_turn_once_and_the_first_is_first(count: int) -> None:
    everybody, tasks = "abcd"[:count], [2, 1, 1]
    found = list(interleaved(everybody, tasks, 3))
    steps = [
        Step(r, task, turn) for r in range(3) for task in range(3) for turn in range(tasks[task])
    ]
    assert [step for step, _ in found] == [step for step in steps for _ in everybody]
    rounds = [found[n : n + count] for n in range(0, len(found), count)]
    orders = ["".join(one for _, one in each) for each in rounds]
    assert all(order[0] == "a" and sorted(order) == sorted(everybody) for order in orders)
    # Each of the others is the next as often as any other, but for one.
    second = [order[1] for order in orders if count > 1]
    counts = [second.count(one) for one in everybody[1:]]
    assert max(counts, default=0) - min(counts, default=0) <= 1


def test_seconds_by_what_they_were_spent_on() -> None:
    times = iter([1.0, 3.0, 10.0, 14.0, 20.0, 25.0])
    spent = Spent(lambda: next(times))
    for what in ("plan", "turns"):
        with spent.on(what):
            pass
    with pytest.raises(ValueError, match="wrong"), spent.on("plan"):
        raise ValueError("wrong")
    assert spent.seconds == {"plan": 7.0, "turns": 4.0}


def test_what_is_measured() -> None:
    """Every prompt once per repeat, each with a seed of its own, and not the warm-up; rates are
    tokens over seconds of a repeat."""
    now = 0.0
    asked: dict[str, list[Request]] = {"one": [], "two": []}

    def decode(name: str, seconds: float) -> Any:
        def call(request: Request) -> Answer:
            nonlocal now
            asked[name].append(request)
            now += seconds
            texts = [[prompt[0]] * request.max_new_tokens for prompt in request.prompts]
            return Answer(texts)

        return call

    made = [Contender("one", decode("one", 1.0)), Contender("two", decode("two", 0.5))]
    ticks: list[float] = []
    measure(
        made,
        [[5], [6], [7]],
        repeats=2,
        max_new_tokens=4,
        temperature=0.5,
        seed=10,
        warm_up=1,
        uncounted=1,
        clock=lambda: now,
        tick=lambda: ticks.append(now),
    )
    for some in asked.values():
        assert [request.max_new_tokens for request in some] == [1, *[4] * 9]
        assert [request.seeds for request in some[4:]] == [[n] for n in range(10, 16)]
    assert made[0].texts == made[1].texts == {0: [5] * 4, 1: [6] * 4, 2: [7] * 4}
    assert len(ticks) == 2 * 3 * 2
    # 12 tokens a repeat in three calls.
    assert made[0].rates() == [4.0, 4.0]
    assert made[1].rates() == [8.0, 8.0]
    assert ratios(made[1], made[0])["median"] == 2
    assert made[0].decoding_rate() is None


class Scores:
    """A model whose next logits are the same everywhere."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, logits: list[float]) -> None:
        self.logits = torch.tensor(logits)

    def __call__(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(logits=self.logits.expand(1, input_ids.shape[1], -1))


def test_greedy_texts_part_at_ties_alone() -> None:
    plain, other = {0: [0, 0], 1: [0, 0]}, {0: [0, 0], 1: [0, 1]}
    tied = verdict(Scores([1.0, 1.0 - 5e-5]), [[2], [2]], plain, other, 0)
    assert tied.lossless
    assert str(tied).startswith("1 of 2, 1 part at a tie")
    assert [(d["prompt"], d["place"]) for d in tied.differences] == [(1, 1)]
    apart = verdict(Scores([1.0, 0.9]), [[2], [2]], plain, other, 0)
    assert not apart.lossless
    assert "1 DIFFER" in str(apart)
    same = verdict(Scores([1.0, 0.9]), [[2], [2]], plain, plain, 0)
    assert same == Verdict(2, [])
    # What is a tie depends on the data type.
    half = Scores([1.0, 0.9])
    half.dtype = torch.bfloat16
    assert verdict(half, [[2], [2]], plain, other, 0).lossless
