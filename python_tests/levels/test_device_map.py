"""Models that accelerate's hooks have spread over devices, as levels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import PROMPT, make, plain_greedy, rough

import polyspec_ext as ps
from polyspec_ext.levels import HuggingFaceLevel

accelerate = pytest.importorskip("accelerate")


def parts(model: Any, offloaded: set[str]) -> dict[str, str]:
    """A device map of every block by name; the CPU, or the disk."""
    names = ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"]
    names += [f"model.layers.{i}" for i in range(model.config.num_hidden_layers)]
    return {name: "disk" if name in offloaded else "cpu" for name in names}


@pytest.mark.parametrize(
    "offloaded",
    [set(), {"model.layers.1"}, {"model.embed_tokens", "model.layers.0", "lm_head"}],
    ids=["all on one device", "a layer on disk", "embeddings and head on disk"],
)
def test_a_spread_target(offloaded: set[str], tmp_path: Path) -> None:
    target, draft = make("llama"), make("llama")
    draft = rough(draft)
    expected = {length: plain_greedy(target, PROMPT[:length], 16) for length in (6, 2)}
    spread = accelerate.dispatch_model(
        target,
        parts(target, offloaded),
        main_device="cpu",
        offload_dir=str(tmp_path),
        force_hooks=True,
    )
    if "model.embed_tokens" in offloaded:
        assert spread.device.type == "meta"  # where its first weights are, between passes
    level = HuggingFaceLevel(spread)
    assert level.device == torch.device("cpu")
    assert level.supports_batches
    chain = ps.Chain([level, draft], [3])
    assert chain.generate(PROMPT, 16, eos_token_id=[]).sequences.tolist() == [expected[6]]
    both = chain.generate([PROMPT, PROMPT[:2]], 16, eos_token_id=[], pad_token_id=0).sequences
    assert both.tolist() == [expected[6], expected[2] + [0] * 4]
    assert level.cache.layers[0].keys.device == level.cache.lengths.device
