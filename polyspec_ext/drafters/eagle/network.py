"""The forward pass of an EAGLE head, EAGLE-1/2 and EAGLE-3.

A step reads pairs of a token's embedding and the state behind the token before it, and gives the
state behind each pair: of the target where it verified, the head's own where it drafts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from .config import EagleConfig

# Called with a layer's number, queries [B, H, T, D], keys and values [B, Hkv, T, D] of the tokens
# at hand: gives the attention's output [B, T, H, D], over whatever else it remembers.
Attention = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


_FOLLOW_LENGTH = ("dynamic", "longrope")  # kinds of rotations that depend on the longest position


class EagleNetwork(nn.Module):
    """The layers of a head, under the tensors' published names (EAGLE-3's `midlayer` is
    `layers.0`).

    Args:
        config: of the head.
        embeds, heads: whether the checkpoint has embeddings and an output head of its own.
    """

    def __init__(self, config: EagleConfig, *, embeds: bool = False, heads: bool = False) -> None:
        super().__init__()
        self.config = config
        layer, width = config.layer, config.hidden_size
        first, third = config.version == 1, config.version == 3
        if embeds:
            self.embed_tokens = nn.Embedding(layer.vocab_size, width)
        if heads:
            self.lm_head = nn.Linear(width, config.draft_vocab_size or layer.vocab_size, bias=False)
        if first:
            self.fc = nn.Linear(2 * width, width, bias=config.fc_bias)
        elif config.fuse:
            self.fc = nn.Linear(config.feature_size, width, bias=config.fc_bias)
        eps = layer.rms_norm_eps
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(config.feature_size, eps)
        if config.fc_norm:
            norms = [nn.RMSNorm(config.target_hidden_size, eps) for _ in config.hidden_layers]
            self.fc_norm = nn.ModuleList(norms)
        self.layers = nn.ModuleList(
            Layer(config, place) for place in range(layer.num_hidden_layers)
        )
        if third:
            self.norm = nn.RMSNorm(width, eps)
        self._rotary: LlamaRotaryEmbedding | None = None
        # Cosines and sines of the positions from 0 on, [P, 2, D] (`reach`).
        self.rotations: torch.Tensor | None
        self.register_buffer("rotations", None, persistent=False)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """The verifier's hidden states ``[B, T, feature_size]`` as the state ``[B, T, H]`` that a
        step reads."""
        config = self.config
        if not config.fuse:
            return features
        if config.norm_before_fc:
            features = self.input_norm(features)
        if config.fc_norm:
            parts = features.split(config.target_hidden_size, -1)
            features = torch.cat(
                [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1
            )
        fused: torch.Tensor = self.fc(features)
        return fused

    def forward(
        self,
        embeds: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        attention: Attention,
    ) -> torch.Tensor:
        """One step.

        Args:
            embeds: ``[B, T, H]``, of the tokens.
            states: ``[B, T, H]``, behind the token before each.
            positions: ``[B or 1, T or 1]`` int64, of the pairs.
            attention: over these and earlier pairs.

        Returns:
            ``[B, T, H]``, the state behind each token, before the final norm of EAGLE-3.
        """
        rotation = self._rotation(states, positions)
        if self.config.version == 1:
            states, own = self.fc(torch.cat([embeds, states], -1)), None
        else:
            own = embeds
        for place, layer in enumerate(self.layers):
            states = layer(states, own if place == 0 else None, rotation, attention)
        return states

    @property
    def follows_length(self) -> bool:
        """Whether rotations depend on the longest position."""
        return self.config.layer.rope_parameters["rope_type"] in _FOLLOW_LENGTH

    @torch.inference_mode(False)
    @torch.no_grad()
    def reach(self, count: int) -> None:
        """Positions stay below `count`: what rotates queries and keys there is computed once."""
        if self.rotations is not None and len(self.rotations) >= count:
            return
        if self.follows_length:
            return
        like = next(self.parameters())
        self.rotations = None
        both = self._rotation(like, torch.arange(count, device=like.device)[None])
        self.rotations = torch.cat(both, 1)[0].transpose(0, 1).contiguous()

    def carried(self, states: torch.Tensor) -> torch.Tensor:
        """What of a step's states the next step of a draft reads."""
        if not self.config.norm_output:
            return states
        normed: torch.Tensor = self.norm(states)
        return normed

    def before_head(self, states: torch.Tensor) -> torch.Tensor:
        """What of a step's states the output head reads."""
        if self.config.version == 1:
            return states
        normed: torch.Tensor = self.norm(states)
        return normed

    def _rotation(
        self, like: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        known = self.rotations
        if known is not None and known.dtype == like.dtype:
            cos, sin = known[positions].unbind(2)
            return cos[:, None], sin[:, None]
        # Made here: it has no weights, and the network may have been on the meta device.
        if self._rotary is None or self._rotary.inv_freq.device != like.device:
            self._rotary = LlamaRotaryEmbedding(self.config.layer).to(like.device)
        cos, sin = self._rotary(like, positions)
        sin[..., : sin.shape[-1] // 2].neg_()
        return cos[:, None], sin[:, None]


class Layer(nn.Module):
    """A Llama layer, and the two that EAGLE begins with: of EAGLE-1, without a norm in front of
    its attention; of EAGLE-3, whose attention reads embedding and state side by side."""

    def __init__(self, config: EagleConfig, place: int) -> None:
        super().__init__()
        layer, width = config.layer, config.hidden_size
        self.pairs = config.version == 3 and place == 0
        self.norm_before_residual = config.norm_before_residual
        self.self_attn = SelfAttention(config, place, 2 * width if self.pairs else width)
        self.mlp = Mlp(width, layer.intermediate_size, config.mlp_bias)
        # (Identity has no tensors.)
        bare = place == 0 and config.version == 1
        norm = nn.Identity() if bare else nn.RMSNorm(width, layer.rms_norm_eps)
        self.input_layernorm: nn.Module = norm
        if self.pairs:
            self.hidden_norm = nn.RMSNorm(width, layer.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(width, layer.rms_norm_eps)

    def forward(
        self,
        states: torch.Tensor,
        embeds: torch.Tensor | None,
        rotation: tuple[torch.Tensor, torch.Tensor],
        attention: Attention,
    ) -> torch.Tensor:
        if embeds is not None:
            normed = self.hidden_norm(states)
            if self.norm_before_residual:
                states = normed
            given = torch.cat([self.input_layernorm(embeds), normed], -1)
        else:
            given = self.input_layernorm(states)
        states = states + self.self_attn(given, rotation, attention)
        out: torch.Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return out


class SelfAttention(nn.Module):
    def __init__(self, config: EagleConfig, place: int, width: int) -> None:
        super().__init__()
        layer, self._dim, self._place = config.layer, config.head_dim, place
        queries = layer.num_attention_heads * self._dim
        keys = layer.num_key_value_heads * self._dim
        self.q_proj = nn.Linear(width, queries, bias=config.qkv_bias)
        self.k_proj = nn.Linear(width, keys, bias=config.qkv_bias)
        self.v_proj = nn.Linear(width, keys, bias=config.qkv_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.output_bias)

    def forward(
        self,
        states: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        attention: Attention,
    ) -> torch.Tensor:
        heads = (*states.shape[:2], -1, self._dim)
        q, k, v = self.q_proj(states), self.k_proj(states), self.v_proj(states)
        q, k, v = q.view(heads), k.view(heads), v.view(heads).transpose(1, 2)
        q, k = rotated(q.transpose(1, 2), *rotation), rotated(k.transpose(1, 2), *rotation)
        out = attention(self._place, q, k, v)
        projected: torch.Tensor = self.o_proj(out.flatten(2))
        return projected


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int, bias: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(states)) * self.up_proj(states))
        return out


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``[B, H, T, D]`` under rotary positions, halves paired as in Llama; `sin` has the sign of
    the half that its products are added to."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
