"""Heads below a level that decodes through `torch.compile`: the same drafts, in few graphs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from compiled_passes import short_passes_in_python
from eagle_heads import Variant, save, weights_of
from last_state_heads import hydra, medusa, save_hydra, save_medusa
from told import draft_input, told
from transformers import LlamaConfig, LlamaForCausalLM

import polyspec_ext as ps
from polyspec_ext.drafters.eagle.load import load_head
from polyspec_ext.drafters.hydra import HydraHeads
from polyspec_ext.drafters.medusa import MedusaHeads

WIDE: dict[str, Any] = {"hidden": 32, "heads": 2, "kv_heads": 1, "head_dim": 32, "inner": 48}
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
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


def require_same_texts(chains: tuple[ps.Chain, ps.Chain]) -> None:
    """Of any length, and batches, which are read as without compilation."""
    for prompt in ([1, 2, 3], [7] * 50, [3, 1, 4, 1, 5, 9], [7] * 300, [[1, 2, 3], [5]]):
        wanted, found = (
            chain.generate(prompt, 20, temperature=0.8, seed=1, eos_token_id=[]) for chain in chains
        )
        assert found.sequences.equal(wanted.sequences)
        levels = [out.stats.levels for out in (wanted, found)]
        assert levels[0][0].num_accepted_tokens == levels[1][0].num_accepted_tokens
        assert levels[0][1].num_forward_passes == levels[1][1].num_forward_passes


@pytest.mark.parametrize("v", HEADS, ids=lambda v: v.name)
def test_drafts_are_the_same(v: Variant, tmp_path: Path) -> None:
    """A chain and a tree."""
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
        both = [ps.Chain([level, ps.Eagle(one, tree)], [4]) for one in (plain, head)]
        chains.append((both[0], both[1]))
        require_same_texts(chains[-1])
    assert graphs["unique_graphs"] == 2
    # All but the prompt's.
    for _, chain in chains:
        with short_passes_in_python([head.features]) as passes:
            chain.generate([7] * 50, 20, eos_token_id=[])
        assert passes == [0]


def save_last_state(kind: str, place: Path) -> Path:
    if kind == "medusa":
        return save_medusa(medusa(5, hidden=32, vocab=40), place)
    return save_hydra(hydra(5, hidden=32, vocab=40), place)


KINDS: dict[str, Any] = {"medusa": ps.Medusa, "hydra": ps.Hydra}
TREES = [ps.DynamicTree(3, 9), ps.StaticTree([[0], [1], [0, 0], [1, 0], [0, 0, 1], [0, 0, 1, 0]])]


def read_in_python(run: Callable[[], Any]) -> set[int]:
    """Which of the heads that remember nothing `run` calls in Python."""
    codes = [kind.logits.__code__ for kind in (MedusaHeads, HydraHeads)]
    places: set[int] = set()

    def seen(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code in codes:
            places.add(frame.f_locals["place"])

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        run()
    finally:
        sys.setprofile(before)
    return places


@pytest.mark.parametrize(("kind", "tree"), list(zip(KINDS, TREES, strict=True)), ids=str)
def test_drafts_of_heads_that_remember_nothing(kind: str, tree: Any, tmp_path: Path) -> None:
    """As one graph, but for the shallower ones at the end of a text."""
    place, own = save_last_state(kind, tmp_path), model()
    level = ps.HuggingFaceLevel(own, pack=True)
    compiling = ps.HuggingFaceLevel(own, pack=True, compile=True)
    plain, head = (KINDS[kind].from_pretrained(place, one, tree=tree) for one in (level, compiling))
    chains = ps.Chain([level, plain], [4]), ps.Chain([level, head], [4])
    require_same_texts(chains)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    for chain, deepest in zip(chains, (3, 2), strict=True):
        places = read_in_python(lambda chain=chain: chain.generate([7] * 50, 20, eos_token_id=[]))
        assert max(places) == deepest


def test_deeper_drafts_are_compiled_when_they_come(tmp_path: Path) -> None:
    """Of one row."""
    place, own = save_last_state("hydra", tmp_path), model()
    levels = [ps.HuggingFaceLevel(own, pack=True, compile=compile) for compile in (False, True)]
    plain, head = (ps.Hydra.from_pretrained(place, one, tree=TREES[0]) for one in levels)
    graphs = torch._dynamo.utils.counters["stats"]
    states = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    for rows, depth, compiled in ((2, 3, 0), (1, 2, 1), (1, 1, 1), (1, 3, 2), (1, 1, 2), (1, 2, 2)):
        hidden = told([-1], [states] * rows, [0] * rows)
        given = draft_input([[3, 9, 27, 17]] * rows, [depth] * rows, hidden)
        wanted, found = (one.draft(given) for one in (plain, head))
        assert wanted.parents is not None
        assert found.parents is not None
        assert found.tokens.equal(wanted.tokens)
        assert found.parents.equal(wanted.parents)
        assert graphs["unique_graphs"] == compiled
