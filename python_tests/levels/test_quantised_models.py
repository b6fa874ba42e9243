"""Models that somebody else has quantised serve as levels: whatever their linear layers have
become, nothing asks for their weights."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from small_models import PROMPT, make, plain_greedy
from torch import nn

import polyspec_ext as ps


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
