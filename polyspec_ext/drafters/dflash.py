"""Drafters of blocks: a few layers that draft all tokens of a block in one pass (DFlash), and those
whose tokens also depend on the one before in the block (DSpark).

The network keeps keys and values of a context: the target's hidden states of every token but the
last, each at its token's position. A pass reads the last token and mask tokens behind it, which see
the context and each other. Their keys and values leave the cache before the next draft. The states
of a block are drawn from one by one, each independently of the others. With a Markov head
(arXiv 2607.05147) the logits of a token have a bias by the token before it.

A token without states of the target, which a model of another width has accepted, has the keys and
values of a pass over that token, until the target's states replace them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from .. import arguments
from ..kv_cache import masks as cache_masks
from ..levels.base import InputBlock, LevelOutput
from ..levels.models import ModelLevel
from ..tensors import Place, RowCounts
from . import checkpoint
from .base import LONGEST, DraftBlock, DrafterCapabilities, DraftInput
from .checkpoint import Target
from .dflash_format import DFlashConfig, parse
from .eagle_format import draft_ids, in_order, renamed, require_shared, require_target
from .heads import Attention, HeadDrafter, HeadPasses, RotaryNetwork, Rotation, attend, rotated
from .model import draw_chain, row_buffer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_UNUSED = "confidence_head."  # begins names of tensors
_NAMES = (("encoder.fc.", "fc."), ("encoder.output_norm_enc.", "hidden_norm."))


# ---- the network ---------------------------------------------------------------------------------


class DFlashNetwork(RotaryNetwork):
    """The layers, under the tensors' published names.

    Args:
        config: of the drafter.
        embeds, heads: whether the checkpoint has embeddings and an output head.
    """

    config: DFlashConfig

    def __init__(self, config: DFlashConfig, *, embeds: bool = False, heads: bool = False) -> None:
        super().__init__(config)
        layer, width, eps = config.layer, config.hidden_size, config.layer.rms_norm_eps
        drawn = config.draft_vocab_size or layer.vocab_size
        if embeds:
            self.embed_tokens = nn.Embedding(layer.vocab_size, width)
        if heads:
            self.lm_head = nn.Linear(width, drawn, bias=False)
        self.fc = nn.Linear(config.feature_size, width, bias=False)
        self.hidden_norm = nn.RMSNorm(width, eps)
        self.layers = nn.ModuleList(Layer(layer, i) for i in range(layer.num_hidden_layers))
        self.norm = nn.RMSNorm(width, eps)
        if config.markov_rank:
            self.markov_head = MarkovHead(layer.vocab_size, config.markov_rank, drawn)

    def remember(
        self, features: torch.Tensor, positions: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield keys and values of every layer, ``[B, Hkv, T, D]``, for tokens with the target's
        states ``[B, T, feature_size]`` at `positions` ``[B or 1, T]``."""
        states = self.hidden_norm(self.fc(features))
        cos, _, sin = self.rotation(states, positions)
        rotation = cos[:, None], sin[:, None]
        for layer in self.layers:
            attention: Any = layer.self_attn
            yield attention.keys_values(states, rotation)

    def forward(
        self, embeds: torch.Tensor, positions: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        """Return the states of the tokens of blocks, ``[B, T, H]``, as the output head reads them.

        Args:
            embeds: ``[B, T, H]`` of these tokens.
            positions: ``[B or 1, T]`` int64.
            attention: over them and the context.
        """
        cos, _, sin = self.rotation(embeds, positions)
        states, rotation = embeds, (cos[:, None], sin[:, None])
        for layer in self.layers:
            states = layer(states, rotation, attention)
        normed: torch.Tensor = self.norm(states)
        return normed


class MarkovHead(nn.Module):
    """The bias of a token's logits by the token before: of a low rank."""

    def __init__(self, vocab_size: int, rank: int, drawn: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, drawn, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        bias: torch.Tensor = self.markov_w2(self.markov_w1(tokens))
        return bias


class Layer(nn.Module):
    """A Qwen3 layer whose attention also sees keys and values of a context."""

    def __init__(self, config: LlamaConfig, number: int) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = SelfAttention(config, number)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = nn.RMSNorm(width, eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps)

    def forward(
        self, states: torch.Tensor, rotation: Rotation, attention: Attention
    ) -> torch.Tensor:
        states = states + self.self_attn(self.input_layernorm(states), rotation, attention)
        out: torch.Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return out


class SelfAttention(nn.Module):
    def __init__(self, config: LlamaConfig, number: int) -> None:
        super().__init__()
        self._dim, self._number = int(config.head_dim), number
        width, bias = config.hidden_size, config.attention_bias
        queries = config.num_attention_heads * self._dim
        keys = config.num_key_value_heads * self._dim
        self.q_proj = nn.Linear(width, queries, bias=bias)
        self.k_proj = nn.Linear(width, keys, bias=bias)
        self.v_proj = nn.Linear(width, keys, bias=bias)
        self.o_proj = nn.Linear(queries, width, bias=bias)
        self.q_norm = nn.RMSNorm(self._dim, config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self._dim, config.rms_norm_eps)

    def keys_values(
        self, states: torch.Tensor, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values ``[B, Hkv, T, D]`` of the states ``[B, T, H]``."""
        heads = (*states.shape[:2], -1, self._dim)
        keys, values = self.k_proj(states).view(heads), self.v_proj(states).view(heads)
        return rotated(self.k_norm(keys).transpose(1, 2), *rotation), values.transpose(1, 2)

    def forward(
        self, states: torch.Tensor, rotation: Rotation, attention: Attention
    ) -> torch.Tensor:
        q = self.q_norm(self.q_proj(states).view(*states.shape[:2], -1, self._dim))
        keys, values = self.keys_values(states, rotation)
        seen = attention(self._number, rotated(q.transpose(1, 2), *rotation), keys, values)
        out: torch.Tensor = self.o_proj(seen.flatten(2))
        return out


# ---- the checkpoint ------------------------------------------------------------------------------


def load_dflash(
    place: str | Path,
    target: ModelLevel | PreTrainedModel,
    dtype: torch.dtype | None = None,
) -> DFlashPasses:
    """Load the drafter that lies in a directory."""
    model = Target(target)
    folder = checkpoint.folder_of(place)
    name, text = str(folder), model.text
    config_json, read = checkpoint.read_config(folder), checkpoint.read_folder(folder)
    tensors = renamed({k: v for k, v in read.items() if not k.startswith(_UNUSED)}, name, _NAMES)
    config = parse(config_json, tensors, text.num_hidden_layers, name)
    require_target(config, text, name)
    require_shared(config, config.draft_vocab_size, text, tensors, name)
    offsets = tensors.pop("d2t", None)
    embeds, heads = "embed_tokens.weight" in tensors, "lm_head.weight" in tensors
    network = model.load(
        lambda: DFlashNetwork(config, embeds=embeds, heads=heads), tensors, dtype, name
    )
    ids = draft_ids(config.draft_vocab_size, offsets, read.get("t2d"), text.vocab_size, name)
    if ids is not None:
        drawn = [network.lm_head.weight]
        if config.markov_rank:
            drawn.append(network.markov_head.markov_w2.weight)
        ids = in_order(ids, *drawn).to(model.device)
    return DFlashPasses(network, target, ids)


# ---- drafts --------------------------------------------------------------------------------------


class DFlashPasses(HeadPasses):
    """A network, what it borrows from the target, and the context of a batch. Arguments are those
    of `HeadPasses`."""

    network: DFlashNetwork
    config: DFlashConfig
    _runs: DFlashNetwork

    def begin(self, batch: int, capacity: int) -> None:
        super().begin(batch, capacity + self.config.block_size)

    def reserve_span(self, tokens: int, followed: bool = False) -> Place | None:
        # The masks of a block lie behind the longest text.
        return super().reserve_span(tokens + self.config.block_size, followed)

    def extend(
        self, tokens: torch.Tensor, features: torch.Tensor, counts: RowCounts
    ) -> torch.Tensor:
        """Append ``counts[b]`` tokens of the context with a verifier's states, ``[B, W,
        feature_size]``."""
        states, batch = features.to(self.device, self.dtype), len(features)
        if max(counts.host or (1,)) > 0:
            if self.passes is None or states.shape[1] > LONGEST:
                self._remember(states, counts)
            else:

                def run(told: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
                    return self._remember(told, RowCounts(None, new))

                self.captured("context", (states, counts.on(self.device)), run, list(counts))
            self.features.appended(counts)
        return torch.zeros(batch, 1, self.config.hidden_size, dtype=self.dtype, device=self.device)

    def _remember(self, states: torch.Tensor, counts: RowCounts) -> torch.Tensor:
        cache, positions = self.features.cache, self._prepare(states.shape[1], counts)
        for number, both in enumerate(self._runs.remember(states, positions)):
            cache.update(*both, number)
        return positions

    def follow(self, tokens: torch.Tensor, states: torch.Tensor, counts: RowCounts) -> torch.Tensor:
        """Append tokens ``[B, 1]`` of the context that have no verifier's states."""
        found = self._read(tokens, counts)
        self.features.appended(counts)
        return found

    def block(self, anchors: torch.Tensor, count: int) -> torch.Tensor:
        """Return the logits ``[B, count, Vd]`` of the first tokens of a block behind `anchors`,
        ``[B, 1]``; the block leaves the cache with the next call of `keep`."""
        if self.passes is None:
            return self._block(anchors, count)
        width = [self.config.block_size] * len(anchors)
        return self.captured(count, [anchors], lambda x: self._block(x, count), width)

    def _block(self, anchors: torch.Tensor, count: int) -> torch.Tensor:
        config = self.config
        masks = anchors.new_full((1, 1), config.mask_token_id)
        masks = masks.expand(len(anchors), config.block_size - 1)
        first = not config.from_anchor
        # All masks, however many tokens are wanted: a token's logits depend on them.
        states = self._read(torch.cat([anchors, masks], 1), None)
        return self.logits(states[:, first : first + count])

    def bias(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return what the token before adds to the logits, ``[B, 1, Vd]``."""
        bias: torch.Tensor = self._runs.markov_head(tokens)
        return bias * self.config.logit_scale

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        logits, cap = super().logits(states), self.config.logit_cap
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        return logits if cap is None else (logits / cap).tanh() * cap

    def _prepare(self, width: int, counts: RowCounts | None) -> torch.Tensor:
        cache = self.features.cache
        cache.prepare(width, None if counts is None or counts.all(width) else counts)
        self._runs.reach(cache.rows.capacity)
        return cache_masks.query_positions(cache.rows.base, cache.rows.counts, width)

    def _read(self, tokens: torch.Tensor, counts: RowCounts | None) -> torch.Tensor:
        cache = self.features.cache
        positions = self._prepare(tokens.shape[1], counts)
        masks = self._masks(positions)

        def attention(
            layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
        ) -> torch.Tensor:
            return attend(q, *cache.update(k, v, layer), masks[layer])

        # What a target does with its embeddings beside reading them is not for blocks.
        weight = getattr(self._embed, "weight", None)
        if isinstance(weight, torch.Tensor):
            embeds = F.embedding(tokens, weight)
        else:
            embeds = self._embed(tokens)
        embeds = embeds.to(self.dtype) * self.config.embedding_scale
        out: torch.Tensor = self._runs(embeds, positions, attention)
        return out

    def _masks(self, positions: torch.Tensor) -> list[torch.Tensor | None]:
        """Return the additive mask of each layer, for tokens at `positions`; None: every token sees
        all that the cache has."""
        config, rows = self.config, self.features.cache.rows
        width = positions.shape[1]
        kinds = list(zip(config.windows, config.causal, strict=True))
        whole = rows.at is not None and rows.span == rows.at + width
        slots = torch.arange(rows.span, device=self.device)[None]
        made: dict[tuple[int | None, bool], torch.Tensor | None] = {}
        for kind in kinds:
            window, causal = kind
            if whole and window is None and (width == 1 or not causal):
                made[kind] = None
            elif kind not in made:
                ends = positions if causal else positions[:, -1:].expand(-1, width)
                seen = cache_masks.visible_slots(ends, slots)
                if window is not None:
                    seen &= (slots[:, None] - positions[..., None]).abs() < window
                made[kind] = cache_masks.additive(seen, self.dtype)
        return [made[kind] for kind in kinds]


class DFlash(HeadDrafter):
    """A DFlash or DSpark drafter (arXiv 2602.06036, 2607.05147), which drafts a block of tokens in
    one pass, as the drafter of a chain. Of a longer window it drafts as many as its block has.
    Arguments are those of `HeadDrafter`; it drafts no trees."""

    kind = "dflash"
    _head: DFlashPasses

    @classmethod
    def from_pretrained(
        cls,
        place: str | Path,
        target: ModelLevel | PreTrainedModel,
        *,
        dtype: torch.dtype | None = None,
        name: str | None = None,
    ) -> DFlash:
        """Load a published drafter.

        Args:
            place: a directory as z-lab, DeepSeek (DSpark) or speculators (dflash, dspark) publish
                it: config.json, and model.safetensors or pytorch_model.bin. Or its id on the
                Hugging Face hub.
            target: that the drafter was trained for: it gives embeddings and output head where the
                checkpoint has none. Below a level with packed weights the drafter runs on packed
                ones too.
            dtype: of the drafter; None: the target's.
            name: for messages; None: the directory's name.

        Raises:
            TypeError: an argument is none of these.
            ValueError: no such directory, a checkpoint with code in it, a key that is not followed,
                tensors that are missing, unknown or of another shape, a drafter for another
                target; names what was expected and what came.
        """
        arguments.dtype("dtype", dtype)
        arguments.label("name", name)
        label = name or Path(str(place)).name
        return cls(load_dflash(place, target, dtype), name=label)

    @property
    def config(self) -> DFlashConfig:
        """Configuration of the drafter."""
        return self._head.config

    @property
    def capabilities(self) -> DrafterCapabilities:
        return dataclasses.replace(super().capabilities, one_pass=True)

    @torch.inference_mode()
    def draft(self, inputs: DraftInput) -> DraftBlock:
        head, device = self._head, self.device
        head.passes = inputs.passes
        features, ids = head.features, inputs.tokens

        def extend(tokens: torch.Tensor, states: torch.Tensor, counts: RowCounts) -> torch.Tensor:
            if counts.host is not None:
                # Nothing is in front of a text of one token.
                both = zip(counts.host, inputs.positions.tolist(), strict=True)
                counts = RowCounts([count if end > 1 else 0 for count, end in both])
            return head.extend(tokens, states, counts)

        def follow(tokens: torch.Tensor, states: torch.Tensor, counts: RowCounts) -> torch.Tensor:
            # The context has the token in front of the one that pairs of a head have.
            begin = inputs.positions.to(device) - inputs.counts.on(device)
            at = (features.cache.lengths - begin).clamp(0, ids.shape[1] - 1)
            return self._follow(ids.gather(1, at[:, None]), states, counts)

        features.read(inputs, head.config.hidden_layers, extend, follow)
        last = inputs.counts.less(1).on(device)
        anchors = ids.gather(1, last[:, None]).clamp(0, self.vocab_size - 1)
        most = min(inputs.most, head.config.num_drafts)
        rows, step = head.block(anchors, most), 0
        rows = rows[..., : head.id_map.entries_below(inputs.vocab_size)]
        self.num_forward_passes += 1
        short = most < inputs.most
        if short:
            # The level above reads a row for each token that it asked for.
            held = row_buffer(inputs.rows, inputs.most, rows) if inputs.wants_rows else None
            lengths = inputs.lengths.less(0, most)
            inputs = dataclasses.replace(inputs, lengths=lengths, most=most, rows=held)

        def forward(block: InputBlock) -> LevelOutput:
            nonlocal step
            logits, step = rows[:, step : step + 1], step + 1
            if head.config.markov_rank:
                bias = head.bias(anchors if step == 1 else block.tokens)
                logits = logits + bias[..., : logits.shape[2]]
            return LevelOutput(logits)

        block = draw_chain(inputs, forward, head.id_map, self.vocab_size, self._draw)
        if short:
            block.counts = inputs.lengths.on(device)
        return block
