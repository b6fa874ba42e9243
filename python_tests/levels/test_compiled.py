"""Levels that decode through `torch.compile`: the same tokens, and a bounded number of graphs."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import polyspec_ext as ps
from polyspec_ext.levels.base import InputBlock


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    """Graphs of other tests in the same process are neither counted nor found."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=1024,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_compiled_passes_give_the_same_tokens_in_few_graphs() -> None:
    graphs = torch._dynamo.utils.counters["stats"]
    models = [model(0), model(1)]
    plain = ps.Chain(models, [3], check_vocabulary=False)
    chain = ps.Chain(models, [3], check_vocabulary=False, compile=True)
    chain.generate([1, 2, 3], 40, eos_token_id=[])
    made = graphs["unique_graphs"]
    # Other lengths and another capacity, the same graphs.
    for prompt in ([4, 5], [7] * 50, [3, 1, 4, 1, 5, 9], [7] * 300):
        wanted = plain.generate(prompt, 60, eos_token_id=[]).sequences
        assert chain.generate(prompt, 60, eos_token_id=[]).sequences.equal(wanted)
    assert 0 < made <= 10
    assert graphs["unique_graphs"] - made <= 2, graphs
    # Rows out of step are read as without it.
    wanted = plain.generate([[1, 2], [3]], [20, 30], 1.0, seed=3, eos_token_id=[]).sequences
    got = chain.generate([[1, 2], [3]], [20, 30], 1.0, seed=3, eos_token_id=[]).sequences
    assert got.equal(wanted)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_hidden_states_of_compiled_passes() -> None:
    """The same as of others, and compiled from the second pass on; trees as well."""
    plain = ps.HuggingFaceLevel(model(2))
    level = ps.HuggingFaceLevel(model(2), compile=True)
    graphs = torch._dynamo.utils.counters["stats"]
    prompt = torch.arange(1, 9)[None]
    chain = {"tokens": torch.tensor([[3, 1, 2]]), "keep": 3}
    parents = torch.tensor([[-1, 0, 0]])
    for asked in ((0,), (-1,), (0, -1)):
        for more in ({}, {}, {"parents": parents}, {}):
            block = InputBlock(**chain, hidden_layers=asked, **more)
            for own in (plain, level):
                own.prefill(prompt)
            wanted, found = (own.forward_block(block) for own in (plain, level))
            torch.testing.assert_close(found.logits, wanted.logits, rtol=0, atol=1e-5)
            assert found.hidden is not None
            assert list(found.hidden) == list(asked)
            for layer in asked:
                torch.testing.assert_close(
                    found.hidden[layer], wanted.hidden[layer], rtol=0, atol=1e-5
                )
    assert 0 < graphs["unique_graphs"] <= 12, graphs
    # Behind the last layer, in front of the norm: returned by no model, read by a hook.
    made = graphs["unique_graphs"]
    for _ in range(2):
        block = InputBlock(**chain, hidden_layers=(1,))
        for own in (plain, level):
            own.prefill(prompt)
        wanted, found = (own.forward_block(block) for own in (plain, level))
        torch.testing.assert_close(found.hidden[1], wanted.hidden[1], rtol=0, atol=1e-5)
    assert graphs["unique_graphs"] == made


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_as_many_tokens_as_heads_are_no_case_of_their_own() -> None:
    """The first pass of several tokens has two, as many as the model has heads."""
    graphs = torch._dynamo.utils.counters["stats"]
    level = ps.HuggingFaceLevel(model(2), compile=True)
    tokens = torch.arange(1, 9)[None]
    level.prefill(tokens)
    made = graphs["unique_graphs"]
    for count in (2, 3, 5):
        level.forward(tokens[:, :count], 1)
        level.rollback([8])
    assert graphs["unique_graphs"] - made == 1
