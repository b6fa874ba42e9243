"""The shipped target with more weights and the same distribution: what a chain costs where the
target's passes are dear, without training one.

Every vector inside becomes `times` copies of itself one behind the other, so that norms and
attention heads see what they saw; the rows of a matrix are repeated, and its input columns divided
among the copies (Net2Net's widening, Chen et al. 2016, arXiv 1511.05641, with equal shares).
"""

from __future__ import annotations

from typing import Any

import torch

from .. import arguments


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
    for name in (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
    ):
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
