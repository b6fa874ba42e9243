"""Keys and values in 8 bits: a token's logits do not depend on how its text was read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rollback_driver import CONFIGS, VOCAB, build
from transformers import AutoModelForCausalLM

import polyspec_ext as ps
from polyspec_ext import tiny
from polyspec_ext.kv_cache import RollbackCache

PROMPTS = [list(range(40, 52)), [7, 8, 9], list(range(5, 40))]
LENGTHS = [3, 24, 9, 24, 5, 24]


@pytest.fixture(scope="module")
def target() -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny.path("target"), dtype="float32").eval()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    size=st.sampled_from([2, 8, 24, 64, 100]),
    heads=st.integers(1, 3),
    exponents=st.lists(st.integers(-30, 15), min_size=2, max_size=2),
    seed=st.integers(0, 9),
)
def test_vectors_are_rounded_to_a_127th_of_their_group(size, heads, exponents, seed) -> None:
    torch.manual_seed(seed)
    cache = RollbackCache(CONFIGS["llama"], 2, kv_bits=8)
    given = [torch.randn(2, heads, 5, size) * 2.0**exponent for exponent in exponents]
    given[0][0, 0, 1] = 0
    cache.prepare(5)
    for x, read, group in zip(given, cache.update(*given, 0), (8, 32), strict=True):
        groups = x.unflatten(-1, (-1, size if size % group else group))
        largest = groups.abs().amax(-1, keepdim=True)
        # Half a step, and for the largest what the scale has lost to bfloat16.
        bound = largest / 127 * 0.5 + largest / 2**8
        assert ((read.view_as(groups) - groups).abs() <= bound).all()


def test_a_vector_that_is_no_number_stays_one() -> None:
    cache = RollbackCache(CONFIGS["llama"], 1, kv_bits=8)
    cache.prepare(2)
    keys = torch.ones(1, 2, 2, 8)
    keys[0, 1, 0, 3] = float("nan")
    read, _ = cache.update(keys, keys, 0)
    assert read[0, 1, 0].isnan().all()
    assert torch.equal(read[0, :, 1], read[0, :, 1].nan_to_num())


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_do_not_depend_on_the_passes(name: str) -> None:
    """Compare a row that is read token by token with three whose passes are partly rejected."""
    model = build(CONFIGS[name])
    text = torch.randint(VOCAB, (20,), generator=torch.Generator().manual_seed(3))
    cache = RollbackCache.for_model(model, 1, kv_bits=8)
    alone = torch.cat([
        model(token[None], past_key_values=cache, **cache.inputs(1)).logits[0]
        for token in text.split(1)
    ])  # fmt: skip
    exact = model(text[None], use_cache=False).logits[0]
    assert 1e-4 < float((alone - exact).abs().max()) < 0.1 * float(exact.std())
    cache = RollbackCache.for_model(model, 3, kv_bits=8, capacity=4, step=3)
    have = [0, 0, 0]
    for counts, kept in (([7, 2, 5], [6, 2, 3]), ([4, 4, 4], [7, 6, 3]), ([5, 0, 9], [12, 6, 12])):
        wrong = [(text + 1) % VOCAB for _ in have]
        rows = [
            torch.cat([text[have[b] : kept[b]], wrong[b][kept[b] : have[b] + counts[b]]])
            for b in range(3)
        ]
        ids = torch.zeros(3, max(counts), dtype=torch.int64)
        for b, row in enumerate(rows):
            ids[b, : len(row)] = row
        logits = model(ids, past_key_values=cache, **cache.inputs(max(counts), counts)).logits
        cache.rollback(kept)
        for b in range(3):
            new = kept[b] - have[b]
            torch.testing.assert_close(
                logits[b, :new], alone[have[b] : kept[b]], atol=2e-5, rtol=1e-4
            )
        have = kept


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("below", ["drafter", "middle", "w4"])
def test_chains_give_the_text_of_plain_decoding(target: Any, below: str, pack: bool) -> None:
    def level() -> ps.HuggingFaceLevel:
        return ps.HuggingFaceLevel(target, pack=pack, kv_bits=8)

    levels: dict[str, list[Any]] = {
        "drafter": [tiny.path("drafter")],
        "middle": [ps.Level(tiny.path("middle"), dtype="float32", kv_bits=8), tiny.path("drafter")],
        "w4": ["w4", ps.PromptLookup()],  # in the target's cache
    }
    plain = ps.Chain([level()]).generate(PROMPTS, 24, eos_token_id=[])
    chain = ps.Chain([level(), *levels[below]], [4, 3][: len(levels[below])])
    out = chain.generate(PROMPTS, 24, eos_token_id=[])
    assert out.sequences.tolist() == plain.sequences.tolist()
    assert out.stats.levels[0].num_forward_passes < plain.stats.levels[0].num_forward_passes
    # Rows that join and leave, in memory that others had.
    server = ps.Server(chain, slots=2)
    texts: dict[int, list[int]] = {
        server.add(prompt, length, eos_token_id=[]): []
        for prompt, length in zip(PROMPTS * 2, LENGTHS, strict=True)
    }
    while server.running or server.waiting:
        for event in server.step():
            texts[event.request] += event.tokens
    rows = zip(texts.values(), PROMPTS * 2, plain.sequences.tolist() * 2, strict=True)
    for text, prompt, row in rows:
        assert text == row[len(prompt) : len(prompt) + len(text)]
    assert [len(text) for text in texts.values()] == LENGTHS


def test_what_is_refused(target: Any) -> None:
    for bits in (4, 16):
        with pytest.raises(ValueError, match=f"kv_bits: expected 8 .*, given {bits}"):
            ps.HuggingFaceLevel(target, kv_bits=bits)
    with pytest.raises(ValueError, match="kv_bits: expected 8 in a cache without slack"):
        RollbackCache.for_model(target, 1, kv_bits=8, slack=3)
    with pytest.raises(ValueError, match="expected two caches of RollbackLayer or of Int8Layer"):
        RollbackCache.for_model(target, 1).take(RollbackCache.for_model(target, 1, kv_bits=8), [0])
