"""GGUF files for llama.cpp, of models of the Llama architecture, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def write_gguf(model: Any, path: str | Path) -> None:
    """Write a model as a GGUF file, its weights in float32 and without a vocabulary: llama.cpp
    takes and gives token ids.

    Args:
        model: a transformers ``LlamaForCausalLM``.
        path: the file, overwritten where it is there.

    Raises:
        ImportError: the package gguf is missing.
        ValueError: another architecture, or scaled rotary embeddings.
    """
    import gguf

    config = model.config
    if config.model_type != "llama":
        raise ValueError(f"model: expected the architecture llama, given {config.model_type}")
    rope = config.rope_parameters
    if rope["rope_type"] != "default":
        raise ValueError(f"model: expected rotary embeddings unscaled, given {rope['rope_type']}")
    heads, groups, width = (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
    )
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name(Path(path).stem)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(groups)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    tied = config.tie_word_embeddings  # llama.cpp then takes the embeddings for the head
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        values = tensor.detach().to("cpu", torch.float32)
        if ".q_proj." in name:
            values = _interleaved(values, heads)
        elif ".k_proj." in name:
            values = _interleaved(values, groups)
        writer.add_tensor(
            names.get_name(name, try_suffixes=(".weight", ".bias")), values.contiguous().numpy()
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows [heads * width, ...] of a projection to queries or keys. transformers rotates feature i
    of a head with feature i + width / 2, llama.cpp neighbours with each other."""
    out: torch.Tensor = rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    return out
