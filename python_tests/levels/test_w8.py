"""8-bit copies: what they multiply with is the model's weights to the nearest, and chains with them
say what their target says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import make
from torch import nn

import polyspec_ext as ps
from polyspec_ext import tiny
from polyspec_ext.levels.gguf import BlockLinear
from polyspec_ext.quantization import weights as rules
from polyspec_ext.quantization.weights import quantisable

PROMPT = [5, 17, 80, 3, 3, 41]


def dequantised(blocks: torch.Tensor) -> torch.Tensor:
    """As the format's description has it."""
    parts = blocks.unflatten(1, (-1, 34))
    scales = parts[..., :2].contiguous().view(torch.float16).double()
    return (scales * parts[..., 2:].contiguous().view(torch.int8)).flatten(1)


def test_weights_are_rounded_to_the_nearest() -> None:
    weight = torch.randn(7, 96, generator=torch.Generator().manual_seed(0)) * 0.02
    weight[1] *= 1e4
    weight[2] = 0
    weight[3, :32] *= 1e-9  # below what float16 can scale
    blocks = rules.to_8_bits(weight)
    assert blocks.shape == (7, 3 * 34)
    found = dequantised(blocks)
    groups = weight.double().unflatten(1, (-1, 32))
    # Half a step, and what the largest number loses to the rounding of its scale.
    largest = groups.abs().amax(-1, keepdim=True)
    bound = largest * (0.5 / 127 + 2**-11) * 1.001 + 127 * 2**-25
    assert ((found.unflatten(1, (-1, 32)) - groups).abs() <= bound).all()
    assert found[2].eq(0).all()
    assert rules.to_8_bits(torch.full((1, 32), 1e9)).view(torch.int8)[0, 2:].eq(127).all()


def wide() -> Any:
    """A model of 64 inputs, which are whole groups."""
    import transformers as hf

    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
        eos_token_id=None, initializer_range=0.2,
    )  # fmt: skip
    return hf.AutoModelForCausalLM.from_config(config).eval()


@torch.no_grad()
def test_logits_are_ten_times_as_near_as_those_of_four_bits() -> None:
    model = wide()
    wanted = model(torch.tensor([PROMPT])).logits

    def error(copy: Any) -> float:
        own = copy(torch.tensor([PROMPT])).logits
        return float((own - wanted).norm() / wanted.norm())

    eight = ps.quantize_w8(model, head=True)
    # Products are of all layers, also of those that are one product.
    assert sum(type(module) is nn.Linear for module in eight.modules()) == 0
    outputs = {module.out_features for module in eight.modules() if isinstance(module, BlockLinear)}
    assert outputs == {64, 96}
    merged = {
        part.merged.linear.out_features for part in eight.modules() if hasattr(part, "merged")
    }
    assert merged == {128, 192}
    assert error(eight) < 0.05  # most of it is that of activations
    assert 10 * error(eight) < error(ps.quantize_w4(model, 32, head=True))
    assert wanted.equal(model(torch.tensor([PROMPT])).logits)  # it is not touched
    kept = ps.quantize_w8(model, head=False)
    assert type(kept.get_output_embeddings()) is nn.Linear


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_below_a_target_in_its_cache(temperature: float) -> None:
    model = wide()
    chain = ps.Chain([ps.Level(model), "w8", "prompt-lookup"], [4, 2])
    assert chain.names[1] == "w8"
    out = chain.generate(PROMPT, 24, temperature, seed=0)
    middle = out.stats.levels[0]
    assert middle.num_draft_tokens > 0
    assert middle.draft_acceptance_rate > 0.8
    if temperature == 0:
        assert out.sequences.equal(ps.Chain([model]).generate(PROMPT, 24).sequences)


def test_of_a_place_and_from_the_command_line(
    tiny_untrained: None, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tiny.path("drafter")
    level = ps.Chain([f"w8:{place}"]).levels[0]
    whole = quantisable(ps.Chain([place]).levels[0].model, 32)  # type: ignore[attr-defined]
    assert len(quantisable(level.model, 32)) < len(whole)  # type: ignore[attr-defined]
    words = ["generate", "Hi", "--target", f"w8:{place}", "--max-new-tokens", "3", "--raw"]
    from polyspec_ext.cli.entry import main

    assert main([*words, "--pack", "off"]) == 0
    assert "3 tokens" in capsys.readouterr().err


def test_what_has_nothing_to_quantise_is_refused() -> None:
    none = make("llama")
    none.config.hidden_size = 33
    for layer in [module for module in none.modules() if type(module) is nn.Linear]:
        layer.in_features = 33  # as a model of such inputs has it
    with pytest.raises(ValueError, match=r"^model: expected linear layers .* multiple of 32"):
        ps.quantize_w8(none)
    for head in (1, "yes"):
        with pytest.raises(TypeError, match="head: expected True, False or None"):
            ps.quantize_w8(wide(), head=head)  # type: ignore[arg-type]
