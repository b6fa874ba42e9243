"""All layers in one call (`levels.fused`): the bits of layer by layer, on every kind of pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import wide

import polyspec_ext as ps
from polyspec_ext.levels import BatchedLevel, HuggingFaceLevel
from polyspec_ext.levels.base import InputBlock
from polyspec_ext.levels.fused import StackedPass
from polyspec_ext.tensors import RowCounts

_LAYERS = (0, 2, 3, -1)


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


class _Passes:
    """Counts the passes that `StackedPass` has built, and can prevent them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs, self.made = True, 0
        given = StackedPass.__call__

        def call(own: StackedPass, *arguments: Any) -> Any:
            found = given(own, *arguments) if self.runs else None
            self.made += found is not None
            return found

        monkeypatch.setattr(StackedPass, "__call__", call)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> _Passes:
    return _Passes(monkeypatch)


def _tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 97, shape, generator=torch.Generator().manual_seed(seed))


def _block(tokens: torch.Tensor, keep: int, **more: Any) -> InputBlock:
    for name in ("counts", "first"):
        if name in more:
            more[name] = RowCounts(more[name])
    return InputBlock(tokens, keep, hidden_layers=_LAYERS, **more)


def _everything(level: BatchedLevel) -> list[torch.Tensor]:
    """Logits and hidden states of every kind of pass."""
    found = []

    def take(block: InputBlock) -> None:
        out = level.forward(block)
        found.extend([out.logits.clone(), *(out.hidden or {}).values()])

    own: Any = level
    own.prefill(_tokens(1, 20))
    take(_block(_tokens(1, 1, seed=1), 1))
    take(_block(_tokens(1, 6, seed=2), 6))
    own.rollback([23])
    take(_block(_tokens(1, 6, seed=3), 2, first=[1]))
    parents = torch.tensor([[-1, -1, 0, 0, 1]])
    take(_block(_tokens(1, 5, seed=4), 5, parents=parents, depth=2))
    own.prefill(_tokens(3, 12), [12, 5, 9])
    take(_block(_tokens(3, 4, seed=5), 2, counts=[4, 1, 3], first=[2, 0, 1]))
    own.rollback([13, 5, 9])
    take(_block(_tokens(3, 1, seed=6), 1))
    own.select([2, 0])
    take(_block(_tokens(2, 2, seed=7), 2))
    return found


@pytest.mark.parametrize("copy", [False, True], ids=["packed", "4-bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", _MODELS)
def test_one_call_is_layer_by_layer_bit_for_bit(kind, dtype, copy, passes) -> None:
    level = _level(kind, dtype, copy)
    _everything(level)  # its first passes allocate the cache
    before = passes.made
    at_once = _everything(level)
    assert passes.made - before == 8  # of nine, since one allocates its cache
    passes.runs = False
    by_layer = _everything(level)
    for mine, wanted in zip(at_once, by_layer, strict=True):
        assert torch.equal(mine, wanted)


def test_modules_with_hooks_are_called(passes: _Passes) -> None:
    level = _level("llama", torch.float32, True)
    _everything(level)
    seen: list[int] = []
    runs: Any = level._runs
    handle = runs.model.layers[1].register_forward_hook(lambda *_: seen.append(1))
    before = passes.made
    hooked = _everything(level)
    assert passes.made == before
    assert len(seen) == 9  # one for each pass
    handle.remove()
    for mine, wanted in zip(_everything(level), hooked, strict=True):
        assert torch.equal(mine, wanted)


@pytest.mark.parametrize("which", ["input_layernorm", "self_attn.k_norm"])
def test_norms_that_were_changed_are_seen(which: str, passes: _Passes) -> None:
    """They belong to the model: new memory is not read at its old address."""
    level = _level("qwen3", torch.float32, True)
    _everything(level)
    before = _everything(level)
    norm = level.model.model.layers[1].get_submodule(which).weight
    norm.data.mul_(2.0)  # where it lies
    made = passes.made
    changed = _everything(level)
    assert passes.made > made
    assert not torch.equal(changed[0], before[0])
    norm.data = norm.data / 2.0  # elsewhere
    made = passes.made
    for mine, wanted in zip(_everything(level), before, strict=True):
        assert torch.equal(mine, wanted)
    assert passes.made == made


def test_a_cache_that_the_call_does_not_take_is_left_to_the_model(passes: _Passes) -> None:
    level = HuggingFaceLevel(wide(), pack=True, streaming=16)
    made = passes.made  # passes that try the model with another cache
    level.prefill(_tokens(1, 8))
    level.forward(_tokens(1, 1), 1)
    assert passes.made == made


@pytest.mark.parametrize(
    "more",
    [
        {"hidden_act": "gelu"},
        {"num_attention_heads": 8, "head_dim": 16},
        {"mlp_bias": True},
    ],
    ids=["another activation", "narrow heads", "a bias behind the rounding"],
)
def test_what_the_call_does_not_compute_is_left_to_the_model(more, passes) -> None:
    level = HuggingFaceLevel(ps.quantize_w4(wide(**more), 32), pack=True)
    assert level.supports_batches  # a call that is refused would count as a model without batches
    for _ in range(2):
        level.prefill(_tokens(1, 8))
        level.forward(_tokens(1, 1), 1)
    assert passes.made == 0
