"""Random blocks of the types of GGUF files, and small files of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
_WITH_MINIMUM = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")


def random_blocks(name: str, outputs: int, inputs: int, seed: int = 0, size: float = 0.02) -> Any:
    """``[outputs, bytes of a row]`` uint8: any bytes, with scales of about `size`."""
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
    factors: Any = None,
    header: Callable[[Any], None] | None = None,
    change: Callable[[dict[str, Any]], Any] | None = None,
    parts: int = 1,
    ids: int = 320,
) -> list[Path]:
    """A random model of two layers and 256 features. Returns its files.

    Args:
        types: of tensors by the last part but one of their names, as in ``ffn_down``; "" for all
            others that are matrices.
        factors: ``[32]`` float32, of the rotations' frequencies; None: there are none.
        header: adds to the header, by its writer.
        change: of the tensors by name, each with its type, before they are written.
        parts: files that it is split into.
    """
    random, seed = np.random.default_rng(7), 0
    features, middle, heads, groups = 256, 512, 4, 2
    width = features // heads
    tensors: dict[str, Any] = {}
    if factors is not None:
        tensors["rope_freqs.weight"] = factors, None

    def matrix(name: str, outputs: int, inputs: int) -> None:
        nonlocal seed
        kind, seed = types.get(name.rpartition(".")[2], types[""]), seed + 1
        if kind == "F16":
            values = (random.normal(size=(outputs, inputs)) * 0.1).astype(np.float16)
            tensors[f"{name}.weight"] = values, None
            return
        blocks = random_blocks(kind, outputs, inputs, seed, 0.25)
        tensors[f"{name}.weight"] = blocks, gguf.GGMLQuantizationType[kind]

    def vector(name: str, size: int) -> None:
        values = 1 + 0.1 * random.normal(size=size)
        tensors[name] = values.astype(np.float32), None

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
    if change is not None:
        change(tensors)
    names, files = list(tensors), []
    for part in range(parts):
        end = f"-{part + 1:05d}-of-{parts:05d}.gguf" if parts > 1 else path.suffix
        files.append(path.with_name(path.stem + end))
        writer = gguf.GGUFWriter(str(files[-1]), family)
        if part == 0:
            sizes = {"embedding_length": features, "feed_forward_length": middle, "block_count": 2}
            sizes |= {"head_count": heads, "head_count_kv": groups, "vocab_size": ids}
            values = {"rope_freq_base": 10000.0, "layer_norm_rms_eps": 1e-6}
            _add(writer, **sizes, **values, context_length=512, tokenizer_model="no_vocab")
            if header is not None:
                header(writer)
        if parts > 1:
            writer.add_uint16("split.no", part)
            writer.add_uint16("split.count", parts)
            writer.add_int32("split.tensors.count", len(names))
        for name in names[part * len(names) // parts : (part + 1) * len(names) // parts]:
            writer.add_tensor(name, tensors[name][0], raw_dtype=tensors[name][1])
        _finish(writer)
    return files


def _add(writer: Any, **values: Any) -> None:
    for name, value in values.items():
        getattr(writer, f"add_{name}")(value)


def _finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
