"""Fused layers on CUDA: launches of a pass, counted with fake tensors, and their bits."""

from __future__ import annotations

import fake_cuda
import pytest
import torch
from fake_chains import fused_copy, in_four_bits, model

from polyspec_ext.kv_cache import RollbackCache
from polyspec_ext.levels import fused

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def launches_of(
    family: str, layers: int, tokens: int, span: int, quantised: bool = False, batch: int = 1
) -> fake_cuda.Launches:
    """Count the launches of a pass after a text, in a cache with `span` slots read."""
    with fake_cuda.launches() as counted, torch.no_grad():
        with torch.device("cuda"):
            given = model(family, layers)
        made = fused_copy(in_four_bits(given) if quantised else given)
        stacked = fused.stacked_pass(made)
        assert stacked is not None
        cache = RollbackCache.for_model(given, batch, capacity=span, bucket=span)
        ids = torch.zeros(batch, tokens, dtype=torch.int64, device="cuda")
        stacked(ids, cache.inputs(tokens), cache, tokens)  # which allocates the cache
        cache.reserve_span(span)
        counted.counts.clear()
        counted.reads.clear()
        masked = stacked.needs_mask(cache, tokens)
        inputs = cache.inputs(tokens, masked=masked)
        out = stacked(ids, inputs, cache, tokens)
        assert out.logits.shape == (batch, tokens, 97)
    return counted


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quantised", [False, True], ids=["plain", "w4"])
def test_a_layer_is_at_most_ten_launches(family: str, quantised: bool) -> None:
    """Norm, products, rotary with append and activation; beyond 512 slots two of attention. In 4
    bits the activation is a product's, heads without norms are, and up to 8 tokens the norms."""
    for tokens, span, wanted in ((1, 512, 9), (8, 512, 9), (32, 512, 9), (5, 2048, 10)):
        two, five = (launches_of(family, n, tokens, span, quantised) for n in (2, 5))
        wanted -= quantised * ((3 if tokens <= 8 else 1) + (family != "qwen3"))
        assert five.total - two.total == 3 * wanted, five.counts - two.counts
        assert not five.reads


def test_a_wide_pass_differs_in_the_attention_alone() -> None:
    """More tokens than the operator takes: the cache appends keys, and torch attends."""
    two, five = (launches_of("llama", n, 65, 512) for n in (2, 5))
    more = five.counts - two.counts
    wanted = {"dense_product": 4, "add_rms_norm": 2, "rotary": 1, "append": 1, "gated": 1}
    assert {name: more[name] for name in wanted} == {name: 3 * n for name, n in wanted.items()}
    assert not five.reads


@pytest.mark.parametrize("family", [*FAMILIES, "olmo2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_models_are_fused_on_cuda_where_that_is_faster(family: str, dtype: torch.dtype) -> None:
    """Known families in bfloat16."""
    with fake_cuda.launches():
        with torch.device("cuda"):
            given = model(family, 2, dtype)
        faster = dtype == torch.bfloat16 and family in FAMILIES
        assert fused.fuses_on_cuda(given) == faster
    assert not fused.fuses_on_cuda(model(family, 2, dtype))


def test_merged_weights_take_no_more_memory() -> None:
    """The projections' weights become views of one matrix, once."""
    with fake_cuda.launches() as counted, torch.no_grad():
        with torch.device("cuda"):
            given = model("llama")
        attends = given.model.layers[0].self_attn
        first = fused_copy(given).model.layers[0].self_attn.q_proj.merged.linear.weight
        storages = {
            each.weight.untyped_storage()._cdata
            for each in (attends.q_proj, attends.k_proj, attends.v_proj)
        }
        assert storages == {first.untyped_storage()._cdata}
        counted.counts.clear()
        second = fused_copy(given).model.layers[0].self_attn.q_proj.merged.linear.weight
        assert second.untyped_storage()._cdata == first.untyped_storage()._cdata
        assert not counted.counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_operators_one_by_one_have_the_bits_of_one_call(family: str, dtype: torch.dtype) -> None:
    """After texts of several lengths, with padding, and in a tree with a mask."""
    made = fused_copy(model(family, dtype=dtype))
    one = fused.stacked_pass(made)
    assert one is not None
    known = one.layers
    if one.native is None:
        pytest.skip("products are oneDNN's here")
    operators = known.layers, known.shape, known.numbers, known.key_shape[1]
    each = fused.StackedPass(made, fused.CachedLayers(*operators))
    caches = [RollbackCache.for_model(made, 2, capacity=64) for _ in range(2)]
    generator = torch.Generator().manual_seed(1)
    parents = torch.tensor([-1, 0, 0, 1])
    with torch.inference_mode():
        for cache in caches:
            one(torch.zeros(2, 1, dtype=torch.int64), cache.inputs(1), cache, 1)
            cache.reset()
        for width, more in ((7, {"counts": [7, 3]}), (1, {}), (4, {"counts": [2, 4]}),
                            (4, {"parents": parents})):  # fmt: skip
            ids = torch.randint(97, (2, width), generator=generator)
            outs = []
            for stacked, cache in zip((one, each), caches, strict=True):
                masked = "parents" in more or stacked.needs_mask(cache, width)
                inputs = cache.inputs(width, masked=masked, **more)
                assert masked or inputs["attention_mask"] is None
                outs.append(stacked(ids, inputs, cache, width, hidden_layers=(0, 1, 2, -1)))
            counts = more.get("counts", [width, width])
            for row, count in enumerate(counts):
                assert outs[0].logits[row, :count].equal(outs[1].logits[row, :count])
                for layer, states in outs[0].hidden.items():
                    assert states[row, :count].equal(outs[1].hidden[layer][row, :count])
            assert caches[0].status.equal(caches[1].status)
            if "parents" in more:
                return
