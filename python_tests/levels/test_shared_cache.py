"""Levels that share one cache: exact answers, one memory, and the target's keys in it."""

import gc
import weakref
from typing import Any

import pytest
import torch
from device_rounds import same
from recorder import WatchedGraphs, on_a_device
from small_models import PROMPT, keys_of, make, plain_greedy, rough

import polyspec_ext as ps
from polyspec_ext.drafters import DraftModel
from polyspec_ext.kv_cache.rollback import RollbackCache
from polyspec_ext.levels import HuggingFaceLevel, InputBlock
from polyspec_ext.levels.base import PromptBatch
from polyspec_ext.runtime.graphs import Graphs
from polyspec_ext.tensors import RowCounts


def own_keys(model: Any, tokens: list[int]) -> torch.Tensor:
    cache = RollbackCache.for_model(model, 1, capacity=len(tokens))
    with torch.inference_mode():
        model(input_ids=torch.tensor([tokens]), past_key_values=cache)
    return keys_of(cache, 0, len(tokens))


def test_one_memory() -> None:
    chain = of_one_cache(3, None)
    chain.generate(PROMPT, 12, eos_token_id=[])
    levels: list[Any] = [*chain.levels, chain.drafter.level]
    assert len({id(level.cache) for level in levels}) == 1
    storages = {
        layer.keys.untyped_storage().data_ptr() for level in levels for layer in level.cache.layers
    }
    assert len(storages) == 2  # one for each of two layers


@pytest.mark.parametrize("streams", ["owner", "copy"])
def test_a_stream_ends_where_another_chain_takes_the_cache(streams: str) -> None:
    target = make("llama")
    owner = HuggingFaceLevel(target)
    copy = HuggingFaceLevel(rough(target), shares_cache_with=owner)
    one, other = (ps.Chain([owner, level], [3]) for level in (rough(target, seed=2), copy))
    if streams == "copy":
        one, other = other, one
    stream = one.stream(PROMPT, 20, eos_token_id=[])
    next(stream)
    wanted = other.generate(PROMPT[:3], 9, eos_token_id=[]).sequences
    with pytest.raises(RuntimeError, match="one with a level in the same cache"):
        list(stream)
    # One after another they may share it.
    one.generate(PROMPT, 20, eos_token_id=[])
    assert other.generate(PROMPT[:3], 9, eos_token_id=[]).sequences.equal(wanted)


def test_the_owner_of_a_cache_stands_above_the_levels_that_share_it() -> None:
    """Elsewhere the owner's keys would be read instead of the copy's."""
    target, draft = make("llama"), make("llama", layers=1, seed=5)
    owner = HuggingFaceLevel(target, name="q")
    copy = ps.Level(rough(target), shares_cache_with=owner, name="w4")
    other = HuggingFaceLevel(draft, name="small")
    wanted = r"expected q, whose cache w4 shares, above it, given"
    for levels, place, found in (
        ([copy], 0, "nothing"),
        ([copy, owner], 0, "nothing"),
        ([copy, other], 0, "nothing"),
        ([other, copy], 1, "small"),
    ):
        with pytest.raises(ValueError, match=rf"^levels\[{place}\]: {wanted} {found}$"):
            ps.Chain(levels)
    first = ps.early_exit(owner, 1)
    with pytest.raises(ValueError, match=r"^levels\[1\]: expected q, whose cache .* above it"):
        ps.Chain([other, ps.SwitchingDrafter([DraftModel(first), ps.PromptLookup()])])
    for levels in ([owner, copy], [owner, other, copy], [owner, copy, first]):
        assert ps.Chain(levels).levels[0] is owner


def test_what_one_copy_has_left_is_not_taken_for_anothers() -> None:
    target = make("llama")
    copies = [rough(target, seed=i) for i in (1, 2)]
    options: dict[str, Any] = {"temperature": 1.0, "eos_token_id": []}
    found = []
    for used in (False, True):
        owner = HuggingFaceLevel(target)
        levels = [HuggingFaceLevel(copy, shares_cache_with=owner) for copy in copies]
        first, second = (ps.Chain([owner, level], [4]) for level in levels)
        if used:
            first.generate(PROMPT, 24, **options, seed=4)
        out = second.generate(PROMPT, 24, **options, seed=3)
        found.append((out.sequences.tolist(), out.stats.levels[0].acceptance_histogram))
    assert found[0] == found[1]


def test_copies_that_are_gone_leave_nothing_with_the_owner() -> None:
    target = make("llama")
    owner = HuggingFaceLevel(target)
    model = rough(target)
    ps.Chain([owner, HuggingFaceLevel(model, shares_cache_with=owner)], [3]).generate(PROMPT, 4)
    held = weakref.ref(model)
    del model
    gc.collect()
    assert held() is None
    chain = ps.Chain([owner, HuggingFaceLevel(rough(target), shares_cache_with=owner)], [3])
    assert chain.generate(PROMPT, 12, eos_token_id=[]).sequences.tolist() == [
        plain_greedy(target, PROMPT, 12)
    ]


@torch.inference_mode()
def test_a_draft_that_looks_back_leaves_the_owners_keys() -> None:
    model = make("llama")
    owner, other = HuggingFaceLevel(model), rough(model, 0.1)
    draft = HuggingFaceLevel(other, shares_cache_with=owner)
    text = [*PROMPT, 11, 12, 13]
    owner.prefill(torch.tensor([text[:4]]))
    draft.prefill(torch.tensor([text[:4]]))
    owner.forward(torch.tensor([text[4:8]]), 1)
    logits = draft.forward(torch.tensor([text[4:]]), 4)
    cache = RollbackCache.for_model(model, 1)
    model(input_ids=torch.tensor([text[:5]]), past_key_values=cache)
    expected = other(input_ids=torch.tensor([text[5:]]), past_key_values=cache).logits
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(
        keys_of(owner.cache, 0, 8), own_keys(model, text[:8]), rtol=1e-4, atol=1e-4
    )


@torch.inference_mode()
def test_states_read_again_leave_the_owners_keys(monkeypatch) -> None:
    """The owner returns no hidden states, and only the device knows the lengths."""
    model = make("llama")
    owner, other = HuggingFaceLevel(model), rough(model, 0.1)
    draft = HuggingFaceLevel(other, shares_cache_with=owner)
    text = torch.tensor([[*PROMPT, 11, 12, 13]])
    for level in (owner, draft):
        level.prefill(PromptBatch(text[:, :4], None, 32))
    owner.forward(text[:, 4:8], 1)
    monkeypatch.setattr(owner, "num_layers", 0)
    for level in (owner, draft):
        level.reserve_span(24)
    width = text.shape[1] - 4
    counts, first = (RowCounts(None, torch.tensor([n])) for n in (width, width - 1))
    out = draft.forward(InputBlock(text[:, 4:], 1, counts, first, None, (-1,)))
    cache = RollbackCache.for_model(model, 1)
    model(input_ids=text[:, :4], past_key_values=cache)
    wanted = other.model(input_ids=text[:, 4:], past_key_values=cache).last_hidden_state
    torch.testing.assert_close(out.hidden[-1], wanted, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(
        keys_of(owner.cache, 0, 8), own_keys(model, text[0, :8].tolist()), rtol=1e-4, atol=1e-4
    )


def test_refusals() -> None:
    target = make("llama")
    for other, text in (
        (make("llama", layers=3), "at most the 2 layers"),
        (make("qwen3").half(), "float32 on cpu"),
        (make("gpt2"), "key and value heads"),
    ):
        with pytest.raises(ValueError, match=text):
            ps.Level(other, shares_cache_with=target)
    with pytest.raises(ValueError, match="or a cache of its own, given both"):
        ps.Level(rough(target), shares_cache_with=target, capacity=64)
    with pytest.raises(ValueError, match="keeps all tokens: remove slack from streaming"):
        ps.Level(rough(target), shares_cache_with=target, streaming={"window": 8, "slack": 4})
    streaming = ps.Level(target, streaming=16)
    with pytest.raises(ValueError, match="expected a level over a full RollbackCache"):
        ps.Level(rough(target), shares_cache_with=streaming)
    draft = ps.Level(rough(target), shares_cache_with=target)
    with pytest.raises(RuntimeError, match="expected prefill before forward"):
        draft.forward(torch.tensor([[1]]), 1)
    with pytest.raises(RuntimeError, match="expected prefill of LlamaForCausalLM, whose cache"):
        draft.prefill(torch.tensor([[1]]))


@torch.inference_mode()
@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2, sliding window"])
def test_a_window_in_the_targets_cache(family: str, pack: bool) -> None:
    """A copy without a difference has the logits of the target under a mask that hides all but the
    first and the latest keys, in chains and trees, for rows of any length."""
    target = make(family)
    owner = HuggingFaceLevel(target, pack=pack)
    near = {"window": 6, "sinks": 3}
    copy = HuggingFaceLevel(target, shares_cache_with=owner, streaming=near, pack=pack)
    text = torch.randint(3, 60, (2, 40), generator=torch.Generator().manual_seed(1))
    lengths = [30, 4]
    for level in (owner, copy):
        level.prefill(PromptBatch(text[:, :30], lengths))
    for parents in (None, torch.tensor([-1, 0, 0, 2])):
        path = [0, 1, 2, 3] if parents is None else [0, 2, 3]
        made = copy.forward(InputBlock(text[:, 30:34], 4, parents=parents)).logits
        copy.rollback(lengths)
        for row, length in enumerate(lengths):
            whole = torch.cat([text[row, :length], text[row, 30:34][path]])[None]
            count = whole.shape[1]
            at = torch.arange(count)
            seen = at <= at[:, None]
            seen[length:] &= (at > at[length:, None] - near["window"]) | (at < near["sinks"])
            # Layers with a window of 8 tokens keep theirs.
            sliding = (at <= at[:, None]) & (at > at[:, None] - 8)
            full, slid = (
                torch.zeros(count, count).masked_fill_(~x, -1e30)[None, None]
                for x in (seen, sliding)
            )
            both = {"full_attention": full, "sliding_attention": slid}
            mask = full if family == "llama" else both
            wanted = target(whole, attention_mask=mask, use_cache=False).logits[0, length:]
            torch.testing.assert_close(made[row, path], wanted, rtol=1e-3, atol=1e-3)


def of_one_cache(count: int, graphs: Graphs | None) -> ps.Chain:
    """A target and its copies, the first with a window; `graphs`: over a cache that is written as
    on a device."""
    target = make("llama", seed=3)
    on_device = {"new_cache": lambda rows: on_a_device(target, rows, bucket=32)}
    owner = HuggingFaceLevel(target, **(on_device if graphs is not None else {}))
    copies = [rough(target, seed=i) for i in range(1, count)]
    near: list[Any] = [{"window": 6, "sinks": 2}, None]  # keys that a copy reads
    levels = [
        owner,
        *(
            ps.Level(model, shares_cache_with=owner, streaming=keys)
            for model, keys in zip(copies, near, strict=False)
        ),
    ]
    window = [[4], [4, 2]][count - 2]
    captured = {} if graphs is None else {"graphs": graphs, "sync_each_step": False}
    return ps.Chain(levels, window, **captured)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("count", [2, 3])
def test_captured_steps_give_the_same_tokens(count: int, temperature: float) -> None:
    graphs = WatchedGraphs()
    eager, chain = of_one_cache(count, None), of_one_cache(count, graphs)
    owner: Any = chain.levels[0]
    for prompts in ([PROMPT], [PROMPT, [7], PROMPT[:3]], [PROMPT, [7], PROMPT[:3]]):
        options: dict[str, Any] = {"temperature": temperature, "seed": 4, "eos_token_id": []}
        wanted = eager.generate(prompts, 40, **options)
        before = graphs.num_replays
        got = chain.generate(prompts, 40, **options)
        same(got, wanted)
        # The owner's keys lie there as computed.
        for b, row in enumerate(got.sequences.tolist()):
            length = len(prompts[b]) + 36
            expected = own_keys(owner.model, row[:length])
            given = keys_of(owner.cache, b, length)
            torch.testing.assert_close(given, expected, rtol=1e-3, atol=1e-3)
    assert graphs.num_captures > 0
    assert graphs.num_replays > before + graphs.num_captures
    assert {key[0] for key, _ in graphs.seen} == set(range(1, count + 1))
    graphs.require_named()
