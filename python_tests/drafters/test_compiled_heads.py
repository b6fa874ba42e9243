"""Heads below a level that decodes through `torch.compile`: the same drafts, in two graphs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_passes import short_passes_in_python
from eagle_heads import Variant, save, weights_of
from transformers import LlamaConfig, LlamaForCausalLM

import polyspec_ext as ps
from polyspec_ext.drafters.eagle.load import load_head

WIDE: dict[str, Any] = {"hidden": 32, "heads": 2, "kv_heads": 1, "head_dim": 32, "inner": 48}
HEADS = [
    Variant("eagle1", **WIDE),
    Variant(
        "eagle3", version=3, own_head=True, draft_vocab=24, aux=(0, 1, 2), norm_output=True, **WIDE
    ),
]


pytestmark = pytest.mark.usefixtures("nothing_compiled")


def model() -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=False,
        max_position_embeddings=1024,
    )  # fmt: skip
    made = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        made.lm_head.weight.normal_()
        made.model.embed_tokens.weight.normal_()
    return made


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("v", HEADS, ids=lambda v: v.name)
def test_drafts_are_the_same(v: Variant, tmp_path: Path) -> None:
    """A chain and a tree, texts of any length, and batches, which are read as without it."""
    place, own = save(v, weights_of(v, 2), tmp_path), model()
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1024}))
    graphs = torch._dynamo.utils.counters["stats"]
    level = ps.HuggingFaceLevel(own, pack=True)
    plain = load_head(place, level)
    compiling = ps.HuggingFaceLevel(own, pack=True, compile=True)
    head = load_head(place, compiling)
    chains = []
    for tree in (None, ps.DynamicTree(3, 9)):
        chains.append([ps.Chain([level, ps.Eagle(one, tree)], [4]) for one in (plain, head)])
    for prompt in ([1, 2, 3], [7] * 50, [3, 1, 4, 1, 5, 9], [7] * 300, [[1, 2, 3], [5]]):
        for both in chains:
            wanted, found = (
                chain.generate(prompt, 20, temperature=0.8, seed=1, eos_token_id=[])
                for chain in both
            )
            assert found.sequences.equal(wanted.sequences)
            accepted = [out.stats.levels[0].num_accepted_tokens for out in (wanted, found)]
            assert accepted[0] == accepted[1]
    assert graphs["unique_graphs"] == 2
    # All but the prompt's.
    for _, chain in chains:
        with short_passes_in_python([head]) as passes:
            chain.generate([7] * 50, 20, eos_token_id=[])
        assert passes == [0]
