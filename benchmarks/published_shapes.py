"""Sizes of published models, whose weights are not needed to take as long as they do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """A published model's sizes."""

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    kind: str = "llama"  # or "qwen2" (biases of q, k and v)
    rope_theta: float = 10000.0  # of the rotary positions

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
        Shape("qwen2.5-0.5b", 896, 4864, 24, 14, 2, 151936, kind="qwen2", rope_theta=1e6),
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
    """Arguments with which `tiny.grown`, which checks the other sizes, makes a model as wide and
    deep as a shape.

    Raises:
        ValueError: it cannot; names what the shape would have to be.
    """
    width = model.config.hidden_size
    for name, holds, wanted in (
        ("hidden", shape.hidden % width == 0, f"a multiple of {width}"),
        ("kind", shape.kind == "llama", "llama"),
    ):
        if not holds:
            raise ValueError(
                f"{shape.name}: {name}: expected {wanted} to grow {width} wide models to, given "
                f"{getattr(shape, name)}"
            )
    return {
        "times": shape.hidden // width,
        "layers": shape.layers,
        "intermediate_size": shape.inner,
        "key_value_heads": shape.kv_heads * shape.head_dim // model.config.head_dim,
    }
