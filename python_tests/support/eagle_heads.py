"""EAGLE checkpoints with random weights, and their forward pass plainly, in float64."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from small_models import llama

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Variant:
    """An EAGLE head; every field is a property of a published kind of checkpoint."""

    name: str
    version: int = 1
    speculators: bool = False
    binary: bool = False
    hidden: int = 16
    inner: int = 24
    heads: int = 4
    kv_heads: int = 4
    head_dim: int | None = None
    layers: int = 1
    vocab: int = 40
    draft_vocab: int | None = None
    target_hidden: int | None = None
    aux: tuple[int, ...] | None = None
    nested_aux: bool = False
    use_aux: bool = True
    fc_bias: bool | None = None  # None: the configuration does not say
    qkv_bias: bool = False
    attention_bias: bool = False
    own_embeddings: bool = False
    own_head: bool = False
    norm_before_residual: bool | None = None
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    rope_scaling: Mapping[str, Any] | None = None
    extra: bool = False  # tensors that are to be skipped

    @property
    def third(self) -> bool:
        return self.version == 3

    @property
    def feature_width(self) -> int:
        return self.target_hidden or self.hidden

    def aux_layers(self, target_layers: int) -> tuple[int, ...]:
        if not self.third or not self.use_aux:
            return (-1,)
        return self.aux or (2, target_layers // 2, target_layers - 3)


def variants() -> list[Variant]:
    third: dict[str, Any] = {"version": 3, "own_head": True}
    scaled = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    return [
        Variant("eagle1"),
        Variant("eagle1 bin", binary=True, own_embeddings=True),
        Variant("eagle1 without bias", fc_bias=False, kv_heads=2),
        Variant("eagle1 qwen2", qkv_bias=True, kv_heads=2, fc_bias=True),
        Variant("eagle1 attention bias", attention_bias=True, extra=True),
        Variant("eagle1 of two layers", layers=2),
        Variant("eagle1 own head", own_head=True, head_dim=8),
        Variant("eagle1 speculators", speculators=True),
        Variant("eagle1 speculators with bias", speculators=True, fc_bias=True),
        Variant("eagle3", **third, draft_vocab=24, extra=True),
        Variant("eagle3 bin", **third, binary=True, draft_vocab=24, kv_heads=1),
        Variant("eagle3 full vocabulary", **third, aux=(1, 3, 4)),
        Variant("eagle3 target's head", version=3),
        Variant("eagle3 wide target", **third, target_hidden=12, own_embeddings=True),
        Variant("eagle3 nested", **third, aux=(0, 5), nested_aux=True, head_dim=6),
        Variant("eagle3 without aux", **third, use_aux=False, nested_aux=True),
        Variant("eagle3 norm before fc", **third, norm_before_fc=True),
        Variant("eagle3.1", **third, fc_norm=True, norm_output=True, draft_vocab=20),
        Variant("eagle3 of three layers", **third, layers=3, attention_bias=True),
        Variant("eagle3 scaled", **third, rope_scaling=scaled, kv_heads=2),
        Variant("eagle3 residual", **third, norm_before_residual=True),
        Variant("speculators", **third, speculators=True, draft_vocab=24, extra=True),
        Variant("speculators plain residual", **third, speculators=True,
                norm_before_residual=False, draft_vocab=40),
        Variant("speculators norms", **third, speculators=True, norm_before_fc=True,
                norm_output=True, aux=(2, 4, 6), layers=2),
    ]  # fmt: skip


def config_of(v: Variant) -> dict[str, Any]:
    layer: dict[str, Any] = {
        "model_type": "llama", "hidden_size": v.hidden, "intermediate_size": v.inner,
        "num_attention_heads": v.heads, "num_key_value_heads": v.kv_heads,
        "num_hidden_layers": v.layers, "vocab_size": v.vocab, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256, "rope_theta": 10000.0, "hidden_act": "silu",
    }  # fmt: skip
    bias = None if v.third else v.fc_bias
    layer |= {"head_dim": v.head_dim, "rope_scaling": v.rope_scaling}
    layer |= {"qkv_bias": v.qkv_bias or None, "attention_bias": v.attention_bias or None}
    top: dict[str, Any] = {}
    if v.third:
        inner = {
            "eagle_aux_hidden_state_layer_ids": v.aux,
            "use_aux_hidden_state": None if v.use_aux else False,
        }
        top = {"eagle_config": _said(inner)} if v.nested_aux else inner
        for key in ("norm_before_fc", "fc_norm", "norm_output"):
            top[key] = getattr(v, key) or None
        top["norm_before_residual"] = v.norm_before_residual
        top |= {"draft_vocab_size": v.draft_vocab, "target_hidden_size": v.target_hidden}
    if v.speculators:
        top |= {"speculators_model_type": "eagle3" if v.third else "eagle", "fusion_bias": bias}
        top |= {"transformer_layer_config": _said(layer), "architectures": ["Speculator"]}
        return _said(top)
    names = ["LlamaForCausalLMEagle3"] if v.third else ["LlamaForCausalLM"]
    return _said({**layer, **top, "bias": bias, "architectures": names})


def _said(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


class Random:
    """Random weights under the published names.

    Attributes:
        found: so far.
    """

    def __init__(self, seed: int) -> None:
        self.generator, self.found = torch.Generator().manual_seed(seed), Weights()

    def normal(self, *shape: int, size: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator) * size / math.sqrt(shape[-1])

    def gain(self, size: int) -> torch.Tensor:
        return 1 + 0.3 * torch.randn(size, generator=self.generator)

    def layer(self, name: str, v: Any, given: int, biased: str) -> None:
        """Add the projections and the MLP of a layer that reads `given` features. `biased`: the
        letters of "qkvo" with a bias."""
        dim = v.head_dim or v.hidden // v.heads
        queries, keys = v.heads * dim, v.kv_heads * dim
        for key, rows, columns in (
            ("q", queries, given), ("k", keys, given), ("v", keys, given), ("o", v.hidden, queries),
        ):  # fmt: skip
            self.found[f"{name}.self_attn.{key}_proj.weight"] = self.normal(rows, columns)
            if key in biased:
                self.found[f"{name}.self_attn.{key}_proj.bias"] = self.normal(rows)
        for key in ("gate", "up"):
            self.found[f"{name}.mlp.{key}_proj.weight"] = self.normal(v.inner, v.hidden)
        self.found[f"{name}.mlp.down_proj.weight"] = self.normal(v.hidden, v.inner)
        self.found[f"{name}.post_attention_layernorm.weight"] = self.gain(v.hidden)


def weights_of(v: Variant, target_layers: int, seed: int = 0) -> Weights:
    random = Random(seed)
    normal, gain = random.normal, random.gain
    width, found = v.hidden, random.found
    fused = "fusion_fc" if v.speculators and not v.third else "fc"
    first = "midlayer" if v.third and not v.speculators else "layers.0"
    if v.speculators and not v.third:
        first = "transformer"
    if not v.third:
        found[f"{fused}.weight"] = normal(width, 2 * width)
        if v.fc_bias if v.speculators else v.fc_bias is not False:
            found[f"{fused}.bias"] = normal(width)
    elif v.use_aux:
        count = len(v.aux_layers(target_layers))
        found["fc.weight"] = normal(width, count * v.feature_width)
        if v.norm_before_fc:
            found["input_norm.weight"] = gain(count * v.feature_width)
        for i in range(count if v.fc_norm else 0):
            found[f"fc_norm.{i}.weight"] = gain(v.feature_width)
    for i in range(v.layers):
        name = first if i == 0 else f"layers.{i}"
        given = 2 * width if v.third and i == 0 else width
        random.layer(name, v, given, "qkvo" if v.attention_bias else "qkv" * v.qkv_bias)
        if v.third or i > 0:
            found[f"{name}.input_layernorm.weight"] = gain(width)
        if v.third and i == 0:
            found[f"{name}.hidden_norm.weight"] = gain(width)
    if v.third:
        found["norm.weight"] = gain(width)
    if v.own_embeddings:
        found["embed_tokens.weight"] = normal(v.vocab, width) * 4
    if v.own_head:
        found["lm_head.weight"] = normal(v.draft_vocab or v.vocab, width) * 4
    ids = torch.arange(v.vocab)
    if v.draft_vocab is not None:
        ids = torch.randperm(v.vocab, generator=random.generator)[: v.draft_vocab].sort().values
        found["d2t"] = ids - torch.arange(v.draft_vocab)
    if v.extra:
        found["t2d"] = torch.zeros(v.vocab, dtype=torch.bool).index_fill(0, ids, True)
        if v.speculators:
            found["verifier_norm.weight"] = gain(width)
            found["verifier_lm_head.weight"] = normal(3, width)
        found[f"{first}.self_attn.rotary_emb.inv_freq"] = normal(4)
    return found


def save(v: Variant, weights: Weights, place: Path) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(config_of(v)))
    if v.binary:
        torch.save(weights, place / "pytorch_model.bin")
    else:
        save_file(weights, place / "model.safetensors")
    return place


def target_of(v: Variant, layers: int = 8, dtype: torch.dtype = torch.float32) -> Any:
    """Return a random target of a head; only embeddings and output head matter."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False}
    sizes = {"hidden_size": v.feature_width, "intermediate_size": 8}
    model = llama(5, layers, v.vocab, **heads, **sizes).to(dtype)
    with torch.no_grad():
        model.lm_head.weight.normal_()
        model.model.embed_tokens.weight.normal_()
    return model


class Layers:
    """The layers of a head over one text, in double precision.

    Args:
        weights: under the published names.
        target: its embeddings and output head replace missing weights.
    """

    def __init__(self, v: Any, weights: Weights, target: Any) -> None:
        self.v, self.dim = v, v.head_dim or v.hidden // v.heads
        self.w = {
            key: value.double() if value.is_floating_point() else value
            for key, value in weights.items()
        }
        given = target.get_input_embeddings().weight, target.get_output_embeddings().weight
        for key, weight in zip(("embed_tokens.weight", "lm_head.weight"), given, strict=True):
            self.w.setdefault(key, weight.detach().double())

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits over the target's vocabulary, -inf for ids without an entry."""
        if "d2t" not in self.w:
            return logits
        full = torch.full((self.v.vocab,), -math.inf, dtype=torch.float64)
        full[torch.arange(len(logits)) + self.w["d2t"]] = logits
        return full

    def norm(self, x: torch.Tensor, key: str) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * self.w[f"{key}.weight"]

    def linear(self, x: torch.Tensor, key: str) -> torch.Tensor:
        out = x @ self.w[f"{key}.weight"].T
        return out + self.w[f"{key}.bias"] if f"{key}.bias" in self.w else out

    def layer(self, x, given, name, sees, *before) -> torch.Tensor:
        """Return x after a layer that reads `given`. `sees`: ``[n, m]`` bool, the keys of a query;
        the first are the keys of the states `before`."""
        x = x + self.attention(given, f"{name}.self_attn", sees, *before)
        given = self.norm(x, f"{name}.post_attention_layernorm")
        gate, up = (self.linear(given, f"{name}.mlp.{key}_proj") for key in ("gate", "up"))
        return x + self.linear(gate * torch.sigmoid(gate) * up, f"{name}.mlp.down_proj")

    def attention(self, x, name, sees, *before) -> torch.Tensor:
        whole, shared = torch.cat([*before, x]), self.v.heads // self.v.kv_heads
        q, k, values = (
            self.linear(y, f"{name}.{key}_proj").view(len(y), -1, self.dim)
            for key, y in (("q", x), ("k", whole), ("v", whole))
        )
        if f"{name}.q_norm.weight" in self.w:
            q, k = self.norm(q, f"{name}.q_norm"), self.norm(k, f"{name}.k_norm")
        q, k = self.rotate(q, len(whole) - len(x)), self.rotate(k).repeat_interleave(shared, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(self.dim)
        weights = scores.masked_fill(~sees, -math.inf).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(shared, 1))
        return self.linear(mixed.reshape(len(x), -1), f"{name}.o_proj")

    def rotate(self, x: torch.Tensor, begin: int = 0) -> torch.Tensor:
        half = self.dim // 2
        speed = torch.tensor([self.frequency(i) for i in range(half)]).double()
        angles = torch.outer(torch.arange(begin, begin + len(x)).double(), speed)[:, None]
        low, high = x.split(half, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

    def frequency(self, i: int) -> float:
        plain = 10000.0 ** (-2 * i / self.dim)
        scaling = getattr(self.v, "rope_scaling", None)
        if scaling is None:
            return plain
        # Llama 3.1: long wavelengths are stretched, short ones stay, the rest is blended.
        waves = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        if waves < low:
            return float(plain / scaling["factor"])
        if waves > high:
            return plain
        blend = (waves - low) / (high - low)
        return float((1 - blend) * plain / scaling["factor"] + blend * plain)


class Reference(Layers):
    """The forward pass of a head over one text."""

    def __init__(self, v: Variant, weights: Weights, target: Any) -> None:
        super().__init__(v, weights, target)
        names = ("midlayer", "transformer", "layers.0")
        self.first = next(name for name in names if f"{name}.mlp.up_proj.weight" in weights)

    def draft(self, tokens: Sequence[int], features: torch.Tensor, count: int) -> torch.Tensor:
        """Greedy: the logits ``[count, V]`` that each token was drawn from, over the target's
        vocabulary.

        Args:
            tokens: x_0 ... x_{N-1}.
            features: ``[N - 1, F]``, the target's states after x_0 ... x_{N-2}.
        """
        pairs, rows = list(zip(tokens[1:], self.fused(features.double()), strict=True)), []
        for _ in range(count):
            logits, state = self.behind(pairs)
            rows.append(logits)
            pairs.append((int(logits.argmax()), state))
        return torch.stack(rows)

    def behind(self, pairs) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits over the target's vocabulary and the state handed on, after the last
        pair."""
        tokens, states = zip(*pairs, strict=True)
        out = self.states(tokens, torch.stack(states))[-1]
        normed = self.norm(out, "norm") if self.v.third else out
        logits = self.spread(self.w["lm_head.weight"] @ normed)
        return logits, normed if self.v.norm_output else out

    def fused(self, features: torch.Tensor) -> torch.Tensor:
        if not self.v.third or not self.v.use_aux:
            return features
        if self.v.norm_before_fc:
            features = self.norm(features, "input_norm")
        if self.v.fc_norm:
            parts = enumerate(features.split(self.v.feature_width, -1))
            features = torch.cat([self.norm(part, f"fc_norm.{i}") for i, part in parts], -1)
        return self.linear(features, "fc")

    def states(self, tokens: Sequence[int], x: torch.Tensor) -> torch.Tensor:
        v, embeds = self.v, self.w["embed_tokens.weight"][list(tokens)]
        if not v.third:
            key = "fusion_fc" if "fusion_fc.weight" in self.w else "fc"
            x = self.linear(torch.cat([embeds, x], 1), key)
        sees = torch.ones(len(x), len(x), dtype=torch.bool).tril()
        for i in range(v.layers):
            name = self.first if i == 0 else f"layers.{i}"
            given = x
            if v.third and i == 0:
                normed = self.norm(x, f"{name}.hidden_norm")
                given = torch.cat([self.norm(embeds, f"{name}.input_layernorm"), normed], 1)
                residual = v.norm_before_residual
                if residual is None:
                    residual = v.speculators
                x = normed if residual else x
            elif i > 0:
                given = self.norm(x, f"{name}.input_layernorm")
            x = self.layer(x, given, name, sees)
        return x
