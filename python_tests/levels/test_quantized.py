"""4-bit copies of models: error feedback beside rounding, what a copy shares, its cache in chains,
saving and loading; the grown target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import polyspec_ext as ps
from polyspec_ext import tiny
from polyspec_ext.levels import quantized
from polyspec_ext.levels.quantized import Int4Linear, Int4Weights
from polyspec_ext.ops import int4
from polyspec_ext.quantization import rules

QUESTIONS = (
    "A farmer has 12 cows and sells 5 of them. How many are left?",
    "Tom reads 20 pages a day. How many pages does he read in 3 weeks?",
    "A box has 4 rows of 6 eggs. 3 eggs break. How many are whole?",
    "Anna saves $15 a week. How much has she saved after 8 weeks?",
)


def llama(seed: int = 0, **more: Any) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        **{
            "vocab_size": 40,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            **more,
        }
    )
    return LlamaForCausalLM(config).eval()


@torch.inference_mode()
def overlap(target: Any, other: Any, texts: list[torch.Tensor]) -> float:
    """E[1 - TV] per token."""
    total, count = 0.0, 0
    for ids in texts:
        p, q = (m(input_ids=ids[None]).logits[0].float().softmax(-1) for m in (target, other))
        total += torch.minimum(p, q).sum().item()
        count += ids.numel()
    return total / count


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny.levels(["target"], pack=False)["target"].model


@pytest.fixture(scope="module")
def texts(target: Any) -> list[torch.Tensor]:
    """What the target itself says to some questions."""
    prompts = tiny.prompt_ids(QUESTIONS) * 4
    out = ps.Chain([target]).generate(prompts, 60, 1.0, seed=list(range(16)))
    return [
        row[: len(prompt) + one.num_new_tokens]
        for row, prompt, one in zip(out.sequences, prompts, out.requests, strict=True)
    ]


def loss(weight: torch.Tensor, given: Int4Weights, hessian: torch.Tensor) -> float:
    error = (weight - given.dequantised()).double()
    return float(((error @ hessian.double()) * error).sum())


def test_feedback_loses_less_than_rounding() -> None:
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(24, 128, generator=random)
    mixing = torch.randn(128, 128, generator=random) * 0.3 + torch.eye(128)
    x = torch.randn(600, 128, generator=random) @ mixing
    hessian = x.T @ x
    rounded = rules.round_to_nearest(weight, 32)
    fed_back = rules.with_feedback(weight, hessian, 32)
    assert loss(weight, fed_back, hessian) < 0.5 * loss(weight, rounded, hessian)
    # Inputs that do not correlate give nothing to feed back.
    plain = rules.with_feedback(weight, torch.eye(128), 32)
    assert plain.values.equal(rounded.values)
    assert plain.scales.equal(rounded.scales)
    for made in (rounded, fed_back):
        assert int(made.values.max()) <= 15
        assert made.scales.equal(made.scales.bfloat16().float())
        assert made.zeros.equal(made.zeros.bfloat16().float())


def test_inputs_that_are_never_seen_do_no_harm() -> None:
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(8, 64, generator=random)
    x = torch.randn(100, 64, generator=random)
    x[:, 10:40] = 0
    made = rules.with_feedback(weight, x.T @ x, 32)
    assert torch.isfinite(made.dequantised()).all()
    assert (weight - made.dequantised()).abs().max() < 1
    constant = rules.round_to_nearest(torch.full((2, 32), 0.5), 32)
    torch.testing.assert_close(constant.dequantised(), torch.full((2, 32), 0.5), rtol=0.01, atol=0)


def test_calibration_comes_closer_to_the_target(target: Any, texts: list[torch.Tensor]) -> None:
    learn, held_out = texts[:12], texts[12:]
    plain = overlap(target, ps.quantize_w4(target), held_out)
    calibrated = overlap(target, ps.quantize_w4(target, 128, learn), held_out)
    assert plain > 0.9
    assert calibrated > plain + 0.005


def test_a_copy_shares_the_rest_and_the_model_is_not_touched() -> None:
    model = llama()
    before = {name: type(module) for name, module in model.named_modules()}
    copy = ps.quantize_w4(model, 32)
    assert {name: type(module) for name, module in model.named_modules()} == before
    assert copy.lm_head is not model.lm_head
    assert copy.lm_head.weight is model.lm_head.weight
    assert copy.model.embed_tokens.weight is model.model.embed_tokens.weight
    assert copy.model.layers[1].input_layernorm.weight is (
        model.model.layers[1].input_layernorm.weight
    )
    layer = copy.model.layers[0]
    assert layer.self_attn.q_proj.merged is layer.self_attn.v_proj.merged
    assert layer.mlp.gate_proj.merged is layer.mlp.up_proj.merged
    assert isinstance(layer.mlp.down_proj, Int4Linear)
    kinds = {type(module) for module in copy.modules()}
    assert nn.Linear in kinds  # the head
    assert sum(type(module) is nn.Linear for module in copy.modules()) == 1


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_copy_is_the_model_with_dequantised_weights(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=40, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval().to(dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(std=0.5)
    copy = ps.quantize_w4(model, 32)
    ids = torch.arange(20).view(2, 10)
    found = copy(input_ids=ids).logits
    for name, weights in quantized.weights_of(copy):
        model.get_submodule(name).weight.copy_(weights.dequantised())
    wanted = model(input_ids=ids).logits
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), wanted.float(), rtol=0.05, atol=0.02)


def test_a_kept_copy_is_the_same(tmp_path: Path) -> None:
    model = llama()
    copy = ps.quantize_w4(model, 32, [[1, 2, 3, 4, 5], [7, 8, 9]])
    ps.save_w4(copy, tmp_path)
    again = ps.load_w4(model, tmp_path)
    ids = torch.arange(10)[None]
    assert again(input_ids=ids).logits.equal(copy(input_ids=ids).logits)
    with pytest.raises(ValueError, match="model: expected the layers"):
        ps.load_w4(llama(num_hidden_layers=3), tmp_path)
    with pytest.raises(ValueError, match=r"model: expected model\.layers.* of"):
        ps.load_w4(llama(intermediate_size=64), tmp_path)
    with pytest.raises(ValueError, match=r"given one with other weights in model\.layers"):
        ps.load_w4(llama(seed=1), tmp_path)
    tuned = llama()
    tuned.model.layers[1].mlp.down_proj.weight.data *= 1.01
    with pytest.raises(ValueError, match=r"other weights in model\.layers\.1\.mlp\.down_proj"):
        ps.load_w4(tuned, tmp_path)
    with pytest.raises(FileNotFoundError, match="folder: expected"):
        ps.load_w4(model, tmp_path / "none")
    with pytest.raises(ValueError, match="copy: expected"):
        ps.save_w4(model, tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_kept_copy_knows_its_model_in_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    ps.save_w4(ps.quantize_w4(llama(), 32), tmp_path)
    other = llama().to(dtype)
    again = ps.load_w4(other, tmp_path)
    ps.save_w4(again, tmp_path / "again")
    ps.load_w4(llama(), tmp_path / "again")
    with pytest.raises(ValueError, match="other weights"):
        ps.load_w4(llama(seed=1).to(dtype), tmp_path)


def test_wrong_arguments_are_named() -> None:
    model = llama()
    for arguments, kind, message in (
        ({"group_size": 48}, ValueError, "group_size: expected 32"),
        ({"group_size": 128}, ValueError, "model: expected linear layers"),
        ({"group_size": 32, "calibration": "text"}, TypeError, "calibration: expected a list"),
        ({"group_size": 32, "calibration": []}, ValueError, "calibration: expected at least"),
        ({"group_size": 32, "calibration": [[40]]}, ValueError, "calibration: .*0 to 39"),
        ({"group_size": 32, "calibration": [[0.5]]}, ValueError, "calibration: expected lists"),
        ({"group_size": 32, "calibration": ["a"]}, ValueError, "calibration: expected token ids"),
        ({"group_size": 32, "calibration": ["a", [1]]}, TypeError, "calibration: .* both"),
    ):
        with pytest.raises(kind, match=message):
            ps.quantize_w4(model, **arguments)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_chain_over_one_cache_says_what_the_target_says(temperature: float) -> None:
    model, draft = llama(), llama(seed=1)
    for pack in (False, True):
        owner = ps.Level(model, name="target", pack=pack)
        copy = ps.Level(ps.quantize_w4(model, 32), name="w4", shares_cache_with=owner, pack=pack)
        assert copy.cache is owner.cache
        alone = ps.Chain([model]).generate([1, 2, 3], 40, temperature, seed=4, eos_token_id=[])
        chain = ps.Chain([owner, copy, draft], [4, 2], check_vocabulary=False)
        out = chain.generate([1, 2, 3], 40, temperature, seed=4, eos_token_id=[])
        if temperature == 0:
            assert out.sequences.equal(alone.sequences)
        # A random model's copy is close to it, and its drafts stand mostly.
        assert out.stats.levels[0].draft_acceptance_rate > 0.7


@torch.inference_mode()
def test_a_verification_is_what_single_steps_are() -> None:
    """The product's rows do not depend on the number of tokens; what is left is the attention."""
    copy = ps.quantize_w4(llama(), 32)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    layer = copy.model.layers[0].self_attn
    together = layer.q_proj(x)
    layer.k_proj(x), layer.v_proj(x)
    for row in range(4):
        one = x[row : row + 1]
        assert layer.q_proj(one).equal(together[row : row + 1])
        layer.k_proj(one), layer.v_proj(one)


def test_the_form_of_torchs_operator_on_cuda() -> None:
    """Shapes only: the operators' own checks, without values or a device."""
    random = torch.Generator().manual_seed(0)
    for inputs in (256, 1024, 1280):
        weights = rules.round_to_nearest(torch.randn(24, inputs, generator=random), 128)
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            parts = (weights.values, weights.scales, weights.zeros)
            shapes = Int4Weights(*(fake.from_tensor(part) for part in parts))
            made = quantized.CudaInt4Linear(shapes, device="meta")
            y = made(torch.empty(2, 3, inputs, device="meta"))
        assert y.shape == (2, 3, 24)
        assert y.dtype == torch.float32
        assert made.in_features + made.padding in (1024, 2048)
    odd = rules.round_to_nearest(torch.randn(12, 128, generator=random), 128)
    with pytest.raises(ValueError, match="out_features: expected a multiple of 8"):
        quantized.CudaInt4Linear(odd, device="meta")


@pytest.mark.gpu
@torch.inference_mode()
def test_cuda_multiplies_the_same_weights() -> None:
    random = torch.Generator().manual_seed(0)
    weights = rules.round_to_nearest(torch.randn(64, 1280, generator=random), 128)
    x = torch.randn(5, 1280, generator=random).bfloat16()
    ours = int4.product(x, int4.pack(weights.values, weights.scales, weights.zeros, 128), 64, 128)
    theirs = quantized.CudaInt4Linear(weights)(x.cuda()).cpu()
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=0.03, atol=0.5)


@torch.inference_mode()
@pytest.mark.parametrize("times", [2, 4])
def test_the_grown_target_says_the_same(target: Any, texts: list[torch.Tensor], times: int) -> None:
    grown = tiny.grown(times)
    assert grown.config.hidden_size == times * target.config.hidden_size
    assert grown.lm_head.weight is grown.model.embed_tokens.weight
    for ids in texts[:2]:
        wanted, found = (m(input_ids=ids[None]).logits for m in (target, grown))
        torch.testing.assert_close(found, wanted, rtol=0, atol=5e-5)
    assert (
        ps.Chain([grown])
        .generate([5, 6, 7], 12)
        .sequences.equal(ps.Chain([target]).generate([5, 6, 7], 12).sequences)
    )
    if times == 2:
        copy = ps.quantize_w4(grown, 128, texts[:6])
        assert overlap(grown, copy, texts[12:]) > 0.95
    with pytest.raises(ValueError, match="times: expected >= 1"):
        tiny.grown(0)


def test_kept_file_tells_its_format(tmp_path: Path) -> None:
    model = llama()
    ps.save_w4(ps.quantize_w4(model, 32), tmp_path)
    with (tmp_path / "int4.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    assert header["__metadata__"] == {"format": "polyspec-int4-2", "group": "32"}
    name = "model.layers.0.self_attn.k_proj"
    assert header[f"{name}.values"]["shape"] == [32, 32]
    assert header[f"{name}.scales"] | {"data_offsets": None} == {
        "dtype": "BF16",
        "shape": [32, 2],
        "data_offsets": None,
    }
