"""Layers of known families (`levels.fused`): the same bits in every kind of pass."""

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from small_models import wide
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import polyspec_ext as ps
from polyspec_ext.kv_cache.lengths import RowLengths
from polyspec_ext.levels import BatchedLevel, HuggingFaceLevel
from polyspec_ext.levels.base import InputBlock
from polyspec_ext.levels.fused import Angles
from polyspec_ext.tensors import RowCounts

_MODELS: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": {"sliding_window": 9},
    "qwen2": {},  # its projections have biases
    "qwen3": {},  # its heads have norms
}  # fmt: skip


def _level(kind: str, dtype: torch.dtype, copy: bool) -> HuggingFaceLevel:
    model = wide(kind, 1, num_hidden_layers=3, **_MODELS[kind])
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    model = model.to(dtype)
    return HuggingFaceLevel(ps.quantize_w4(model, 32) if copy else model, pack=True)


def _tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 97, shape, generator=torch.Generator().manual_seed(seed))


def _block(tokens: torch.Tensor, keep: int, layers: tuple[int, ...], **more: Any) -> InputBlock:
    for name in ("counts", "first"):
        if name in more:
            more[name] = RowCounts(more[name])
    return InputBlock(tokens, keep, hidden_layers=layers, **more)


def _everything(level: BatchedLevel, layers: tuple[int, ...] = (0, 2, 3, -1)) -> list[torch.Tensor]:
    """Logits and hidden states of every kind of pass."""
    found = []

    def take(tokens: torch.Tensor, keep: int, **more: Any) -> None:
        out = level.forward(_block(tokens, keep, layers, **more))
        found.extend([out.logits.clone(), *(out.hidden or {}).values()])

    own: Any = level
    own.prefill(_tokens(1, 20))
    take(_tokens(1, 1, seed=1), 1)
    take(_tokens(1, 6, seed=2), 6)
    own.rollback([23])
    take(_tokens(1, 6, seed=3), 2, first=[1])
    parents = torch.tensor([[-1, -1, 0, 0, 1]])
    take(_tokens(1, 5, seed=4), 5, parents=parents, depth=2)
    own.prefill(_tokens(3, 12), [12, 5, 9])
    take(_tokens(3, 4, seed=5), 2, counts=[4, 1, 3], first=[2, 0, 1])
    own.rollback([13, 5, 9])
    take(_tokens(3, 1, seed=6), 1)
    own.select([2, 0])
    take(_tokens(2, 2, seed=7), 2)
    return found


@pytest.mark.parametrize("copy", [False, True], ids=["packed", "4-bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", _MODELS)
def test_one_call_is_layer_by_layer_bit_for_bit(kind, dtype, copy, monkeypatch) -> None:
    """All layers in one call, with an operator after the other, and with keys and values appended
    by the cache."""
    level = _level(kind, dtype, copy)
    stacked: Any = level._stacked
    assert stacked.native is not None
    at_once = _everything(level)
    monkeypatch.setattr(stacked, "native", None)
    by_operator = _everything(level)
    monkeypatch.setattr(stacked.layers, "longest", 0)
    for mine, *wanted in zip(at_once, by_operator, _everything(level), strict=True):
        assert all(map(mine.equal, wanted))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn", "dynamic"])
def test_angles_are_the_modules(kind: str, dtype: torch.dtype) -> None:
    """Computed at most five times for a text that grows to 600 tokens."""
    rope = {
        "rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 128,
    }  # fmt: skip
    config = LlamaConfig(max_position_embeddings=512, head_dim=64, rope_parameters=rope)
    module, same = LlamaRotaryEmbedding(config), LlamaRotaryEmbedding(config)
    computed = mock.Mock(side_effect=module)
    angles, rows = Angles(computed, kind), RowLengths(2, 64, 64, 1, torch.device("cpu"))
    like = torch.zeros(2, 5, 1, dtype=dtype)
    with torch.inference_mode():
        for length in (0, 30, 59, 60, 250, 300, 590):
            rows.assign(RowCounts([length, length // 2]))
            rows.begin(5, None)
            after = rows.base[:, None] + torch.arange(5)
            for positions in (None, after, after[:, :1], after[:1]):
                cosine, sine, at = angles.rotation(like, positions, rows)
                at = after if at is None else at
                wanted = same(like, after if positions is None else positions)
                assert all(map(torch.equal, (cosine[at], sine[at]), wanted))
                assert all(map(torch.equal, angles.at(like, after), same(like, after)))
    if kind != "dynamic":
        assert computed.call_count <= 5
        assert not cosine.is_inference()
    other = like.half()  # of a network that was converted
    cosine, _, at = angles.rotation(other, after, rows)
    assert cosine[at].equal(same(other, after)[0])


def require_whole(model: Any, level: HuggingFaceLevel, *cuts: int) -> None:
    """Compare logits of passes between the cuts with logits of a pass without a cache."""
    tokens = _tokens(1, cuts[-1])
    level.prefill(tokens[:, : cuts[0]])
    passes = [level.forward(tokens[:, a:b], b - a) for a, b in itertools.pairwise(cuts)]
    whole = model(input_ids=tokens).logits[:, cuts[0] :]
    torch.testing.assert_close(torch.cat(passes, 1), whole.detach(), rtol=1e-4, atol=1e-5)


def test_masks_by_type_of_layer() -> None:
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    windows = {"layer_types": kinds, "use_sliding_window": True, "sliding_window": 5}
    model = wide("qwen2", num_hidden_layers=3, **windows)
    level = HuggingFaceLevel(model, pack=True)
    assert level._stacked is not None
    require_whole(model, level, 9, 14, 20)


@pytest.mark.parametrize("part", ["model.layers.1", "model.layers.0.mlp.act_fn", "lm_head",
                                  "model.layers.1.post_attention_layernorm"])  # fmt: skip
def test_modules_with_hooks_are_called(part: str) -> None:
    model, seen = wide("qwen3"), list[int]()
    model.get_submodule(part).register_forward_hook(lambda *_: seen.append(1))
    level = HuggingFaceLevel(model, pack=True)
    seen.clear()
    hooked = _everything(level, (0, 2, -1))
    assert len(seen) == 9  # one for each pass
    plain = _everything(HuggingFaceLevel(wide("qwen3"), pack=True), (0, 2, -1))
    for mine, wanted in zip(hooked, plain, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-3, atol=1e-4)


def test_norms_belong_to_the_model() -> None:
    """Values written to the same memory are read; other memory is refused."""
    level = _level("qwen3", torch.float32, True)
    before = _everything(level)
    norm = level.model.model.layers[1].self_attn.k_norm.weight
    norm.data.mul_(2.0)
    assert not _everything(level)[0].equal(before[0])
    norm.data = norm.data / 2.0
    with pytest.raises(ValueError, match="other weights; make the level anew"):
        level.prefill(_tokens(1, 8))


@pytest.mark.parametrize("more", [{}, {"head_dim": 16, "num_attention_heads": 8}], ids=str)
@pytest.mark.parametrize("options", [{}, {"streaming": 40}], ids=str)
def test_a_pass_may_have_any_cache_and_width_of_heads(more: Any, options: Any) -> None:
    model = wide(**more)
    level = HuggingFaceLevel(model, pack=True, **options)
    assert level._stacked is not None
    require_whole(model, level, 8, 12, 16, 20)


def _own_norm(model: Any) -> None:
    norm = type(model.model.norm)
    own = type("OwnRMSNorm", (norm,), {"forward": lambda self, x: 2 * norm.forward(self, x)})
    model.model.norm.__class__ = own


def _other_epsilon(model: Any) -> None:
    model.model.layers[0].self_attn.k_norm.variance_epsilon *= 2


def _eager(model: Any) -> None:
    model.set_attn_implementation("eager")


@pytest.mark.parametrize(
    ("family", "more", "change"),
    [
        ("gemma2", {}, None),
        ("llama", {"hidden_act": "gelu"}, None),
        ("llama", {"mlp_bias": True}, None),
        ("qwen3", {}, _own_norm),
        ("qwen3", {}, _other_epsilon),
        ("qwen3", {}, _eager),
    ],
)
def test_other_models_run_their_forward(family: str, more: Any, change: Any) -> None:
    model = wide(family, **more)
    if change is not None:
        change(model)
    level = HuggingFaceLevel(model, pack=True)
    assert (level._stacked is None) == ("mlp_bias" not in more)
    assert level.supports_batches
    require_whole(model, level, 8, 12)


def test_a_bias_behind_the_rounding_is_added_by_operators() -> None:
    level = HuggingFaceLevel(ps.quantize_w4(wide(mlp_bias=True), 32), pack=True)
    assert level._stacked.native is None
    unpacked = HuggingFaceLevel(wide())
    assert unpacked._stacked is None  # its rounding is part of its distribution


def test_the_model_stays_as_it_is() -> None:
    model = wide("qwen2")
    before = {name: type(module) for name, module in model.named_modules()}
    level = HuggingFaceLevel(model, pack=True)
    assert level.model is model
    assert {name: type(module) for name, module in model.named_modules()} == before
