"""Heads below packed levels run on packed weights; one output head serves both."""

import copy
import gc
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from any_head import head_for
from calls import arguments_of
from eagle_heads import Reference, Variant, save, target_of, weights_of
from told import draft_input, drawn_from, prompts, told

import polyspec_ext as ps

pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="oneDNN multiplies here",
)
PRODUCT = torch.ops.polyspec.dense_product.default
LAYERS = 8
# The attention operator reads heads of 32.
WIDE: dict[str, Any] = {"heads": 2, "kv_heads": 1, "head_dim": 32, "inner": 48}
FIRST = Variant("eagle1 of heads of 32", hidden=32, **WIDE)


def wide_head(place: Path, target: Any, **options: Any) -> ps.Eagle:
    save(FIRST, weights_of(FIRST, LAYERS), place)
    return ps.Eagle.from_pretrained(place, target, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_head_of_another_dtype_than_the_targets(dtype: torch.dtype, tmp_path: Path) -> None:
    """The output head belongs to the target and multiplies in the target's dtype."""
    model = target_of(FIRST, dtype=dtype)
    level = ps.HuggingFaceLevel(model, pack=True)
    head = wide_head(tmp_path, level, dtype=torch.bfloat16)
    reference = Reference(FIRST, weights_of(FIRST, LAYERS), model)
    text = [3, 9, 27, 17, 4]
    states = torch.randn(4, FIRST.hidden, generator=torch.Generator().manual_seed(1))
    head.prefill(prompts(1))
    block = head.draft(draft_input([text], [1], told((-1,), [states], [0])))
    assert block.rows.logits.dtype == dtype
    row = reference.draft(text, states, 1)
    assert (drawn_from(head, block, 0) - row).abs().max() < 0.05 * row.abs().max()


@pytest.mark.parametrize("tree", [None, ps.DynamicTree(3, 9)], ids=["chain", "tree"])
def test_chains_say_what_the_target_says(tree: Any, tmp_path: Path) -> None:
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
    # Of embedding and state, and of o; of queries, keys and values; of gate and up; of down.
    shapes = {(x.shape[1], outputs) for x, _, outputs, _ in products}
    assert shapes >= {(64, 32), (32, 128), (32, 96), (48, 32)}


@pytest.mark.parametrize(
    ("way", "onednn"), [(copy.deepcopy, False), (lambda one: pickle.loads(pickle.dumps(one)), True)]
)
@pytest.mark.parametrize("kind", ["eagle", "medusa", "hydra"])
def test_copies(kind, way, onednn, tmp_path, monkeypatch) -> None:
    """A copy of a chain has separate packed weights, and again one output head for both."""
    if onednn:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    level = ps.HuggingFaceLevel(target_of(FIRST), pack=True)
    chain = ps.Chain([level, head_for(level, kind, tmp_path, **WIDE)], [3])
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
