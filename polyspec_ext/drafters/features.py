"""What a drafter keeps of a verifier's hidden states: a cache of keys and values of its own.

Its entries are pairs: pair t of a row is made of the state behind token t and of token t + 1, and
lies in slot t. Pairs made of a verifier's states stay. So do those of tokens that only a verifier
without such states has read: they are made of the drafter's own. What it drafts goes when the next
draft begins.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from ..kv_cache import RollbackCache
from ..kv_cache import masks as cache_masks
from ..levels.base import Counts
from ..tensors import Place
from .base import DraftInput

_STEP = 256  # pairs per row that the cache grows by
_BUCKET = 128  # slots that attention reads a multiple of, off the CPU

# Appends pairs: from tokens [B, W] int64, features [B, W, F] and the pairs of each row to the state
# behind each row's last pair, [B, 1, H].
Append = Callable[[torch.Tensor, torch.Tensor, Counts], torch.Tensor]


class FeatureCache:
    """The pairs of a batch, in rounds with and without host synchronisation alike.

    Args:
        config: of the drafter's decoder layers, as `RollbackCache` reads it.
        feature_size: F, of a verifier's states that a pair is made of, side by side.
        hidden_size: H, of the states that the drafter makes itself.
        dtype, device: of keys, values and states.
    """

    def __init__(
        self,
        config: Any,
        feature_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._config, self.dtype, self.device = config, dtype, device
        self._feature_size, self._size = feature_size, hidden_size
        self._cache: RollbackCache | None = None
        # Pairs of each row, [B] int64, and what the host knows of them: None behind a round without
        # host synchronisation, which changes the tensor alone.
        self._pairs = torch.zeros(0, dtype=torch.int64, device=device)
        self._host: list[int] | None = []
        self._states = torch.empty(0)  # [B, 1, H], behind each row's last pair, for the host

    @property
    def cache(self) -> RollbackCache:
        """Keys and values, for passes."""
        assert self._cache is not None, "prefill comes first"
        return self._cache

    @property
    def in_one_place(self) -> bool:
        """Whether the pairs can stay on the device in the batch at hand."""
        return self._cache is not None and self._cache.in_one_place

    # ---- a batch ---------------------------------------------------------------------------------

    def begin(self, batch: int, capacity: int) -> None:
        """No pairs, of so many rows."""
        self._host = [0] * batch
        self._states = self.no_states(batch)
        if self._cache is None or not self._cache.refit(batch):
            self._cache = self.another(batch, capacity)

    def another(self, batch: int, capacity: int) -> RollbackCache:
        """A cache of this kind."""
        return RollbackCache(
            self._config,
            batch,
            dtype=self.dtype,
            device=self.device,
            capacity=-(-max(capacity, 1) // _STEP) * _STEP,
            step=_STEP,
            bucket=1 if self.device.type == "cpu" else _BUCKET,
        )

    def no_states(self, batch: int) -> torch.Tensor:
        """Zeros, ``[B, 1, H]``."""
        return torch.zeros(batch, 1, self._size, dtype=self.dtype, device=self.device)

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in that order."""
        pairs = self._on_host()
        self._host = [pairs[row] for row in rows]
        self._states = self._states[list(rows)]
        if list(rows) != list(range(self.cache.batch_size)):
            self.cache.batch_select_indices(torch.tensor(list(rows), dtype=torch.int64))

    def _on_host(self) -> list[int]:
        """Pairs of each row. Waits for the device behind a round without host synchronisation."""
        if self._host is None:
            self._host = self._pairs.tolist()
            self.cache.rows.note(self._host)
        return self._host

    # ---- pairs -----------------------------------------------------------------------------------

    def keep(self, pairs: Counts) -> None:
        """Only the first ``pairs[b]`` of row b stay, and none that were drafted. A tensor: in a
        round without host synchronisation (`reserve_span`)."""
        if isinstance(pairs, torch.Tensor):
            torch.minimum(self._pairs, pairs.clamp_min(0), out=self._pairs)
            self.cache.rollback(self._pairs)
            return
        self._host = [min(had, max(n, 0)) for had, n in zip(self._on_host(), pairs, strict=True)]
        self.cache.rollback(self._host)

    def rollback(self, lengths: Counts) -> None:
        """`keep` of so many tokens: a pair ends with a token, so n tokens have n - 1 pairs."""
        self.keep(lengths - 1 if isinstance(lengths, torch.Tensor) else [n - 1 for n in lengths])

    def appended(self, counts: Counts) -> None:
        """The last pass has appended ``counts[b]`` pairs to row b, which stay."""
        if isinstance(counts, torch.Tensor):
            self._pairs.add_(counts)
        else:
            self._host = [had + n for had, n in zip(self._on_host(), counts, strict=True)]

    def reserve_span(self, tokens: int, more: Hashable = None) -> Place | None:
        """See `DeviceLengths`: a round without host synchronisation begins, in which no row gets
        longer than `tokens`, drafted pairs among them.

        Args:
            more: what passes depend on beside the cache.
        """
        cache = self.cache
        if self._host is not None:
            if self._pairs.shape[0] != len(self._host):
                self._pairs = torch.zeros(len(self._host), dtype=torch.int64, device=self.device)
            self._pairs.copy_(torch.tensor(self._host), non_blocking=True)
            self._host = None
        cache.rows.reach(tokens)
        if tokens > cache.room:
            return None
        form = (cache.rows.capacity, cache.rows.span_of(tokens), more)
        return Place(cache, [*cache.tensors, self._pairs], form)

    # ---- passes ----------------------------------------------------------------------------------

    def inputs(
        self, width: int, counts: Counts | None, cache: RollbackCache | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Positions and additive mask of a pass that appends pairs; the cache is prepared for it.

        Args:
            width: pairs per row, W.
            counts: of these, the leading ones that each row appends; None: all.
            cache: of `another`; None: the own one.
        """
        cache = self.cache if cache is None else cache
        inputs = cache.inputs(width, counts)
        mask, positions = inputs["attention_mask"], inputs["position_ids"]
        if mask is None and width > 1:  # causal, which a model would see to
            slots = torch.arange(cache.rows.span, device=self.device)[None]
            mask = cache_masks.additive(cache_masks.visible_slots(positions, slots), self.dtype)
        return positions, mask

    def tree_inputs(
        self, width: int, depth: int, ancestors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of one more level of a tree, which stands until the next call of `keep`.

        Args:
            width: nodes of the level, n.
            depth: of the nodes; 1: children of the root.
            ancestors: ``[B or 1, n, m]`` bool: which of the m pairs behind those that stand each
                node sees; the last n of them are the nodes themselves.
        """
        rows, nodes = self.cache.rows, ancestors.shape[2]
        self.cache.prepare(width)
        if rows.at is not None:
            begin = rows.at + width - nodes
            seen = cache_masks.tree_slots(begin, ancestors, rows.span)
            positions = torch.full((1, width), begin + depth - 1, device=self.device)
        else:
            # Of the rows' own lengths, which the device may know alone.
            stand = rows.lengths - nodes
            seen = cache_masks.tree_slots(stand, ancestors.expand(rows.batch, -1, -1), rows.span)
            positions = (stand + depth - 1)[:, None]
        return positions, cache_masks.additive(seen, self.dtype)

    # ---- what a draft begins with ----------------------------------------------------------------

    def read(
        self, inputs: DraftInput, layers: Sequence[int], extend: Append, follow: Append
    ) -> torch.Tensor:
        """Appends all pairs that are new.

        Args:
            inputs: of the draft.
            layers: whose states a verifier's feature is, side by side.
            extend: appends pairs behind a verifier's features, F their width.
            follow: the same behind the drafter's own states, F = H, one pair per row at a time.
                Not called in rounds without host synchronisation, where every level gives states.

        Returns:
            ``[B, 1, H]``, the state behind each row's last pair.
        """
        hidden = inputs.hidden
        assert hidden is not None
        if hidden.layers:
            own = [hidden.layers[layer] for layer in layers]
            features = torch.cat(own, -1) if len(own) > 1 else own[0]
        else:  # of texts of one token
            features = torch.zeros(len(inputs.tokens), 0, self._feature_size, dtype=self.dtype)
        if isinstance(inputs.counts, torch.Tensor):  # what is told is all that is new
            part, width = inputs.counts > 0, features.shape[1]
            self.keep(torch.where(part, hidden.positions, torch.iinfo(torch.int64).max))
            tokens = inputs.tokens[:, 1 : width + 1]
            return extend(tokens, features, (inputs.counts - 1).clamp(0, width))
        return self._read_on_host(inputs, inputs.counts, features, extend, follow)

    def _read_on_host(
        self,
        inputs: DraftInput,
        unread: Sequence[int],
        features: torch.Tensor,
        extend: Append,
        follow: Append,
    ) -> torch.Tensor:
        assert inputs.hidden is not None
        told = inputs.hidden.counts.tolist()
        ends = [total - 1 for total in inputs.positions.tolist()]  # pairs of each text
        kept, known, fresh = list(self._on_host()), [0] * len(ends), [0] * len(ends)
        for b, (end, count) in enumerate(zip(ends, unread, strict=True)):
            if not count:
                continue
            begin = end + 1 - count  # position of the first token at hand
            kept[b] = min(kept[b], begin if told[b] else end)
            # (A state behind the last token is of no pair yet.)
            known[b] = min(told[b], count - 1)
            fresh[b] = end - kept[b] - known[b]
        self.keep(kept)
        # A text of one token has no pair: the token is read behind a state of zeros, which stands
        # until the next draft.
        alone = [int(end == 0 < count) for end, count in zip(ends, unread, strict=True)]
        if any(alone):
            known = list(map(max, known, alone))
        width = max(known)
        if width:
            own = features[:, :width]
            if any(alone):
                tokens, own = self._with_alone(inputs.tokens, own, alone, width)
            else:
                tokens = inputs.tokens[:, 1 : width + 1]
            self._note(extend(tokens, own, known), known)
        for place in range(max(fresh)):
            # Tokens that no verifier with states has read.
            counts = [int(n > place) for n in fresh]
            at = [max(n - m + place, 0) for n, m in zip(unread, fresh, strict=True)]
            at = [min(i, inputs.tokens.shape[1] - 1) for i in at]
            ids = inputs.tokens.gather(1, torch.tensor(at, device=self.device)[:, None])
            self._note(follow(ids, self._states, counts), counts)
        if any(alone):
            self._host = [0 if one else n for one, n in zip(alone, self._on_host(), strict=True)]
        return self._states

    def _with_alone(
        self, tokens: torch.Tensor, features: torch.Tensor, alone: Sequence[int], width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What `extend` reads where some rows are `alone`, whose first token is the last."""
        rows = torch.tensor(alone, device=self.device)[:, None]
        at = torch.arange(1, width + 1, device=self.device) - rows
        own = torch.zeros(
            len(alone), width, self._feature_size, dtype=self.dtype, device=self.device
        )
        own[:, : features.shape[1]] = features.to(self.device).where(rows[..., None] == 0, 0)
        return tokens.gather(1, at.clamp_max(tokens.shape[1] - 1)), own

    def _note(self, states: torch.Tensor, counts: Sequence[int]) -> None:
        """The states behind the last pairs of those rows that have read any."""
        if all(counts):
            self._states = states
        else:
            read = torch.tensor(counts, device=self.device)[:, None, None] > 0
            self._states = torch.where(read, states, self._states)
