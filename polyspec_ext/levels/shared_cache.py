"""A common cache of a target and its quantised or pruned copies.

A copy's keys and values are nearly the target's, so it reads the target's for tokens that the
target has read, and writes its keys and values after them, where the target's next pass overwrites
them. This saves a second prefill and half the memory, and the copy's distribution comes closer to
the target's. The answer stays exact, because the level above verifies against the distribution that
the copy samples from.

Every level counts its tokens separately. The cache has each token's key and value by the level
highest in the chain that has read the token: a level never writes below the length of a level
above, and skips tokens that a level above has read.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..ops.decoder import take_rows, update_lengths
from ..tensors import RowCounts
from .base import Hidden, InputBlock, LevelOutput, PromptBatch


def require_same_shape(model: Any, other: Any, name: str) -> None:
    """Refuse to share a cache between models whose keys and values differ in shape or dtype."""
    ours, theirs = (m.config.get_text_config(decoder=True) for m in (model, other))
    for fact, mine in _facts(ours).items():
        shared = _facts(theirs)[fact]
        if mine != shared:
            raise ValueError(
                f"{name}: expected the {fact} of the level whose cache it shares, {shared}, given "
                f"{mine}"
            )
    if ours.num_hidden_layers > theirs.num_hidden_layers:
        raise ValueError(
            f"{name}: expected at most the {theirs.num_hidden_layers} layers of the level whose "
            f"cache it shares, given {ours.num_hidden_layers}"
        )
    if model.dtype != other.dtype or model.device != other.device:
        raise ValueError(
            f"{name}: expected {other.dtype} on {other.device}, as the level whose cache it "
            f"shares, given {model.dtype} on {model.device}"
        )


def _facts(config: Any) -> dict[str, Any]:
    """Return properties that must be equal for configurations to share keys."""
    heads = config.num_attention_heads
    return {
        "key and value heads": getattr(config, "num_key_value_heads", None) or heads,
        "size of a head": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "rotary positions": getattr(config, "rope_parameters", None),
        "sliding window": getattr(config, "sliding_window", None),
    }


class Member:
    """Tokens that a level of a shared cache has read, by row.

    Args:
        owner: the member highest in the chain; None: this.

    Attributes:
        rank: 0 for the owner, more for levels further down in the chain.
        lengths: number of tokens that the level has read, as its chain counts them.
        ready: whether it has been prefilled in this batch.
    """

    def __init__(self, level: Any, owner: Member | None = None) -> None:
        self.level, self.owner = level, owner or self
        # Weak references: a level keeps its member alive, so that discarded copies are no members.
        self._members: list[weakref.ref[Member]] = [] if owner is None else owner._members
        self.rank: int = 1 + max((member.rank for member in self.members), default=-1)
        self._members[:] = map(weakref.ref, [*self.members, self])
        self._memory = torch.zeros(0, dtype=torch.int64)
        self.lengths = [0]
        self.ready = False

    @property
    def members(self) -> list[Member]:
        """Members by level, the owner first."""
        return [member for reference in self._members if (member := reference()) is not None]

    @property
    def lengths(self) -> list[int]:
        return self._lengths

    @lengths.setter
    def lengths(self, lengths: list[int]) -> None:
        self._uploaded = False
        self._lengths = lengths

    @property
    def above(self) -> list[Member]:
        """The members further up in the chain."""
        return [member for member in self.members if member.rank < self.rank]

    def forget(self, rows: int | None = None) -> None:
        """Reset all members for a new batch of `rows` rows (None: as many as before): each level
        has to begin again."""
        rows = len(self.owner.lengths) if rows is None else rows
        for member in self.members:
            member.lengths, member.ready = [0] * rows, False

    # ---- rounds without host synchronisation -----------------------------------------------------

    @property
    def on_device(self) -> Tensor:
        """Lengths ``[B]`` int64, while the host does not know them."""
        return self._memory[: len(self._lengths)]

    def reserve_span(self) -> tuple[list[Tensor], tuple[bool, ...]]:
        """Begin a round with lengths on the device. Returns the tensors of lengths that its passes
        use, and by level from the top whether it is ready."""
        members = [*self.above, self]
        for member in members:
            member.upload()
        return [member.on_device for member in members], tuple(member.ready for member in members)

    def upload(self) -> None:
        """Copy the lengths to the device, unless they are there."""
        count, device = len(self._lengths), self.level.device
        if len(self._memory) < count or self._memory.device != device:
            self._uploaded = False
            with torch.inference_mode(False):
                self._memory = torch.zeros(count, dtype=torch.int64, device=device)
        if not self._uploaded:
            self.on_device.copy_(torch.tensor(self._lengths), non_blocking=True)
            self._uploaded = True

    def note_lengths(self, lengths: Sequence[int]) -> None:
        """Set the host's lengths to the device's."""
        self._lengths = [int(n) for n in lengths]

    def held(self) -> list[int]:
        """Count by row the leading tokens with keys and values of levels above."""
        above = [m.lengths for m in self.above if m.ready]
        return [max(lengths) for lengths in zip(*above, strict=True)] or [0] * len(self.lengths)

    def prefill(self, prompts: PromptBatch) -> Hidden | None:
        """Begin a batch; below the owner, join the batch that it has begun with the same texts."""
        tokens, layers, owner = prompts.tokens, prompts.hidden_layers, self.owner
        rows, width = tokens.shape
        counts = [width] * rows if prompts.counts is None else list(prompts.counts)
        if self.rank == 0:
            self.forget(rows)
            longest = max(counts, default=0)
            cache = self.level.fresh(rows, max(prompts.capacity, longest))
            for member in self.members:
                member.level.adopt(cache)
            cache.rows.make_room(prompts.capacity)  # it grows once, with the next pass
            hidden: Hidden = self.level.append(tokens[:, :longest], counts, layers)
        else:
            if not owner.ready or len(owner.lengths) != rows:
                raise RuntimeError(
                    f"{self.level.name}: expected prefill of {owner.level.name}, whose cache it "
                    f"shares, with {rows} rows first"
                )
            self.level.cache.rows.make_room(prompts.capacity)
            hidden = self._read_rest(tokens, counts, layers)
        self.lengths = counts
        self.ready = True
        return self.level.states.padded(hidden, layers, tokens) if layers else None

    def admit(self, lengths: Sequence[int], rows: Sequence[int] | None) -> None:
        """Set the lengths of rows that have joined the cache; call the owner first."""
        if rows is None:
            rows = range(len(lengths))
            if self.rank == 0:
                self.forget(0)
        if self.rank == 0:
            new = sum(row >= len(self.lengths) for row in rows)
            for member in self.members:
                member.level.adopt(self.level.cache)
                member.lengths = [*member.lengths, *[0] * new]
        joined = dict(zip(rows, lengths, strict=True))
        self.lengths = [joined.get(row, length) for row, length in enumerate(self.lengths)]
        self.ready = True

    def _read_rest(self, tokens: Tensor, counts: list[int], layers: tuple[int, ...]) -> Hidden:
        """Read ``counts[b]`` of `tokens` into row b, without tokens that a level above has read;
        for hidden states, which are of this level, all tokens."""
        done = [min(length, count) for length, count in zip(self.held(), counts, strict=True)]
        at = [0] * len(done) if layers else done
        rest = [count - begin for count, begin in zip(counts, at, strict=True)]
        if not any(rest):
            return {}
        self.level.cache.rows.assign(RowCounts(at))
        start, end = torch.tensor(at), torch.tensor(done)
        with _put_back(self.level.cache, start, end, int((end - start).max())):
            hidden: Hidden = self.level.append(_shift(tokens, start, max(rest)), rest, layers)
        return hidden

    def forward(self, block: InputBlock) -> LevelOutput:
        if not self.ready:
            raise RuntimeError(
                f"{self.level.name}: expected prefill before forward; a level that shares a cache "
                "belongs to the batch that the latest of them has begun"
            )
        tokens, keep, parents, layers = block.tokens, block.keep, block.parents, block.hidden_layers
        width, cache = tokens.shape[1], self.level.cache
        # Counts in tensors are read on the device only.
        blind = block.counts is not None and block.counts.host is None
        members = [self, *(m for m in self.above if m.ready)]
        have, *above = [m.on_device if blind else torch.tensor(m.lengths) for m in members]
        rows = len(self._lengths)
        counts, first = (
            have.new_full((rows,), whole) if numbers is None else numbers.on(have.device)
            for whole, numbers in ((width, block.counts), (width - keep, block.first))
        )
        # Tokens that a level above has read have its hidden states, if it returns them.
        alone = bool(layers) and not all(_alike(m.level, self.level, layers) for m in members)
        start = cache.rows.lengths if blind else torch.empty_like(have)
        longest = functools.reduce(torch.maximum, above) if above else None
        skipped: Tensor | None = None
        if longest is None or alone:
            update_lengths(have, start, None, counts, width)
        else:
            # Logits after a token need its query even if a level above has read it, and so do
            # hidden states that no level above returns. Its key and value are restored afterwards.
            rest = counts.new_empty(3, rows)
            update_lengths(have, start, None, counts, width, longest, first, rest)
            skips, counts, first = rest.unbind()
            if blind or skips.any():
                skipped = skips
                wide = width if blind else max(int(counts.max()), 1)
                tokens = _shift(tokens, skips, wide)
                # Skipped tokens come before the tree, and so before its later passes.
                if parents is not None and parents.shape[1] == width:
                    parents = _shift(parents, skips, wide) - skips[:, None].to(parents)
        # (A chain needs logits after the last token that a level above has emitted, or later, and
        # no level has read its last token: with lengths on the device, only hidden states may need
        # a token to be read again.)
        again, end = False, start
        if longest is not None and (alone or not blind):
            end = torch.minimum(longest, have).maximum(start)
            again = blind or not start.equal(end)
        # With the host's values, if known.
        new, behind = (RowCounts.read(x, not blind) for x in (counts, first))
        if blind:
            cache.rows.host = None
        else:
            cache.rows.assign(RowCounts.read(start, True))
        shifted = replace(
            block,
            tokens=tokens,
            counts=None if new.all(tokens.shape[1]) else new,
            first=None if behind.all(tokens.shape[1] - keep) else behind,
            parents=parents,
        )
        with _put_back(cache, start, end, width if again else 0):
            out: LevelOutput = self.level.run(shifted)
        if out.hidden is not None and skipped is not None:
            hidden = {layer: _back(states, skipped, width) for layer, states in out.hidden.items()}
            out = out._replace(hidden=hidden, skipped=skipped)
        if not blind:
            self.lengths = have.tolist()
        return out

    def keep_path(
        self, begin: Sequence[int], path: Tensor, lengths: Sequence[int]
    ) -> Sequence[int]:
        """Keep a path of a tree, which follows the tokens that levels above have read: only keys of
        this level move. If a level above has read the path since, its keys are there already."""
        if self.rank:
            front = RowCounts.of(begin)
            above = [m for m in self.above if m.ready]
            blind = front.host is None
            sizes = [m.on_device if blind else torch.tensor(m.lengths) for m in above]
            behind = [front.on(x.device) >= x for x in sizes]
            if behind:
                free = torch.stack(behind).all(0).to(path.device)
                path = path.where(free[:, None], -1)
        self.level.cache.keep_path(begin, path, lengths)
        return self.rollback(lengths)

    def rollback(self, lengths: Sequence[int]) -> Sequence[int]:
        """Truncate this level's lengths only: tokens that other levels have written stay."""
        counts = RowCounts.of(lengths)
        if counts.host is None:
            have = self.on_device
            torch.minimum(have, counts.on(have.device), out=have)
            return counts
        self.lengths = [min(have, n) for have, n in zip(self.lengths, lengths, strict=True)]
        return counts

    def select(self, rows: Sequence[int]) -> None:
        """Select rows of all members with the owner's call."""
        if self.rank == 0 and list(rows) != list(range(len(self.lengths))):
            self.level.cache.select(rows)
            for member in self.members:
                member.lengths = [member.lengths[row] for row in rows]


@contextmanager
def _put_back(cache: Any, start: Tensor, end: Tensor, width: int) -> Iterator[None]:
    """Let a level write slots ``[start[b], end[b])`` of levels above, at most `width` of them, and
    restore their keys and values. The slots may be known to the device only."""
    if width == 0:
        yield
        return
    # Beyond the end the last slot again, with the same value; in an empty row any slot.
    slots = start[:, None] + torch.arange(width, device=start.device)
    slots = torch.minimum(slots, end[:, None] - 1).clamp_min(0)[:, None, :, None]
    saved = (start < end)[:, None, None, None]

    def states() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        # Evaluated again after a pass, because the cache may have grown.
        for x in (x for layer in cache.layers for x in (layer.keys, layer.values)):
            index = slots.to(x.device).expand(-1, x.shape[1], -1, x.shape[3])
            yield x, index, x.gather(2, index)

    before = [values for _, _, values in states()]
    try:
        yield
    finally:
        for (x, index, after), values in zip(states(), before, strict=True):
            x.scatter_(2, index, torch.where(saved.to(x.device), values, after))


def _alike(level: Any, other: Any, layers: Sequence[int]) -> bool:
    has = bool(level.capabilities.hidden_states) and level.num_layers >= max(layers)
    return has and level.hidden_size == other.hidden_size


def _back(states: Tensor, by: Tensor, width: int) -> Tensor:
    # Undo `_shift` for states of the tokens, [B, width, H].
    return take_rows(states, None, by.to(states.device), 0, width, False)


def _shift(tokens: Tensor, by: Tensor, width: int) -> Tensor:
    # tokens[b, by[b] : by[b] + width], the last column where that is out of range.
    return take_rows(tokens, by.to(tokens.device), None, 0, width, False)
