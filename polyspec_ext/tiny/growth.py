"""The shipped target with more weights and the same distribution: what a chain costs where the
target's passes are dear, without training one.

Every vector inside becomes `times` copies of itself one behind the other, so that norms and
attention heads see what they saw; the rows of a matrix are repeated, and its input columns divided
among the copies (Net2Net's widening, Chen et al. 2016, arXiv 1511.05641, with equal shares).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from .. import arguments
from ..drafters import checkpoint

_WIDTHS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


@torch.no_grad()
def grown_model(model: Any, times: int) -> Any:
    """A Llama model whose hidden and intermediate widths and heads are `times` those of `model`,
    with its logits to rounding.

    Raises:
        TypeError, ValueError: the model is no Llama with tied embeddings, or `times` is not >= 1.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    if arguments.integer("times", times) < 1:
        raise ValueError(f"times: expected >= 1, given {times}")
    if type(model) is not LlamaForCausalLM or not model.config.tie_word_embeddings:
        raise TypeError(
            f"model: expected a LlamaForCausalLM with tied embeddings, given {type(model).__name__}"
        )
    config = model.config.to_dict()
    for name in _WIDTHS:
        config[name] *= times
    # The head stays tied: the final norm's weight is divided instead of the head's columns.
    with torch.device("meta"):
        made = LlamaForCausalLM(LlamaConfig.from_dict(config))
    made = made.to(model.dtype).to_empty(device=model.device).eval()
    made.model.rotary_emb = model.model.rotary_emb
    made.generation_config = model.generation_config
    made.name_or_path = model.name_or_path
    given = model.state_dict()
    for name, weight in made.state_dict().items():
        if name == "model.norm.weight":
            weight.copy_(given[name].repeat(times) / times)
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            weight.copy_(given[name].repeat(1, times))
        elif weight.dim() == 1:
            weight.copy_(given[name].repeat(times))
        else:
            weight.copy_((given[name] / times).repeat(times, times))
    made.tie_weights()
    return made


@torch.no_grad()
def grown_head(place: Path, model: Any, times: int, output: Path) -> None:
    """A shipped EAGLE head for `grown_model(model, times)`, with its distribution to rounding, in
    the format that it has.

    An EAGLE-2 head reads and gives states of the target's width, so it grows as the target does. An
    EAGLE-3 head keeps its own width: the product that fuses the target's states has its columns
    divided among the copies, and the head gets the embeddings of `model`.

    Args:
        place: directory of the head, trained for `model`.
        output: directory that is written.
    """
    from safetensors.torch import save_file

    config, tensors = checkpoint.read_config(place), checkpoint.read_folder(place)
    if "midlayer.hidden_norm.weight" in tensors:
        config["target_hidden_size"] = config["hidden_size"] * times
        parts = tensors["fc.weight"].split(config["hidden_size"], 1)
        tensors["fc.weight"] = torch.cat([part.repeat(1, times) / times for part in parts], 1)
        embeds = model.get_input_embeddings().weight
        tensors["embed_tokens.weight"] = embeds.to(tensors["fc.weight"].dtype)
    else:
        # States come with the grown final norm's factor 1 / times and leave with it, so the whole
        # residual stream has it; the one norm in between divides it out.
        config["rms_norm_eps"] /= times**2
        embeds, states = tensors["fc.weight"].chunk(2, 1)
        for name in _WIDTHS:
            config[name] *= times
        for name, weight in tensors.items():
            if weight.dim() == 1:
                tensors[name] = weight.repeat(times)
                continue
            reads = name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
            adds = name.endswith(("o_proj.weight", "down_proj.weight"))
            factor = 1 if reads else times**2 if adds else times
            tensors[name] = weight.repeat(times, times) / factor
        both = [embeds.repeat(times, times) / times, states.repeat(times, times)]
        tensors["fc.weight"] = torch.cat(both, 1) / times
    output.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, output / "model.safetensors", {"format": "pt"})
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n")
