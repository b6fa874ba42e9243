"""A head's passes over the pairs of a batch (`FeatureCache`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from ...kv_cache import RollbackCache
from ...levels import HuggingFaceLevel, IdMap
from ...levels.cpu_packed import pack_layers
from ...ops import attention as cache_attention
from ...tensors import Place, RowCounts
from ..features import FeatureCache
from ..target import Target
from .network import EagleNetwork

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Step(torch.nn.Module):
    """A pass of a head over its cache, with arguments as a model's.

    Args:
        network, embed: of the head.
    """

    def __init__(self, network: EagleNetwork, embed: torch.nn.Module) -> None:
        super().__init__()
        self.network, self.embed = network, embed

    def forward(
        self,
        input_ids: torch.Tensor,
        states: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        past_key_values: RollbackCache,
    ) -> torch.Tensor:
        """See `EagleNetwork.forward`. The mask is additive, ``[B or 1, 1, T, N]``; None: a token
        sees all slots."""

        def attention(
            layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
        ) -> torch.Tensor:
            keys, values = past_key_values.update(k, v, layer)
            if cache_attention.takes(q, keys, values, attention_mask):
                scale = q.shape[3] ** -0.5
                return cache_attention.attention(q, keys, values, attention_mask, scale)
            out = F.scaled_dot_product_attention(
                q, keys, values, attn_mask=attention_mask, enable_gqa=keys.shape[1] != q.shape[1]
            )
            return out.transpose(1, 2)

        embeds = self.embed(input_ids).to(states.dtype)
        out: torch.Tensor = self.network(embeds, states, position_ids, attention)
        return out


class HeadPasses:
    """A network, what it borrows from the target, and the cache of a batch.

    Pair t of a row is the state behind token t and the embedding of token t + 1; it lies in slot t.

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
        target: HuggingFaceLevel | PreTrainedModel,
        ids: torch.Tensor | None = None,
    ) -> None:
        self.network, self._target = network, target
        own = Target(target)
        # What the passes run: `network` stays as it is.
        self._runs = pack_layers(network) if own.pack else network
        embed: Any = getattr(self._runs, "embed_tokens", None) or own.model.get_input_embeddings()
        self._step = Step(self._runs, embed)
        head: Any = getattr(self._runs, "lm_head", None)
        if head is None:
            head = own.model.get_output_embeddings() if own.level is None else own.level.output_head
        self._head, self.vocab_size = head, own.vocab_size
        self.id_map = IdMap(own.vocab_size, ids)
        weight = next(network.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        # (A packed product has a dtype and no weights to ask.)
        self._head_dtype: torch.dtype = getattr(getattr(head, "weight", head), "dtype", self.dtype)
        self.config = network.config
        config = self.config
        self.features = FeatureCache(
            config.layer, config.feature_size, config.hidden_size, self.dtype, self.device
        )
        self._weights: Place | None = None  # None: to be asked anew, since a batch begins

    def __reduce__(self) -> tuple[Any, ...]:
        """For `copy` and `pickle`: made anew over copies, with an empty cache."""
        return type(self), (self.network, self._target, self.id_map.drawn)

    def begin(self, batch: int, capacity: int) -> None:
        """An empty cache of so many rows."""
        self._weights = None
        self.features.begin(batch, capacity)

    def reserve_span(self, tokens: int) -> Place | None:
        """See `FeatureCache.reserve_span`: all that passes use beside their inputs."""
        if self._weights is None:
            parts = (self._step, self._head)
            weights = [x for part in parts for x in (*part.parameters(), *part.buffers())]
            self._weights = Place(self.network, weights + self.id_map.tensors)
        return self.features.reserve_span(tokens, self._weights)

    def extend(
        self, tokens: torch.Tensor, features: torch.Tensor, counts: RowCounts
    ) -> torch.Tensor:
        """Append pairs behind those that stand.

        Args:
            tokens: ``[B, W]`` int64; `features`: ``[B, W, feature_size]``, behind the token before
                each.
            counts: pairs of each row.

        Returns:
            ``[B, 1, H]``, the state behind each row's last pair.
        """
        states = self._runs.fuse(features.to(self.device, self.dtype))
        return self._append(tokens.clamp(0, self.vocab_size - 1), states, counts)

    def follow(
        self, tokens: torch.Tensor, states: torch.Tensor, counts: RowCounts, stays: bool = True
    ) -> torch.Tensor:
        """The same behind this head's own `states`, ``[B, W, H]``.

        Args:
            stays: the pairs stand until `keep` cuts them; else until its next call.
        """
        return self._append(tokens, self._runs.carried(states), counts, stays)

    def _append(
        self, tokens: torch.Tensor, states: torch.Tensor, counts: RowCounts, stays: bool = True
    ) -> torch.Tensor:
        width = tokens.shape[1]
        even = counts.all(width)
        inputs = self.features.inputs(width, None if even else counts)
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
        """One more level of a tree, which stands until the next call of `keep`.

        Args:
            tokens: ``[B, n]`` int64, the nodes of depth `depth` (1: children of the root).
            states: ``[B, n, H]``, of this head, behind the parent of each.
            ancestors: ``[B or 1, n, m]`` bool: which of the m pairs behind those that stand each
                node sees; the last n of them are the nodes themselves.

        Returns:
            ``[B, n, H]``, behind each.
        """
        positions, mask = self.features.tree_inputs(tokens.shape[1], depth, ancestors)
        return self._pass(tokens, self._runs.carried(states), positions, mask)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """``[B, n, Vd]``, an entry for each id that `id_map` draws."""
        logits: torch.Tensor = self._head(self._runs.before_head(states).to(self._head_dtype))
        return logits

    def _pass(
        self,
        tokens: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        cache = self.features.cache
        self._runs.reach(cache.rows.capacity)
        out: torch.Tensor = self._step(tokens, states, positions, mask, cache)
        return out
