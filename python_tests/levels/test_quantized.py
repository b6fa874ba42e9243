"""4-bit copies of models: error feedback, shared parts of a copy, saving and loading."""

import math
import weakref
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import small_models
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

import polyspec_ext as ps
from benchmarks.int4 import torch_form
from polyspec_ext import tiny
from polyspec_ext.quantization import calibration
from polyspec_ext.quantization import weights as int4_weights
from polyspec_ext.quantization.weights import Int4Linear, Int4Weights

QUESTIONS = (
    "A farmer has 12 cows and sells 5 of them. How many are left?",
    "Tom reads 20 pages a day. How many pages does he read in 3 weeks?",
    "A box has 4 rows of 6 eggs. 3 eggs break. How many are whole?",
    "Anna saves $15 a week. How much has she saved after 8 weeks?",
)


def llama(seed: int = 0, **more: Any) -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 128}
    return small_models.llama(seed, 2, 40, **{**sizes, **more})


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
    prompts = tiny.prompt_ids(QUESTIONS) * 4
    out = ps.Chain([target]).generate(prompts, 60, 1.0, seed=list(range(16)))
    return [
        row[: len(prompt) + one.num_new_tokens]
        for row, prompt, one in zip(out.sequences, prompts, out.requests, strict=True)
    ]


def dequantised(given: Int4Weights) -> torch.Tensor:
    centred = (given.values.float() - 8).unflatten(1, (-1, given.group))
    return (centred * given.scales[..., None] + given.zeros[..., None]).flatten(1)


def loss(weight: torch.Tensor, given: Int4Weights, hessian: torch.Tensor) -> float:
    error = (weight - dequantised(given)).double()
    return float(((error @ hessian.double()) * error).sum())


def test_feedback_loses_less_than_rounding() -> None:
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(24, 128, generator=random)
    mixing = torch.randn(128, 128, generator=random) * 0.3 + torch.eye(128)
    x = torch.randn(600, 128, generator=random) @ mixing
    hessian = x.T @ x
    rounded = int4_weights.Int4Weights.nearest(weight, 32)
    fed_back = calibration.with_feedback(weight, hessian, 32)
    assert loss(weight, fed_back, hessian) < 0.5 * loss(weight, rounded, hessian)
    # Inputs that do not correlate give nothing to feed back.
    plain = calibration.with_feedback(weight, torch.eye(128), 32)
    assert plain.values.equal(rounded.values)
    assert plain.scales.equal(rounded.scales)
    for made in (rounded, fed_back):
        assert int(made.values.max()) <= 15
        assert made.scales.equal(made.scales.bfloat16().float())
        assert made.zeros.equal(made.zeros.bfloat16().float())


def test_groups_of_the_largest_inputs_are_rounded_first() -> None:
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(8, 128, generator=random)
    x = torch.randn(300, 128, generator=random) * torch.tensor(
        [1.0, 4.0, 0.5, 2.0]
    ).repeat_interleave(32)
    hessian = x.T @ x
    made = calibration.with_feedback(weight, hessian, 32)
    order = torch.tensor([2, 0, 3, 1])
    columns = torch.arange(128).view(4, 32)[order].flatten()
    other = calibration.with_feedback(weight[:, columns], hessian[columns][:, columns], 32)
    assert other.values.equal(made.values[:, columns])
    assert other.scales.equal(made.scales[:, order])
    assert other.zeros.equal(made.zeros[:, order])


def test_inputs_that_are_never_seen_do_no_harm() -> None:
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(8, 64, generator=random)
    x = torch.randn(100, 64, generator=random)
    x[:, 10:40] = 0
    made = calibration.with_feedback(weight, x.T @ x, 32)
    assert torch.isfinite(dequantised(made)).all()
    assert (weight - dequantised(made)).abs().max() < 1
    constant = int4_weights.Int4Weights.nearest(torch.full((2, 32), 0.5), 32)
    torch.testing.assert_close(dequantised(constant), torch.full((2, 32), 0.5), rtol=0.01, atol=0)


def test_calibration_holds_a_layer_at_a_time() -> None:
    """Each layer reads the texts once, with its input in the whole model."""
    model = llama(num_hidden_layers=5)
    texts = [torch.tensor(ids) for ids in ([3, 1, 4, 1, 5], [9, 2], list(range(30)))]
    layers = {name: x for name, x in model.named_modules() if isinstance(x, nn.Linear)}
    found = calibration.Hessians(model, layers, texts)
    reads: list[int] = []
    inputs: dict[str, list[torch.Tensor]] = {name: [] for name in layers}
    twin = llama(num_hidden_layers=5)
    for name, rows in inputs.items():
        layer = twin.get_submodule(name)
        layer.register_forward_pre_hook(lambda _, own, rows=rows: rows.append(own[0][0]))
    for ids in texts:
        twin(input_ids=ids[None])
    for at, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_hook(lambda *_, at=at: reads.append(at))
    own = model.model.layers[1].forward
    model.model.layers[1].forward = own  # as accelerate's hooks have theirs
    for name in layers:
        x = torch.cat(inputs[name]).detach()
        torch.testing.assert_close(found.of(name), x.T @ x, msg=name)
    assert sorted(reads) == sorted([*range(5)] * len(texts))
    left = [vars(layer).get("forward") for layer in model.model.layers]
    assert left == [None, own, None, None, None]
    with pytest.raises(KeyError):
        found.of("model.layers.0.mlp.down_proj")  # forgotten


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_calibration_sums_inputs_as_they_are(dtype: torch.dtype) -> None:
    """Sums are of float32, and torch's setting is as before, after an error too."""
    setting = torch.backends.mkldnn.matmul.fp32_precision
    with pytest.raises(KeyError), calibration.bfloat16_factors():
        raise KeyError
    assert torch.backends.mkldnn.matmul.fp32_precision == setting
    model = llama(hidden_size=256, intermediate_size=256).to(dtype)
    seen: list[torch.Tensor] = []
    name, layer = "model.layers.1.mlp.down_proj", model.model.layers[1].mlp.down_proj
    layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].flatten(0, -2)))
    found = calibration.Hessians(model, {name: layer}, [torch.arange(40)] * 30).of(name)
    x = torch.cat(seen).double()
    wanted, near = (x.T @ x).triu(), 1e-5 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(found.triu().double(), wanted, rtol=1e-5, atol=near * wanted.max())
    assert torch.backends.mkldnn.matmul.fp32_precision == setting


def test_calibration_comes_closer_to_the_target(target: Any, texts: list[torch.Tensor]) -> None:
    learn, held_out = texts[:12], texts[12:]
    plain = overlap(target, ps.quantize_w4(target), held_out)
    calibrated = overlap(target, ps.quantize_w4(target, 128, learn), held_out)
    assert plain > 0.9
    assert calibrated > plain + 0.005


def test_a_copy_shares_the_rest_and_the_model_is_not_touched() -> None:
    model = llama()
    before = {name: type(module) for name, module in model.named_modules()}
    copy = ps.quantize_w4(model, 32, head=False)
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
    for name, weights in int4_weights.weights_of(copy):
        model.get_submodule(name).weight.copy_(dequantised(weights))
    wanted = model(input_ids=ids).logits
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), wanted.float(), rtol=0.05, atol=0.02)


@pytest.mark.parametrize("tied", [False, True])
@torch.inference_mode()
def test_a_copy_with_its_head(tied: bool) -> None:
    """Look-ups, norms and all else are shared."""
    model = llama(tie_word_embeddings=tied)
    copy = ps.quantize_w4(model, 32, head=True)
    assert isinstance(copy.lm_head, Int4Linear)
    assert copy.model.embed_tokens.weight is model.model.embed_tokens.weight
    assert copy.model.norm.weight is model.model.norm.weight
    assert type(model.lm_head) is nn.Linear
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    weights = dequantised(copy.lm_head.weights()).double()
    assert (weights - model.lm_head.weight.double()).abs().max() < 0.02
    without = ps.quantize_w4(model, 32, head=False)
    assert type(without.lm_head) is nn.Linear
    assert without.lm_head.weight is model.lm_head.weight


def test_a_head_is_quantised_unasked_where_it_pays() -> None:
    large, small = llama(), llama(vocab_size=8)  # 24 and 6 percent of a pass's bytes
    assert isinstance(ps.quantize_w4(large, 32).lm_head, Int4Linear)
    assert type(ps.quantize_w4(small, 32).lm_head) is nn.Linear
    assert isinstance(ps.quantize_w4(small, 32, head=True).lm_head, Int4Linear)


@pytest.mark.parametrize("calibrated", [False, True])
def test_a_kept_copy_has_the_head_that_it_had(tmp_path: Path, calibrated: bool) -> None:
    texts = [[1, 2, 3, 4, 5, 6], [9, 8, 7]] if calibrated else None
    for head in (True, False):
        copy = ps.quantize_w4(llama(), 32, texts, head=head)
        ps.save_w4(copy, tmp_path)
        again = ps.load_w4(llama(), tmp_path)
        assert type(again.lm_head) is type(copy.lm_head)
        ids = torch.arange(10)[None]
        assert again(input_ids=ids).logits.equal(copy(input_ids=ids).logits)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    model = llama()
    copy = ps.quantize_w4(model, 32)
    ps.save_w4(copy, tmp_path)
    place, ids = tmp_path / "int4.safetensors", torch.arange(10)[None]
    whole, wanted = place.read_bytes(), copy(input_ids=ids).logits
    begin = int.from_bytes(whole[:8], "little") + 8
    places = [*range(0, begin, begin // 60), *range(begin, len(whole), len(whole) // 60)]
    refused = 0
    for at in places:
        place.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            again = ps.load_w4(model, tmp_path)
        except ValueError:
            refused += at >= begin
        else:
            assert again(input_ids=ids).logits.equal(wanted)
    assert refused == sum(at >= begin for at in places)


def test_layers_are_rounded_and_packed_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the model and its copy, memory has the numbers of one layer at most."""
    order: list[str] = []
    rounds, packs = int4_weights.round_to_nearest, int4_weights.pack

    def rounded(*given: Any, **options: Any) -> Any:
        order.append("round")
        return rounds(*given, **options)

    def packed(*given: Any, **options: Any) -> Any:
        order.append("pack")
        return packs(*given, **options)

    monkeypatch.setattr(int4_weights, "round_to_nearest", rounded)
    monkeypatch.setattr(int4_weights, "pack", packed)
    ps.quantize_w4(llama(), 32, head=True)
    of_a_layer = ["round"] * 3 + ["pack"] + ["round", "pack"]  # q, k and v; o
    of_a_layer += ["round"] * 2 + ["pack"] + ["round", "pack"]  # gate and up; down
    assert order == of_a_layer * 2 + ["round", "pack"]


def test_layers_are_unpacked_and_kept_one_after_the_other(tmp_path: Path) -> None:
    """A byte to a number they are twice as large as the copy."""
    copy = ps.quantize_w4(llama(), 32)
    before: list[weakref.ref[torch.Tensor]] = []

    def weights() -> Iterator[tuple[str, Int4Weights]]:
        for name, own in int4_weights.weights_of(copy):
            before[:] = [other for other in before if other() is not None]
            assert len(before) <= 1  # the one that was written last
            before.append(weakref.ref(own.values))
            yield name, own

    place = tmp_path / "int4.safetensors"
    int4_weights.write_weights(place, weights(), copy.sampled_weights)
    assert load_file(place).keys() == {
        f"{name}.{part}"
        for name, _ in int4_weights.weights_of(copy)
        for part in ("values", "scales", "zeros", "sample")
    }
    ids = torch.arange(10)[None]
    assert ps.load_w4(llama(), tmp_path)(input_ids=ids).logits.equal(copy(input_ids=ids).logits)


def test_a_kept_copy_of_another_model(tmp_path: Path) -> None:
    model = llama()
    ps.save_w4(ps.quantize_w4(model, 32), tmp_path)
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


LAYER = "model.layers.0.mlp.down_proj"  # of 64 outputs and 96 inputs
Tensors = dict[str, torch.Tensor]
FORMAT = {"format": "polyspec-int4-4", "group": "32"}


def summed(tensors: Tensors, about: dict[str, str]) -> dict[str, str]:
    """The metadata of a file that is not damaged."""
    sums = {
        name: zlib.crc32(tensor.flatten().view(torch.uint8).numpy().data, zlib.crc32(name.encode()))
        for name, tensor in tensors.items()
    }
    return {**about, "crc32": "".join(f"{sums[name]:08x}" for name in sorted(sums))}


def kept(place: Path) -> tuple[Any, Path, Tensors]:
    """Return a model, the file of its copy, and the file's contents."""
    model = llama()
    ps.save_w4(ps.quantize_w4(model, 32, head=False), place)
    file = place / "int4.safetensors"
    # Copies: loaded tensors lie in the file, which is about to be written over.
    return model, file, {name: tensor.clone() for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({}, "expected the format polyspec-int4-4, given None"),
        ({**FORMAT, "format": "polyspec-int4-3"}, "expected the format .*given polyspec-int4-3"),
        ({"format": FORMAT["format"]}, "group: expected one of 32, 64, 128, 256, given None"),
        ({**FORMAT, "group": "a"}, "group: .*given 'a'"),
        ({**FORMAT, "group": "-32"}, "group: .*given '-32'"),
        ({**FORMAT, "group": "9" * 5000}, "group: .*given '9+"),
        ({**FORMAT, "group": "64"}, rf"{LAYER}.values: .*K a multiple of 64, given \[64, 48\]"),
    ],
    ids=str,
)
def test_a_kept_file_of_another_format(about: Any, message: str, tmp_path: Path) -> None:
    model, file, tensors = kept(tmp_path)
    save_file(tensors, file, summed(tensors, about))
    with pytest.raises(ValueError, match=f"^folder: {file}: {message}"):
        ps.load_w4(model, tmp_path)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        *((part, None, "expected a tensor of this name, given none") for part in
          ("values", "scales", "zeros", "sample")),
        ("values", lambda x: x.float(), "expected U8, given F32"),
        ("values", lambda x: x.to(torch.int8), "expected U8, given I8"),
        ("scales", lambda x: x.float(), "expected BF16, given F32"),
        ("zeros", lambda x: x.to(torch.complex64), "expected BF16, given C64"),
        ("sample", lambda x: x.double(), "expected F32, given F64"),
        ("values", lambda x: x[0, 0].clone(), r"expected shape \[N, K / 2\] .*given \[\]"),
        ("values", lambda x: x[:, :0], r"expected shape \[N, K / 2\] .*given \[64, 0\]"),
        ("scales", lambda x: x[:, :0], r"expected shape \[64, 3\], given \[64, 0\]"),
        ("scales", lambda x: x[:, :1], r"expected shape \[64, 3\], given \[64, 1\]"),
        ("zeros", lambda x: x[:-1], r"expected shape \[64, 3\], given \[63, 3\]"),
        ("zeros", lambda x: x.flatten(), r"expected shape \[64, 3\], given \[192\]"),
        ("sample", lambda x: x[:8], r"expected shape \[32\], given \[8\]"),
        *((part, lambda x, bad=bad: x.index_fill(1, torch.tensor(2), bad),
           f"expected numbers that make finite weights, given {bad}")
          for part in ("scales", "zeros") for bad in (math.nan, math.inf, -math.inf)),
        ("scales", lambda x: x.fill_(1e38), "expected numbers that make finite weights"),
    ],
)  # fmt: skip
def test_a_kept_tensor_that_is_not_what_it_says(part, change, message, tmp_path) -> None:
    model, file, tensors = kept(tmp_path)
    found = tensors.pop(f"{LAYER}.{part}")
    if change is not None:
        tensors[f"{LAYER}.{part}"] = change(found).contiguous()
    save_file(tensors, file, summed(tensors, FORMAT))
    with pytest.raises(ValueError, match=f"^folder: {file}: {LAYER}.{part}: {message}"):
        ps.load_w4(model, tmp_path)


def test_kept_files_that_are_none(tmp_path: Path) -> None:
    model, file, tensors = kept(tmp_path)
    whole = file.read_bytes()
    for content in (whole[:0], whole[:7], whole[:100], whole[:-1], whole + b"x", b"{}" * 40):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=f"^folder: expected a safetensors file {file}: "):
            ps.load_w4(model, tmp_path)
    for more in ("x", f"{LAYER}.bias"):
        save_file({**tensors, more: torch.zeros(1)}, file, FORMAT)
        with pytest.raises(ValueError, match=f"expected tensors named values, .*given '{more}'"):
            ps.load_w4(model, tmp_path)
    save_file({}, file, FORMAT)
    with pytest.raises(ValueError, match="expected the tensors of at least 1 layer, given none"):
        ps.load_w4(model, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"^folder: expected int4\..*, which is a file"):
        ps.load_w4(model, file)
    file.unlink()
    file.mkdir()
    with pytest.raises(FileNotFoundError, match=r"^folder: expected int4\..* in "):
        ps.load_w4(model, tmp_path)


def test_what_has_nothing_to_quantise_is_named() -> None:
    with pytest.raises(TypeError, match=r"given 'some/model'; .*from_pretrained loads it"):
        ps.quantize_w4("some/model")
    with pytest.raises(ValueError, match="model: expected linear layers"):
        ps.quantize_w4(llama(), 128)
    with pytest.raises(ValueError, match="head: expected an output head"):
        ps.quantize_w4(llama(), 256, head=True)
    with pytest.raises(TypeError, match="head: expected True, False or None"):
        ps.quantize_w4(llama(), head=1)


@pytest.mark.gpu
@torch.inference_mode()
def test_cuda_multiplies_the_same_weights() -> None:
    """As torch's product. (The CPU's may round activations to 8 bits.)"""
    random = torch.Generator().manual_seed(0)
    weights = int4_weights.Int4Weights.nearest(torch.randn(64, 1280, generator=random), 128)
    x = torch.randn(5, 1280, generator=random).bfloat16()
    scales, zeros = (each.repeat_interleave(128, 1) for each in (weights.scales, weights.zeros))
    exact = x.float() @ ((weights.values - 8.0) * scales + zeros).T
    packed, both = torch_form(weights.to("cuda"))
    for y in (
        int4_weights.CudaInt4Linear(weights)(x.cuda()),
        torch.ops.aten._weight_int4pack_mm(x.cuda(), packed, 128, both),
    ):
        torch.testing.assert_close(exact, y.cpu().float(), rtol=0.01, atol=0.3)
