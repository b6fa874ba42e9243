"""Read the header of a GGUF file as a configuration of transformers.

A value of the architecture that is not read here is refused by name: a model that left it out would
be another one.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from ..arguments import shown
from .gguf_file import GgufFile

# Architectures of files, and what transformers calls them.
FAMILIES = {
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}
HEAD, EMBEDDINGS = "output.weight", "token_embd.weight"
_CONTROL = 3  # type of tokens that are no text
# Control tokens that end a turn or a text whether or not the header has their ids.
_ENDS = (
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>",
    "<end_of_turn>", "<end_of_utterance>", "<EOT>", "[EOT]",
)  # fmt: skip
_SENTENCEPIECE = {"bos": 1, "eos": 2}  # ids of files that do not say
_LAYERS_27B = {"gemma2": 46, "gemma3": 62}  # whose queries are scaled otherwise


def config_of(file: GgufFile, dtype: torch.dtype) -> Any:
    """Return the configuration of a file's model. Sizes are those of tensors in the file, so that
    nothing is made larger than the file.

    Raises:
        ValueError: another architecture, a value that is missing or of another kind, or one that
            would not be followed; names it.
    """
    from transformers import AutoConfig

    header = _Header(file)
    family = header.family
    heads = header.size("attention.head_count")
    rows, hidden = file.tensors[EMBEDDINGS].shape
    header.require("embedding_length", hidden, there=True)
    width = header.size("attention.key_length", max(1, hidden // heads))
    groups = header.size("attention.head_count_kv", heads)
    if heads % groups or width % 2:
        raise ValueError(
            f"{family}.attention: expected a number of heads that is a multiple of head_count_kv, "
            f"of an even width, given {heads}, {groups} and width {width}"
        )
    layers = header.integer("block_count")
    numbers = {name.split(".")[1] for name in file.tensors if name.startswith("blk.")}
    if numbers != {str(i) for i in range(min(layers, len(numbers) + 1))}:
        raise ValueError(
            f"{family}.block_count: expected the number of layers that have tensors, "
            f"{len(numbers)}, given {layers}"
        )
    values: dict[str, Any] = {
        "max_position_embeddings": header.integer("context_length"),
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": header.size("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": width,
        "rms_norm_eps": header.positive("attention.layer_norm_rms_epsilon"),
        "rope_parameters": header.rope(),
        "tie_word_embeddings": HEAD not in file.tensors,
        "bos_token_id": header.token("bos"),
        "pad_token_id": header.token("padding"),
        "eos_token_id": header.ends(),
    }
    for key, expected in (
        ("attention.value_length", width),
        ("rope.dimension_count", width),
        ("vocab_size", rows),
        ("attention.causal", True),
        ("expert_count", 0),
        ("expert_used_count", 0),
        ("nextn_predict_layers", 0),
        ("tensor_data_layout", "Meta AI original pth"),
    ):
        header.require(key, expected)
    if family == "llama":
        values["attention_bias"] = any(".attn_" in name for name in _biases(file))
        values["mlp_bias"] = any(".ffn_" in name for name in _biases(file))
    elif family in _LAYERS_27B:
        values |= header.gemma(layers, hidden // heads if layers == _LAYERS_27B[family] else width)
    header.require_read()
    return AutoConfig.for_model(FAMILIES[family], vocab_size=rows, dtype=dtype, **values)


def _biases(file: GgufFile) -> list[str]:
    return [name for name in file.tensors if name.endswith(".bias")]


class _Header:
    """Values of a header, each of which is read once."""

    def __init__(self, file: GgufFile) -> None:
        about = file.metadata
        kind = about.get("general.type", "model")
        self.family: str = about.get("general.architecture", "")
        if kind != "model":
            raise ValueError(f"general.type: expected a model, given {shown(kind)}")
        if self.family not in FAMILIES:
            raise ValueError(
                f"general.architecture: expected one of {', '.join(FAMILIES)}, given "
                f"{shown(self.family)}"
            )
        embeddings = file.tensors.get(EMBEDDINGS)
        if embeddings is None or len(embeddings.shape) != 2:
            raise ValueError(f"expected a matrix {EMBEDDINGS} in the file, given none")
        self._values, self._prefix = about, f"{self.family}."
        self._unread = {key for key in about if key.startswith(self._prefix)}
        self._largest = max(size for tensor in file.tensors.values() for size in tensor.shape)
        self._ids = embeddings.shape[0]

    def _of(self, key: str) -> Any:
        """Return a value, or None. Of an array, one for each layer, what all of it is."""
        self._unread.discard(self._prefix + key)
        value, layers = (self._values.get(self._prefix + each) for each in (key, "block_count"))
        if isinstance(value, np.ndarray):
            value = value.tolist()
            if type(layers) is int and len(value) == layers and len({*value}) == 1:
                value = value[0]
        return value

    def _error(self, key: str, expected: object, given: object) -> ValueError:
        return ValueError(f"{self._prefix}{key}: expected {expected}, given {shown(given)}")

    def integer(self, key: str, default: int | None = None, largest: int = 2**31 - 1) -> int:
        found = self._of(key)
        value = default if found is None else found
        if type(value) is not int or not 1 <= value <= largest:
            raise self._error(key, f"an integer in [1, {largest}]", value)
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """Return a number that some tensor has at least as one of its sizes."""
        return self.integer(key, default, self._largest)

    def positive(self, key: str, default: float | None = None) -> float:
        found = self._of(key)
        value: Any = default if found is None else found
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self._error(key, "a number > 0", value)
        return float(value)

    def require(self, key: str, expected: object, there: bool = False) -> None:
        """Refuse another value than the model follows, and with `there` that there is none."""
        found = self._of(key)
        if (there or found is not None) and (type(found), found) != (type(expected), expected):
            raise self._error(key, expected, found)

    def require_read(self) -> None:
        if self._unread:
            key = min(self._unread)
            raise ValueError(f"expected a file without {key}, given {shown(self._values[key])}")

    def rope(self) -> dict[str, Any]:
        """Return how positions are rotated. Without a type, factors are linear."""
        kind = self._of("rope.scaling.type")
        kind = "linear" if kind is None else kind
        if kind not in ("linear", "none"):
            raise self._error("rope.scaling.type", "linear", kind)
        self.require("rope.scaling.attn_factor", 1.0)
        self._of("rope.scaling.finetuned")  # which changes nothing
        old, factor = self._of("rope.scale_linear"), self._of("rope.scaling.factor")
        factor = old if factor is None else factor
        made: dict[str, Any] = {
            "rope_type": "default",
            "rope_theta": self.positive("rope.freq_base", 10000.0),
        }
        if factor is not None and (type(factor) is not float or not 0 <= factor < math.inf):
            raise self._error("rope.scaling.factor", "a number >= 0", factor)
        if kind == "linear" and factor not in (None, 0.0, 1.0):  # 0 stands for none
            made |= {"rope_type": "linear", "factor": factor}
        return made

    def gemma(self, layers: int, scale: int) -> dict[str, Any]:
        """Return what configurations of Gemma 2 and 3 have besides."""
        rope = self.rope()
        if self.family == "gemma2":
            self.require("attention.sliding_window_pattern", 2)
            self.require("rope.freq_base_swa", rope["rope_theta"])
            return {
                "query_pre_attn_scalar": scale,
                "sliding_window": self.integer("attention.sliding_window", 4096),
                "attn_logit_softcapping": self.positive("attn_logit_softcapping", 50.0),
                "final_logit_softcapping": self.positive("final_logit_softcapping", 30.0),
            }
        self.require("attention.sliding_window_pattern", 6)
        cap, window = self._of("final_logit_softcapping"), self._of("attention.sliding_window")
        local = self.positive("rope.freq_base_swa", 10000.0)
        made = {
            "query_pre_attn_scalar": scale,
            "final_logit_softcapping": self.positive("final_logit_softcapping") if cap else None,
            "rope_parameters": {
                "full_attention": rope,
                "sliding_attention": {"rope_type": "default", "rope_theta": local},
            },
        }
        if window:
            return made | {"sliding_window": self.integer("attention.sliding_window")}
        return made | {"layer_types": ["full_attention"] * layers}

    def token(self, name: str) -> int | None:
        """Return the id of a special token, where the vocabulary has it."""
        kind = self._values.get("tokenizer.ggml.model")
        default = _SENTENCEPIECE.get(name) if kind == "llama" else None
        found = self._values.get(f"tokenizer.ggml.{name}_token_id", default)
        return found if type(found) is int and 0 <= found < self._ids else None

    def ends(self) -> list[int] | None:
        """Return the ids that end a text, a turn or a message."""
        found = {self.token(name) for name in ("eos", "eot", "eom")} - {None}
        tokens = self._values.get("tokenizer.ggml.tokens")
        kinds = self._values.get("tokenizer.ggml.token_type")
        if isinstance(tokens, list) and isinstance(kinds, np.ndarray):
            known = {text.encode() for text in _ENDS}
            found |= {
                i
                for i, (text, kind) in enumerate(zip(tokens, kinds.tolist(), strict=False))
                if kind == _CONTROL and text in known and i < self._ids
            }
        return sorted(i for i in found if i is not None) or None
