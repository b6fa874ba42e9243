"""EAGLE heads: drafters that read the hidden states of the model that they draft for.

A head reads pairs of a token and the state behind the token before it, from whichever verifier read
that last. The target's states replace those of the levels below it after each of its passes. Pairs
of the head's states are dropped when a draft ends.

A verifier whose states have another width, or that lacks the layers that the head reads (a smaller
model between the target and the head), has none to read: behind what that one accepted the head
reads its states, until another verifier has read the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding

from .. import arguments
from ..levels import IdMap
from ..levels.base import InputBlock, LevelOutput, PromptBatch
from ..levels.cpu import pack_layers
from ..levels.models import ModelLevel
from ..ops import attention as cache_attention
from ..ops import unchecked
from ..tensors import Place, RowCounts
from . import checkpoint
from .base import DraftBlock, DrafterCapabilities, DraftInput, TreeSize
from .checkpoint import Target
from .eagle_format import (
    EagleConfig,
    draft_ids,
    parse,
    renamed,
    require_target,
)
from .features import FeatureCache
from .model import draw_chain
from .trees import Tree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Eagle", "EagleConfig", "EagleNetwork", "HeadPasses"]

# Called with a layer's number, queries [B, H, T, D], keys and values [B, Hkv, T, D] of the tokens
# at hand: returns the attention's output [B, T, H, D], over whatever else it remembers.
Attention = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Rotation = tuple[torch.Tensor, torch.Tensor]  # cosines and sines

_FOLLOW_LENGTH = ("dynamic", "longrope")  # kinds of rotations that depend on the longest position


class EagleNetwork(nn.Module):
    """The layers of a head, under the tensors' published names (EAGLE-3's `midlayer` is
    `layers.0`).

    Args:
        config: of the head.
        embeds, heads: whether the checkpoint has embeddings and an output head.
    """

    def __init__(self, config: EagleConfig, *, embeds: bool = False, heads: bool = False) -> None:
        super().__init__()
        self.config = config
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
        self._rotary: LlamaRotaryEmbedding | None = None
        # Cosines and sines of the positions from 0 on, [P, 2, D] (`reach`).
        self.rotations: torch.Tensor | None
        self.register_buffer("rotations", None, persistent=False)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Return the state ``[B, T, H]`` that a step reads of the verifier's hidden states
        ``[B, T, feature_size]``."""
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
        rotation = self._rotation(states, positions)
        first: torch.Tensor | None = embeds
        if self.config.version == 1:
            states, first = self.fc(torch.cat([embeds, states], -1)), None
        for layer in self.layers:
            states, first = layer(states, first, rotation, attention), None
        return states

    @torch.inference_mode(False)
    @torch.no_grad()
    def reach(self, count: int) -> None:
        """Compute once what rotates queries and keys at positions below `count`, unless it depends
        on the longest position."""
        if self.rotations is not None and len(self.rotations) >= count:
            return
        if self.config.layer.rope_parameters["rope_type"] in _FOLLOW_LENGTH:
            return
        like = next(self.parameters())
        self.rotations = None
        both = self._rotation(like, torch.arange(count, device=like.device)[None])
        self.rotations = torch.cat(both, 1)[0].transpose(0, 1).contiguous()

    def carried(self, states: torch.Tensor) -> torch.Tensor:
        """Return what of a step's states the next step of a draft reads."""
        normed: torch.Tensor = self.norm(states) if self.config.norm_output else states
        return normed

    def before_head(self, states: torch.Tensor) -> torch.Tensor:
        """Return what of a step's states the output head reads."""
        normed: torch.Tensor = states if self.config.version == 1 else self.norm(states)
        return normed

    def _rotation(self, like: torch.Tensor, positions: torch.Tensor) -> Rotation:
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
        self._dim, self._number = config.head_dim, number
        queries = config.layer.num_attention_heads * self._dim
        keys = config.layer.num_key_value_heads * self._dim
        self.q_proj = nn.Linear(width, queries, bias=config.qkv_bias)
        self.k_proj = nn.Linear(width, keys, bias=config.qkv_bias)
        self.v_proj = nn.Linear(width, keys, bias=config.qkv_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.output_bias)

    def forward(
        self, states: torch.Tensor, rotation: Rotation, attention: Attention
    ) -> torch.Tensor:
        heads = (*states.shape[:2], -1, self._dim)
        q, k, v = self.q_proj(states), self.k_proj(states), self.v_proj(states)
        q, k, v = q.view(heads), k.view(heads), v.view(heads).transpose(1, 2)
        q, k = _rotated(q.transpose(1, 2), *rotation), _rotated(k.transpose(1, 2), *rotation)
        out: torch.Tensor = self.o_proj(attention(self._number, q, k, v).flatten(2))
        return out


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    # [B, H, T, D], halves paired as in Llama; `sin` has the sign of the half that it is added to.
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class HeadPasses:
    """A network, what it borrows from the target, and the cache of a batch.

    Args:
        network: with its weights. Below a level with packed weights it runs on packed ones too, and
            later changes of its linear weights are not seen.
        target: a level or its model: gives embeddings and output head where the network has none.
        ids: ``[Vd]`` int64, increasing, the target's id of each entry of a row of logits; None: the
            same.
    """

    def __init__(
        self,
        network: EagleNetwork,
        target: ModelLevel | PreTrainedModel,
        ids: torch.Tensor | None = None,
    ) -> None:
        self.network, self._target = network, target
        model = Target(target)
        # What the passes run: `network` stays as it is.
        self._runs = pack_layers(network) if model.pack else network
        embed: Any = getattr(self._runs, "embed_tokens", None)
        head: Any = getattr(self._runs, "lm_head", None)
        self._embed = model.model.get_input_embeddings() if embed is None else embed
        self._head = head = model.output_head if head is None else head
        self.vocab_size = model.vocab_size
        self.id_map = IdMap(model.vocab_size, ids)
        weight = next(network.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        # (A packed product has a dtype and no weights to ask.)
        self._head_dtype: torch.dtype = getattr(getattr(head, "weight", head), "dtype", self.dtype)
        self.config = config = network.config
        self.features = FeatureCache(
            config.layer, config.feature_size, config.hidden_size, self.dtype, self.device
        )
        self._weights: Place | None = None  # None: to be asked anew, since a batch begins

    def __reduce__(self) -> tuple[Any, ...]:
        """Make another over copies, with an empty cache, for `copy` and `pickle`."""
        return type(self), (self.network, self._target, self.id_map.drawn)

    def begin(self, batch: int, capacity: int) -> None:
        """Begin a batch of so many rows."""
        self._weights = None
        self.features.begin(batch, capacity)

    def reserve_span(self, tokens: int) -> Place | None:
        """Reserve a span (`FeatureCache.reserve_span`) with all that passes use beside their
        inputs."""
        if self._weights is None:
            parts = (self._runs, self._embed, self._head)
            weights = [x for part in parts for x in (*part.parameters(), *part.buffers())]
            self._weights = Place(self.network, weights + self.id_map.tensors)
        return self.features.reserve_span(tokens, self._weights)

    def extend(
        self, tokens: torch.Tensor, features: torch.Tensor, counts: RowCounts
    ) -> torch.Tensor:
        """Append ``counts[b]`` pairs of tokens ``[B, W]`` and a verifier's states
        ``[B, W, feature_size]``. Returns the state behind each row's last pair, ``[B, 1, H]``."""
        states = self._runs.fuse(features.to(self.device, self.dtype))
        return self._append(tokens.clamp(0, self.vocab_size - 1), states, counts)

    def follow(
        self, tokens: torch.Tensor, states: torch.Tensor, counts: RowCounts, stays: bool = True
    ) -> torch.Tensor:
        """Append pairs of this head's `states`, ``[B, W, H]``, as `extend` does; without `stays`
        until the next call of `keep`."""
        return self._append(tokens, self._runs.carried(states), counts, stays)

    def _append(
        self, tokens: torch.Tensor, states: torch.Tensor, counts: RowCounts, stays: bool = True
    ) -> torch.Tensor:
        even = counts.all(tokens.shape[1])
        inputs = self.features.inputs(tokens.shape[1], None if even else counts)
        out = self._pass(tokens, states, *inputs)
        if stays:
            self.features.appended(counts)
        if even:
            return out[:, -1:]
        last = counts.less(1).on(self.device)
        return out.gather(1, last[:, None, None].expand(-1, 1, out.shape[2]))

    def step(
        self, tokens: torch.Tensor, states: torch.Tensor, depth: int, ancestors: torch.Tensor
    ) -> torch.Tensor:
        """Read a level of a tree, whose pairs stay until the next call of `keep`: from the tokens
        ``[B, n]`` and this head's states ``[B, n, H]`` behind their parents to those behind them.
        `depth` and `ancestors` are those of `FeatureCache.tree_inputs`."""
        inputs = self.features.tree_inputs(tokens.shape[1], depth, ancestors)
        return self._pass(tokens, self._runs.carried(states), *inputs)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return ``[B, n, Vd]``, an entry for each id that `id_map` draws."""
        logits: torch.Tensor = self._head(self._runs.before_head(states).to(self._head_dtype))
        return logits

    def _pass(
        self,
        tokens: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run the network. The mask is additive, ``[B or 1, 1, T, N]``; None: a token sees all
        slots."""
        cache = self.features.cache
        self._runs.reach(cache.rows.capacity)

        def attention(
            layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
        ) -> torch.Tensor:
            keys, values = cache.update(k, v, layer)
            if cache_attention.takes(q, keys, values, mask):
                return cache_attention.attention(q, keys, values, mask, q.shape[3] ** -0.5)
            grouped = keys.shape[1] != q.shape[1]
            out = F.scaled_dot_product_attention(
                q, keys, values, attn_mask=mask, enable_gqa=grouped
            )
            return out.transpose(1, 2)

        embeds = self._embed(tokens).to(states.dtype)
        out: torch.Tensor = self._runs(embeds, states, positions, attention)
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
    offsets = tensors.pop("d2t", None)
    embeds, heads = "embed_tokens.weight" in tensors, "lm_head.weight" in tensors
    network = model.load(
        lambda: EagleNetwork(config, embeds=embeds, heads=heads), tensors, dtype, name
    )
    if not embeds and config.hidden_size != text.hidden_size:
        raise ValueError(
            f"{name}: embed_tokens.weight: expected shape [{text.vocab_size}, "
            f"{config.hidden_size}], given none, and the target's embeddings have "
            f"{text.hidden_size} columns"
        )
    if config.draft_vocab_size is not None and not heads:
        raise ValueError(
            f"{name}: lm_head.weight: expected shape [{config.draft_vocab_size}, "
            f"{config.hidden_size}], given none"
        )
    ids = draft_ids(config.draft_vocab_size, offsets, read.get("t2d"), text.vocab_size, name)
    if ids is None:
        return HeadPasses(network, target)
    # Entries in the order of their ids, whatever order they were stored in.
    ids, order = ids.sort()
    if not torch.equal(order, torch.arange(len(order))):
        with torch.no_grad():
            weight = network.lm_head.weight
            weight.copy_(weight[order.to(weight.device)])
    return HeadPasses(network, target, ids.to(model.device))


class Eagle:
    """An EAGLE-1, EAGLE-2 or EAGLE-3 head (arXiv 2401.15077, 2406.16858, 2503.01840).

    As a chain it draws one token after another from its processed distribution, which it hands up
    as q. With a tree its proposals are deterministic, and the level above verifies a tree.

    Args:
        head: the network, and what it borrows from the target.
        tree: `DynamicTree()`, a `StaticTree`, or None for a chain.
        name: for messages and statistics.
        draw: `ops.unchecked.draw`, or what stands in for it.
    """

    def __init__(
        self,
        head: HeadPasses,
        tree: Tree | None = None,
        name: str = "eagle",
        draw: Callable[..., Any] = unchecked.draw,
    ) -> None:
        arguments.instance("head", head, HeadPasses, none=False)
        arguments.instance("tree", tree, Tree)
        arguments.function("draw", draw)
        self._head, self.tree, self.name = head, tree, name
        self.vocab_size, self.device = head.vocab_size, head.device
        self.max_length: int | None = head.config.layer.max_position_embeddings
        self._draw, self.num_forward_passes = draw, 0
        self.revision = 0  # see `Continuing`

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
                checkpoint has none. Below a level with packed weights (`HuggingFaceLevel`) the
                head runs on packed ones too, whose memory is taken again, but for the output head
                that both share.
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
        return self._head.config

    @property
    def capabilities(self) -> DrafterCapabilities:
        return DrafterCapabilities(
            batches=True,
            reads_apart=True,
            hidden_layers=self.config.hidden_layers,
            hidden_size=self.config.target_hidden_size,
            trees=self.tree is not None,
            tree_size=None if self.tree is None else self._tree_size,
            keeps_lengths=True,
            admits=True,
            continues=True,
            device_lengths=self._head.features.in_one_place,
            id_map=self._head.id_map,
        )

    def _tree_size(self, depth: int) -> TreeSize:
        assert self.tree is not None
        return self.tree.size(depth, self._head.id_map.entries_below(self.vocab_size))

    @torch.inference_mode()
    def prefill(self, prompts: PromptBatch) -> None:
        # The prompts' states come with the first draft.
        self.revision += 1
        if prompts.held is None:
            self._head.begin(prompts.tokens.shape[0], prompts.capacity)

    def read(self, tokens: torch.Tensor, counts: Sequence[int]) -> None:
        """Read nothing: the states come with the next draft."""

    def open(self, capacity: int) -> None: ...

    def extend(self, sequence: None, tokens: torch.Tensor, layers: tuple[int, ...]) -> None: ...

    @torch.inference_mode()
    def admit(
        self,
        sequences: Sequence[None],
        lengths: Sequence[int],
        capacity: int,
        rows: Sequence[int] | None,
    ) -> None:
        self.revision += 1
        if rows is None:
            self._head.begin(len(sequences), capacity)
        else:
            self._head.features.admit(rows)

    def save(self, row: int, begin: int, end: int) -> None:
        """Save nothing: the states of the verifier are not kept."""

    def restore(self, sequence: None, saved: None) -> None: ...

    @torch.inference_mode()
    def rollback(self, lengths: RowCounts) -> RowCounts:
        self.revision += 1
        self._head.features.rollback(lengths)
        return lengths

    @torch.inference_mode()
    def select(self, rows: Sequence[int]) -> None:
        self.revision += 1
        self._head.features.select(rows)

    @torch.inference_mode()
    def reserve_span(self, tokens: int) -> Hashable | None:
        return self._head.reserve_span(tokens)

    def note_lengths(self, lengths: Sequence[int]) -> None:
        """Ignore lengths: the device knows the pairs, which are not the tokens."""

    @torch.inference_mode()
    def draft(self, inputs: DraftInput) -> DraftBlock:
        self.revision += 1
        head = self._head
        states = head.features.read(inputs, self.config.hidden_layers, head.extend, self._follow)
        if self.tree is None:
            return self._draft_chain(inputs, states)
        return self._draft_tree(self.tree, inputs, states)

    def _follow(
        self, tokens: torch.Tensor, states: torch.Tensor, counts: RowCounts
    ) -> torch.Tensor:
        self.num_forward_passes += 1
        return self._head.follow(tokens.clamp(0, self.vocab_size - 1), states, counts)

    def _draft_chain(self, inputs: DraftInput, states: torch.Tensor) -> DraftBlock:
        head, begun = self._head, False

        def forward(block: InputBlock) -> LevelOutput:
            # The first pass has been done, and each later one reads a token that was drawn.
            nonlocal states, begun
            if begun:
                counts = block.counts or RowCounts([1] * len(block.tokens))
                states = head.follow(block.tokens, states, counts, stays=False)
            begun = True
            return LevelOutput(head.logits(states))

        block = draw_chain(inputs, forward, head.id_map, self.vocab_size, self._draw)
        self.num_forward_passes += block.tokens.shape[1]
        return block

    def _draft_tree(self, tree: Tree, inputs: DraftInput, states: torch.Tensor) -> DraftBlock:
        head, id_map = self._head, self._head.id_map
        entries = id_map.entries_below(inputs.vocab_size)

        def expand(
            tokens: torch.Tensor, above: torch.Tensor, depth: int, ancestors: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            self.num_forward_passes += 1
            out = head.step(id_map.to_above(tokens), above, depth, ancestors)
            return out, head.logits(out)[..., :entries]

        lengths = inputs.lengths.on(self.device)
        self.num_forward_passes += 1
        first = head.logits(states)[:, 0, :entries]
        nodes = tree.grow(first, states, lengths, inputs.most, expand)
        return DraftBlock(id_map.to_above(nodes.tokens), nodes.counts, parents=nodes.parents)
