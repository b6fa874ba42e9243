"""Rounds without host synchronisation, on the CPU: as step by step, and no value is read."""

import math
from typing import Any

import pytest
import torch
from captured_chains import PROMPTS, level, models
from device_rounds import counted, same, same_without_the_host, watched

import polyspec_ext as ps


def chains(window: list[int], **options: Any) -> tuple[ps.Chain, ps.Chain]:
    """The same chain twice: step by step, as it is on the CPU, and without synchronisation."""
    made = []
    for sync in (None, False):
        levels = [level(i, 3 - min(i, 2), f"level {i}") for i in range(len(window) + 1)]
        made.append(ps.Chain(levels, window, sync_each_step=sync, **options))
    return made[0], made[1]


def test_the_target_s_logits_are_those_behind_the_tokens() -> None:
    followed, alone = chains([4, 2])
    seen: list[dict[int, list[torch.Tensor]]] = []
    for chain in (followed, alone):
        seen.append({number: [] for number in range(3)})
        rows = seen[-1]

        def observe(number, logits, rows=rows) -> None:
            rows[number].append(logits.clone())

        batch = chain.batch(PROMPTS, 20, temperature=1.0, seed=1, eos_token_id=[], observe=observe)
        batch.complete()
    for number in range(3):
        a, b = (torch.cat(rows[number]) for rows in seen)
        assert a.shape == (20, 40)
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("window", [[3], [4, 2], [4, 3, 2]], ids=str)
def test_caches_hold_what_they_hold_step_by_step(window: list[int]) -> None:
    pair = chains(window)
    batches = [chain.batch(PROMPTS, 30, temperature=1.0, seed=8, eos_token_id=[]) for chain in pair]
    rounds = 0
    while batches[0].advance() and batches[1].advance() and len(pair[1].engine.slots) == 3:
        rounds += 1
        assert [row.tokens for row in batches[0].rows] == [row.tokens for row in batches[1].rows]
        for stepped, alone in zip(*map(models, pair), strict=True):
            lengths = alone.cache.lengths.tolist()
            assert lengths == alone.cache.rows.host == stepped.cache.lengths.tolist()
            assert all(n < len(row.tokens) for n, row in zip(lengths, batches[1].rows, strict=True))
    assert rounds > 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("window", [[3], [4, 2], [4, 3, 2]], ids=str)
def test_one_synchronisation_per_round(window: list[int], temperature: float) -> None:
    _, alone = chains(window)
    with watched(alone) as seen:
        batch = alone.batch(PROMPTS, 20, temperature=temperature, seed=1, eos_token_id=[])
        batch.complete()
    assert seen.synchronisations == 0
    assert seen.reads == batch.stats.levels[0].num_forward_passes > 3


def test_rounds_that_need_the_host_are_named() -> None:
    def of(*levels: Any, **options: Any) -> None:
        """Runs as it is by default, and is refused without synchronisation."""
        chain = ps.Chain(list(levels), **options)
        with counted() as seen:
            assert chain.generate(PROMPTS[0], 5, eos_token_id=[]).stats.num_new_tokens == 5
        assert not seen
        ps.Chain(list(levels), **options, sync_each_step=False)

    a, b, c = (level(i, 1, f"level {i}") for i in range(3))
    of(a)
    of(a, b, c, window=[4, 2])
    of(a, b, c, window=[0, 2], rounds=[0])  # the middle is never asked
    start = "sync_each_step: expected True or None, since "
    with pytest.raises(ValueError, match=start + "rounds are not bounded, given False"):
        of(a, b, c, window=[4, 2], rounds=[0])
    with pytest.raises(ValueError, match=start + ".* keeps its lengths on the host, given False"):
        of(a, ps.PromptLookup(), window=[4])


def test_rules_and_ends_of_the_context_are_followed() -> None:
    _, alone = chains([4, 2])
    with counted() as seen:
        alone.generate(PROMPTS[0], 9, rules=ps.LogitsRules(repetition_penalty=1.3))
    assert not seen
    # 256 positions: drafts that overshoot the last would have none.
    followed, alone = chains([4, 2])
    prompt = [(i * i) % 40 for i in range(200)]
    got, seen = same_without_the_host(followed, alone, prompt, 56, 1.0, seed=1, eos_token_id=[])
    assert 0 < len(seen) < got.stats.levels[0].num_forward_passes


def test_a_text_of_one_token_reads_the_target_alone() -> None:
    followed, alone = chains([4, 2])
    for _ in range(2):
        options = {"temperature": 1.0, "seed": 0, "eos_token_id": []}
        pair = [chain.generate(PROMPTS[0], 1, **options) for chain in (followed, alone)]
        for out in pair:
            assert out.stats.num_new_tokens == 1
            assert [own.num_forward_passes for own in out.stats.levels] == [1, 0, 0]
        same(*pair)
        alone.generate(PROMPTS[0], 9, eos_token_id=[])  # the caches are allocated now


@pytest.mark.parametrize(
    ("faulty", "at", "first"),
    [(0, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 0), (1, 1, 0), (1, 0, 1), (2, 0, 0), (2, 1, 0)],
)
def test_a_row_of_nans(faulty: int, at: int, first: int) -> None:
    """Raise the error of rounds step by step, also after accepted tokens; the chain is unharmed."""
    errors = []
    for chain in chains([4, 2]):
        good = chain.generate(PROMPTS, 14, 1.0, seed=7, eos_token_id=[])
        one = models(chain)[faulty]
        head, calls = one.model.lm_head, iter(range(1, 10_000))
        forward = head.forward

        def poisoned(x, forward=forward, calls=calls) -> torch.Tensor:
            logits: torch.Tensor = forward(x)
            if logits.shape[0] == len(PROMPTS) and next(calls) > at:
                logits[1, first:] = math.nan
            return logits

        head.forward = poisoned
        with pytest.raises(ps.RequestError) as caught:
            chain.generate(PROMPTS, 14, 1.0, seed=7, eos_token_id=[])
        head.forward = forward
        errors.append(caught.value)
        same(chain.generate(PROMPTS, 14, 1.0, seed=7, eos_token_id=[]), good)
    a, b = errors
    assert (b.request, b.level, b.position, b.status) == (a.request, a.level, a.position, a.status)
    assert (b.request, b.level) == (1, faulty + 1)
