"""Sizes of published models, whose weights are not needed to take as long as they do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """A published model's sizes.

    Attributes:
        kind: "llama" or "qwen2" (biases of q, k and v).
        rope_theta: of the rotary positions.
    """

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    kind: str = "llama"
    rope_theta: float = 10000.0

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def layer_weights(self) -> int:
        """Of the matrices of a layer."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * self.inner


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("llama2-7b", 4096, 11008, 32, 32, 32, 32000),
        Shape("vicuna-7b", 4096, 11008, 32, 32, 32, 32000),
        Shape("vicuna-13b", 5120, 13824, 40, 40, 40, 32000),
        Shape("llama2-70b", 8192, 28672, 80, 64, 8, 32000),
        Shape("llama3-8b", 4096, 14336, 32, 32, 8, 128256, rope_theta=500000.0),
        Shape("qwen2-7b", 3584, 18944, 28, 28, 4, 152064, kind="qwen2", rope_theta=1e6),
    )
}


def config_of(shape: Shape) -> Any:
    """The configuration of transformers' model of a shape."""
    from transformers import LlamaConfig, Qwen2Config

    make = {"llama": LlamaConfig, "qwen2": Qwen2Config}[shape.kind]
    return make(
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocab,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=False,
    )


def growth_of(shape: Shape, model: Any) -> dict[str, int]:
    """Arguments of `tiny.grown` with which a model becomes as wide and deep as a shape.

    Raises:
        ValueError: it cannot; names what the shape would have to be.
    """
    given = model.config
    times = shape.hidden // given.hidden_size
    heads = shape.kv_heads * shape.head_dim // given.head_dim
    least = (
        ("hidden", shape.hidden % given.hidden_size == 0, f"a multiple of {given.hidden_size}"),
        ("inner", shape.inner >= times * given.intermediate_size,
         f">= {times * given.intermediate_size}"),
        ("layers", shape.layers >= given.num_hidden_layers, f">= {given.num_hidden_layers}"),
        ("kv_heads", heads % given.num_key_value_heads == 0,
         f"a multiple of {given.num_key_value_heads} heads of {given.head_dim}"),
        ("kind", shape.kind == "llama", "llama"),
    )  # fmt: skip
    for name, holds, wanted in least:
        if not holds:
            raise ValueError(
                f"{shape.name}: {name}: expected {wanted} to grow {given.hidden_size} wide models "
                f"to, given {getattr(shape, name)}"
            )
    return {
        "times": times,
        "layers": shape.layers,
        "intermediate_size": shape.inner,
        "key_value_heads": heads,
    }
