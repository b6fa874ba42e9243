"""Levels that decode through `torch.compile`: the same tokens, and a bounded number of graphs."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from compiled_passes import short_passes_in_python
from transformers import LlamaConfig, LlamaForCausalLM

import polyspec_ext as ps
from polyspec_ext.levels import compiled
from polyspec_ext.levels.base import InputBlock

pytestmark = pytest.mark.usefixtures("nothing_compiled")


def model(seed: int, heads: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16 * heads,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=heads,
        max_position_embeddings=1024,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_compiled_passes_give_the_same_tokens_in_few_graphs() -> None:
    graphs = torch._dynamo.utils.counters["stats"]
    models = [model(0), model(1)]
    plain = ps.Chain(models, [3], check_vocabulary=False)
    levels = [ps.HuggingFaceLevel(one, compile=True) for one in models]
    chain = ps.Chain(levels, [3], check_vocabulary=False)
    chain.generate([1, 2, 3], 5, eos_token_id=[])
    made = graphs["unique_graphs"]
    assert made == 4  # of one token and of several, of each model
    # None of them was traced in vain first.
    assert torch._dynamo.utils.counters["aot_autograd"]["total"] == made
    # Other lengths and capacities, texts that end within a window: the same graphs, and nothing
    # but the prompts without.
    for prompt in ([4, 5, 6], [7] * 50, [3, 1, 4, 1, 5, 9], [7] * 300, [8] * 700, [7] * 255):
        for count in (1, 2, 60):
            wanted = plain.generate(prompt, count, eos_token_id=[]).sequences
            with short_passes_in_python(levels) as passes:
                got = chain.generate(prompt, count, eos_token_id=[])
            assert got.sequences.equal(wanted)
            assert max(passes) <= (len(prompt) <= compiled.LONGEST)
    assert graphs["unique_graphs"] == made, graphs
    # Batches are read as without it.
    wanted = plain.generate([[1, 2], [3]], [20, 30], 1.0, seed=3, eos_token_id=[]).sequences
    got = chain.generate([[1, 2], [3]], [20, 30], 1.0, seed=3, eos_token_id=[]).sequences
    assert got.equal(wanted)
    assert graphs["unique_graphs"] == made, graphs


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_hidden_states_of_compiled_passes() -> None:
    """The same as of others; trees and single tokens as well."""
    plain = ps.HuggingFaceLevel(model(2))
    level = ps.HuggingFaceLevel(model(2), compile=True)
    graphs = torch._dynamo.utils.counters["stats"]
    prompt = torch.arange(1, 9)[None]
    chain = {"tokens": torch.tensor([[3, 1, 2]]), "keep": 3}
    parents = torch.tensor([[-1, 0, 0]])
    for asked in ((0,), (-1,), (0, -1)):
        # The first pass finds out whether the model returns these states, and compiles.
        level.prefill(prompt)
        level.forward(InputBlock(**chain, hidden_layers=asked))
        for more in ({}, {"parents": parents}, {"tokens": torch.tensor([[3]]), "keep": 1}):
            block = InputBlock(**{**chain, **more}, hidden_layers=asked)
            for own in (plain, level):
                own.prefill(prompt)
            wanted = plain.forward(block)
            with short_passes_in_python([level]) as passes:
                found = level.forward(block)
            assert passes == [0]
            torch.testing.assert_close(found.logits, wanted.logits, rtol=0, atol=1e-5)
            assert found.hidden is not None
            assert list(found.hidden) == list(asked)
            for layer in asked:
                torch.testing.assert_close(
                    found.hidden[layer], wanted.hidden[layer], rtol=0, atol=1e-5
                )
    assert graphs["unique_graphs"] == 2, graphs
    # Behind the last layer, in front of the norm: returned by no model, read by a hook.
    made = graphs["unique_graphs"]
    for _ in range(2):
        block = InputBlock(**chain, hidden_layers=(1,))
        for own in (plain, level):
            own.prefill(prompt)
        wanted, found = (own.forward(block) for own in (plain, level))
        torch.testing.assert_close(found.hidden[1], wanted.hidden[1], rtol=0, atol=1e-5)
    assert graphs["unique_graphs"] == made


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_last_hidden_states_have_no_graphs_of_their_own() -> None:
    plain = ps.HuggingFaceLevel(model(3))
    level = ps.HuggingFaceLevel(model(3), compile=True)
    graphs = torch._dynamo.utils.counters["stats"]
    for asked in ((), (-1,)):
        block = InputBlock(torch.tensor([[3, 1, 2]]), 2, hidden_layers=asked)
        for own in (plain, level):
            own.prefill(torch.arange(1, 9)[None])
        wanted, found = (own.forward(block) for own in (plain, level))
        torch.testing.assert_close(found.logits, wanted.logits, rtol=0, atol=1e-5)
        assert (found.hidden is None) == (not asked)
        assert graphs["unique_graphs"] == len(compiled.WIDTHS)
    torch.testing.assert_close(found.hidden[-1], wanted.hidden[-1], rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_model_that_does_not_return_its_hidden_states() -> None:
    """They are read by a hook, without compilation; passes without them are compiled."""

    class Silent(LlamaForCausalLM):
        @functools.wraps(LlamaForCausalLM.forward)
        def forward(self, *arguments: Any, output_hidden_states: bool = False, **more: Any) -> Any:
            if output_hidden_states:
                raise RuntimeError("no hidden states")
            return super().forward(*arguments, **more)

    torch.manual_seed(3)
    one = Silent(model(3).config).eval()
    plain, level = ps.HuggingFaceLevel(one), ps.HuggingFaceLevel(one, compile=True)
    for asked in ((), (-1,)):
        block = InputBlock(torch.tensor([[3, 1, 2]]), 2, hidden_layers=asked)
        for own in (plain, level):
            own.prefill(torch.arange(1, 9)[None])
        wanted = plain.forward(block)
        level.forward(block)
        level.rollback([8])
        with short_passes_in_python([level]) as passes:
            found = level.forward(block)
        assert passes == [len(asked)]
        torch.testing.assert_close(found.logits, wanted.logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.hidden[-1], wanted.hidden[-1], rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_hidden_states_of_a_model_and_its_copy_in_its_cache() -> None:
    """What transformers hangs on the one, to record them, does not keep the other's passes from
    being those that were compiled."""
    one = model(4)
    target = ps.HuggingFaceLevel(one, pack=True, compile=True)
    copy = ps.HuggingFaceLevel(ps.quantize_w4(one, 32), compile=True, shares_cache_with=target)
    levels = [target, copy]
    block = InputBlock(torch.tensor([[3, 1, 2]]), 3, hidden_layers=(0,))
    for again in (False, True):
        for level in levels:
            level.prefill(torch.arange(1, 9)[None])
        for level in levels[::-1]:
            with short_passes_in_python([level]) as passes:
                level.forward(block)
            assert passes == [0] or not again


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_as_many_tokens_as_heads_are_no_case_of_their_own() -> None:
    """The model has three, as many as the pass with which several tokens are compiled."""
    graphs = torch._dynamo.utils.counters["stats"]
    level = ps.HuggingFaceLevel(model(2, heads=compiled.WIDTHS[1]), compile=True)
    tokens = torch.arange(1, 9)[None]
    level.prefill(tokens)
    level.forward(tokens[:, :2], 1)
    assert graphs["unique_graphs"] == len(compiled.WIDTHS)
    for count in (1, 2, 3, 5, 8):
        level.rollback([8])
        with short_passes_in_python([level]) as passes:
            level.forward(tokens[:, :count], 1)
        assert passes == [0]
    assert graphs["unique_graphs"] == len(compiled.WIDTHS)
