"""The shipped target with the widths and layers of larger models, and its EAGLE heads."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from polyspec_ext import progress, tiny
from polyspec_ext.drafters import checkpoint
from polyspec_ext.levels import load_model

_WIDTHS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


# Wider: every hidden vector becomes `times` copies of itself, so that norms do not change; the
# rows of a matrix are repeated, and its input columns divided among the copies (Net2Net's widening,
# Chen et al. 2016, arXiv 1511.05641, with equal shares). Deeper: layers with output projections of
# zero add nothing to the residual stream, and take the time of any other layer.


@torch.no_grad()
def grown(
    times: int = 4,
    *,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    layers: int | None = None,
    intermediate_size: int | None = None,
    key_value_heads: int | None = None,
) -> Any:
    """Build the shipped target with `times` its hidden and intermediate widths and heads and the
    same distribution to rounding: 112 million parameters at 4, 445 million at 8. This takes
    seconds, in memory; the model has the costs of its size and the texts of the target.

    Args:
        times: >= 1.
        dtype: of the model; None: float32.
        device: of the model; None: the CPU.
        layers: number of layers, at least the target's, which come first; None: the target's.
        intermediate_size: at least `times` the target's; None: `times` the target's.
        key_value_heads: a multiple of the target's that divides the grown query heads, since copies
            of a query head read the same keys; None: `times` the target's.
    """
    model = _target(dtype, device)
    base, config = model.config, model.config.to_dict()
    for name in _WIDTHS:
        config[name] *= times
    config |= {
        name: size
        for name, size in (
            ("num_hidden_layers", layers),
            ("intermediate_size", intermediate_size),
            ("num_key_value_heads", key_value_heads),
        )
        if size is not None
    }
    # The head stays tied: the final norm's weight is divided instead of the head's columns.
    with torch.device("meta"):
        larger = LlamaForCausalLM(LlamaConfig.from_dict(config))
    larger = larger.to(model.dtype).to_empty(device=model.device).eval()
    larger.model.rotary_emb = model.model.rotary_emb
    larger.generation_config = model.generation_config
    larger.name_or_path = model.name_or_path
    source = model.state_dict()
    shares = config["num_key_value_heads"] // base.num_key_value_heads
    for name, weight in larger.state_dict().items():
        match = _LAYER.match(name)
        number = int(match[1]) if match else 0
        original = name.replace(f".{number}.", f".{number % base.num_hidden_layers}.", 1)
        tensor, module = source[original if match else name], name.split(".")[-2]
        if number >= base.num_hidden_layers and module in ("o_proj", "down_proj"):
            weight.zero_()
        elif name == "model.norm.weight":
            weight.copy_(tensor.repeat(times) / times)
        elif module in ("embed_tokens", "lm_head"):
            weight.copy_(tensor.repeat(1, times))
        elif weight.dim() == 1:
            weight.copy_(tensor.repeat(times))
        elif module == "o_proj":  # its input columns are heads, copies of a head adjacent
            by_head = _heads_repeated(tensor.T, base.head_dim, times).T
            weight.copy_((by_head / times).repeat(times, 1))
        elif module == "q_proj":
            weight.copy_(_heads_repeated(tensor.repeat(1, times) / times, base.head_dim, times))
        elif module in ("k_proj", "v_proj"):
            weight.copy_(_heads_repeated(tensor.repeat(1, times) / times, base.head_dim, shares))
        elif module == "down_proj":  # zero columns for additional intermediate width
            weight.zero_()
            weight[:, : tensor.shape[1] * times] = (tensor / times).repeat(times, times)
        else:
            rows = torch.arange(weight.shape[0], device=tensor.device) % tensor.shape[0]
            weight.copy_((tensor / times).repeat(1, times)[rows])
    larger.tie_weights()
    return larger


def _target(dtype: torch.dtype | str | None, device: str | torch.device | None = None) -> Any:
    with progress.loading(shown=False):
        return load_model(tiny.path("target"), dtype, device)


def _heads_repeated(rows: torch.Tensor, size: int, copies: int) -> torch.Tensor:
    by_head = rows.reshape(-1, size, rows.shape[1])
    return by_head.repeat_interleave(copies, 0).reshape(-1, rows.shape[1])


@torch.no_grad()
def grown_head(name: str, times: int, folder: str | Path) -> Path:
    """Write a shipped EAGLE head, "eagle2" or "eagle3", for `grown(times)`, with its distribution
    to rounding: a directory in `folder`, in its training format, for `ps.Eagle.from_pretrained`.

    An EAGLE-2 head reads and returns states of the target's width, so it grows as the target does.
    An EAGLE-3 head keeps its width: the columns of the product that fuses the target's states are
    divided among the copies, and the head gets the embeddings of the target.
    """
    model, output, shipped = _target(torch.float32), Path(folder) / name, tiny.path(name)
    config, tensors = checkpoint.read_config(shipped), checkpoint.read_folder(shipped)
    if "midlayer.hidden_norm.weight" in tensors:
        config["target_hidden_size"] = config["hidden_size"] * times
        # The layers of its training: a grown target may have more layers.
        count = model.config.num_hidden_layers
        config.setdefault("eagle_aux_hidden_state_layer_ids", [2, count // 2, count - 3])
        parts = tensors["fc.weight"].split(config["hidden_size"], 1)
        tensors["fc.weight"] = torch.cat([piece.repeat(1, times) / times for piece in parts], 1)
        embeds = model.get_input_embeddings().weight
        tensors["embed_tokens.weight"] = embeds.to(tensors["fc.weight"].dtype)
    else:
        # States enter and leave with the grown final norm's factor 1 / times, so the whole
        # residual stream has it; the single norm in between divides it out.
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
        halves = [embeds.repeat(times, times) / times, states.repeat(times, times)]
        tensors["fc.weight"] = torch.cat(halves, 1) / times
    output.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, output / "model.safetensors", {"format": "pt"})
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return output
