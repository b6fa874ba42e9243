"""Several multi-token prediction heads behind each other: head k drafts token k of a draft, and the
last head all tokens behind.

Pair t of the first head is the target's state behind token t, and token t + 1. Pair t of head k is
the state of head k - 1's pair t, and token t + k + 1. So the last k pairs of head k have drafted
tokens, and are read again with those that the text goes on with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..kv_cache import RollbackCache
from ..tensors import RowCounts
from .features import FeatureCache
from .heads import HeadConfig, HeadNetwork, HeadPasses

_DIGITS = (65536, 256, 1)  # of an id to base 256: every dtype of a cache has these numbers


class SeveralNetwork(HeadNetwork):
    """Heads behind each other, of which a pass of a single head runs the first."""

    def __init__(self, config: HeadConfig, heads: Sequence[HeadNetwork]) -> None:
        super().__init__()
        self.config, self.heads = config, nn.ModuleList(heads)
        first = heads[0]
        self.key_shape, self.longest = first.key_shape, first.longest

    def packed(self) -> SeveralNetwork:
        heads: Any = self.heads
        return type(self)(self.config, [head.packed() for head in heads])

    def read(
        self,
        embeds: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None,
        cache: RollbackCache,
    ) -> torch.Tensor:
        first: Any = self.heads[0]
        out: torch.Tensor = first.read(embeds, states, positions, mask, cache)
        return out


class SeveralCache(FeatureCache):
    """Keys and values of several heads, and what a head reads of the one before: a layer for each
    head but the last has its states, and the first of these layers the tokens as well.

    The pairs of the first head are those of `FeatureCache`. All rows have as many slots of every
    head, of which a later head may not have read the latest.

    Args:
        heads: how many.
        config, feature_size, hidden_size, dtype, device: as of `FeatureCache`; the layers of
            states are the last of `config`.
    """

    def __init__(self, heads: int, config: Any, *args: Any) -> None:
        super().__init__(config, *args)
        self._later, self._first = heads - 1, config.num_hidden_layers - heads + 1
        # By head behind the first: pairs of each row that it has read.
        self._known: list[list[int]] = []

    @property
    def in_one_place(self) -> bool:
        """False: the host knows what each head has read."""
        return False

    def begin(self, batch: int, capacity: int) -> None:
        super().begin(batch, capacity)
        self._known = [[0] * batch for _ in range(self._later)]

    def allocate(self, groups: int, width: int) -> None:
        for number, layer in enumerate(self.cache.layers[self._first :]):
            self._hold(layer, 1, self._size, 1 if number else len(_DIGITS))
        super().allocate(groups, width)

    def admit(self, rows: Sequence[int]) -> None:
        super().admit(rows)
        more = [0] * (len(self._states) - len(self._known[0]))
        self._known = [
            [0 if row in rows else n for row, n in enumerate((*known, *more))]
            for known in self._known
        ]

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self._known = [[known[row] for row in rows] for known in self._known]

    def keep(self, pairs: Sequence[int] | torch.Tensor) -> None:
        super().keep(pairs)
        kept = self._on_host()
        # The last pairs of a head have had tokens that come next.
        self._known = [
            [min(n, max(count - head, 0)) for n, count in zip(known, kept, strict=True)]
            for head, known in enumerate(self._known, 1)
        ]
        if self.cache.rows.host != list(kept):  # behind a pass that was cut off
            self.cache.rows.place(self._pairs)

    def note(self, head: int, states: torch.Tensor, tokens: torch.Tensor | None = None) -> None:
        """Append the states ``[B, W, H]`` of a head's pass, with the first head's tokens
        ``[B, W]``."""
        if head == self._later:
            return
        digits = states[..., :1]
        if tokens is not None:
            digits = torch.stack([tokens // size % 256 for size in _DIGITS], -1).to(states.dtype)
        self.cache.update(states[:, None], digits[:, None], self._first + head)

    def later(
        self, head: int, some: RowCounts, drafted: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, RowCounts]:
        """Begin a pass of a head behind the first over the pairs that it has yet to read.

        Args:
            some: 1 for a row that takes part, else 0.
            drafted: ``[B, head]`` int64, the latest tokens.

        Returns:
            Tokens ``[B, W]`` and states ``[B, W, H]``, and how many of them are a row's. `note`
            and `has_read` come next.
        """
        rows = self.cache.rows
        assert rows.host is not None
        ends, known = list(rows.host), self._known[head - 1]
        begins = [n if on else end for n, on, end in zip(known, some, ends, strict=True)]
        counts = RowCounts(list(map(int.__sub__, ends, begins)))
        rows.place(RowCounts(begins))
        first = self.cache.layers[self._first]
        before = self.cache.layers[self._first + head - 1]
        pairs = RowCounts(begins).on(self.device)[:, None]
        pairs = pairs + torch.arange(max(counts), device=self.device)
        behind = RowCounts(ends).on(self.device)[:, None]
        slots = pairs.minimum(behind - 1).clamp_min(0)[:, None, :, None]
        states = before.keys.gather(2, slots.expand(-1, -1, -1, before.keys.shape[3]))[:, 0]
        slots = (pairs + head).minimum(behind - 1).clamp_min(0)[:, None, :, None]
        digits = first.values.gather(2, slots.expand(-1, -1, -1, len(_DIGITS)))[:, 0].long()
        tokens = (digits * torch.tensor(_DIGITS, device=self.device)).sum(-1)
        new = pairs + head - behind
        tokens = tokens.where(new < 0, drafted.gather(1, new.clamp(0, head - 1)))
        return tokens, states, counts

    def has_read(self, head: int, some: RowCounts) -> None:
        """Note that the pass of `later` is done."""
        assert self.cache.rows.host is not None
        read = zip(self._known[head - 1], some, self.cache.rows.host, strict=True)
        self._known[head - 1] = [end if on else n for n, on, end in read]


class SeveralPasses(HeadPasses):
    """Several heads, and the cache of a batch. Trees are drafted by the first alone. Arguments are
    those of `HeadPasses`."""

    network: SeveralNetwork
    features: SeveralCache

    def __init__(self, network: SeveralNetwork, *args: Any) -> None:
        super().__init__(network, *args)
        config, self._count = network.config, len(network.heads)
        self._drafted = torch.empty(0, 0)
        self.features = SeveralCache(
            self._count,
            config.layer,
            config.feature_size,
            config.hidden_size,
            self.dtype,
            self.device,
        )

    def _pass(
        self,
        tokens: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        out = super()._pass(tokens, states, positions, mask)
        self.features.note(0, out, tokens)
        return out

    def next(
        self, step: int, tokens: torch.Tensor, states: torch.Tensor, counts: RowCounts
    ) -> torch.Tensor:
        head, features = min(step, self._count - 1), self.features
        if step > head:
            masked = self._runs.longest < 1
            inputs = features.inputs(1, None if counts.all(1) else counts, masked)
            return self._read(head, tokens, states, *inputs)
        self._drafted = tokens if step == 1 else torch.cat([self._drafted, tokens], 1)
        ids, before, new = features.later(head, counts, self._drafted)
        width = ids.shape[1]
        masked = width > self._runs.longest
        inputs = features.inputs(width, None if new.all(width) else new, masked)
        out = self._read(head, ids, before, *inputs)
        features.note(head, out)
        features.has_read(head, counts)
        last = new.less(1).on(self.device)
        return out.gather(1, last[:, None, None].expand(-1, 1, out.shape[2]))

    def _read(
        self,
        head: int,
        tokens: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        network: Any = self._runs.heads
        embeds = self._embed(tokens).to(states.dtype)
        cache = self.features.cache
        out: torch.Tensor = network[head].read(embeds, states, positions, mask, cache)
        return out
