"""Chains are copied and pickled with their models, idle; a copy gives the same tokens."""

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import captured_chains
import failing
import gates
import pytest
import torch
import toy_rows

import polyspec_ext as ps
from polyspec_ext.policies import RoundReport

PROMPTS = [[3, 4, 5], [6], [7, 8, 9]]
OPTIONS: dict[str, Any] = {"temperature": 1.0, "seed": [3, 4, 5], "eos_token_id": []}


def pickled(chain: ps.Chain) -> ps.Chain:
    again: ps.Chain = pickle.loads(pickle.dumps(chain))
    return again


def models() -> list[Any]:
    return [failing.model(seed, layers) for seed, layers in enumerate((3, 2, 1))]


def shared() -> ps.Chain:
    target, middle, drafter = models()
    owner = ps.HuggingFaceLevel(target, step=4)
    copied = ps.HuggingFaceLevel(middle, shares_cache_with=owner)
    return ps.Chain([owner, copied, drafter], [4, 2])


class Alternates:
    def next(self, report: RoundReport) -> list[int]:
        return [2 + len(report.text) % 2, len(report.text) % 3]


CHAINS: dict[str, Callable[[], ps.Chain]] = {
    "toys": lambda: ps.Chain(toy_rows.make(3), [3, 2], rule="block"),
    "without host synchronisation": lambda: ps.Chain(
        [toy_rows.Staying(40, 11 + i, scale=1.5) for i in range(3)], [3, 2], sync_each_step=False
    ),
    "policy": lambda: ps.Chain(toy_rows.make(3), [3, 2], policy=Alternates()),
    "models": lambda: ps.Chain(models(), [4, 2], rounds=[0]),
    "one model": lambda: ps.Chain(models()[:1]),
    "shared cache": shared,
    "packed": lambda: ps.Chain(models(), [4, 2], pack=True),
    "prompt lookup": lambda: ps.Chain([*models()[:1], ps.PromptLookup()], [4]),
    "streaming": lambda: ps.Chain(
        [*models()[:1], ps.HuggingFaceLevel(models()[2], streaming=16, name="windowed")], [4]
    ),
}


def generate(chain: ps.Chain, **options: Any) -> ps.Output:
    return chain.generate(PROMPTS, 14, **{**OPTIONS, **options})


@pytest.mark.parametrize("way", [copy.deepcopy, pickled])
@pytest.mark.parametrize("kind", CHAINS)
def test_a_copy_gives_the_same_tokens_and_is_independent(kind, way) -> None:
    chain = CHAINS[kind]()
    fresh = way(chain)
    all_rows = generate(chain)
    used = way(chain)  # caches and buffers are there by now
    begun = chain.stream([1, 2], 20, temperature=1.0, seed=0)
    next(begun)
    busy = way(chain)  # idle, though the original has a text in progress
    for again in (fresh, used, busy):
        out = generate(again)
        assert out.sequences.equal(all_rows.sequences)
        assert out.logprobs == all_rows.logprobs
        assert repr(again) == repr(chain)
    rest = list(begun)
    assert rest == list(fresh.stream([1, 2], 20, temperature=1.0, seed=0))[1:]
    assert generate(chain).sequences.equal(all_rows.sequences)
    # Texts in progress in both: neither ends the other, nor reads its cache.
    stream: dict[str, Any] = {"temperature": 1.0, "seed": 0, "eos_token_id": []}
    wanted = list(chain.stream([1, 2, 1], 20, **stream))
    both = [c.stream([1, 2, 1], 20, **stream) for c in (chain, used)]
    texts = list(zip(*both, strict=True))
    assert [one for one, _ in texts] == [other for _, other in texts] == wanted
    # Later changes of the original's models do not matter to the copy.
    for level in chain.levels:
        with torch.no_grad():
            if isinstance(level, ps.HuggingFaceLevel):
                for weight in level.model.parameters():
                    weight.zero_()
            else:
                level.table.zero_()
    del chain, both, level, begun
    gc.collect()
    assert list(used.stream([1, 2, 1], 20, **stream)) == wanted


def test_what_is_shared_stays_shared() -> None:
    chain = shared()
    again = copy.deepcopy(chain)
    owner, member = again.levels
    assert member.cache is owner.cache
    assert owner.cache is not chain.levels[0].cache
    model = models()[0]
    both = copy.deepcopy(ps.Chain([ps.HuggingFaceLevel(model), ps.HuggingFaceLevel(model)], [3]))
    assert both.levels[0].model is both.drafter.level.model is not model


def test_a_copy_captures_steps_of_its_own() -> None:
    chain, graphs = captured_chains.make([4, 2], True)
    wanted = [generate(chain).sequences for _ in range(2)][1]
    assert graphs.num_captures
    again = copy.deepcopy(chain)
    own = again.engine.graphs
    assert own is not graphs
    assert (len(own), own.num_captures, own.num_replays) == (0, 0, 0)
    before = (len(graphs), graphs.num_captures, graphs.num_replays)
    for _ in range(2):
        assert generate(again).sequences.equal(wanted)
    assert own.num_captures == len(own) > 0
    assert (len(graphs), graphs.num_captures, graphs.num_replays) == before


def test_a_chain_at_work_is_not_copied() -> None:
    chain, gate = gates.setting(1, "forward")
    with gates.Waiting(gate, 2, lambda: gates.generate(chain)) as first:
        for way in (copy.deepcopy, pickle.dumps):
            with pytest.raises(RuntimeError, match="at work in another thread"):
                way(chain)
    assert isinstance(first.result, torch.Tensor)
