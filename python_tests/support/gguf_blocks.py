"""Random blocks of the types of GGUF files, and small files of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
_WITH_MINIMUM = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")


def random_blocks(name: str, outputs: int, inputs: int, seed: int = 0, size: float = 0.02) -> Any:
    """``[outputs, bytes of a row]`` uint8: any bytes, with scales of about `size` over the largest
    whole number."""
    random = np.random.default_rng(seed)
    each, width = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    blocks = random.integers(0, 256, (outputs, inputs // each, width), dtype=np.uint8)
    whole = {"Q8_0": 127, "Q4_K": 15 * 63, "Q5_K": 31 * 63, "Q6_K": 32 * 127}.get(name, 15)
    scales = size / whole * random.uniform(0.5, 2, blocks.shape[:2])
    place = 208 if name == "Q6_K" else 0
    blocks[..., place : place + 2] = _halves(scales)
    if name in _WITH_MINIMUM:
        least = 7.5 * scales * (15 if name.endswith("K") else -1)
        blocks[..., 2:4] = _halves(least * (2 if name == "Q5_K" else 1))
    return blocks.reshape(outputs, -1)


def _halves(values: Any) -> Any:
    return values.astype(np.float16)[..., None].view(np.uint8)


def write_model(
    path: Path,
    family: str,
    types: dict[str, str],
    tied: bool = False,
    tokenizer: str = "no_vocab",
    factors: Any = None,
    scaling: gguf.RopeScalingType | None = None,
) -> None:
    """A random model of two layers, 256 features and 320 ids.

    Args:
        types: of tensors by the last part but one of their names, as in ``ffn_down``; "" for all
            others that are matrices.
        tokenizer: its kind, by the name that files have; there is none.
        factors: ``[32]`` float32, of the rotations' frequencies; None: there are none.
        scaling: of rotations, as the header names it; None: it does not.
    """
    random, seed = np.random.default_rng(7), 0
    features, middle, heads, groups, ids = 256, 512, 4, 2, 320
    width = features // heads
    writer = gguf.GGUFWriter(str(path), family)
    writer.add_context_length(512)
    writer.add_embedding_length(features)
    writer.add_block_count(2)
    writer.add_feed_forward_length(middle)
    writer.add_head_count(heads)
    writer.add_head_count_kv(groups)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(ids)
    writer.add_tokenizer_model(tokenizer)
    if scaling is not None:
        writer.add_rope_scaling_type(scaling)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)

    def matrix(name: str, outputs: int, inputs: int) -> None:
        nonlocal seed
        kind, seed = types.get(name.rpartition(".")[2], types[""]), seed + 1
        if kind == "F16":
            values = (random.normal(size=(outputs, inputs)) * 0.1).astype(np.float16)
            writer.add_tensor(f"{name}.weight", values)
            return
        blocks = random_blocks(kind, outputs, inputs, seed, 0.25)
        raw = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=raw)

    def vector(name: str, size: int) -> None:
        values = 1 + 0.1 * random.normal(size=size)
        writer.add_tensor(name, values.astype(np.float32))

    matrix("token_embd", ids, features)
    for i in range(2):
        at = f"blk.{i}."
        for name, outputs in (("q", features), ("k", groups * width), ("v", groups * width)):
            matrix(f"{at}attn_{name}", outputs, features)
            if family == "qwen2":
                vector(f"{at}attn_{name}.bias", outputs)
        matrix(f"{at}attn_output", features, features)
        matrix(f"{at}ffn_gate", middle, features)
        matrix(f"{at}ffn_up", middle, features)
        matrix(f"{at}ffn_down", features, middle)
        vector(f"{at}attn_norm.weight", features)
        vector(f"{at}ffn_norm.weight", features)
    vector("output_norm.weight", features)
    if not tied:
        matrix("output", ids, features)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
