"""Heads below packed levels run on packed weights; one output head serves both."""

import copy
import gc
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import arguments_of
from eagle_heads import Reference, Variant, save, target_of, weights_of
from last_state_heads import hydra, medusa, save_hydra, save_medusa
from told import draft_input, drawn_from, prompts, told

import polyspec_ext as ps

pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="oneDNN multiplies here",
)
PRODUCT = torch.ops.polyspec.dense_product.default
LAYERS = 8
# The attention operator reads heads of 32.
FIRST = Variant("eagle1 of heads of 32", hidden=32, heads=2, kv_heads=1, head_dim=32, inner=48)


def wide_head(place: Path, target: Any, v: Variant = FIRST, **options: Any) -> ps.Eagle:
    return ps.Eagle.from_pretrained(save(v, weights_of(v, LAYERS), place), target, **options)


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
