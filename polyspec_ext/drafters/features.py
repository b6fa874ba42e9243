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
from ..tensors import Place, RowCounts
from .base import DraftInput

_STEP = 256  # pairs per row that the cache grows by
_BUCKET = 128  # slots that attention reads a multiple of, off the CPU

# Appends pairs: from tokens [B, W] int64, features [B, W, F] and the pairs of each row to the state
# behind each row's last pair, [B, 1, H].
Append = Callable[[torch.Tensor, torch.Tensor, RowCounts], torch.Tensor]


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
        # Pairs of each row; behind a round without host synchronisation the device alone knows
        # them, in memory that stays.
        self._pairs = RowCounts([])
        self._memory = torch.zeros(0, dtype=torch.int64, device=device)
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
        self._pairs = RowCounts([0] * batch)
        self._states = self.no_states(batch)
        if self._cache is None or not self._cache.refit(batch):
            self._cache = RollbackCache(
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
        self._pairs = RowCounts([pairs[row] for row in rows])
        self._states = self._states[list(rows)]
        self.cache.select(rows)

    def _on_host(self) -> tuple[int, ...]:
        """Pairs of each row. Waits for the device behind a round without host synchronisation."""
        if self._pairs.host is None:
            self._pairs = RowCounts(list(self._pairs))
            self.cache.note_lengths(self._pairs)
        assert self._pairs.host is not None
        return self._pairs.host

    # ---- pairs -----------------------------------------------------------------------------------

    def keep(self, pairs: Sequence[int] | torch.Tensor) -> None:
        """Only the first ``pairs[b]`` >= 0 of row b stay, and none that were drafted. The host
        knows how many, but in a round without host synchronisation (`reserve_span`)."""
        left = RowCounts.of(pairs)
        if left.host is None:
            torch.minimum(self._memory, left.on(self.device), out=self._memory)
        else:
            self._pairs = RowCounts(list(map(min, self._on_host(), left.host)))
        self.cache.rollback(self._pairs)

    def rollback(self, lengths: Sequence[int] | torch.Tensor) -> None:
        """`keep` of so many tokens: a pair ends with a token, so n tokens have n - 1 pairs."""
        self.keep(RowCounts.of(lengths).less(1))

    def appended(self, counts: Sequence[int] | torch.Tensor) -> None:
        """The last pass has appended ``counts[b]`` pairs to row b, which stay."""
        more = RowCounts.of(counts)
        if more.host is None:
            self._memory.add_(more.on(self.device))
        else:
            self._pairs = RowCounts(list(map(int.__add__, self._on_host(), more.host)))

    def reserve_span(self, tokens: int, more: Hashable = None) -> Place | None:
        """See `DeviceLengths`: a round without host synchronisation begins, in which no row gets
        longer than `tokens`, drafted pairs among them.

        Args:
            more: what passes depend on beside the cache.
        """
        if self._pairs.host is not None:
            if self._memory.shape[0] != len(self._pairs):
                self._memory = self._memory.new_zeros(len(self._pairs))
            self._memory.copy_(self._pairs.on(self.device), non_blocking=True)
            self._pairs = RowCounts(None, self._memory)
        return self.cache.reserve_span(tokens, more, [self._memory])

    # ---- passes ----------------------------------------------------------------------------------

    def inputs(
        self, width: int, counts: RowCounts | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return positions and additive mask of a pass that appends pairs, and prepare the cache.

        Args:
            width: pairs per row, W.
            counts: of these, the leading ones that each row appends; None: all.
        """
        cache = self.cache
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
        cache, nodes = self.cache, ancestors.shape[2]
        rows = cache.rows
        cache.prepare(width)
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
            apart = [hidden.layers[layer] for layer in layers]
            features = torch.cat(apart, -1) if len(apart) > 1 else apart[0]
        else:  # of texts of one token
            features = torch.zeros(len(inputs.tokens), 0, self._feature_size, dtype=self.dtype)
        known = inputs.counts.host is not None
        # (Where the state rows are, so are these.)
        told, ends = hidden.counts, inputs.positions - 1  # pairs of each text
        counts = inputs.counts.on(told.device)
        stands = torch.where(told > 0, hidden.positions, ends)
        stands = torch.where(counts > 0, stands, torch.iinfo(torch.int64).max)
        self.keep(RowCounts.read(stands, known))
        # (A state behind the last token is of no pair yet.)
        fresh = torch.minimum(told, counts - 1).clamp_min(0)
        if not known:
            width = features.shape[1]
            return extend(inputs.tokens[:, 1 : width + 1], features, RowCounts(None, fresh))
        # Tokens that no verifier with states has read.
        rest = (ends - fresh - self._pairs.on(ends.device)) * (counts > 0)
        # A text of one token has no pair: the token is read behind a state of zeros, which stands
        # until the next draft.
        alone = ((ends == 0) & (counts > 0)).long()
        some = bool(alone.any())
        new = RowCounts.read(torch.maximum(fresh, alone), True)
        if width := max(new):
            tokens, own = inputs.tokens[:, 1 : width + 1], features[:, :width]
            if some:
                tokens, own = self._with_alone(inputs.tokens, own, alone, width)
            self._note(extend(tokens, own, new), new)
        for place in range(int(rest.max())):
            at = (counts - rest + place).clamp(0, inputs.tokens.shape[1] - 1)
            ids = inputs.tokens.gather(1, at[:, None].to(self.device))
            new = RowCounts.read((rest > place).long(), True)
            self._note(follow(ids, self._states, new), new)
        if some:
            self._pairs = RowCounts.read(self._pairs.on(ends.device) * (1 - alone), True)
        return self._states

    def _with_alone(
        self, tokens: torch.Tensor, features: torch.Tensor, alone: torch.Tensor, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What `extend` reads where some rows are `alone`, whose first token is the last."""
        rows = alone.to(self.device)[:, None]
        at = torch.arange(1, width + 1, device=self.device) - rows
        own = torch.zeros(
            len(alone), width, self._feature_size, dtype=self.dtype, device=self.device
        )
        own[:, : features.shape[1]] = features.to(self.device).where(rows[..., None] == 0, 0)
        return tokens.gather(1, at.clamp_max(tokens.shape[1] - 1)), own

    def _note(self, states: torch.Tensor, counts: RowCounts) -> None:
        """The states behind the last pairs of those rows that have read any."""
        if all(counts.host or ()):
            self._states = states
        else:
            read = counts.on(self.device)[:, None, None] > 0
            self._states = torch.where(read, states, self._states)
