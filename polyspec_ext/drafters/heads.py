"""Heads that draft from pairs of a token and a hidden state of the target: their passes over a
cache, and their drafts in a chain.

A head reads pairs of a token and the state after the token before it, of the last verifier that
read that token. After each pass of the target its states replace the states of lower levels. Pairs
with the head's states are dropped when a draft ends.

A verifier with states of another width, or without the layers that the head reads (a smaller model
between the target and the head), provides no states: for tokens that it accepted the head reads
pairs with the head's states, until another verifier has read the tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding

from .. import arguments, rooms
from ..kv_cache import RollbackCache
from ..kv_cache.layers import attended
from ..levels.base import InputBlock, Ints, LevelOutput, PromptBatch
from ..levels.fused import Angles, CachedLayers, epsilon_of, has_operators, is_norm, pack_layers
from ..levels.models import ModelLevel, changes_of
from ..levels.products import replaced
from ..ops import verification
from ..ops.decoder import rms_norm, take_rows
from ..tensors import IdMap, RowCounts
from .base import LONGEST, DraftBlock, DrafterCapabilities, DraftInput, TreeSize
from .checkpoint import Target
from .features import FeatureCache, Pairs
from .model import draw_chain
from .trees import Nodes, Tree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Called with a layer's number, queries [B, H, T, D], keys and values [B, Hkv, T, D] of the new
# tokens: returns the attention's output [B, T, H, D] over these and cached keys.
Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
Rotation = tuple[Tensor, Tensor]  # cosines and sines of a pass's tokens
Where = tuple[Tensor | None, Tensor | None]  # positions of pairs, and their mask

_Network = TypeVar("_Network", bound="HeadNetwork")
_Drafter = TypeVar("_Drafter", bound="HeadDrafter")
_Passes = TypeVar("_Passes", bound="HeadPasses")


class HeadConfig:
    """The configuration of a head, as passes and drafts read it.

    Attributes:
        layer: shape and number of the decoder layers, as `RollbackCache` reads them; `vocab_size`
            is the target's.
        hidden_layers: states of the target that the head reads; k is the state after k layers, -1
            the last state, after the final norm.
        target_hidden_size: width of each state.
        draft_vocab_size: number of ids that the output head draws; None: all.
    """

    layer: Any
    hidden_layers: tuple[int, ...]
    target_hidden_size: int
    draft_vocab_size: int | None

    @property
    def hidden_size(self) -> int:
        """Width of the head's states."""
        return int(self.layer.hidden_size)

    @property
    def feature_size(self) -> int:
        """Total width of the target's states of a token."""
        return self.target_hidden_size * len(self.hidden_layers)


class HeadNetwork(nn.Module):
    """The layers of a head. Without `embed_tokens` or `lm_head` the target's embeddings or output
    head are used.

    Attributes:
        operators: the fused layers of a `packed` network; None: not fused.
        angles: rotary angles of `read`; None: a module's.
        longest: maximum tokens of a pass by fused layers, which needs no mask for a chain.
    """

    config: HeadConfig
    operators: CachedLayers | None = None
    angles: Angles | None = None
    longest = 0

    def packed(self: _Network) -> _Network:
        """Return a copy on packed weights, with norms as operators and fused layers
        (`levels.fused`)."""
        twin = pack_layers(self)
        operators = twin.fused()
        if has_operators(twin):
            twin = replaced(twin, is_norm, lambda norms: OperatorNorm(norms[0]), merge=False)
        twin.operators, twin.longest = operators, 0 if operators is None else operators.longest
        return twin

    def fused(self) -> CachedLayers | None:
        """Return the fused layers of a packed copy; None: layers of unknown classes."""
        return None

    def fuse(self, features: Tensor) -> Tensor:
        """Project the verifier's hidden states ``[B, T, feature_size]`` to the states ``[B, T, H]``
        that a step reads."""
        return features

    def read(self, embeds: Tensor, states: Tensor, where: Where, cache: RollbackCache) -> Tensor:
        """Return the state after each token, ``[B, T, H]``.

        Args:
            embeds, states: ``[B, T, H]``, of the tokens, and after the token before each.
            where: positions of the pairs, ``[B or 1, T or 1]`` int64, and the additive mask,
                ``[B or 1, 1, T, N]``. Mask None: a token sees all slots, or, in a pass of at most
                `longest` tokens, earlier slots. Positions None, in such a pass: after the earlier.
            cache: has the earlier pairs, and is prepared for these.
        """
        raise NotImplementedError

    def carried(self, states: Tensor) -> Tensor:
        """Return a step's states as the next step of a draft reads them."""
        return states

    def before_head(self, states: Tensor) -> Tensor:
        """Return a step's states as the output head reads them."""
        return states


class RotaryNetwork(HeadNetwork):
    """A head with Llama's rotary positions, and tensors under the published names.

    Args:
        config: configuration of the head.
        embeds: whether the checkpoint has embeddings.
        heads: whether the checkpoint has an output head.
    """

    def __init__(self, config: HeadConfig, *, embeds: bool = False, heads: bool = False) -> None:
        super().__init__()
        self.config, width = config, config.hidden_size
        vocab_size = config.layer.vocab_size
        if embeds:
            self.embed_tokens = nn.Embedding(vocab_size, width)
        if heads:
            self.lm_head = nn.Linear(width, config.draft_vocab_size or vocab_size, bias=False)
        kind = config.layer.rope_parameters["rope_type"]
        self.angles: Angles = Angles(_Rotary(config.layer), kind)

    @property
    def drawn_weights(self) -> list[Tensor]:
        """Weights with a row for each id of the draft vocabulary."""
        return [self.lm_head.weight]


class _Rotary:
    """Llama's rotary positions, by the configuration `layer`: cosines, sines, and sines for
    `rotated`."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._module: Any = None

    def __call__(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # Created here: it has no weights, and a network may be built on the meta device.
        if self._module is None or self._module.inv_freq.device != like.device:
            self._module = LlamaRotaryEmbedding(self._layer).to(like.device)
        cos, sin = self._module(like, positions)
        signed = sin.clone()
        signed[..., : sin.shape[-1] // 2].neg_()
        return cos, sin, signed


class OperatorNorm(nn.Module):
    """A norm (`levels.fused.is_norm`) by `ops.decoder.rms_norm`."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.epsilon = norm.weight, epsilon_of(norm)

    def forward(self, states: Tensor) -> Tensor:
        rows = states.reshape(-1, states.shape[-1]).contiguous()
        return rms_norm(rows, self.weight, self.epsilon).view(states.shape)


class HeadLayer(nn.Module):
    """A Llama layer with the sizes of `shape`; `bare`: without a norm before the attention."""

    def __init__(self, shape: Any, attention: HeadAttention, bare: bool = False) -> None:
        super().__init__()
        width, eps = shape.hidden_size, shape.rms_norm_eps
        self.self_attn, self.mlp = attention, LlamaMLP(shape)
        # (Identity has no tensors.)
        self.input_layernorm: nn.Module = nn.Identity() if bare else nn.RMSNorm(width, eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps)

    def forward(
        self, states: Tensor, rotation: Rotation, attention: Attention, first: Tensor | None = None
    ) -> Tensor:
        """Return the states after the layer. Its attention reads `first`, if not None, instead of
        the normed states."""
        inputs = self.input_layernorm(states) if first is None else first
        states = states + self.self_attn(inputs, rotation, attention)
        out: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return out


class HeadAttention(nn.Module):
    """The attention of layer `number` of a cache.

    Args:
        width: width of the inputs.
        biases: whether queries, keys and values have biases, and whether the output has.
        norms: norm queries and keys by head, as Qwen3.
    """

    def __init__(
        self, shape: Any, number: int, width: int, biases: tuple[bool, bool], norms: bool = False
    ) -> None:
        super().__init__()
        heads, groups = shape.num_attention_heads, shape.num_key_value_heads
        dim = int(getattr(shape, "head_dim", None) or shape.hidden_size // heads)
        self.head_dim, self._number, self.scaling = dim, number, dim**-0.5
        self.q_proj = nn.Linear(width, heads * dim, bias=biases[0])
        self.k_proj = nn.Linear(width, groups * dim, bias=biases[0])
        self.v_proj = nn.Linear(width, groups * dim, bias=biases[0])
        self.o_proj = nn.Linear(heads * dim, shape.hidden_size, bias=biases[1])
        if norms:
            self.q_norm = nn.RMSNorm(dim, shape.rms_norm_eps)
            self.k_norm = nn.RMSNorm(dim, shape.rms_norm_eps)
        self._norms = norms

    def forward(self, states: Tensor, rotation: Rotation, attention: Attention) -> Tensor:
        heads = (*states.shape[:2], -1, self.head_dim)
        q, k, v = self.q_proj(states), self.k_proj(states), self.v_proj(states)
        q, k, v = q.view(heads), k.view(heads), v.view(heads).transpose(1, 2)
        if self._norms:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotated(q.transpose(1, 2), *rotation), rotated(k.transpose(1, 2), *rotation)
        out: Tensor = self.o_proj(attention(self._number, q, k, v).flatten(2))
        return out


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys ``[B, H, T, D]`` with halves paired as in Llama; `sin` is negated in
    the first half."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def attend(
    cache: RollbackCache,
    masks: Sequence[Tensor | None],
    layer: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Tensor:
    """Append keys ``[B, Hkv, T, D]`` and values to a layer of a cache that is prepared for them,
    and return `attended` with the mask of the layer."""
    return attended(q, *cache.update(k, v, layer), masks[layer])


class HeadPasses:
    """Passes of a network, with the cache of a batch.

    Args:
        network: with loaded weights. Below a level with packed weights a packed copy runs, and
            later changes of linear weights have no effect.
        target: a level or its model, for embeddings and output head missing in the network.
        ids: ``[Vd]`` int64, increasing, the target's id of each entry of a row of logits; None: the
            same.

    Attributes:
        passes: `DraftInput.passes` of the current draft.
    """

    def __init__(
        self, network: HeadNetwork, target: ModelLevel | PreTrainedModel, ids: Tensor | None = None
    ) -> None:
        self.network, self._target = network, target
        model = Target(target)
        # The network of the passes; `network` is unchanged.
        self._runs = network.packed() if model.pack else network
        embed: Any = getattr(self._runs, "embed_tokens", None)
        head: Any = getattr(self._runs, "lm_head", None)
        self._embed = model.model.get_input_embeddings() if embed is None else embed
        self._head = head = model.output_head if head is None else head
        self.vocab_size = model.vocab_size
        self.id_map = IdMap(model.vocab_size, ids)
        weight = next(network.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        # (A packed product has a dtype, and no weights.)
        self._head_dtype: torch.dtype = getattr(getattr(head, "weight", head), "dtype", self.dtype)
        self.config = config = network.config
        self.features = FeatureCache(
            config.layer, config.feature_size, config.hidden_size, self.dtype, self.device
        )
        self._weights: rooms.graphs.MemoryKey | None = None  # None: not collected since `begin`
        self.passes: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the type and its arguments, without the cache, for `copy` and `pickle`."""
        return type(self), (self.network, self._target, self.id_map.drawn)

    def quantised(self: _Passes) -> _Passes:
        """Return passes of a 4-bit copy of the network and of its output head (`stored_w4`)."""
        from ..quantization import four_bit_head  # most chains have no copy

        output = Target(self._target).model.get_output_embeddings()
        return type(self)(four_bit_head(self.network, output), self._target, self.id_map.drawn)

    def trimmed(self: _Passes, size: int) -> _Passes:
        """Return passes of the network that draw the `size` lowest ids of the vocabulary."""
        from ..quantization import trimmed_head

        arguments.integer("ids", size, self.vocab_size, 1)
        if self.id_map.drawn is not None:
            raise ValueError(f"ids: remove it: the head draws {len(self.id_map.drawn)} ids already")
        output = Target(self._target).model.get_output_embeddings()
        ids = torch.arange(size, device=self.device)
        return type(self)(trimmed_head(self.network, output, ids), self._target, ids)

    def begin(self, batch: int, capacity: int) -> None:
        """Begin a batch of `batch` rows, the longest of `capacity` tokens."""
        self._weights = self.passes = None
        self.features.begin(batch, capacity)
        if self._runs.operators is not None:
            self.features.allocate(*self._runs.operators.key_shape)

    def reserve_span(self, tokens: int, followed: bool = False) -> rooms.graphs.MemoryKey | None:
        """Reserve a span (`FeatureCache.reserve_span`) with all tensors that passes use beside
        their inputs."""
        if self._weights is None:
            parts = (self._runs, self._embed, self._head)
            weights = [x for module in parts for x in (*module.parameters(), *module.buffers())]
            self._weights = rooms.graphs.MemoryKey(self.network, weights + self.id_map.tensors)
        more: tuple[Hashable, ...] = (self._weights,)
        if (angles := self._runs.angles) is not None:
            more += (angles.key(self.features.cache.rows.capacity, next(self._runs.parameters())),)
        return self.features.reserve_span(tokens, more, followed)

    def captured(
        self,
        form: Hashable,
        inputs: Sequence[Tensor],
        run: Callable[..., Tensor],
        more: Sequence[int],
        beside: int = 0,
    ) -> Tensor:
        """Return ``run(*inputs)``, which appends ``more[b]`` pairs to row b, by a CUDA graph; valid
        until the next call.

        Args:
            form: as for `runtime.graphs.Passes.call`.
            beside: pairs of a row beyond its text.
        """
        cache = self.features.cache
        before = cache.rows.host
        assert self.passes is not None
        assert before is not None, "the host follows these passes"

        def reserve(tokens: int) -> rooms.graphs.MemoryKey | None:
            return self.reserve_span(tokens + beside, followed=True)

        output: Tensor
        (output,) = self.passes.call(
            "a pass of a head", form, reserve, inputs, lambda *tensors: (run(*tensors),)
        )
        cache.note_lengths(list(map(int.__add__, before, more)))
        return output

    def extend(self, tokens: Tensor, features: Tensor, counts: RowCounts) -> Tensor:
        """Append ``counts[b]`` pairs of tokens ``[B, W]`` and a verifier's states
        ``[B, W, feature_size]``. Returns the state after each row's last pair, ``[B, 1, H]``."""
        return self._append(True, tokens, features.to(self.device, self.dtype), counts)

    def follow(self, tokens: Tensor, states: Tensor, counts: RowCounts) -> Tensor:
        """Append pairs with this head's `states`, ``[B, W, H]``, as `extend` does."""
        return self._append(False, tokens, states, counts)

    def next(self, tokens: Tensor, states: Tensor, counts: RowCounts) -> Tensor:
        """Append, until the next `keep`, pairs with the draft tokens ``[B, 1]`` of the step
        before."""
        return self._append(False, tokens, states, counts, stays=False)

    def _append(
        self, fuses: bool, tokens: Tensor, states: Tensor, counts: RowCounts, stays: bool = True
    ) -> Tensor:
        if self.passes is None or tokens.shape[1] > LONGEST:
            out = self._behind(fuses, tokens, states, counts)
        else:

            def run(ids: Tensor, behind: Tensor, new: Tensor) -> Tensor:
                return self._behind(fuses, ids, behind, RowCounts(None, new))

            inputs = tokens, states, counts.on(self.device)
            out = self.captured(fuses, inputs, run, list(counts)).clone()
        if stays:
            self.features.appended(counts)
        return out

    def _behind(self, fuses: bool, tokens: Tensor, states: Tensor, counts: RowCounts) -> Tensor:
        """Append pairs; return the state after each row's last pair, ``[B, 1, H]``."""
        if fuses:
            tokens, states = tokens.clamp(0, self.vocab_size - 1), self._runs.fuse(states)
        else:
            states = self._runs.carried(states)
        width, even = tokens.shape[1], counts.all(tokens.shape[1])
        masked = width > self._runs.longest
        inputs = self.features.inputs(width, None if even else counts, masked)
        out = self._pass(tokens, states, inputs)
        if even or width == 1:
            return out[:, -1:]
        return take_rows(out, counts.on(self.device), None, -1, 1, False)

    def step(self, tokens: Tensor, states: Tensor, depth: int, ancestors: Tensor) -> Tensor:
        """Read a level of a tree, whose pairs stay until the next `keep`: from the tokens
        ``[B, n]`` and this head's states ``[B, n, H]`` after their parents to the states after the
        tokens. `depth` and `ancestors`: as for `FeatureCache.tree_inputs`."""
        inputs = self.features.tree_inputs(tokens.shape[1], depth, ancestors)
        return self._pass(tokens, self._runs.carried(states), inputs)

    def logits(self, states: Tensor) -> Tensor:
        """Return logits ``[B, n, Vd]``, an entry for each id that `id_map` draws."""
        logits: Tensor = self._head(self._runs.before_head(states).to(self._head_dtype))
        return logits

    def _pass(self, tokens: Tensor, states: Tensor, where: Where) -> Tensor:
        cache = self.features.cache
        embeds = self._embed(tokens).to(states.dtype)
        angles, capacity = self._runs.angles, cache.rows.capacity
        if angles is not None and angles.reached < capacity:
            angles.reach(capacity, embeds)
        return self._runs.read(embeds, states, where, cache)


class HeadDrafter:
    """A head as the drafter of a chain.

    Without a tree it draws tokens in turn from its processed distribution, which the level above
    gets as q. With a tree its proposals are deterministic, and the level above verifies a tree.

    Args:
        head: network and cache.
        tree: `DynamicTree()`, a `StaticTree`, or None for a chain.
        name: for messages and statistics; None: the class's `kind`.
        draw: `ops.verification.draw`, or a replacement.
    """

    kind = "head"
    one_pass = False  # whether a pass drafts all tokens
    in_target = False  # whether the target's checkpoint has the head
    _load: Callable[..., HeadPasses]

    def __init__(
        self,
        head: HeadPasses,
        tree: Tree | None = None,
        name: str | None = None,
        draw: Callable[..., Any] = verification.draw,
    ) -> None:
        arguments.instance("head", head, HeadPasses, none=False)
        arguments.instance("tree", tree, Tree)
        arguments.function("draw", draw)
        if self.one_pass and tree is not None:
            raise ValueError(f"tree: expected None for {self.kind}, given {arguments.shown(tree)}")
        self._head, self.tree, self.name = head, tree, name or self.kind
        self.config: Any = head.config
        self.vocab_size, self.device = head.vocab_size, head.device
        self.max_length: int | None = head.config.layer.max_position_embeddings
        self._draw, self.num_forward_passes = draw, 0

    def stamp(self) -> object:
        """Return the stamp of the head's weights, as `ModelLevel.stamp`."""
        return changes_of(self._head.network)

    @classmethod
    def from_pretrained(
        cls: type[_Drafter],
        location: str | Path,
        target: ModelLevel | PreTrainedModel,
        *,
        tree: Tree | None = None,
        dtype: torch.dtype | None = None,
        name: str | None = None,
        w4: bool = False,
        ids: int | None = None,
    ) -> _Drafter:
        """Load published heads.

        Args:
            location: a directory with config.json, and model.safetensors or pytorch_model.bin, or
                an id on the Hugging Face hub. EAGLE: in the format of SafeAILab (SpecForge) or
                speculators. DFlash: of z-lab, DeepSeek (DSpark) or speculators (dflash, dspark).
                MTP: the target's checkpoint.
            target: the level or model that the head was trained for, used for embeddings and output
                head missing in the checkpoint. Below a level with packed weights the head runs on
                packed copies too, in additional memory, except for a shared output head.
            tree: `DynamicTree()`, a `StaticTree`, or None for a chain. DFlash: None.
            dtype: dtype of the head; None: the target's.
            name: for messages; None: the directory's name, of an MTP head "mtp".
            w4: round the weights to 4 bits, of a shared output head too, in a copy: drafts read a
                quarter of the bytes of bfloat16.
            ids: draw the lowest ids alone, about the most frequent in vocabularies of byte pairs;
                None: all that the head draws.

        Raises:
            TypeError: an argument is of another type.
            ValueError: the directory is missing, the checkpoint has code in it, tensors are
                missing, unknown or of another shape, or the head is for another target; the message
                names the expected and the actual value.
        """
        arguments.instance("tree", tree, Tree)
        arguments.dtype("dtype", dtype)
        arguments.label("name", name)
        label = name or (cls.kind if cls.in_target else Path(str(location)).name)
        head = cls._load(location, target, dtype)
        head = head if ids is None else head.trimmed(ids)
        return cls(head.quantised() if w4 else head, tree, label)

    @property
    def capabilities(self) -> DrafterCapabilities:
        return DrafterCapabilities(
            batches=True,
            reads_apart=True,
            hidden_layers=self._head.config.hidden_layers,
            hidden_size=self._head.config.target_hidden_size,
            trees=self.tree is not None,
            tree_size=None if self.tree is None else self._tree_size,
            keeps_lengths=True,
            checked=True,
            admits=True,
            continues=True,
            device_lengths=self._head.features.in_one_place,
            id_map=self._head.id_map,
            one_pass=self.one_pass,
        )

    def _tree_size(self, depth: int) -> TreeSize:
        assert self.tree is not None
        return self.tree.size(depth, self._head.id_map.entries_below(self.vocab_size))

    @torch.inference_mode()
    def prefill(self, prompts: PromptBatch) -> None:
        # The prompts' states come with the first draft.
        self._head.begin(prompts.tokens.shape[0], prompts.capacity)

    def read(self, tokens: Tensor, counts: Sequence[int]) -> None:
        """Read nothing: the states come with the next draft."""

    # A sequence is a list of copied pairs: later states come with a draft.

    def open(self, capacity: int) -> list[Pairs]:
        return []

    def extend(self, sequence: list[Pairs], tokens: Tensor, layers: tuple[int, ...]) -> None: ...

    @torch.inference_mode()
    def admit(
        self, sequences: Sequence[list[Pairs]], lengths: Ints, capacity: int, rows: Ints | None
    ) -> None:
        if rows is None:
            self._head.begin(len(sequences), capacity)
        else:
            self._head.features.admit(rows)
        numbers = range(len(sequences)) if rows is None else rows
        for row, sequence in zip(numbers, sequences, strict=True):
            if sequence:
                self._head.features.fill(row, sequence)

    @torch.inference_mode()
    def save(self, row: int, begin: int, end: int) -> Pairs:
        # The last pair of a text has the state of its second to last token.
        return self._head.features.save(row, max(begin - 1, 0), end - 1)

    def restore(self, sequence: list[Pairs], saved: Pairs, count: int) -> None:
        count -= not sequence  # pair t ends with token t + 1
        sequence.append([(keys[:, :count], values[:, :count]) for keys, values in saved])

    @torch.inference_mode()
    def rollback(self, lengths: RowCounts) -> RowCounts:
        counts = RowCounts.of(lengths)
        if counts.host is not None:  # else the next draft calls `keep`
            self._head.features.keep(counts.less(1))
        return lengths

    @torch.inference_mode()
    def select(self, rows: Sequence[int]) -> None:
        self._head.features.select(rows)

    @torch.inference_mode()
    def reserve_span(self, tokens: int) -> Hashable | None:
        return self._head.reserve_span(tokens)

    def note_lengths(self, lengths: Sequence[int]) -> None:
        """Ignore lengths of texts: the device counts the pairs."""

    @torch.inference_mode()
    def draft(self, inputs: DraftInput) -> DraftBlock:
        head, head.passes = self._head, inputs.passes
        states = head.features.read(
            inputs, self._head.config.hidden_layers, head.extend, self._follow
        )
        if self.tree is None:
            return self._draft_chain(inputs, states)
        return self._draft_tree(self.tree, inputs, states)

    def _follow(self, tokens: Tensor, states: Tensor, counts: RowCounts) -> Tensor:
        self.num_forward_passes += 1
        return self._head.follow(tokens.clamp(0, self.vocab_size - 1), states, counts)

    def _draft_chain(self, inputs: DraftInput, states: Tensor) -> DraftBlock:
        head, first = self._head, True
        if inputs.counts.host is None:  # the first pass is done: only active rows matter
            single = inputs.counts.less(0, 1)
            inputs = dataclasses.replace(inputs, tokens=inputs.tokens[:, :1], counts=single)

        def forward(block: InputBlock) -> LevelOutput:
            # The first pass is done, and each later pass reads a drawn token.
            nonlocal states, first
            if not first:
                counts = block.counts or RowCounts([1] * len(block.tokens))
                states = head.next(block.tokens, states, counts)
            first = False
            return LevelOutput(head.logits(states))

        block = draw_chain(inputs, forward, head.id_map, self.vocab_size, self._draw)
        self.num_forward_passes += block.tokens.shape[1]
        return block

    def _draft_tree(self, tree: Tree, inputs: DraftInput, states: Tensor) -> DraftBlock:
        head, id_map, most = self._head, self._head.id_map, inputs.most
        entries = id_map.entries_below(inputs.vocab_size)
        size = tree.size(most, entries)

        def expand(
            tokens: Tensor, above: Tensor, depth: int, ancestors: Tensor
        ) -> tuple[Tensor, Tensor]:
            out = head.step(id_map.to_above(tokens), above, depth, ancestors)
            return out, head.logits(out)[..., :entries]

        def grown(states: Tensor, lengths: Tensor) -> Nodes:
            first = head.logits(states)[:, 0, :entries]
            nodes = tree.grow(first, states, lengths, most, expand)
            return nodes._replace(tokens=id_map.to_above(nodes.tokens))

        tensors = states, inputs.lengths.on(self.device)
        if inputs.passes is None:
            nodes = grown(*tensors)
        else:
            read, rows = size.read, len(states)
            table = head.captured(
                (most, entries), tensors, lambda *x: grown(*x).table(), [read] * rows, read
            )
            nodes = Nodes.of(table.cpu())
        self.num_forward_passes += size.passes
        return DraftBlock(nodes.tokens, nodes.counts, parents=nodes.parents)
