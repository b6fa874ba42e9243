"""Quantised models as levels: 4-bit copies by a word, and quantised models of others."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import PROMPT, make, plain_greedy
from torch import nn

import polyspec_ext as ps
from polyspec_ext import tiny
from polyspec_ext.levels import load
from polyspec_ext.quantization import stored_w4
from polyspec_ext.quantization.weights import weights_of

pytestmark = pytest.mark.filterwarnings("ignore:levels.*more parameters")

IDS = [1, 7, 300, 22, 5]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "polyspec_ext" / "w4"


def text_of(chain: ps.Chain) -> list[int]:
    found: list[int] = chain.generate(IDS, 24, seed=0).sequences[0].tolist()
    return found


def test_stored_w4_a_copy_below_the_target(cache: Path) -> None:
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
    assert wanted == text_of(ps.Chain([ps.quantize_w4(load(target, "auto").model, 128)]))
    (kept,) = cache.glob("*/int4.safetensors")
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-5000] + bytes([whole[-5000] ^ 16]) + whole[-4999:])
    assert text_of(ps.Chain([f"w4:{target}", f"w4:{tiny.path('middle')}"], [4])) == wanted
    assert kept.read_bytes() == whole


def test_stored_w4_a_model_that_differs_in_one_weight_has_a_copy_of_its_own(cache: Path) -> None:
    """As one with further training, in the rows of a few tokens."""
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


class Int8Linear(nn.Module):
    """Weights of one byte and a scale per row; loaders replace `nn.Linear` with it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("packed", (layer.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.packed * self.scale).to(x.dtype).T


class Int8Subclass(nn.Linear):
    """A subclass with a weight that is no floating-point tensor."""

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
    """Return torch's dynamic quantisation: weights are no parameters, activations are quantised by
    pass."""
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
def test_a_target_with_one_scale_for_a_pass_decodes_alone() -> None:
    """A token has other logits in a block than alone."""
    target = dynamic(make("llama"), True)
    with pytest.raises(ValueError, match=r"levels\[0\]: .* quantised by one scale for all tokens"):
        ps.Chain([target, make("llama", 1)])
    assert ps.Chain([target]).generate(PROMPT, 4, eos_token_id=[]).sequences.shape[1] == 4 + len(
        PROMPT
    )
