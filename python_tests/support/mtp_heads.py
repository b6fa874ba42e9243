"""Tiny models with a multi-token prediction head, and its forward pass plainly."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers as hf
from safetensors.torch import load_file, save_file

V = 64
LAYERS = 3  # of the targets
_SIZES: dict[str, Any] = {
    "vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_hidden_layers": LAYERS, "max_position_embeddings": 256, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_GROUPED = {**_SIZES, "num_key_value_heads": 2, "head_dim": 8}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_ROUTED = {**_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
           "v_head_dim": 6}  # fmt: skip
_INDEX = {"index_topk": 64, "index_n_heads": 2, "index_head_dim": 8}
_LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}  # fmt: skip
_QWEN_EXPERTS = {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16}
_MAMBA = {"ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 1,
          "chunk_size": 8, "conv_kernel": 3, "moe_shared_expert_intermediate_size": 16,
          "layer_types": ["linear_attention", "full_attention", "moe"]}  # fmt: skip


class Family(NamedTuple):
    """A family of models.

    Attributes:
        kind, values: class and values of a target's configuration.
        layout: of the head's tensors: "deepseek", "qwen", "mimo" or "nemotron".
        fused: its checkpoints have the experts' matrices stacked.
    """

    kind: str
    values: dict[str, Any]
    layout: str
    fused: bool = False

    def config(self, **sizes: int) -> Any:
        return getattr(hf, self.kind)(**{**self.values, **sizes})


_DENSE_FIRST = {**_ROUTED, "first_k_dense_replace": 1}
_WIDE = {**_SIZES, "num_key_value_heads": 4}
FAMILIES: dict[str, Family] = {
    "deepseek_v3": Family("DeepseekV3Config", {**_WIDE, **_DENSE_FIRST, **_LATENT}, "deepseek"),
    "deepseek_v32": Family(
        "DeepseekV32Config", {**_WIDE, **_DENSE_FIRST, **_LATENT, **_INDEX}, "deepseek"
    ),
    "glm4_moe": Family(
        "Glm4MoeConfig", {**_GROUPED, **_DENSE_FIRST, "use_qk_norm": True}, "deepseek"
    ),
    "glm4_moe_lite": Family("Glm4MoeLiteConfig", {**_WIDE, **_ROUTED, **_LATENT}, "deepseek"),
    "qwen3_next": Family("Qwen3NextConfig", {**_GROUPED, **_QWEN_EXPERTS, **_LINEAR}, "qwen"),
    "qwen3_5": Family("Qwen3_5TextConfig", {**_GROUPED, **_LINEAR}, "qwen"),
    "qwen3_5_moe": Family(
        "Qwen3_5MoeTextConfig", {**_GROUPED, **_QWEN_EXPERTS, **_LINEAR}, "qwen", True
    ),
    "mimo": Family("Qwen2Config", _GROUPED, "mimo"),
    "nemotron_h": Family("NemotronHConfig", {**_GROUPED, **_ROUTED, **_MAMBA}, "nemotron"),
}


def target_of(family: str, **sizes: int) -> Any:
    """Make a random target, sharp enough that greedy texts are not all the same token."""
    return _random(FAMILIES[family].config(**sizes), 0)


def _random(config: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    model = hf.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.25)
            else:
                parameter += 0.3 * torch.randn_like(parameter)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.1)
    return model


@dataclass
class Head:
    """Modules of a head, and its product of embedding and state."""

    layers: Any
    norm: Any
    embed_norm: Any
    state_norm: Any
    fc: torch.Tensor


class Reference:
    """Heads with random weights: the layers of each come from another model of the family.

    Args:
        family: of `FAMILIES`.
        target: the heads read its embeddings and output head.
        heads: how many; the first drafts.
    """

    def __init__(self, family: str, target: Any, heads: int = 1, **sizes: int) -> None:
        self.family, self.target = FAMILIES[family], target
        config = self.family.config(**sizes)
        nemotron = self.family.layout == "nemotron"
        kinds = ["full_attention", "moe"] if nemotron else ["full_attention"]
        if getattr(config, "layer_types", None) is not None:
            config.layer_types = kinds
        if getattr(config, "mlp_layer_types", None) is not None:
            config.mlp_layer_types = ["sparse"]
        if hasattr(config, "first_k_dense_replace"):
            config.first_k_dense_replace = 0
        if not nemotron:
            config.num_hidden_layers = 1
        self.heads: list[Head] = []
        for number in range(heads):
            body = _random(config, 7 + number).model
            self.rotary = getattr(body, "rotary_emb", None)
            norm = body.norm_f if nemotron else body.norm
            width = target.config.hidden_size
            eps = getattr(config, "rms_norm_eps", None) or config.layer_norm_epsilon
            norms = [type(norm)(width, eps=eps) for _ in range(2)]
            with torch.no_grad():
                for each in norms:
                    each.weight += 0.3 * torch.randn(width)
            self.heads.append(Head(body.layers, norm, *norms, torch.randn(width, 2 * width) / 8))
            if self.family.layout == "qwen":  # all but the layers are shared
                self.heads[number] = replace(self.heads[0], layers=body.layers)

    @torch.no_grad()
    def behind(self, tokens: Sequence[int], states: torch.Tensor) -> torch.Tensor:
        """Return the first head's states ``[n, H]`` after pairs of tokens and states."""
        head = self.heads[0]
        embeds = self.target.get_input_embeddings()(torch.tensor(tokens))[None]
        pair = [head.embed_norm(embeds), head.state_norm(states[None])]
        if self.family.layout == "mimo":
            pair.reverse()
        x, count = torch.cat(pair, -1) @ head.fc.T, len(tokens)
        mask = torch.full((count, count), torch.finfo(torch.float32).min).triu(1)[None, None]
        options: dict[str, Any] = {}
        if self.rotary is not None:
            options["position_embeddings"] = self.rotary(x, torch.arange(count)[None])
        for layer in head.layers:
            x = layer(x, attention_mask=mask, **options)
        out: torch.Tensor = head.norm(x)[0]
        return out

    @torch.no_grad()
    def draft(self, text, states, drafted) -> torch.Tensor:
        """Return the logits ``[n, V]`` that the `drafted` tokens after a text are drawn from."""
        tokens, rows = [*text, *drafted], []
        for _ in drafted:
            behind = self.behind(tokens[1:][: len(states)], states)
            states = torch.cat([states, behind[-1:]])
            rows.append(self.target.get_output_embeddings()(behind[-1]))
        return torch.stack(rows)

    def tensors(self, layers: int = LAYERS) -> dict[str, torch.Tensor]:
        """Return the weights under the names in a checkpoint of a target of so many layers."""
        found: dict[str, torch.Tensor] = {}
        for number, head in enumerate(self.heads):
            count = len(head.layers)
            if self.family.layout == "deepseek":
                begin = f"model.layers.{layers + number}."
                parts = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
            elif self.family.layout == "qwen":
                begin = "mtp."
                parts = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
            elif self.family.layout == "mimo":
                begin = f"model.mtp_layers.{number}."
                parts = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
            else:
                begin, first = "mtp.layers.", number * count
                parts = (f"{first}.enorm", f"{first}.hnorm", f"{first}.eh_proj",
                         f"{first + 1}.final_layernorm")  # fmt: skip
            weights = (head.embed_norm.weight, head.state_norm.weight, head.fc, head.norm.weight)
            found |= {f"{begin}{part}.weight": w for part, w in zip(parts, weights, strict=True)}
            inner = {"qwen": "layers.{}.", "nemotron": "{}."}.get(self.family.layout, "")
            for i, layer in enumerate(head.layers):
                at = begin + inner.format(number * count + i)
                for key, value in layer.state_dict().items():
                    found |= {at + name: w for name, w in self._published(key, value)}
            if self.family.layout == "deepseek":
                model = self.target
                found[f"{begin}shared_head.head.weight"] = model.get_output_embeddings().weight
                found[f"{begin}embed_tokens.weight"] = model.get_input_embeddings().weight
        return {name: weight.detach().clone() for name, weight in found.items()}

    def _published(self, key: str, value: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        match = re.fullmatch(r"(.*experts)\.(gate_up_proj|up_proj|down_proj)", key)
        if match is None or self.family.fused:
            return [(key, value)]
        begin, product = match.groups()
        names = ("gate_proj", "up_proj") if product == "gate_up_proj" else (product,)
        return [
            (f"{begin}.{number}.{name}.weight", part)
            for number, matrix in enumerate(value)
            for name, part in zip(names, matrix.chunk(len(names)), strict=True)
        ]


def save(target: Any, tensors: dict[str, torch.Tensor], place: Path) -> Path:
    target.save_pretrained(place)
    file = place / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, metadata={"format": "pt"})
    return place


def change_config(place: Path, **values: Any) -> None:
    file = place / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
