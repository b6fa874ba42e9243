"""Quantised models as levels: 8-bit copies, 4-bit copies by a word, and somebody else's."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import PROMPT, llama, make, plain_greedy
from torch import nn

import polyspec_ext as ps
from polyspec_ext import tiny
from polyspec_ext.cli import main
from polyspec_ext.levels import load
from polyspec_ext.levels.gguf import BlockLinear
from polyspec_ext.quantization import stored_w4
from polyspec_ext.quantization import weights as rules
from polyspec_ext.quantization.weights import quantisable, weights_of

pytestmark = pytest.mark.filterwarnings("ignore:levels.*more parameters")

# ---- 8 bits --------------------------------------------------------------------------------------


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


def sharp() -> Any:
    """A model of 64 inputs, which are whole groups."""
    more = {"tie_word_embeddings": False, "eos_token_id": None, "initializer_range": 0.2}
    return llama(0, 2, 96, hidden_size=64, intermediate_size=96, **more)


@torch.no_grad()
def test_logits_are_ten_times_as_near_as_those_of_four_bits() -> None:
    model = sharp()
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
def test_w8_below_a_target_in_its_cache(temperature: float) -> None:
    model = sharp()
    chain = ps.Chain([ps.Level(model), "w8", "prompt-lookup"], [4, 2])
    assert chain.names[1] == "w8"
    out = chain.generate(PROMPT, 24, temperature, seed=0)
    middle = out.stats.levels[0]
    assert middle.num_draft_tokens > 0
    assert middle.draft_acceptance_rate > 0.8
    if temperature == 0:
        assert out.sequences.equal(ps.Chain([model]).generate(PROMPT, 24).sequences)


def test_w8_of_a_place_and_from_the_command_line(tiny_untrained, capsys) -> None:
    place = tiny.path("drafter")
    level = ps.Chain([f"w8:{place}"]).levels[0]
    whole = quantisable(ps.Chain([place]).levels[0].model, 32)  # type: ignore[attr-defined]
    assert len(quantisable(level.model, 32)) < len(whole)  # type: ignore[attr-defined]
    words = ["generate", "Hi", "--target", f"w8:{place}", "--max-new-tokens", "3", "--raw"]
    assert main([*words, "--pack", "off"]) == 0
    assert "3 tokens" in capsys.readouterr().err


def test_w8_of_what_has_nothing_to_quantise_is_refused() -> None:
    none = make("llama")
    none.config.hidden_size = 33
    for layer in [module for module in none.modules() if type(module) is nn.Linear]:
        layer.in_features = 33  # as a model of such inputs has it
    with pytest.raises(ValueError, match=r"^model: expected linear layers .* multiple of 32"):
        ps.quantize_w8(none)
    for head in (1, "yes"):
        with pytest.raises(TypeError, match="head: expected True, False or None"):
            ps.quantize_w8(sharp(), head=head)  # type: ignore[arg-type]


# ---- 4 bits, by a word ---------------------------------------------------------------------------

IDS = [1, 7, 300, 22, 5]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "polyspec_ext" / "w4"


def text_of(chain: ps.Chain) -> list[int]:
    found: list[int] = chain.generate(IDS, 24, seed=0).sequences[0].tolist()
    return found


def test_stored_w4_a_copy_below_the_target(cache: Path) -> None:
    """It shares the target's cache, and the text is the target's."""
    target = tiny.path("target")
    chain = ps.Chain([target, "w4", tiny.path("drafter")], [6, 3])
    assert chain.names == ["target", "w4", "drafter"]
    assert text_of(chain) == text_of(ps.Chain([target]))
    (kept,) = cache.glob("*/int4.safetensors")
    made = kept.stat().st_mtime_ns
    ps.Chain([target, "w4"])
    assert kept.stat().st_mtime_ns == made
    # Of another model it is another copy.
    ps.Chain([tiny.path("middle"), "w4"])
    assert len([*cache.glob("*/int4.safetensors")]) == 2


def test_stored_w4_a_damaged_copy_is_made_again(cache: Path) -> None:
    target = tiny.path("target")
    wanted = text_of(ps.Chain([f"w4:{target}"]))
    (kept,) = cache.glob("*/int4.safetensors")
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-5000] + bytes([whole[-5000] ^ 16]) + whole[-4999:])
    assert text_of(ps.Chain([f"w4:{target}"])) == wanted
    assert kept.read_bytes() == whole


def test_stored_w4_a_copy_as_the_target(cache: Path) -> None:
    place = tiny.path("target")
    own = ps.quantize_w4(load(place, "auto").model, 128)
    assert text_of(ps.Chain([f"w4:{place}", f"w4:{tiny.path('middle')}"], [4])) == text_of(
        ps.Chain([own])
    )


def test_stored_w4_a_model_that_differs_in_one_weight_has_a_copy_of_its_own(cache: Path) -> None:
    """Such as one that was trained further, in the rows of a few tokens."""
    model = load(tiny.path("target"), "auto").model
    first = stored_w4(model)
    layer = model.get_decoder().layers[0].mlp.down_proj
    with torch.no_grad():
        layer.weight[5, 7] *= -3
    again = stored_w4(model)
    assert len([*cache.glob("*/int4.safetensors")]) == 2
    differ = {
        name
        for (name, one), (_, other) in zip(weights_of(first), weights_of(again), strict=True)
        if not one.values.equal(other.values)
    }
    assert {name.rpartition(".")[2] for name in differ} == {"down_proj"}


def test_stored_w4_where_nothing_can_be_kept(cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file where the folder would be")
    assert text_of(ps.Chain([tiny.path("target"), "w4"])) == text_of(
        ps.Chain([tiny.path("target")])
    )


def test_stored_w4_where_it_cannot_stand(cache: Path) -> None:
    with pytest.raises(ValueError, match=r"levels\[0\]: expected 'w4' below a Hugging Face model"):
        ps.Chain(["w4"])
    with pytest.raises(ValueError, match=r"levels\[0\]: expected .*given '.*nowhere'"):
        ps.Chain([f"w4:{cache}/nowhere"])


def test_stored_w4_on_the_command_line(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The copy's tokenizer is its model's."""
    words = ["generate", "Who wrote Hamlet?", "--target", f"w4:{tiny.path('target')}"]
    assert main([*words, "--middle", f"w4:{tiny.path('middle')}", "--max-new-tokens", "8"]) == 0
    assert capsys.readouterr().out.strip()


# ---- somebody else's -----------------------------------------------------------------------------


class Int8Linear(nn.Module):
    """Weights of one byte and a scale per row, as loaders put them in place of `nn.Linear`."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("packed", (layer.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.packed * self.scale).to(x.dtype).T  # type: ignore[operator]


class Int8Subclass(nn.Linear):
    """A subclass whose weight is no floating-point tensor."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False)
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        whole = (layer.weight.detach() / scale).round().to(torch.int8)
        self.weight = nn.Parameter(whole, requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight * self.scale).to(x.dtype).T


def replaced(model: Any, kind: Any, head: bool) -> Any:
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and (head or name != "lm_head"):
                setattr(module, name, kind(child))
    return model


def dynamic(model: Any, head: bool) -> Any:
    """torch's own, whose weights are no parameters and whose activations are quantised by pass."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own = copy.deepcopy(model)
        made = torch.ao.quantization.quantize_dynamic(own, {nn.Linear}, torch.qint8)
    if not head:
        made.lm_head = copy.deepcopy(model.lm_head)
    return made


MAKERS = {
    "module": lambda model, head: replaced(model, Int8Linear, head),
    "subclass": lambda model, head: replaced(model, Int8Subclass, head),
    "torch.ao": dynamic,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("head", [True, False], ids=["with its head", "but for its head"])
@pytest.mark.parametrize("kind", MAKERS)
def test_a_quantised_copy_between_target_and_drafter(kind: str, head: bool) -> None:
    target = make("llama")
    middle = MAKERS[kind](target, head)
    level = ps.Level(middle)
    assert level.supports_batches
    assert level.capabilities.hidden_states
    prompts, count = [PROMPT, [9], [30, 31, 32]], 16
    expected = [plain_greedy(target, prompt, count) for prompt in prompts]
    for levels in (
        [target, level, make("llama", 1)],
        [target, ps.Level(MAKERS[kind](target, head), shares_cache_with=target)],
    ):
        chain = ps.Chain(levels, [4, 2][: len(levels) - 1])
        out = chain.generate(prompts, count, eos_token_id=[], pad_token_id=0)
        for row, text in zip(out.sequences.tolist(), expected, strict=True):
            assert row[: len(text)] == text
        stats = out.stats.levels[0]
        assert stats.num_accepted_tokens > stats.num_draft_tokens / 2  # near the target


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["module", "subclass"])
def test_a_quantised_target(kind: str) -> None:
    """Exact for what it is, also beside linear layers that are packed."""
    target = MAKERS[kind](make("qwen2"), False)
    text = plain_greedy(target, PROMPT, 16)
    for pack in (False, True):
        chain = ps.Chain([ps.Level(target, pack=pack), make("qwen2", 1)], [3])
        assert chain.generate(PROMPT, 16, eos_token_id=[]).sequences.tolist() == [text]
