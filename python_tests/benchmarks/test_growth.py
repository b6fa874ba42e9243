"""The target grown to any shape, and shipped EAGLE heads for it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import polyspec_ext as ps
from benchmarks.growth import grown, grown_head
from polyspec_ext import tiny
from polyspec_ext.outputs import Output

PROMPT = [0, 5, 6, 7, 8, 9]


def require_same(wanted: Output, found: Output) -> None:
    assert found.sequences.equal(wanted.sequences)
    ours, theirs = (out.stats.levels[0].acceptance_histogram for out in (found, wanted))
    assert ours == theirs


@torch.inference_mode()
@pytest.mark.parametrize(
    ("times", "more"),
    [
        (1, {"key_value_heads": 4}),
        (2, {"layers": 12}),
        (4, {}),
        (2, {"intermediate_size": 1400}),
        (2, {"key_value_heads": 2}),
        (3, {"layers": 11, "intermediate_size": 2000, "key_value_heads": 12}),
    ],
)
def test_more_of_everything_says_the_same(times: int, more: dict[str, int]) -> None:
    small, made = grown(1), grown(times, **more)
    config = made.config
    assert config.hidden_size == times * small.config.hidden_size
    assert config.num_hidden_layers == more.get("layers", 10)
    assert config.intermediate_size == more.get("intermediate_size", 640 * times)
    assert config.num_key_value_heads == more.get("key_value_heads", 2 * times)
    assert made.lm_head.weight is made.model.embed_tokens.weight
    ids = torch.tensor([[0, *range(5, 45)]])
    wanted, found = (model(input_ids=ids).logits for model in (small, made))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
    # Layers that were added have weights like any other's, and add nothing to the states.
    for number, layer in enumerate(made.model.layers):
        for name, weight in layer.named_parameters():
            output = name in ("self_attn.o_proj.weight", "mlp.down_proj.weight")
            assert bool(weight.any()) == (number < 10 or not output), name


def drafted(target: Any, place: Path) -> list[Output]:
    """Return drafts of a head: a chain, greedy and sampled, and trees."""
    chain = ps.Chain([target, ps.Eagle.from_pretrained(place, target)], [4])
    found = [chain.generate(PROMPT, 40, temperature, seed=3) for temperature in (0.0, 1.0)]
    head = ps.Eagle.from_pretrained(place, target, tree=ps.DynamicTree(3, 8))
    return [*found, ps.Chain([target, head], [3]).generate(PROMPT, 24)]


@functools.cache
def drafted_as_shipped(name: str) -> list[Output]:
    return drafted(grown(1), tiny.path(name))


@pytest.mark.parametrize(("times", "layers"), [(1, None), (2, None), (1, 14)])
@pytest.mark.parametrize("name", tiny.HEADS)
def test_a_grown_head_drafts_what_the_shipped_one_does(name, times, layers, tmp_path) -> None:
    """Compare accepted tokens too, for sampled texts as well."""
    place = grown_head(name, times, tmp_path)
    found = drafted(grown(times, layers=layers), place)
    for wanted, own in zip(drafted_as_shipped(name), found, strict=True):
        require_same(wanted, own)
