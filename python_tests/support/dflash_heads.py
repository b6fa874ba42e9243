"""DFlash and DSpark checkpoints with random weights, and their forward pass plainly."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from eagle_heads import Layers, Random, Weights
from safetensors.torch import save_file
from small_models import llama, sharp


@dataclass(frozen=True)
class Variant:
    """A drafter of blocks; every field is a property of published checkpoints."""

    name: str
    kind: str = "zlab"  # zlab, dspark (of DeepSeek), assistant (of transformers), or of speculators
    hidden: int = 16
    inner: int = 24
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    layers: int = 2
    vocab: int = 40
    mask: int = 39
    block: int = 5
    target_layers: tuple[int, ...] = (1, 3)  # layers with outputs that the drafter reads
    nested: bool = True  # keys in dflash_config
    draft_vocab: int | None = None
    rank: int = 0
    from_anchor: bool | None = None  # None: the configuration does not say
    sliding: tuple[bool, ...] = ()
    window: int | None = None
    causal: bool | None = None
    own: bool = False  # embeddings and output head
    bias: bool = False
    values: Mapping[str, Any] | None = None  # factors, and a cap, of logits and embeddings

    @property
    def speculators(self) -> bool:
        return self.kind.startswith("speculators")

    @property
    def anchored(self) -> bool:
        return "dspark" in self.kind if self.from_anchor is None else self.from_anchor

    @property
    def drafts(self) -> int:
        return self.block if self.anchored else self.block - 1


def variants() -> list[Variant]:
    scaled = {"output_multiplier": 0.5, "final_logit_softcapping": 3.0, "input_embedding_scale": 2}
    mixed: dict[str, Any] = {"sliding": (True, False), "window": 4}
    return [
        Variant("z-lab", target_layers=(0, 2, 4)),
        Variant("z-lab, keys at the top", nested=False, block=3, kv_heads=4, layers=1),
        Variant("z-lab, scaled", values=scaled, bias=True),
        Variant("z-lab, sliding", **mixed),
        Variant("z-lab, sliding both ways", **mixed, causal=False),
        Variant("z-lab, causal", causal=True),
        Variant("assistant", "assistant", nested=False, sliding=(True, True), window=5),
        Variant("dspark of DeepSeek", "dspark", nested=False, rank=4, own=True),
        Variant("speculators", "speculators dflash", own=True, draft_vocab=24),
        Variant("speculators, all ids", "speculators dflash", draft_vocab=40, **mixed),
        Variant("speculators, from the anchor", "speculators dflash", from_anchor=True),
        Variant("speculators, both ways", "speculators dflash", **mixed, causal=False),
        Variant("dspark", "speculators dspark", rank=4, own=True, draft_vocab=24),
        Variant("dspark behind the anchor", "speculators dspark", rank=3, from_anchor=False),
    ]


def config_of(v: Variant) -> dict[str, Any]:
    layer: dict[str, Any] = {
        "model_type": "muse_glimmer_assistant" if v.kind == "assistant" else "qwen3",
        "hidden_size": v.hidden, "intermediate_size": v.inner, "head_dim": v.head_dim,
        "num_attention_heads": v.heads, "num_key_value_heads": v.kv_heads,
        "num_hidden_layers": v.layers, "vocab_size": v.vocab, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256, "rope_theta": 10000.0, "attention_bias": v.bias,
        "hidden_act": "silu", "tie_word_embeddings": False,
    }  # fmt: skip
    if v.sliding:
        kinds = ["sliding_attention" if each else "full_attention" for each in v.sliding]
        layer |= {"layer_types": kinds, "sliding_window": v.window, "use_sliding_window": True}
    keys: dict[str, Any] = {"mask_token_id": v.mask, **(v.values or {})}
    if v.rank:
        keys |= {"markov_rank": v.rank, "markov_head_type": "vanilla"}
        keys |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
    if v.from_anchor is not None:
        keys["sample_from_anchor"] = v.from_anchor
    if not v.speculators:
        keys["target_layer_ids"] = list(v.target_layers)
        names = {"zlab": "DFlashDraftModel", "dspark": "Qwen3DSparkModel"}.get(v.kind, "Assistant")
        top = {"architectures": [names], "block_size": v.block, "num_target_layers": 6}
        if v.causal is not None:
            top["is_causal"] = v.causal
        return {**layer, **top, **({"dflash_config": keys} if v.nested else keys)}
    keys["aux_hidden_state_layer_ids"] = [number + 1 for number in v.target_layers]
    keys["sliding_window_non_causal"] = v.causal is False
    kind = v.kind.split()[1]
    return {
        "speculators_model_type": kind, "architectures": ["DFlashSpeculator"], **keys,
        "block_size": v.block, "draft_vocab_size": v.draft_vocab, "projector_type": "dflash",
        "speculators_config": {"algorithm": kind}, "transformer_layer_config": layer,
    }  # fmt: skip


def weights_of(v: Variant, seed: int = 0) -> Weights:
    """Random, under the published names."""
    random = Random(seed)
    normal, gain, found = random.normal, random.gain, random.found
    width, fused = v.hidden, len(v.target_layers) * v.hidden
    other = v.kind == "assistant"
    found |= {
        "encoder.fc.weight" if other else "fc.weight": normal(width, fused),
        "encoder.output_norm_enc.weight" if other else "hidden_norm.weight": gain(width),
        "norm.weight": gain(width),
    }
    for name in (f"layers.{i}" for i in range(v.layers)):
        random.layer(name, v, width, "qkvo" * v.bias)
        for key in ("self_attn.q_norm", "self_attn.k_norm"):
            found[f"{name}.{key}.weight"] = gain(v.head_dim)
        found[f"{name}.input_layernorm.weight"] = gain(width)
    drawn = v.draft_vocab or v.vocab
    if v.own:
        found["embed_tokens.weight"] = normal(v.vocab, width, size=4)
        found["lm_head.weight"] = normal(drawn, width, size=4)
    if v.rank:
        found["markov_head.markov_w1.weight"] = normal(v.vocab, v.rank, size=3)
        found["markov_head.markov_w2.weight"] = normal(drawn, v.rank, size=3)
        found["confidence_head.proj.weight"] = normal(1, width + v.rank)
    if drawn < v.vocab:
        # In no order: the head's rows are in that of these ids.
        ids = torch.randperm(v.vocab, generator=random.generator)[:drawn]
        found["d2t"] = ids - torch.arange(drawn)
        found["t2d"] = torch.zeros(v.vocab, dtype=torch.bool).index_fill(0, ids, True)
    return found


def save(v: Variant, weights: Weights, place: Path, **changes: Any) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps({**config_of(v), **changes}))
    save_file(weights, place / "model.safetensors")
    return place


def target_of(v: Variant, layers: int = 6) -> Any:
    """Return a random target with embeddings and an output head for the drafter."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False}
    sizes = {"hidden_size": v.hidden, "intermediate_size": 8, "eos_token_id": None}
    return sharp(llama(5, layers, v.vocab, **heads, **sizes))


class Reference(Layers):
    """The forward pass of a drafter over one text."""

    def __init__(self, v: Variant, weights: Weights, target: Any) -> None:
        names = {"encoder.fc.weight": "fc.weight"}
        names["encoder.output_norm_enc.weight"] = "hidden_norm.weight"
        super().__init__(v, {names.get(key, key): own for key, own in weights.items()}, target)

    @torch.no_grad()
    def draft(self, text, features, drafted) -> torch.Tensor:
        """Return the logits ``[n, V]`` that each of the `drafted` tokens is drawn from, -inf for
        ids without an entry.

        Args:
            text: x_0 ... x_{N-1}.
            features: ``[N - 1, F]``, the target's states of x_0 ... x_{N-2}.
        """
        v, w, values = self.v, self.w, self.v.values or {}
        block = [text[-1], *[v.mask] * (v.block - 1)]
        x = w["embed_tokens.weight"][block] * values.get("input_embedding_scale", 1.0)
        context = self.norm(features.double() @ w["fc.weight"].T, "hidden_norm")
        for i in range(v.layers):
            given = self.norm(x, f"layers.{i}.input_layernorm")
            places = range(len(text) - 1 + len(block))
            sees = [[self.sees(q, k, i) for k in places] for q in places[len(text) - 1 :]]
            x = self.layer(x, given, f"layers.{i}", torch.tensor(sees), context)
        logits = self.norm(x, "norm")[0 if v.anchored else 1 :] @ w["lm_head.weight"].T
        logits = logits * values.get("output_multiplier", 1.0)
        if cap := values.get("final_logit_softcapping"):
            logits = cap * torch.tanh(logits / cap)
        rows = []
        for before, row in zip([text[-1], *drafted][: len(drafted)], logits, strict=False):
            if v.rank:
                inner = w["markov_head.markov_w1.weight"][before]
                row = row + w["markov_head.markov_w2.weight"] @ inner
            rows.append(self.spread(row))
        return torch.stack(rows)

    def sees(self, query: int, key: int, layer: int) -> bool:
        v = self.v
        sliding = bool(v.sliding) and v.sliding[layer]
        causal = sliding and v.kind != "assistant" if v.causal is None else v.causal
        if v.speculators:
            causal = sliding and v.causal is not False
        if causal and key > query:
            return False
        if not sliding:
            return True
        return abs(query - key) < v.window + (v.kind == "assistant")
