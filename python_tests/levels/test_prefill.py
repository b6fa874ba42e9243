"""Prompts of 4096 tokens through the shipped models' architecture, in passes of bounded memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

import polyspec_ext as ps
from polyspec_ext import tiny
from polyspec_ext.levels import HuggingFaceLevel

TOKENS = 4096


class Largest(TorchDispatchMode):
    """The most bytes that any operator's result takes for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.bytes = max(self.bytes, leaf.untyped_storage().nbytes())
        return out


def shipped(name: str, layers: int | None = None) -> Any:
    """A shipped architecture with room for 16384 positions."""
    config = AutoConfig.from_pretrained(tiny.path(name))
    config.max_position_embeddings = 16384
    torch.manual_seed(0)
    if layers is not None:
        config.num_hidden_layers = layers
        return AutoModelForCausalLM.from_config(config).float().eval()
    return AutoModelForCausalLM.from_pretrained(
        tiny.path(name), config=config, dtype=torch.float32
    ).eval()


def prompt(rows: int) -> torch.Tensor:
    return torch.randint(3, 2000, (rows, TOKENS), generator=torch.Generator().manual_seed(2))


def bound(level: HuggingFaceLevel, rows: int, chunk: int) -> int:
    """The docstring's: activations of c tokens, masks of c queries, and the cache itself."""
    config = level.model.config
    width = max(config.intermediate_size, 2 * config.hidden_size)
    cache = rows * config.num_key_value_heads * config.head_dim * (TOKENS + 256)
    return 4 * max(rows * chunk * width, rows * chunk * TOKENS, cache)


@pytest.mark.parametrize("name", tiny.LEVELS)
def test_a_long_prompt_goes_in_passes_of_bounded_memory(name: str) -> None:
    model = shipped(name, layers=2 if name == "target" else None)
    chunk, text = 256, prompt(1)
    level = HuggingFaceLevel(model, prefill_chunk=chunk)
    level.reserve(TOKENS + 1)
    with Largest() as largest:
        level.prefill(text[:, :-1])
    assert largest.bytes <= bound(level, 1, chunk)
    assert largest.bytes * 8 < TOKENS * TOKENS * 4
    rows = level.forward(text[:, -1:], 1)
    with torch.inference_mode():
        whole = model(text, use_cache=False, logits_to_keep=1).logits
    torch.testing.assert_close(rows, whole, rtol=1e-3, atol=1e-3)


def test_ragged_prompts_too() -> None:
    chunk, text = 128, prompt(2)
    level = HuggingFaceLevel(shipped("drafter"), prefill_chunk=chunk)
    counts = [TOKENS - 1, 1501]
    level.reserve(TOKENS)
    with Largest() as largest:
        level.prefill(text[:, :-1], counts)
    assert largest.bytes <= bound(level, 2, chunk)
    rows = level.forward(text[:, -1:], 1)
    with torch.inference_mode():
        for b, n in enumerate(counts):
            ids = torch.cat([text[b : b + 1, :n], text[b : b + 1, -1:]], 1)
            whole = level.model(ids, use_cache=False, logits_to_keep=1).logits
            torch.testing.assert_close(rows[b : b + 1], whole, rtol=1e-3, atol=1e-3)


def test_the_chain_on_a_long_prompt() -> None:
    """Greedy text behind 4096 tokens is the target's own."""
    target = shipped("middle")
    chain = ps.Chain(
        [target, ps.Level(shipped("drafter"), streaming={"window": 128, "slack": 32})], [3]
    )
    text = prompt(1)
    out = chain.generate(text, 6, eos_token_id=[])
    with torch.inference_mode():
        rows = target(out.sequences[:, :-1], use_cache=False, logits_to_keep=6).logits[0]
    top = rows.topk(2).values
    for i, token in enumerate(out.sequences[0, TOKENS:].tolist()):
        # A tie may fall either way, since a chain's passes round differently.
        assert token == int(rows[i].argmax()) or float(top[i, 0] - top[i, 1]) < 1e-3
    cached = chain.drafter.level.cache.layers[0].keys.shape[2]  # type: ignore[union-attr]
    assert cached == 4 + 128 + 32
    assert math.isfinite(float(top.sum()))
