"""Drafts in vLLM of the target's heads and of suffixes keep the target's texts and law."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_engines as engines
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config

NUMBER = 600
PROMPTS = [[(5 * i + j * j) % engines.V for j in range(4 + i)] for i in range(4)]
WIDTH = 64  # of hidden states


def random(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Return weights: random matrices, norms and biases of 1."""
    generator = torch.Generator().manual_seed(5)
    return {
        name: 0.15 * torch.randn(shape, generator=generator)
        if len(shape) > 1
        else torch.ones(shape)
        for name, shape in shapes.items()
    }


def layer(prefix: str, width: int = WIDTH) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer with attention that reads `width` numbers a token."""
    square = (WIDTH, WIDTH)
    return {
        **{f"{prefix}self_attn.{name}_proj.weight": (WIDTH, width) for name in "qkv"},
        **{f"{prefix}mlp.{name}_proj.weight": square for name in ("gate", "up", "down")},
        f"{prefix}self_attn.o_proj.weight": square,
        f"{prefix}input_layernorm.weight": (WIDTH,),
        f"{prefix}post_attention_layernorm.weight": (WIDTH,),
    }


def save(
    folder: Path, config: PretrainedConfig, kind: str, weights: dict[str, torch.Tensor]
) -> None:
    config.architectures = [kind]
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def eagle(root: Path) -> dict[str, Any]:
    shapes = {"fc.weight": (WIDTH, 2 * WIDTH), **layer("layers.0.")}
    del shapes["layers.0.input_layernorm.weight"]
    config = LlamaConfig(**engines.sizes(layers=1))
    save(root / "eagle", config, "LlamaForCausalLM", random(shapes))
    return {"method": "eagle", "model": str(root / "eagle")}


def eagle3(root: Path) -> dict[str, Any]:
    shapes = {
        "fc.weight": (WIDTH, 3 * WIDTH),
        "midlayer.hidden_norm.weight": (WIDTH,),
        "norm.weight": (WIDTH,),
        "lm_head.weight": (engines.V, WIDTH),
        **layer("midlayer.", 2 * WIDTH),
    }
    layers = {"draft_vocab_size": engines.V, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    config = LlamaConfig(**engines.sizes(layers=1), **layers)
    save(root / "eagle3", config, "LlamaForCausalLM", random(shapes))
    return {"method": "eagle3", "model": str(root / "eagle3")}


def mtp(root: Path) -> dict[str, Any]:
    """Make the target one of MiMo's family, which is Qwen2 with a head."""
    config = Qwen2Config(
        **engines.sizes(layers=2), num_key_value_heads=2, num_nextn_predict_layers=1
    )
    prefix = "model.mtp_layers.0."
    shapes = {
        "model.embed_tokens.weight": (engines.V, WIDTH),
        "lm_head.weight": (engines.V, WIDTH),
        "model.norm.weight": (WIDTH,),
        f"{prefix}input_proj.weight": (WIDTH, 2 * WIDTH),
        **{f"{prefix}{name}_layernorm.weight": (WIDTH,) for name in ("token", "hidden", "final")},
    }
    for before in ("model.layers.0.", "model.layers.1.", prefix):
        shapes |= layer(before)
        shapes |= {f"{before}self_attn.{name}_proj.bias": (WIDTH,) for name in "qkv"}
    save(root / "target", config, "MiMoForCausalLM", random(shapes))
    return {"method": "mtp"}


def suffix(root: Path) -> dict[str, Any]:
    """Keep other requests' answers out: with them the text of a seed depends on its company."""
    pytest.importorskip("arctic_inference", reason="arctic-inference is not installed here")
    return {"method": "suffix", "suffix_decoding_max_cached_requests": 0}


def answers(engine: Any) -> dict[str, Any]:
    """Return greedy texts, seeded texts together and alone, others, and accepted drafts."""
    import vllm

    greedy = vllm.SamplingParams(temperature=0.0, max_tokens=24, detokenize=False)
    seeded = vllm.SamplingParams(temperature=0.9, seed=7, max_tokens=24, detokenize=False)
    free = vllm.SamplingParams(temperature=0.8, max_tokens=engines.LENGTH, detokenize=False)
    return {
        "greedy": engines.texts(engine, PROMPTS, greedy),
        "together": engines.texts(engine, PROMPTS, seeded),
        "alone": [engines.texts(engine, [prompt], seeded)[0] for prompt in PROMPTS],
        "free": engines.texts(engine, [engines.PROMPT] * NUMBER, free),
        "accepted": engines.counters(engine)["vllm:spec_decode_num_accepted_tokens"],
    }


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(eagle, marks=pytest.mark.slow),
        eagle3,
        pytest.param(mtp, marks=pytest.mark.slow),
        suffix,
    ],
)
def test_heads_keep_texts_and_law(make: Callable[[Path], dict[str, Any]], tmp_path: Path) -> None:
    target = engines.save_llama(tmp_path / "target", seed=6, layers=2)
    speculation = {"num_speculative_tokens": 2, **make(tmp_path)}
    if make is not suffix:
        speculation["draft_sample_method"] = "probabilistic"
    config = {
        "speculative_config": speculation,
        "additional_config": {"polyspec": {"rule": "block"}},
    }
    ours = engines.run(answers, model=str(target), **config)
    assert ours["accepted"] > 0
    assert ours["together"] == ours["alone"]
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    for prompt, text in zip(PROMPTS, ours["greedy"], strict=True):
        plain = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=24)
        assert text == plain[0, len(prompt) :].tolist()
    law = engines.Law(target)
    assert engines.g_test(law.of(lambda rows: torch.softmax(rows / 0.8, -1)), ours["free"]) > 1e-6
