"""EAGLE heads (`heads`): the network, and published checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from ..kv_cache import RollbackCache
from ..levels.fused import CachedLayers, cached_layers
from ..levels.models import ModelLevel
from .checkpoint import REQUIRED, Reader, architectures, load_network
from .heads import (
    Attention,
    HeadAttention,
    HeadConfig,
    HeadDrafter,
    HeadLayer,
    HeadPasses,
    RotaryNetwork,
    Where,
    attend,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Eagle", "EagleConfig", "EagleNetwork", "HeadPasses"]


class EagleNetwork(RotaryNetwork):
    """The layers of a head (EAGLE-3's `midlayer` is `layers.0`). In EAGLE-1 the first layer has no
    norm before its attention; in EAGLE-3 it reads embedding and state, concatenated. Arguments: as
    for `RotaryNetwork`."""

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
        self._numbers = tuple(range(layer.num_hidden_layers))
        for i in self._numbers:
            inner = 2 * width if third and i == 0 else width
            attention = HeadAttention(layer, i, inner, biases)
            self.layers.append(HeadLayer(layer, attention, bare=first and i == 0))
        if third:
            self.layers[0].hidden_norm = nn.RMSNorm(width, eps)
            self.norm = nn.RMSNorm(width, eps)

    def fuse(self, features: Tensor) -> Tensor:
        config = self.config
        if not config.fuse:
            return features
        if config.norm_before_fc:
            features = self.input_norm(features)
        if config.fc_norm:
            states = features.split(config.target_hidden_size, -1)
            normed = [norm(state) for norm, state in zip(self.fc_norm, states, strict=True)]
            features = torch.cat(normed, -1)
        fused: Tensor = self.fc(features)
        return fused

    def forward(
        self, embeds: Tensor, states: Tensor, positions: Tensor, attention: Attention
    ) -> Tensor:
        """Return the state after each token, ``[B, T, H]``, before the final norm of EAGLE-3, as
        `read` does, at positions ``[B or 1, T or 1]`` and with attention over all pairs."""
        cos, _, sin = self.angles.at(states, positions)
        rotation = cos[:, None], sin[:, None]
        for number, layer in enumerate(self.layers):
            first = None
            if number == 0:
                states, first = self._entering(layer, embeds, states)
            states = layer(states, rotation, attention, first)
        return states

    def _entering(self, layer: Any, embeds: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        if self.config.version == 1:
            states = self.fc(torch.cat([embeds, states], -1))
            return states, states
        normed = layer.hidden_norm(states)
        first = torch.cat([layer.input_layernorm(embeds), normed], -1)
        return normed if self.config.norm_before_residual else states, first

    def read(self, embeds: Tensor, states: Tensor, where: Where, cache: RollbackCache) -> Tensor:
        positions, mask = where
        if self.operators is None:
            assert positions is not None
            attention = partial(attend, cache, [mask] * len(self._numbers))
            out: Tensor = self(embeds, states, positions, attention)
            return out
        rotation = self.angles.rotation(states, positions, cache.rows)
        states, first = self._entering(self.layers[0], embeds, states)
        # (States of a verifier may be a slice.)
        states = states.contiguous()
        return self.operators.run(states, rotation, mask, cache, first=first)[0]

    def fused(self) -> CachedLayers | None:
        return cached_layers(self, self.layers, self._numbers, all_known=True)

    def carried(self, states: Tensor) -> Tensor:
        normed: Tensor = self.norm(states) if self.config.norm_output else states
        return normed

    def before_head(self, states: Tensor) -> Tensor:
        normed: Tensor = states if self.config.version == 1 else self.norm(states)
        return normed


def load_head(
    location: str | Path, target: ModelLevel | PreTrainedModel, dtype: torch.dtype | None = None
) -> HeadPasses:
    """Load the head in a directory."""
    return HeadPasses(*load_network(location, target, dtype, parse, EagleNetwork))


class Eagle(HeadDrafter):
    """An EAGLE-1, EAGLE-2 or EAGLE-3 head (arXiv 2401.15077, 2406.16858, 2503.01840) as the drafter
    of a chain. Arguments: as for `HeadDrafter`."""

    kind = "eagle"
    _load = staticmethod(load_head)
    config: EagleConfig


# ---- checkpoints ---------------------------------------------------------------------------------


_EAGLE3 = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator")
_LAST = -1  # the last hidden state of a model, after its final norm
_AUX_LAYERS = 3  # the default of a configuration
# Values that the network assumes: a configuration may have no others.
_FIXED = {
    "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
    "parallel_draft_step": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class EagleConfig(HeadConfig):
    """The configuration of an EAGLE head.

    Attributes:
        version: 1 (EAGLE-1 and EAGLE-2) or 3.
        fuse: whether `fc` projects the target's states to the head's width (EAGLE-3), before the
            first step of a draft only.
        fc_bias, qkv_bias, output_bias: whether these products have a bias.
        norm_before_fc: norm the target's concatenated states; `fc_norm`: norm each state
            (EAGLE-3.1). Never both.
        norm_before_residual: the first layer's residual is the normed state.
        norm_output: the next step reads the state after the final norm.
    """

    version: int
    layer: LlamaConfig
    target_hidden_size: int
    hidden_layers: tuple[int, ...]
    draft_vocab_size: int | None = None
    fuse: bool = False
    fc_bias: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False


# ---- the configuration ---------------------------------------------------------------------------


def parse(
    config: Mapping[str, Any], tensors: Collection[str], target_layers: int, name: str
) -> EagleConfig:
    """Read the config.json of the checkpoint `name`. An error names the invalid key.

    Args:
        tensors: names of the tensors, which distinguish EAGLE-3 from EAGLE-1 if the configuration
            is a plain Llama's.
        target_layers: n, decoder layers of the target. The default of EAGLE-3 heads is to read the
            inputs of layers 2, n // 2 and n - 3.
    """
    top = Reader(name, (config, set()))
    kind = top.of("speculators_model_type")
    if kind not in (None, "eagle", "eagle3"):
        raise top.error("speculators_model_type", "'eagle' or 'eagle3'", kind)
    published = kind is None
    layer = top if published else top.nested("transformer_layer_config")
    # Qwen's configurations have an unused window.
    if layer.of("use_sliding_window", "false", lambda x: x is False) is False:
        for key in ("sliding_window", "max_window_layers"):
            layer.of(key)
    full = "'full_attention' for all layers"
    layer.of("layer_types", full, lambda x: all(kind == "full_attention" for kind in x))
    # speculators writes only values other than a Llama's defaults.
    shape = layer.shape(REQUIRED if published else (), tensors)
    bias = layer.flag("attention_bias", False)
    biases: dict[str, bool] = {
        "qkv_bias": layer.flag("qkv_bias", bias or layer.of("model_type") == "qwen2"),
        "output_bias": bias,
    }
    third = kind == "eagle3"
    if published:
        third = any(arch in _EAGLE3 for arch in architectures(config)) or any(
            key.endswith(".hidden_norm.weight") for key in tensors
        )
    if not third:
        if not published and top.flag("layernorms", False):
            raise top.error("layernorms", "false, a head without norms around its layer", True)
        fc_bias = top.flag("bias", True) if published else top.flag("fusion_bias", False)
        head = EagleConfig(1, shape, shape.hidden_size, (_LAST,), fc_bias=fc_bias, **biases)
        layer.require_all_read({})
        top.require_all_read({})
        return head
    # Keys of EAGLE-3 are at the top, or nested in `eagle_config`.
    inner = top.nested("eagle_config", {})
    fields = inner.before(top)
    fuse = fields.flag("use_aux_hidden_state", True)
    head = EagleConfig(
        3,
        shape,
        fields.size("target_hidden_size") or shape.hidden_size,
        _aux_layers(fields, target_layers) if fuse else (_LAST,),
        draft_vocab_size=fields.size("draft_vocab_size"),
        fuse=fuse,
        norm_before_fc=fields.flag("norm_before_fc", False),
        fc_norm=fields.flag("fc_norm", False),
        # speculators' heads without this key were trained with it.
        norm_before_residual=fields.flag("norm_before_residual", not published),
        norm_output=fields.flag("norm_output", False),
        **biases,
    )
    if head.norm_before_fc and head.fc_norm:
        raise ValueError(f"{name}: expected norm_before_fc or fc_norm, given both")
    for reader in (top, layer, inner):
        reader.require_all_read(_FIXED)
    return head


def _aux_layers(reader: Reader, target_layers: int) -> tuple[int, ...]:
    key = "eagle_aux_hidden_state_layer_ids"
    value, count = reader.of(key), reader.size("num_aux_hidden_states")
    if value is None:
        if (count or _AUX_LAYERS) != _AUX_LAYERS:
            raise reader.error(key, f"{count} layers, as num_aux_hidden_states says", None)
        value = [2, target_layers // 2, target_layers - 3]
    return reader.layers(key, value, target_layers, count)
