"""EAGLE heads in every published format against a plain reference of their forward pass."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from eagle_heads import Reference, Variant, save, target_of, variants, weights_of
from told import draft_input, drawn_from, prompts, rounds_of, told
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import polyspec_ext as ps
from polyspec_ext.drafters.eagle import load_head

LAYERS = 8  # of the target
# Packed heads: the attention operator reads heads of 32.
WIDE: dict[str, Any] = {"hidden": 32, "heads": 2, "kv_heads": 1, "head_dim": 32, "inner": 48}
PACKED = [
    Variant("eagle1 of heads of 32", **WIDE),
    Variant("eagle3.1 of two layers", version=3, own_head=True, draft_vocab=24, layers=2,
            aux=(0, 1, 3), fc_norm=True, norm_output=True, **WIDE),
    *(v for v in variants() if v.name in (
        "eagle1", "eagle1 qwen2", "eagle1 of two layers", "eagle1 own head", "eagle3.1",
        "eagle3 of three layers", "eagle3 target's head", "speculators norms",
    )),
]  # fmt: skip


@pytest.mark.parametrize(
    ("v", "pack"),
    [
        *(pytest.param(v, False, id=v.name) for v in variants()),
        *(pytest.param(v, True, id=f"{v.name}, packed") for v in PACKED),
    ],
)
def test_variants_against_the_reference(v: Variant, pack: bool, tmp_path: Path) -> None:
    weights = weights_of(v, LAYERS)
    target = target_of(v)
    owner = ps.Level(target, pack=True) if pack else target
    head = ps.Eagle.from_pretrained(save(v, weights, tmp_path / "head"), owner)
    assert head.capabilities.hidden_layers == v.aux_layers(LAYERS)
    reference = Reference(v, weights, target)
    for texts, features, hidden in rounds_of(head, v.vocab, v.feature_width):
        block = head.draft(draft_input(texts, [3, 2], hidden))
        for b, count in enumerate((3, 2)):
            rows = reference.draft(texts[b], features[b], count)
            given = drawn_from(head, block, b)[:count]
            assert given.shape[-1] == v.vocab
            assert torch.equal(given.isinf(), rows.isinf())
            given, rows = given.nan_to_num(0, 0, 0), rows.nan_to_num(0, 0, 0)
            assert (given - rows).abs().max() < 1e-4 * rows.abs().max()
            assert block.tokens[b, :count].tolist() == [int(row.argmax()) for row in rows] or (
                v.draft_vocab is not None
            )


@pytest.mark.parametrize("kind", ["llama3", "linear", "dynamic"])
def test_rotations_that_were_computed_ahead(kind: str, tmp_path: Path) -> None:
    """The longest position follows the cache, unless rotations depend on it."""
    scaled = {
        "rope_type": kind, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    v = Variant("scaled", rope_scaling=scaled)
    network = load_head(save(v, weights_of(v, LAYERS), tmp_path), target_of(v)).network
    generator = torch.Generator().manual_seed(1)
    embeds, states = torch.randn(2, 1, 3, v.hidden, generator=generator)

    def at(first: int) -> torch.Tensor:
        """Attention that lets queries through: the positions show."""
        positions = torch.arange(first, first + 3)[None]
        with torch.no_grad():
            out: torch.Tensor = network(
                embeds, states, positions, lambda layer, q, k, value: q.transpose(1, 2)
            )
        return out

    plain = {first: at(first) for first in (0, 7, 90)}
    assert (plain[0] - plain[7]).abs().max() > 1e-3
    with torch.inference_mode():
        network.angles.reach(10, states)
    assert at(7).equal(plain[7])
    for count in (93, 20):
        network.angles.reach(count, states)
        with mock.patch.object(LlamaRotaryEmbedding, "forward", side_effect=AssertionError):
            if kind == "dynamic":
                with pytest.raises(AssertionError):
                    at(7)
                continue
            assert all(at(first).equal(plain[first]) for first in (0, 7, 90))


def test_many_pairs_behind_others(tmp_path: Path) -> None:
    """More at once than a cache has a mask ready for."""
    v = variants()[0]
    weights, target = weights_of(v, LAYERS), target_of(v)
    head = ps.Eagle.from_pretrained(save(v, weights, tmp_path), target)
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(v.vocab, (50,), generator=generator).tolist()
    features = torch.randn(49, v.hidden, generator=generator)
    reference = Reference(v, weights, target)
    head.prefill(prompts(1))
    for first, last in ((0, 5), (5, 50)):
        told_now = told((-1,), [features[max(first - 1, 0) : last - 1]], [max(first - 1, 0)])
        block = head.draft(draft_input([text[:last]], [1], told_now))
        rows = reference.draft(text[:last], features[: last - 1], 1)
        assert (drawn_from(head, block, 0) - rows).abs().max() < 1e-4 * rows.abs().max()
