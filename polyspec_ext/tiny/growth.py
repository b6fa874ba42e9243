"""The shipped target with more weights and the same distribution: what a chain costs where the
target's passes are dear, without training one.

Wider: every vector inside becomes `times` copies of itself, so that norms see what they saw; the
rows of a matrix are repeated, and its input columns divided among the copies (Net2Net's widening,
Chen et al. 2016, arXiv 1511.05641, with equal shares). Deeper: layers whose output projections are
zero add nothing to the residual stream, and take the time of any other.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

from .. import arguments
from ..drafters import checkpoint

_WIDTHS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@torch.no_grad()
def grown_model(
    model: Any,
    times: int,
    layers: int | None = None,
    intermediate_size: int | None = None,
    key_value_heads: int | None = None,
) -> Any:
    """Widen a Llama model on its device, with the same logits to rounding (`tiny.grown`)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if type(model) is not LlamaForCausalLM or not model.config.tie_word_embeddings:
        raise TypeError(
            f"model: expected a LlamaForCausalLM with tied embeddings, given {type(model).__name__}"
        )
    given = model.config
    if given.attention_bias or given.mlp_bias:
        raise ValueError("model: expected projections without biases, given some")
    if arguments.integer("times", times) < 1:
        raise ValueError(f"times: expected >= 1, given {times}")
    config = given.to_dict()
    for name in _WIDTHS:
        config[name] *= times
    heads, own_heads = config["num_attention_heads"], given.num_key_value_heads
    for name, asked in (("num_hidden_layers", layers), ("intermediate_size", intermediate_size)):
        if asked is not None:
            if arguments.integer(name, asked) < config[name]:
                raise ValueError(f"{name}: expected >= {config[name]}, given {asked}")
            config[name] = asked
    if key_value_heads is not None:
        count = arguments.integer("key_value_heads", key_value_heads)
        if count < 1 or count % own_heads or heads % count:
            raise ValueError(
                f"key_value_heads: expected a multiple of {own_heads} that divides {heads}, given "
                f"{count}"
            )
        config["num_key_value_heads"] = count
    # The head stays tied: the final norm's weight is divided instead of the head's columns.
    with torch.device("meta"):
        made = LlamaForCausalLM(LlamaConfig.from_dict(config))
    made = made.to(model.dtype).to_empty(device=model.device).eval()
    made.model.rotary_emb = model.model.rotary_emb
    made.generation_config = model.generation_config
    made.name_or_path = model.name_or_path
    source = model.state_dict()
    shares = config["num_key_value_heads"] // own_heads
    for name, weight in made.state_dict().items():
        found = _LAYER.match(name)
        number = int(found[1]) if found else 0
        original = name.replace(f".{number}.", f".{number % given.num_hidden_layers}.", 1)
        own, part = source[original if found else name], name.split(".")[-2]
        if number >= given.num_hidden_layers and part in ("o_proj", "down_proj"):
            weight.zero_()
        elif name == "model.norm.weight":
            weight.copy_(own.repeat(times) / times)
        elif part in ("embed_tokens", "lm_head"):
            weight.copy_(own.repeat(1, times))
        elif weight.dim() == 1:
            weight.copy_(own.repeat(times))
        elif part == "o_proj":  # reads heads, whose copies stand side by side
            by_head = _heads_repeated(own.T, given.head_dim, times).T
            weight.copy_((by_head / times).repeat(times, 1))
        elif part == "q_proj":
            weight.copy_(_heads_repeated(own.repeat(1, times) / times, given.head_dim, times))
        elif part in ("k_proj", "v_proj"):
            weight.copy_(_heads_repeated(own.repeat(1, times) / times, given.head_dim, shares))
        elif part == "down_proj":  # what is wider yet is not read
            weight.zero_()
            weight[:, : own.shape[1] * times] = (own / times).repeat(times, times)
        else:
            rows = torch.arange(weight.shape[0], device=own.device) % own.shape[0]
            weight.copy_((own / times).repeat(1, times)[rows])
    made.tie_weights()
    return made


def _heads_repeated(rows: torch.Tensor, size: int, copies: int) -> torch.Tensor:
    by_head = rows.reshape(-1, size, rows.shape[1])
    return by_head.repeat_interleave(copies, 0).reshape(-1, rows.shape[1])


@torch.no_grad()
def grown_head(place: Path, model: Any, times: int, output: Path) -> None:
    """Write a shipped EAGLE head for `grown_model(model, times)`, in its format, with its
    distribution to rounding.

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
        # Those that it was trained with, however many layers stand behind them.
        count = model.config.num_hidden_layers
        config.setdefault("eagle_aux_hidden_state_layer_ids", [2, count // 2, count - 3])
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
