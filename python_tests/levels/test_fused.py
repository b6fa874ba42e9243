"""Packed levels of known families: one operator each for norms, heads and activations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import wide as model

import polyspec_ext as ps

pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="packed levels multiply with oneDNN here",
)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
FUSED = ("RMSNorm", "MLP", "Attention", "DecoderLayer")


def kinds(level: ps.HuggingFaceLevel) -> set[str]:
    """Return the replaced kinds of modules; a kind is replaced everywhere or nowhere."""
    found: dict[str, set[bool]] = {kind: set() for kind in FUSED}
    for module in level._runs.modules():
        for kind in FUSED:
            if type(module).__name__.endswith(kind):
                found[kind].add(type(module).__name__.startswith("Fused"))
    assert all(len(places) <= 1 for places in found.values())
    return {kind for kind, places in found.items() if True in places}


@DTYPES
def test_known_families(dtype: torch.dtype) -> None:
    for family, wanted in (
        ("llama", set(FUSED)),
        ("mistral", set(FUSED)),
        ("qwen2", set(FUSED)),
        ("qwen3", set(FUSED)),  # heads with norms
        ("gemma2", set()),
    ):
        assert kinds(ps.HuggingFaceLevel(model(family, dtype=dtype), pack=True)) == wanted
    copy = ps.quantize_w4(model("qwen2", dtype=dtype), 32)
    assert kinds(ps.HuggingFaceLevel(copy)) == set(FUSED)
    assert kinds(ps.HuggingFaceLevel(model("qwen2", dtype=dtype))) == set()  # unchanged


@DTYPES
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_layers_are_their_classes_to_rounding(family: str, dtype: torch.dtype) -> None:
    level = ps.HuggingFaceLevel(model(family, dtype=dtype), pack=True)
    layer = level._runs.model.layers[1]
    x, angles = torch.randn(2, 6, 128, dtype=dtype), torch.randn(1, 6, 32)
    turns = (angles.cos().to(dtype), angles.sin().to(dtype))
    with torch.inference_mode():
        for module, more in (
            (layer, {"position_embeddings": turns, "attention_mask": None}),
            (layer.self_attn, {"position_embeddings": turns, "attention_mask": None}),
            (layer.mlp, {}),
            (layer.input_layernorm, {}),
        ):
            made, wanted = (
                found[0] if isinstance(found, tuple) else found
                for found in (
                    module(x, **more),
                    type(module).__bases__[1].forward(module, x, **more),
                )
            )
            assert made.shape == wanted.shape
            difference = (made - wanted).abs().amax() / wanted.abs().amax()
            assert difference <= (1e-6 if dtype == torch.float32 else 2**-7)


def test_other_modules_stay() -> None:
    assert kinds(ps.HuggingFaceLevel(model("qwen2", hidden_act="gelu"), pack=True)) == {
        "RMSNorm", "Attention", "DecoderLayer",
    }  # fmt: skip

    given = model("qwen2")
    norm = type(given.model.norm)
    own = type("OwnRMSNorm", (norm,), {"forward": lambda self, x: 2 * norm.forward(self, x)})
    given.model.norm.__class__ = own
    level = ps.HuggingFaceLevel(given, pack=True)
    assert type(level._runs.model.norm) is own


@pytest.mark.parametrize("change", ["a hook", "another epsilon"])
def test_norms_of_heads_that_the_operator_does_not_have(change: str) -> None:
    given = model("qwen3")
    norm = given.model.layers[0].self_attn.k_norm
    seen: list[Any] = []
    if change == "a hook":
        norm.register_forward_hook(lambda *_: seen.append(1))
    else:
        norm.variance_epsilon *= 2
    level = ps.HuggingFaceLevel(given, pack=True)
    names = [type(layer.self_attn).__name__ for layer in level._runs.model.layers]
    assert names == ["Qwen3Attention", "FusedQwen3Attention"]
    seen.clear()
    level.prefill(torch.tensor([[1, 2]]))
    assert len(seen) == (change == "a hook")


def test_hooks_still_run() -> None:
    """Hooks on parts that a layer would skip, and hooks of hidden states."""
    given, seen = model("qwen2"), []
    norm = given.model.layers[0].post_attention_layernorm
    norm.register_forward_hook(lambda *_: seen.append("norm"))
    given.model.layers[1].mlp.act_fn.register_forward_hook(lambda *_: seen.append("activation"))
    given.lm_head.register_forward_hook(lambda *_: seen.append("head"))
    level = ps.HuggingFaceLevel(given, pack=True)
    seen.clear()
    level.prefill(torch.tensor([[1, 2]]))
    assert seen == ["norm", "activation", "head"]
    names = [type(layer).__name__ for layer in level._runs.model.layers]
    assert names == ["Qwen2DecoderLayer", "FusedQwen2DecoderLayer"]


def test_the_model_stays_as_it_is() -> None:
    given = model("qwen2")
    before = {name: type(module) for name, module in given.named_modules()}
    level = ps.HuggingFaceLevel(given, pack=True)
    assert level.model is given
    assert {name: type(module) for name, module in given.named_modules()} == before
    embeddings = given.get_input_embeddings()
    assert level._runs.get_input_embeddings().weight is embeddings.weight
