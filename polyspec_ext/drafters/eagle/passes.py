"""A head's passes over its own cache: pairs made of a verifier's states stay, pairs made of the
head's own states are dropped when the next draft begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from ...kv_cache import RollbackCache
from ...kv_cache import masks as cache_masks
from ...levels import HuggingFaceLevel, compiled
from ...levels.base import Counts
from ...levels.cpu_packed import pack_layers
from ...levels.grouped_attention import grouped_attention
from ...tensors import Place
from ..target import Target
from .network import EagleNetwork

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_STEP = 256  # pairs per row that the cache grows by
_BUCKET = 128  # slots that attention reads a multiple of, off the CPU


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
            if q.device.type == "cpu":
                return grouped_attention(self, q, keys, values, attention_mask)[0]
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
            later changes of its linear weights are not seen. On the CPU, below a level that decodes
            through `torch.compile` its passes of one row are compiled as that one's are, the first
            time that there is one.
        target: a level or its model: gives embeddings and output head where the network has none.
        ids: ``[Vd]`` int64, the target's id of each id of the draft vocabulary; None: the same.
    """

    def __init__(
        self,
        network: EagleNetwork,
        target: HuggingFaceLevel | PreTrainedModel,
        ids: torch.Tensor | None = None,
    ) -> None:
        self.network, self.ids, self._target = network, ids, target
        own = Target(target)
        # What the passes run: `network` stays as it is.
        self._runs = pack_layers(network) if own.pack else network
        embed: Any = getattr(self._runs, "embed_tokens", None) or own.model.get_input_embeddings()
        self._step = Step(self._runs, embed)
        head: Any = getattr(self._runs, "lm_head", None)
        if head is None:
            head = own.model.get_output_embeddings() if own.level is None else own.level.output_head
        self._head, self.vocab_size = head, own.vocab_size
        weight = next(network.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        # (A packed product has a dtype and no weights to ask.)
        self._head_dtype: torch.dtype = getattr(getattr(head, "weight", head), "dtype", self.dtype)
        self.config = network.config
        self._compiles = own.compile and not network.follows_length
        self._compiled: compiled.CompiledPasses | None = None
        self._pairs: list[int] = []
        self._cache: RollbackCache | None = None
        # In rounds without host synchronisation: the pairs, while the host does not know them.
        self._stand = torch.zeros(0, dtype=torch.int64)
        self._ahead = False
        self._weights: Place | None = None  # None: to be asked anew, since a batch begins
        self._places: dict[int, torch.Tensor] = {}  # below a number of ids

    def __reduce__(self) -> tuple[Any, ...]:
        """For `copy` and `pickle`: made anew over copies, with an empty cache."""
        return type(self), (self.network, self._target, self.ids)

    @property
    def num_ids(self) -> int:
        """Of the draft vocabulary."""
        return self.vocab_size if self.ids is None else len(self.ids)

    @property
    def pairs(self) -> list[int]:
        """Pairs of each row. Waits for the device behind a round without host synchronisation."""
        if self._ahead:
            self._ahead = False
            self._pairs = self._stand.tolist()
            self.cache.rows.note(self._pairs)
        return self._pairs

    @pairs.setter
    def pairs(self, pairs: list[int]) -> None:
        self._pairs = pairs

    def begin(self, batch: int, capacity: int) -> None:
        """An empty cache of so many rows."""
        self._ahead, self._weights = False, None
        self.pairs = [0] * batch
        cache = self._cache
        if cache is None or not cache.refit(batch):
            self._cache = self._new_cache(batch, capacity)

    def _new_cache(self, batch: int, capacity: int) -> RollbackCache:
        return RollbackCache(
            self.config.layer,
            batch,
            dtype=self.dtype,
            device=self.device,
            capacity=-(-max(capacity, 1) // _STEP) * _STEP,
            step=_STEP,
            bucket=1 if self.device.type == "cpu" else _BUCKET,
        )

    @property
    def cache(self) -> RollbackCache:
        assert self._cache is not None, "prefill comes first"
        return self._cache

    @property
    def stays(self) -> bool:
        """Whether the pairs can stay on the device in the batch at hand."""
        return self._cache is not None and self._cache.in_one_place

    def reach(self, tokens: int) -> Place | None:
        """A round begins in which no row gets longer than `tokens`, the head's own states among
        them. Returns all that passes use beside their inputs meanwhile; None: the cache has to
        grow first."""
        cache = self.cache
        if not self._ahead:
            if self._stand.shape[0] != len(self._pairs) or self._stand.device != self.device:
                self._stand = torch.zeros(len(self._pairs), dtype=torch.int64, device=self.device)
            self._stand.copy_(torch.tensor(self._pairs), non_blocking=True)
            self._ahead = True
        cache.rows.reach(tokens)
        if tokens > cache.room:
            return None
        if self._weights is None:
            parts = (self._step, self._head)
            weights = [x for part in parts for x in (*part.parameters(), *part.buffers())]
            weights += [*([] if self.ids is None else [self.ids]), *self._places.values()]
            self._weights = Place(self.network, weights)
        form = (cache.rows.capacity, cache.rows.span_of(tokens), self._weights)
        return Place(cache, [*cache.tensors, self._stand], form)

    def keep(self, pairs: Counts) -> None:
        """Only the first ``pairs[b]`` of row b stay, and none made of the head's own states."""
        if isinstance(pairs, torch.Tensor):
            torch.minimum(self._stand, pairs.clamp_min(0), out=self._stand)
            self.cache.rollback(self._stand)
            return
        self.pairs = [min(had, n) for had, n in zip(self.pairs, pairs, strict=True)]
        self.cache.rollback(self.pairs)

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in that order."""
        self.pairs = [self.pairs[row] for row in rows]
        if list(rows) != list(range(self.cache.batch_size)):
            self.cache.batch_select_indices(torch.tensor(list(rows), dtype=torch.int64))

    def extend(self, tokens: torch.Tensor, features: torch.Tensor, counts: Counts) -> torch.Tensor:
        """Append pairs behind those that stand.

        Args:
            tokens: ``[B, W]`` int64; `features`: ``[B, W, feature_size]``, behind the token before
                each.
            counts: pairs of each row.

        Returns:
            ``[B, 1, H]``, the state behind each row's last pair.
        """
        return self._append(tokens, self._runs.fuse(features.to(self.device, self.dtype)), counts)

    def follow(
        self, tokens: torch.Tensor, states: torch.Tensor, counts: Counts, stays: bool = True
    ) -> torch.Tensor:
        """The same behind this head's own `states`, ``[B, W, H]``.

        Args:
            stays: the pairs stand until `keep` cuts them; else until its next call.
        """
        return self._append(tokens, self._runs.carried(states), counts, stays)

    def no_states(self, batch: int) -> torch.Tensor:
        """Zeros, ``[B, 1, H]``."""
        size = self.config.layer.hidden_size
        return torch.zeros(batch, 1, size, dtype=self.dtype, device=self.device)

    def _append(
        self, tokens: torch.Tensor, states: torch.Tensor, counts: Counts, stays: bool = True
    ) -> torch.Tensor:
        width = tokens.shape[1]
        even = not isinstance(counts, torch.Tensor) and min(counts) == width
        out = self._pass(tokens, states, *self._inputs(self.cache, width, None if even else counts))
        if stays and isinstance(counts, torch.Tensor):
            self._stand.add_(counts)
        elif stays:
            self.pairs = [had + n for had, n in zip(self.pairs, counts, strict=True)]
        if even:
            return out[:, -1:]
        last = torch.as_tensor(counts, device=self.device).sub(1).clamp_(min=0)
        return out.gather(1, last[:, None, None].expand(-1, 1, out.shape[2]))

    def _inputs(
        self, cache: RollbackCache, width: int, counts: Counts | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Positions and mask of a pass, for which the cache is prepared."""
        inputs = cache.inputs(width, counts)
        mask, positions = inputs["attention_mask"], inputs["position_ids"]
        if mask is None and width > 1:  # causal, which a model would see to
            slots = torch.arange(cache.rows.span, device=self.device)[None]
            mask = cache_masks.additive(cache_masks.visible_slots(positions, slots), self.dtype)
        return positions, mask

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
        rows, (batch, width) = self.cache.rows, tokens.shape
        nodes = ancestors.shape[2]
        self.cache.prepare(width)
        if rows.at is not None:
            begin = rows.at + width - nodes
            seen = cache_masks.tree_slots(begin, ancestors, rows.span)
            positions = torch.full((1, width), begin + depth - 1, device=self.device)
        else:
            # Of the rows' own lengths, which the device may know alone.
            stand = rows.lengths - nodes
            seen = cache_masks.tree_slots(stand, ancestors.expand(batch, -1, -1), rows.span)
            positions = (stand + depth - 1)[:, None]
        mask = cache_masks.additive(seen, self.dtype)
        return self._pass(tokens, self._runs.carried(states), positions, mask)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """``[B, n, Vd]``, over the draft vocabulary."""
        logits: torch.Tensor = self._head(self._runs.before_head(states).to(self._head_dtype))
        return logits

    def of_target(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits over the target's vocabulary; ids that the head does not know have none."""
        if self.ids is None:
            return logits[..., : self.vocab_size]
        full = logits.new_full((*logits.shape[:-1], self.vocab_size), -float("inf"))
        return full.index_copy_(full.dim() - 1, self.ids, logits)

    def places_below(self, vocab_size: int) -> torch.Tensor | None:
        """``[n]`` int64, the ids of the draft vocabulary that stand for the target's below
        `vocab_size`; None: all do."""
        if vocab_size >= self.vocab_size:
            return None
        if vocab_size not in self._places:
            known = torch.arange(self.vocab_size) if self.ids is None else self.ids
            self._places[vocab_size] = (known < vocab_size).nonzero()[:, 0].to(self.device)
        return self._places[vocab_size]

    def tokens_of_target(self, ids: torch.Tensor) -> torch.Tensor:
        """The target's ids of ids of the draft vocabulary."""
        return ids if self.ids is None else self.ids[ids]

    def _pass(
        self,
        tokens: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        given = {
            "input_ids": tokens,
            "states": states,
            "position_ids": positions,
            "attention_mask": mask,
            "past_key_values": self.cache,
        }
        passes = self._compiled_passes(tokens)
        if passes is None:
            self._runs.reach(self.cache.rows.capacity)
        out: torch.Tensor = (passes or self._step)(**given)
        return out

    def _compiled_passes(self, tokens: torch.Tensor) -> compiled.CompiledPasses | None:
        """What runs a pass over these tokens, if it is compiled. Asked for the first time, all
        kinds are."""
        (batch, width), at = tokens.shape, self.cache.rows.at
        if not self._compiles or batch > 1 or width > compiled.LONGEST:
            return None
        if at is None or at < compiled.CONTEXT:
            return None
        if self._compiled is None:
            self._compiled = self._compile()
        return self._compiled

    def _compile(self) -> compiled.CompiledPasses:
        """Passes of one pair and of several, compiled over a cache of their own."""
        passes, context = compiled.CompiledPasses(Step.forward, self._step), 2 * compiled.CONTEXT
        cache = self._new_cache(1, context + max(compiled.WIDTHS))
        # The table of rotations grows with the cache, and would be a constant to them.
        self._runs.rotations = None
        for width in (context, *compiled.WIDTHS):
            positions, mask = self._inputs(cache, width, None)
            run = passes.compile if cache.rows.at else self._step
            run(
                input_ids=torch.zeros(1, width, dtype=torch.int64),
                states=self.no_states(1).expand(-1, width, -1),
                position_ids=positions,
                attention_mask=mask,
                past_key_values=cache,
            )
            cache.rollback([context])
        return passes
