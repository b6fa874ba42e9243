"""Prompts of 4096 tokens in bounded memory, and ragged prompts: rows are as if alone."""

from typing import Any

import pytest
import torch
from small_models import V, make
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

import polyspec_ext as ps
from polyspec_ext import tiny
from polyspec_ext.levels import HuggingFaceLevel, PromptBatch, hugging_face

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


def bound(level: HuggingFaceLevel, rows: int, chunk: int) -> int:
    """The docstring's: activations of c tokens, masks of c queries, and the cache itself."""
    config = level.model.config
    width = max(config.intermediate_size, 2 * config.hidden_size)
    cache = rows * config.num_key_value_heads * config.head_dim * (TOKENS + 256)
    return 4 * max(rows * chunk * width, rows * chunk * TOKENS, cache)


@pytest.mark.parametrize(
    ("name", "counts"),
    [*((name, [TOKENS - 1]) for name in tiny.LEVELS), ("drafter", [TOKENS - 1, 1501])],
)
def test_a_long_prompt_goes_in_passes_of_bounded_memory(name: str, counts: list[int]) -> None:
    chunk, rows = 256 // len(counts), len(counts)
    generator = torch.Generator().manual_seed(2)
    text = torch.randint(3, 2000, (rows, TOKENS), generator=generator)
    model = shipped(name, layers=2 if name == "target" else None)
    level = HuggingFaceLevel(model, prefill_chunk=chunk)
    with Largest() as largest:
        level.prefill(PromptBatch(text[:, :-1], counts, TOKENS + 1))
    assert largest.bytes <= bound(level, rows, chunk)
    assert largest.bytes * 8 < rows * TOKENS * TOKENS * 4
    logits = level.forward(text[:, -1:], 1)
    with torch.inference_mode():
        for b, n in enumerate(counts):
            ids = torch.cat([text[b : b + 1, :n], text[b : b + 1, -1:]], 1)
            whole = model(ids, use_cache=False, logits_to_keep=1).logits
            torch.testing.assert_close(logits[b : b + 1], whole, rtol=1e-3, atol=1e-3)


COUNTS = [60, 3, 0, 58, 120, 4]


def test_on_a_device_a_pass_costs_more() -> None:
    counts = [10, 90, 170, 250]
    assert len(hugging_face.groups(counts, "cpu")) > 2
    assert len(hugging_face.groups(counts, "cuda")) == 1
    assert len(hugging_face.groups([*counts, 4000], "cuda")) == 2


def tokens() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, V, (len(COUNTS), max(COUNTS)), generator=generator)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_rows_read_apart_are_what_they_are_alone(family: str) -> None:
    model = make(family, seed=1)
    level, alone = ps.HuggingFaceLevel(model), ps.HuggingFaceLevel(model)
    text, widths = tokens(), []
    read = level.append

    def watched(piece: torch.Tensor, counts: Any, *layers: Any) -> Any:
        widths.append(tuple(piece.shape))
        return read(piece, counts, *layers)

    level.append = watched
    for _ in range(2):  # the second batch finds a used cache
        widths.clear()
        level.prefill(PromptBatch(text, COUNTS, 400 if family == "llama" else 0))
        assert len(widths) == len(hugging_face.groups(COUNTS, "cpu")) > 1
        assert sum(rows * width for rows, width in widths) < 1.1 * sum(COUNTS)
        assert level.cache.batch_size == len(COUNTS)
        assert level.cache.lengths.tolist() == COUNTS
        assert not level.cache.status.any()
        more = torch.arange(3 * len(COUNTS)).view(-1, 3) % V
        logits = level.forward(more, 2)
        for b, count in enumerate(COUNTS):
            alone.prefill(text[b : b + 1, :count])
            wanted = alone.forward(more[b : b + 1], 2)
            torch.testing.assert_close(logits[b : b + 1], wanted, rtol=1e-4, atol=1e-4)
        level.rollback([max(count - 1, 0) for count in COUNTS])
        assert level.cache.lengths.tolist() == [max(count - 1, 0) for count in COUNTS]


def test_rows_may_also_repeat_and_change_places() -> None:
    level = ps.HuggingFaceLevel(make("llama", seed=1))
    level.prefill(tokens(), COUNTS)
    before = [layer.keys.clone() for layer in level.cache.layers]
    for rows in ([4, 0, 0], [0, 0, 1]):
        level.select(rows)
        before = [keys[rows] for keys in before]
        for layer, keys in zip(level.cache.layers, before, strict=True):
            assert layer.keys.equal(keys)
    assert level.cache.lengths.tolist() == [COUNTS[4], COUNTS[4], COUNTS[0]]
