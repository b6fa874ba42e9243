"""EAGLE heads (`heads`): their network, and published checkpoints of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

from .. import arguments
from ..kv_cache import RollbackCache
from ..levels.fused import layer_operators
from ..levels.models import ModelLevel
from ..ops.decoder import LayerOperators
from . import checkpoint
from .checkpoint import Target
from .eagle_format import (
    EagleConfig,
    draft_ids,
    in_order,
    parse,
    renamed,
    require_shared,
    require_target,
)
from .heads import (
    Attention,
    HeadDrafter,
    HeadPasses,
    RotaryNetwork,
    Rotation,
    attend,
    rotated,
)
from .trees import Tree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Eagle", "EagleConfig", "EagleNetwork", "HeadPasses"]


class EagleNetwork(RotaryNetwork):
    """The layers of a head, under the tensors' published names (EAGLE-3's `midlayer` is
    `layers.0`).

    Args:
        config: of the head.
        embeds, heads: whether the checkpoint has embeddings and an output head.
    """

    config: EagleConfig

    def __init__(self, config: EagleConfig, *, embeds: bool = False, heads: bool = False) -> None:
        super().__init__(config)
        layer, width, eps = config.layer, config.hidden_size, config.layer.rms_norm_eps
        if embeds:
            self.embed_tokens = nn.Embedding(layer.vocab_size, width)
        if heads:
            self.lm_head = nn.Linear(width, config.draft_vocab_size or layer.vocab_size, bias=False)
        if config.version == 1 or config.fuse:
            inner = 2 * width if config.version == 1 else config.feature_size
            self.fc = nn.Linear(inner, width, bias=config.fc_bias)
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(config.feature_size, eps)
        if config.fc_norm:
            norms = [nn.RMSNorm(config.target_hidden_size, eps) for _ in config.hidden_layers]
            self.fc_norm = nn.ModuleList(norms)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(layer.num_hidden_layers))
        if config.version == 3:
            self.norm = nn.RMSNorm(width, eps)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        config = self.config
        if not config.fuse:
            return features
        if config.norm_before_fc:
            features = self.input_norm(features)
        if config.fc_norm:
            states = features.split(config.target_hidden_size, -1)
            normed = [norm(state) for norm, state in zip(self.fc_norm, states, strict=True)]
            features = torch.cat(normed, -1)
        fused: torch.Tensor = self.fc(features)
        return fused

    def forward(
        self,
        embeds: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        attention: Attention,
    ) -> torch.Tensor:
        """Return the state behind each token, ``[B, T, H]``, before the final norm of EAGLE-3.

        Args:
            embeds, states: ``[B, T, H]``, of the tokens, and behind the token before each.
            positions: ``[B or 1, T or 1]`` int64, of the pairs.
            attention: over these and earlier pairs.
        """
        cos, _, sin = self.rotation(states, positions)
        rotation = cos[:, None], sin[:, None]
        first: torch.Tensor | None = embeds
        if self.config.version == 1:
            states, first = self.fc(torch.cat([embeds, states], -1)), None
        for layer in self.layers:
            states, first = layer(states, first, rotation, attention), None
        return states

    def read(
        self,
        embeds: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None,
        cache: RollbackCache,
    ) -> torch.Tensor:
        if embeds.shape[1] <= self.longest:
            return self._read_fused(embeds, states, positions, mask, cache)

        def attention(
            layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
        ) -> torch.Tensor:
            keys, values = cache.update(k, v, layer)
            return attend(q, keys, values, mask)

        out: torch.Tensor = self(embeds, states, positions, attention)
        return out

    def _read_fused(
        self,
        embeds: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None,
        cache: RollbackCache,
    ) -> torch.Tensor:
        cos, sin, _ = self.rotation(states, positions.expand(-1, embeds.shape[1]))
        if self.config.version == 1:
            states = first = self.fc(torch.cat([embeds, states], -1))
        else:
            layer: Any = self.layers[0]
            normed = layer.hidden_norm(states)
            first = torch.cat([layer.input_layernorm(embeds), normed], -1)
            states = normed if layer.norm_before_residual else states
        numbers = tuple(range(len(self.layers)))
        return self.through_layers(states, (cos, sin), mask, cache, numbers, first)

    def fused(self) -> LayerOperators | None:
        return layer_operators(list(self.layers), all_known=True)

    def carried(self, states: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(states) if self.config.norm_output else states
        return normed

    def before_head(self, states: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = states if self.config.version == 1 else self.norm(states)
        return normed


class Layer(nn.Module):
    """A Llama layer, and the two that EAGLE begins with: of EAGLE-1, without a norm in front of
    its attention; of EAGLE-3, whose attention reads embedding and state side by side."""

    def __init__(self, config: EagleConfig, number: int) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.layer.rms_norm_eps
        pairs = config.version == 3 and number == 0
        self.norm_before_residual = config.norm_before_residual
        self.self_attn = SelfAttention(config, number, 2 * width if pairs else width)
        self.mlp = LlamaMLP(config.layer)
        # (Identity has no tensors.)
        bare = number == 0 and config.version == 1
        self.input_layernorm: nn.Module = nn.Identity() if bare else nn.RMSNorm(width, eps)
        if pairs:
            self.hidden_norm = nn.RMSNorm(width, eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps)

    def forward(
        self,
        states: torch.Tensor,
        embeds: torch.Tensor | None,
        rotation: Rotation,
        attention: Attention,
    ) -> torch.Tensor:
        if embeds is not None:
            normed = self.hidden_norm(states)
            if self.norm_before_residual:
                states = normed
            inputs = torch.cat([self.input_layernorm(embeds), normed], -1)
        else:
            inputs = self.input_layernorm(states)
        states = states + self.self_attn(inputs, rotation, attention)
        out: torch.Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return out


class SelfAttention(nn.Module):
    def __init__(self, config: EagleConfig, number: int, width: int) -> None:
        super().__init__()
        self.head_dim, self._number = config.head_dim, number
        self.scaling = self.head_dim**-0.5
        queries = config.layer.num_attention_heads * self.head_dim
        keys = config.layer.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(width, queries, bias=config.qkv_bias)
        self.k_proj = nn.Linear(width, keys, bias=config.qkv_bias)
        self.v_proj = nn.Linear(width, keys, bias=config.qkv_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.output_bias)

    def forward(
        self, states: torch.Tensor, rotation: Rotation, attention: Attention
    ) -> torch.Tensor:
        heads = (*states.shape[:2], -1, self.head_dim)
        q, k, v = self.q_proj(states), self.k_proj(states), self.v_proj(states)
        q, k, v = q.view(heads), k.view(heads), v.view(heads).transpose(1, 2)
        q, k = rotated(q.transpose(1, 2), *rotation), rotated(k.transpose(1, 2), *rotation)
        out: torch.Tensor = self.o_proj(attention(self._number, q, k, v).flatten(2))
        return out


def load_head(
    place: str | Path,
    target: ModelLevel | PreTrainedModel,
    dtype: torch.dtype | None = None,
) -> HeadPasses:
    model = Target(target)
    folder = checkpoint.folder_of(place)
    name, text = str(folder), model.text
    config_json, read = checkpoint.read_config(folder), checkpoint.read_folder(folder)
    tensors = renamed(read, name)
    config = parse(config_json, tensors, text.num_hidden_layers, name)
    require_target(config, text, name)
    if not config.fuse and config.hidden_size != config.target_hidden_size:
        raise ValueError(
            f"{name}: hidden_size: expected the target's, {config.target_hidden_size}, where no "
            f"product brings one to the other, given {config.hidden_size}"
        )
    offsets = tensors.pop("d2t", None)
    embeds, heads = "embed_tokens.weight" in tensors, "lm_head.weight" in tensors
    network = model.load(
        lambda: EagleNetwork(config, embeds=embeds, heads=heads), tensors, dtype, name
    )
    require_shared(config, config.draft_vocab_size, text, tensors, name)
    ids = draft_ids(config.draft_vocab_size, offsets, read.get("t2d"), text.vocab_size, name)
    if ids is None:
        return HeadPasses(network, target)
    return HeadPasses(network, target, in_order(ids, network.lm_head.weight).to(model.device))


class Eagle(HeadDrafter):
    """An EAGLE-1, EAGLE-2 or EAGLE-3 head (arXiv 2401.15077, 2406.16858, 2503.01840) as the drafter
    of a chain. Arguments are those of `HeadDrafter`."""

    kind = "eagle"

    @classmethod
    def from_pretrained(
        cls,
        place: str | Path,
        target: ModelLevel | PreTrainedModel,
        *,
        tree: Tree | None = None,
        dtype: torch.dtype | None = None,
        name: str | None = None,
    ) -> Eagle:
        """Load a published head.

        Args:
            place: a directory as SafeAILab (SpecForge) or speculators publish it: config.json, and
                model.safetensors or pytorch_model.bin. Or its id on the Hugging Face hub.
            target: that the head was trained for: it gives embeddings and output head where the
                checkpoint has none. Below a level with packed weights the head runs on packed ones
                too, whose memory is taken again, but for the output head that both share.
            tree: see `Eagle`.
            dtype: of the head; None: the target's.
            name: for messages; None: the directory's name.

        Raises:
            TypeError: an argument is none of these.
            ValueError: no such directory, a checkpoint with code in it, tensors that are missing,
                unknown or of another shape, a head for another target; names what was expected and
                what came.
        """
        arguments.instance("tree", tree, Tree)
        arguments.dtype("dtype", dtype)
        arguments.label("name", name)
        label = name or Path(str(place)).name
        return cls(load_head(place, target, dtype), tree, label)

    @property
    def config(self) -> EagleConfig:
        """Configuration of the head."""
        config = self._head.config
        assert isinstance(config, EagleConfig)
        return config
