"""Drafters of blocks: a few layers that draft all tokens of a block in one pass (DFlash), possibly
with a dependence of each token on the token before it in the block (DSpark).

The cache has keys and values of a context: the target's hidden states of every token but the last,
each at its token's position. A pass reads the last token and mask tokens after it, which see the
context and each other; their keys and values leave the cache before the next draft. Tokens are
drawn in turn from the block's states, independently of each other. With a Markov head (arXiv
2607.05147) the logits of a token have a bias by the token before it.

A token without states of the target, accepted by a model of another width, has the keys and values
of a pass over the token, until the target's states replace them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3Config

from .. import arguments, rooms
from ..kv_cache.layers import additive, query_positions, visible_slots
from ..kv_cache.lengths import RowLengths
from ..levels.base import InputBlock, LevelOutput
from ..levels.fused import CachedLayers, cached_layers
from ..levels.models import ModelLevel
from ..tensors import RowCounts
from .base import LONGEST, DraftBlock, DraftInput
from .checkpoint import REQUIRED, SIZES, Reader, architectures, load_network
from .heads import (
    Attention,
    HeadAttention,
    HeadConfig,
    HeadDrafter,
    HeadLayer,
    HeadPasses,
    RotaryNetwork,
    attend,
    rotated,
)
from .model import draw_chain, row_buffer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAMES = (
    ("encoder.fc.", "fc."),
    ("encoder.output_norm_enc.", "hidden_norm."),
    ("confidence_head.", None),
)


# ---- the network ---------------------------------------------------------------------------------


class DFlashNetwork(RotaryNetwork):
    """Layers as in Qwen3, with attention also over keys and values of a context. Arguments: as for
    `RotaryNetwork`."""

    config: DFlashConfig

    def __init__(self, config: DFlashConfig, **tied: bool) -> None:
        super().__init__(config, **tied)
        layer, width, eps = config.layer, config.hidden_size, config.layer.rms_norm_eps
        self.fc = nn.Linear(config.feature_size, width, bias=False)
        self.hidden_norm = nn.RMSNorm(width, eps)
        self.layers, biases = nn.ModuleList(), (layer.attention_bias, layer.attention_bias)
        for i in range(layer.num_hidden_layers):
            attention = HeadAttention(layer, i, width, biases, norms=True)
            self.layers.append(HeadLayer(layer, attention))
        self.norm = nn.RMSNorm(width, eps)
        if config.markov_rank:
            drawn = config.draft_vocab_size or layer.vocab_size
            self.markov_head = MarkovHead(layer.vocab_size, config.markov_rank, drawn)

    @property
    def drawn_weights(self) -> list[Tensor]:
        markov = [self.markov_head.markov_w2.weight] if self.config.markov_rank else []
        return [*super().drawn_weights, *markov]

    def remember(self, features: Tensor, positions: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield keys and values ``[B, Hkv, T, D]`` of every layer, for tokens with the target's
        states ``[B, T, feature_size]`` at `positions` ``[B or 1, T]``."""
        states = self.hidden_norm(self.fc(features))
        cos, _, sin = self.angles.at(states, positions)
        rotation = cos[:, None], sin[:, None]
        for layer in self.layers:
            attends: Any = layer.self_attn
            heads = (*states.shape[:2], -1, attends.head_dim)
            keys, values = attends.k_proj(states).view(heads), attends.v_proj(states).view(heads)
            keys = rotated(attends.k_norm(keys).transpose(1, 2), *rotation)
            yield keys, values.transpose(1, 2)

    def forward(
        self,
        embeds: Tensor,
        positions: Tensor,
        attention: Attention,
        rows: RowLengths | None = None,
    ) -> Tensor:
        """Return the states of blocks of tokens, ``[B, T, H]``, as the output head reads them, from
        embeddings at positions ``[B or 1, T]``, with attention over the block and the context.
        Fused layers need `rows`, the lengths of the context."""
        if self.operators is not None and rows is not None:
            heads, tables = self.operators.heads, self.angles.rotation(embeds, positions, rows)

            def attend(number: int, product: Tensor) -> Tensor:
                return attention(number, *heads(number, product, tables, len(embeds)))

            states, _ = self.operators.through(embeds, attend)
        else:
            cos, _, sin = self.angles.at(embeds, positions)
            states, rotation = embeds, (cos[:, None], sin[:, None])
            for layer in self.layers:
                states = layer(states, rotation, attention)
        normed: Tensor = self.norm(states)
        return normed

    def fused(self) -> CachedLayers | None:
        return cached_layers(self, self.layers, range(len(self.layers)), all_known=True)


class MarkovHead(nn.Module):
    """Low-rank bias of a token's logits by the token before."""

    def __init__(self, vocab_size: int, rank: int, drawn: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, drawn, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        bias: Tensor = self.markov_w2(self.markov_w1(tokens))
        return bias


def load_dflash(
    location: str | Path, target: ModelLevel | PreTrainedModel, dtype: torch.dtype | None = None
) -> DFlashPasses:
    """Load the drafter in a directory."""
    return DFlashPasses(*load_network(location, target, dtype, parse, DFlashNetwork, _NAMES))


# ---- drafts --------------------------------------------------------------------------------------


class DFlashPasses(HeadPasses):
    """Passes of a network, with the cached context of a batch. Arguments: as for `HeadPasses`."""

    network: DFlashNetwork
    config: DFlashConfig
    _runs: DFlashNetwork

    def begin(self, batch: int, capacity: int) -> None:
        super().begin(batch, capacity + self.config.block_size)

    def reserve_span(self, tokens: int, followed: bool = False) -> rooms.graphs.MemoryKey | None:
        # The mask tokens of a block follow the longest text.
        return super().reserve_span(tokens + self.config.block_size, followed)

    def extend(self, tokens: Tensor, features: Tensor, counts: RowCounts) -> Tensor:
        """Append ``counts[b]`` tokens to the context of row b, with a verifier's states
        ``[B, W, feature_size]``. Returns zeros ``[B, 1, H]``."""
        states, batch = features.to(self.device, self.dtype), len(features)
        if max(counts.host or (1,)) > 0:
            if self.passes is None or states.shape[1] > LONGEST:
                self._remember(states, counts)
            else:

                def run(added: Tensor, new: Tensor) -> Tensor:
                    return self._remember(added, RowCounts(None, new))

                self.captured("context", (states, counts.on(self.device)), run, list(counts))
            self.features.appended(counts)
        return torch.zeros(batch, 1, self.config.hidden_size, dtype=self.dtype, device=self.device)

    def _remember(self, states: Tensor, counts: RowCounts) -> Tensor:
        cache, positions = self.features.cache, self._prepare(states.shape[1], counts)
        for number, pair in enumerate(self._runs.remember(states, positions)):
            cache.update(*pair, number)
        return positions

    def follow(self, tokens: Tensor, states: Tensor, counts: RowCounts) -> Tensor:
        """Append tokens ``[B, 1]`` without a verifier's states to the context."""
        output = self._read(tokens, counts)
        self.features.appended(counts)
        return output

    def block(self, anchors: Tensor, count: int) -> Tensor:
        """Return the logits ``[B, count, Vd]`` of the first tokens of a block after `anchors`,
        ``[B, 1]``; the block leaves the cache with the next `keep`."""
        if self.passes is None:
            return self._block(anchors, count)
        width = [self.config.block_size] * len(anchors)
        return self.captured(count, [anchors], lambda x: self._block(x, count), width)

    def _block(self, anchors: Tensor, count: int) -> Tensor:
        config = self.config
        masks = anchors.new_full((1, 1), config.mask_token_id)
        masks = masks.expand(len(anchors), config.block_size - 1)
        first = not config.from_anchor
        # All mask tokens for any `count`: a token's logits depend on them.
        states = self._read(torch.cat([anchors, masks], 1), None)
        return self.logits(states[:, first : first + count])

    def bias(self, tokens: Tensor) -> Tensor:
        """Return the bias of the logits by the token before, ``[B, 1, Vd]``."""
        bias: Tensor = self._runs.markov_head(tokens)
        return bias * self.config.logit_scale

    def logits(self, states: Tensor) -> Tensor:
        logits, cap = super().logits(states), self.config.logit_cap
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        return logits if cap is None else (logits / cap).tanh() * cap

    def _prepare(self, width: int, counts: RowCounts | None) -> Tensor:
        cache = self.features.cache
        cache.prepare(width, None if counts is None or counts.all(width) else counts)
        if self._runs.angles.reached < cache.rows.capacity:
            self._runs.angles.reach(cache.rows.capacity, self._runs.norm.weight)
        return query_positions(cache.rows.base, cache.rows.counts, width)

    def _read(self, tokens: Tensor, counts: RowCounts | None) -> Tensor:
        cache = self.features.cache
        positions = self._prepare(tokens.shape[1], counts)
        attention = partial(attend, cache, self._masks(positions))
        # Blocks use only the lookup of a target's embeddings, no further steps such as scaling.
        weight: Any = getattr(self._embed, "weight", None)
        plain = isinstance(weight, Tensor)
        embeds = F.embedding(tokens, weight) if plain else self._embed(tokens)
        embeds = embeds.to(self.dtype) * self.config.embedding_scale
        out: Tensor = self._runs(embeds, positions, attention, cache.rows)
        return out

    def _masks(self, positions: Tensor) -> list[Tensor | None]:
        """Return the additive mask of each layer, for tokens at `positions`; None: every token sees
        all slots."""
        config, rows = self.config, self.features.cache.rows
        width = positions.shape[1]
        kinds = list(zip(config.windows, config.causal, strict=True))
        whole = rows.at is not None and rows.span == rows.at + width
        slots = torch.arange(rows.span, device=self.device)[None]
        masks: dict[tuple[int | None, bool], Tensor | None] = {}
        for kind in kinds:
            window, causal = kind
            if whole and window is None and (width == 1 or not causal):
                masks[kind] = None
            elif kind not in masks:
                ends = positions if causal else positions[:, -1:].expand(-1, width)
                seen = visible_slots(ends, slots)
                if window is not None:
                    seen &= (slots[:, None] - positions[..., None]).abs() < window
                masks[kind] = additive(seen, self.dtype)
        return [masks[kind] for kind in kinds]


class DFlash(HeadDrafter):
    """A DFlash or DSpark drafter (arXiv 2602.06036, 2607.05147) as a chain's drafter. It drafts a
    block of tokens in one pass, and in a longer window no more than a block has. Arguments: as
    for `HeadDrafter`, without trees."""

    kind, one_pass = "dflash", True
    _head: DFlashPasses
    _load = staticmethod(load_dflash)
    config: DFlashConfig

    @torch.inference_mode()
    def draft(self, inputs: DraftInput) -> DraftBlock:
        head, device = self._head, self.device
        head.passes = inputs.passes
        features, ids = head.features, inputs.tokens

        def extend(tokens: Tensor, states: Tensor, counts: RowCounts) -> Tensor:
            if counts.host is not None:
                # A text of a single token has no context.
                pairs = zip(counts.host, inputs.positions.tolist(), strict=True)
                counts = RowCounts([count if end > 1 else 0 for count, end in pairs])
            return head.extend(tokens, states, counts)

        def follow(tokens: Tensor, states: Tensor, counts: RowCounts) -> Tensor:
            # The context appends token t, while pair t of a head has token t + 1.
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
            # The level above reads a row of logits for each token of its window.
            buffer = row_buffer(inputs.rows, inputs.most, rows) if inputs.wants_rows else None
            lengths = inputs.lengths.less(0, most)
            inputs = dataclasses.replace(inputs, lengths=lengths, most=most, rows=buffer)

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


# ---- configurations ------------------------------------------------------------------------------


_SPECULATORS = ("dflash", "dspark")
_ASSISTANT = "muse_glimmer_assistant"
_DEFAULTS = {"qwen3": Qwen3Config, "llama": LlamaConfig}  # for keys missing in a configuration
_SLIDING = "sliding_attention"
_FLAT_BLOCK, _BLOCK = 16, 8  # default block sizes in tokens
_RANK = 256  # default rank of speculators' dspark
_MOST = 256  # maximum tokens of a block
# Values that the network assumes: a configuration may have no others.
_FIXED = {
    "markov_head_type": "vanilla", "projector_type": "dflash", "shift_label": False,
    "use_aux_hidden_state": True,
}  # fmt: skip
# Keys without an effect on drafts: of training, and of the confidence head.
_IGNORED = (
    "_attn_implementation", "auf", "ce_loss_alpha", "confidence_head_alpha",
    "confidence_head_with_markov", "emb_dim", "enable_confidence_head", "gru_hidden_dim",
    "l1_loss_alpha", "lambda_base_decay_ratio", "lambda_base_start", "loss_decay_gamma",
    "max_anchors", "max_window_layers", "num_anchors", "pure_draft_prefix_len",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DFlashConfig(HeadConfig):
    """The configuration of a drafter of blocks.

    Attributes:
        block_size: tokens of a block, including the last token of the text.
        mask_token_id: id of the other tokens.
        from_anchor: the first token is drafted from the state of the text's last token, else from
            the state of the first mask token.
        windows: by layer, number of positions back that a token sees, with its position; None: all.
        causal: by layer, whether a token sees no later tokens of the block.
        markov_rank: rank of the Markov head; 0: no such head.
        embedding_scale, logit_scale: factors of embeddings and logits.
        logit_cap: bound of the logits, by a hyperbolic tangent; None: no bound.
    """

    layer: LlamaConfig
    hidden_layers: tuple[int, ...]
    target_hidden_size: int
    block_size: int
    mask_token_id: int
    from_anchor: bool
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    draft_vocab_size: int | None = None
    markov_rank: int = 0
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None

    @property
    def num_drafts(self) -> int:
        """Number of draft tokens of a block."""
        return self.block_size - (not self.from_anchor)


def parse(
    config: Mapping[str, Any], tensors: Collection[str], target_layers: int, name: str
) -> DFlashConfig:
    """Read the config.json of the checkpoint `name`, with the names of its tensors, for a target of
    `target_layers` decoder layers. An error names the invalid key."""
    top = Reader(name, (config, set()))
    kind = top.of("speculators_model_type")
    if kind not in (None, *_SPECULATORS):
        raise top.error("speculators_model_type", "'dflash' or 'dspark'", kind)
    flat = kind is None
    if flat:
        top = layer = _with_defaults(top, config, REQUIRED)
    else:
        nested = top.nested("transformer_layer_config")
        layer = _with_defaults(nested, config["transformer_layer_config"], ())
    inner = top.nested("dflash_config", {})
    fields = inner.before(layer).before(top)
    shape = layer.shape(REQUIRED if flat else (), tensors)
    shape.attention_bias = layer.flag("attention_bias", False)
    assistant = layer.of("model_type") == _ASSISTANT
    windows = _windows(fields, shape.num_hidden_layers)
    if flat:
        key = "target_layer_ids"
        # Formats differ in the state after the last layer: before or after the final norm.
        numbers = fields.layers(key, fields.of(key), target_layers - 2)
        hidden_layers = tuple(number + 1 for number in numbers)
        if fields.size("num_target_layers") not in (None, target_layers):
            expected = f"the target's {target_layers}"
            raise fields.error("num_target_layers", expected, fields.of("num_target_layers"))
    else:
        key = "aux_hidden_state_layer_ids"
        hidden_layers = fields.layers(key, fields.of(key), target_layers)
    rank = 0 if fields.of("markov_rank") == 0 else fields.size("markov_rank")
    rank = _RANK if rank is None and kind == "dspark" else rank or 0
    spark = kind == "dspark" or any("DSpark" in str(n) for n in architectures(config))
    head = DFlashConfig(
        shape,
        hidden_layers,
        fields.size("target_hidden_size") or shape.hidden_size,
        fields.size("block_size", _MOST) or (_FLAT_BLOCK if flat else _BLOCK),
        _mask_id(fields, shape.vocab_size),
        fields.flag("sample_from_anchor", spark),
        # (An assistant's window is a distance, its end included.)
        tuple(window and window + assistant for window in windows),
        _causal(fields, windows, flat, assistant),
        draft_vocab_size=fields.size("draft_vocab_size", arguments.SIZE_MAX),
        markov_rank=rank,
        embedding_scale=fields.number("input_embedding_scale", 1.0),
        logit_scale=fields.number("output_multiplier", 1.0),
        logit_cap=fields.number("final_logit_softcapping", 0.0) or None,
    )
    if head.draft_vocab_size == shape.vocab_size and "d2t" not in tensors:
        head = dataclasses.replace(head, draft_vocab_size=None)
    if head.num_drafts < 1:
        raise fields.error("block_size", "at least 2 tokens, one of them drafted", head.block_size)
    for reader in (top, layer, inner):
        reader.require_all_read(_FIXED, _IGNORED)
    return head


def _with_defaults(reader: Reader, config: Mapping[str, Any], required: Collection[str]) -> Reader:
    """Return a reader of a layer's configuration with the defaults of its class, except for
    `required` keys: formats may write only other values."""
    kind = reader.of("model_type") or "qwen3"
    if kind != _ASSISTANT and kind not in _DEFAULTS:
        raise reader.error("model_type", f"one of {', '.join((*_DEFAULTS, _ASSISTANT))}", kind)
    defaults = _DEFAULTS[kind]() if kind in _DEFAULTS else None
    keys = [key for key in (*SIZES, "rms_norm_eps") if key not in required]
    known = {key: getattr(defaults, key, None) for key in keys}
    known = {key: value for key, value in known.items() if value is not None}
    given = {key: value for key, value in config.items() if value is not None}
    return Reader(reader.name, ({**known, **given}, set()))


def _windows(reader: Reader, count: int) -> tuple[int | None, ...]:
    kinds, window = reader.of("layer_types"), reader.size("sliding_window", arguments.SIZE_MAX)
    if kinds is None and reader.flag("use_sliding_window", False):
        raise reader.error("layer_types", f"the kind of each of {count} layers", None)
    kinds = ["full_attention"] * count if kinds is None else kinds
    known = isinstance(kinds, list) and set(kinds) <= {_SLIDING, "full_attention"}
    if not known or len(kinds) != count:
        expected = f"'full_attention' or '{_SLIDING}' for each of {count} layers"
        raise reader.error("layer_types", expected, kinds)
    if _SLIDING not in kinds or not reader.flag("use_sliding_window", True):
        return (None,) * count
    if window is None:
        raise reader.error("sliding_window", "a number >= 1 for sliding layers", None)
    return tuple(window if kind == _SLIDING else None for kind in kinds)


def _causal(
    reader: Reader, windows: Sequence[int | None], flat: bool, assistant: bool
) -> tuple[bool, ...]:
    keys = ("is_causal", "causal") if flat else ()
    if key := next((key for key in keys if reader.of(key) is not None), None):
        return (reader.flag(key, False),) * len(windows)
    sliding = not (assistant or reader.flag("sliding_window_non_causal", False))
    return tuple(sliding and window is not None for window in windows)


def _mask_id(reader: Reader, vocab_size: int) -> int:
    expected = f"an id below {vocab_size}"
    value = reader.of("mask_token_id", expected, lambda x: type(x) is int and 0 <= x < vocab_size)
    if value is None:
        raise reader.error("mask_token_id", expected, None)
    return int(value)
