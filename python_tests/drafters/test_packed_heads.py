"""Heads below packed levels run on packed weights; one output head serves both."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import arguments_of
from eagle_heads import Reference, Variant, save, target_of, variants, weights_of
from last_state_heads import hydra, medusa, save_hydra, save_medusa
from told import draft_input, drawn_from, prompts, told

import polyspec_ext as ps

pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="oneDNN multiplies here",
)
PRODUCT = torch.ops.polyspec.dense_product.default
LAYERS = 8
TEXTS = [[3, 9, 27, 17, 4], [5, 6, 30]]
# The attention operator reads heads of 32.
WIDE: dict[str, Any] = {"hidden": 32, "heads": 2, "kv_heads": 1, "head_dim": 32, "inner": 48}
FIRST = Variant("eagle1 of heads of 32", **WIDE)
THIRD = Variant(
    "eagle3.1 of two layers", version=3, own_head=True, draft_vocab=24, layers=2, aux=(0, 1, 3),
    fc_norm=True, norm_output=True, **WIDE,
)  # fmt: skip
KINDS = [
    FIRST,
    THIRD,
    *(v for v in variants() if v.name in (
        "eagle1", "eagle1 qwen2", "eagle1 of two layers", "eagle1 own head", "eagle3.1",
        "eagle3 of three layers", "eagle3 target's head", "speculators norms",
    )),
]  # fmt: skip


def features_of(v: Variant, layers: Sequence[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    width = len(layers) * v.feature_width
    return [torch.randn(len(text) - 1, width, generator=generator) for text in TEXTS]


@pytest.mark.parametrize("v", KINDS, ids=lambda v: v.name)
def test_eagle_against_the_reference(v: Variant, tmp_path: Path) -> None:
    """Two rows of different lengths, then rows that go on."""
    model = target_of(v)
    layers = v.aux_layers(LAYERS)
    weights = weights_of(v, LAYERS)
    level = ps.HuggingFaceLevel(model, pack=True)
    head = ps.Eagle.from_pretrained(save(v, weights, tmp_path), level)
    reference = Reference(v, weights, model)
    features = features_of(v, layers)
    head.prefill(prompts(2))
    blocks: list[Any] = []

    def draft() -> None:
        given = draft_input(TEXTS, [3, 2], told(layers, features, [0, 0]))
        blocks.append(head.draft(given))

    products = arguments_of(PRODUCT, draft)
    for b, count in enumerate((3, 2)):
        rows = reference.draft(TEXTS[b], features[b], count)
        found = drawn_from(head, blocks[0], b)[:count]
        assert found.isinf().equal(rows.isinf())
        found, rows = found.nan_to_num(0, 0, 0), rows.nan_to_num(0, 0, 0)
        assert (found - rows).abs().max() < 1e-4 * rows.abs().max()
    # Three passes of q, k and v, o, gate and up, down; the product that fuses, with each pass or
    # with the first; and three of the output head.
    fused = 0 if v.third and not v.use_aux else 1 if v.third else 3
    assert len(products) == 3 * 4 * v.layers + fused + 3
    if not v.own_head:
        shared: Any = level.output_head
        last = [packed for _, packed, outputs, _ in products if outputs == v.vocab]
        assert [packed.data_ptr() for packed in last] == [shared.packed.data_ptr()] * 3


def wide_head(place: Path, target: Any, v: Variant = FIRST, **options: Any) -> ps.Eagle:
    return ps.Eagle.from_pretrained(save(v, weights_of(v, LAYERS), place), target, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_head_of_another_dtype_than_the_targets(dtype: torch.dtype, tmp_path: Path) -> None:
    """The output head belongs to the target and multiplies in the target's dtype."""
    model = target_of(FIRST, dtype=dtype)
    level = ps.HuggingFaceLevel(model, pack=True)
    head = wide_head(tmp_path, level, dtype=torch.bfloat16)
    reference = Reference(FIRST, weights_of(FIRST, LAYERS), model)
    features = features_of(FIRST, (-1,))[:1]
    head.prefill(prompts(1))
    block = head.draft(draft_input(TEXTS[:1], [1], told((-1,), features, [0])))
    assert block.rows is not None
    assert block.rows.logits.dtype == dtype
    row = reference.draft(TEXTS[0], features[0], 1)
    assert (drawn_from(head, block, 0) - row).abs().max() < 0.05 * row.abs().max()


@pytest.mark.parametrize("tree", [None, ps.DynamicTree(3, 9)], ids=["chain", "tree"])
def test_chains_say_what_the_target_says(tree: Any, tmp_path: Path) -> None:
    """A chain's `pack` is the `pack` of a head loaded from its directory."""
    place, texts = save(FIRST, weights_of(FIRST, LAYERS), tmp_path), [[3, 9, 27], [5], [8, 1]]
    target = ps.Chain([target_of(FIRST)])
    wanted = target.generate(texts, 12, eos_token_id=[]).sequences
    if tree is None:
        chain = ps.Chain([target_of(FIRST), place], [3], pack=True)
    else:
        level = ps.HuggingFaceLevel(target_of(FIRST), pack=True)
        chain = ps.Chain([level, wide_head(tmp_path, level, tree=tree)], [3])
    found: list[torch.Tensor] = []
    products = arguments_of(
        PRODUCT, lambda: found.append(chain.generate(texts, 12, eos_token_id=[]).sequences)
    )
    assert found[0].equal(wanted)
    # (The target has no product of that many inputs.)
    assert any(x.shape[1] == 2 * FIRST.hidden for x, *_ in products)


HEADS: dict[str, Callable[[Path, Any], Any]] = {
    "eagle": wide_head,
    "medusa": lambda place, target: ps.Medusa.from_pretrained(
        save_medusa(medusa(hidden=32, vocab=FIRST.vocab), place), target
    ),
    "hydra": lambda place, target: ps.Hydra.from_pretrained(
        save_hydra(hydra(hidden=32, vocab=FIRST.vocab), place), target
    ),
}


def pickled(one: Any) -> Any:
    return pickle.loads(pickle.dumps(one))


@pytest.mark.parametrize(("way", "onednn"), [(copy.deepcopy, False), (pickled, True)])
@pytest.mark.parametrize("kind", HEADS)
def test_copies(kind, way, onednn, tmp_path, monkeypatch) -> None:
    """A copy of a chain has separate packed weights, and again one output head for both."""
    if onednn:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    level = ps.HuggingFaceLevel(target_of(FIRST), pack=True)
    chain = ps.Chain([level, HEADS[kind](tmp_path, level)], [3])
    wanted = chain.generate([3, 9, 27], 10, eos_token_id=[])
    again = way(chain)
    del chain, level
    gc.collect()
    found: list[Any] = []
    products = arguments_of(
        PRODUCT, lambda: found.append(again.generate([3, 9, 27], 10, eos_token_id=[]))
    )
    assert found[0].sequences.equal(wanted.sequences)
    accepted = [out.stats.levels[0].num_accepted_tokens for out in (wanted, found[0])]
    assert accepted[0] == accepted[1]
    if not onednn and kind == "eagle":
        last = {packed.data_ptr() for _, packed, outputs, _ in products if outputs == FIRST.vocab}
        assert len(last) == 1
