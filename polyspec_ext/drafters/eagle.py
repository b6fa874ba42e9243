"""EAGLE heads (`heads`): their network, and published checkpoints of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .. import arguments
from ..kv_cache import RollbackCache
from ..levels.fused import layer_operators
from ..levels.models import ModelLevel
from ..ops.decoder import LayerOperators
from .eagle_format import EagleConfig, load_network, parse
from .heads import (
    Attention,
    HeadAttention,
    HeadDrafter,
    HeadLayer,
    HeadPasses,
    RotaryNetwork,
    Where,
    attention_over,
)
from .trees import Tree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Eagle", "EagleConfig", "EagleNetwork", "HeadPasses"]


class EagleNetwork(RotaryNetwork):
    """The layers of a head (EAGLE-3's `midlayer` is `layers.0`). The first one has no norm in front
    of its attention in EAGLE-1, and in EAGLE-3 reads embedding and state side by side. Arguments
    are those of `RotaryNetwork`."""

    config: EagleConfig

    def __init__(self, config: EagleConfig, **tied: bool) -> None:
        super().__init__(config, **tied)
        layer, width, eps = config.layer, config.hidden_size, config.layer.rms_norm_eps
        first, third = config.version == 1, config.version == 3
        if first or config.fuse:
            inner = 2 * width if first else config.feature_size
            self.fc = nn.Linear(inner, width, bias=config.fc_bias)
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(config.feature_size, eps)
        if config.fc_norm:
            norms = [nn.RMSNorm(config.target_hidden_size, eps) for _ in config.hidden_layers]
            self.fc_norm = nn.ModuleList(norms)
        biases, self.layers = (config.qkv_bias, config.output_bias), nn.ModuleList()
        for i in range(layer.num_hidden_layers):
            inner = 2 * width if third and i == 0 else width
            attention = HeadAttention(layer, i, inner, biases)
            self.layers.append(HeadLayer(layer, attention, bare=first and i == 0))
        if third:
            self.layers[0].hidden_norm = nn.RMSNorm(width, eps)
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
        states, first = self._entering(embeds, states)
        for number, layer in enumerate(self.layers):
            states = layer(states, rotation, attention, None if number else first)
        return states

    def _entering(
        self, embeds: torch.Tensor, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the states that enter the first layer, and what its attention reads."""
        if self.config.version == 1:
            states = self.fc(torch.cat([embeds, states], -1))
            return states, states
        layer: Any = self.layers[0]
        normed = layer.hidden_norm(states)
        first = torch.cat([layer.input_layernorm(embeds), normed], -1)
        return normed if self.config.norm_before_residual else states, first

    def read(
        self, embeds: torch.Tensor, states: torch.Tensor, where: Where, cache: RollbackCache
    ) -> torch.Tensor:
        layers, (positions, mask) = len(self.layers), where
        if embeds.shape[1] > self.longest:
            attention = attention_over(cache, [mask] * layers)
            out: torch.Tensor = self(embeds, states, positions, attention)
            return out
        cos, sin, _ = self.rotation(states, positions.expand(-1, embeds.shape[1]))
        states, first = self._entering(embeds, states)
        return self.through_layers(states, (cos, sin), mask, cache, tuple(range(layers)), first)

    def fused(self) -> LayerOperators | None:
        return layer_operators(list(self.layers), all_known=True)

    def carried(self, states: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(states) if self.config.norm_output else states
        return normed

    def before_head(self, states: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = states if self.config.version == 1 else self.norm(states)
        return normed


def load_head(
    place: str | Path, target: ModelLevel | PreTrainedModel, dtype: torch.dtype | None = None
) -> HeadPasses:
    """Load the head that lies in a directory."""
    return HeadPasses(*load_network(place, target, dtype, parse, EagleNetwork))


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
