"""Batches of requests, and exclusive use of a chain's caches by one batch and one call.

Windows, parameters, seed, end and length are per row. No token of a row depends on other rows,
because draws are keyed by the row's seed and position (contract C3).
"""

from __future__ import annotations

import operator
import threading
import time
import weakref
from collections.abc import Sequence
from functools import partial

import torch

from .. import arguments, rooms
from ..policies import RoundReport, StepReport, WindowPolicy
from ..sampling import LogitsProcessors, RequestProcessors
from ..stats import LevelStats, Stats, StatsRecorder
from .engine import Committed, Engine, Observer
from .rows import Row

_ENDED = operator.attrgetter("ended")


class _Cache:
    """State of a cache: the latest batch (None: it has ended), and, while a call uses the cache, a
    single dict entry, inserted with `setdefault`: atomic with respect to threads and signals."""

    __slots__ = ("batch", "call")

    def __init__(self) -> None:
        self.batch: weakref.ref[object] | None = None
        self.call: dict[None, weakref.ref[_Call]] = {}


# By level: several chains may share a level, or have levels that share a cache.
_caches: weakref.WeakKeyDictionary[object, _Cache] = weakref.WeakKeyDictionary()


class _Call:
    """Context of a call that uses caches, with the names of their levels."""

    __slots__ = ("__weakref__", "_batch", "_caches", "_reference", "thread")

    def __init__(self, caches: Sequence[tuple[str, _Cache]], batch: object = None) -> None:
        self._caches, self._batch = caches, batch
        self.thread = threading.current_thread()
        # If an interrupt prevents the removal of the entries, they are removed with the frame.
        self._reference = weakref.ref(self, partial(_release, caches))

    def __enter__(self) -> None:
        for name, cache in self._caches:
            other, batch = cache.call.setdefault(None, self._reference), self._batch
            busy = other is not self._reference
            if busy or (batch is not None and batch is not (cache.batch and cache.batch())):
                _release(self._caches, self._reference)
                raise RuntimeError(_busy(name, other()) if busy else _ended(name))

    def __exit__(self, *error: object) -> None:
        _release(self._caches, self._reference)
        # The reference has no further use, and an error in its callback would be lost.
        del self._reference


def _release(caches: Sequence[tuple[str, _Cache]], reference: weakref.ref[_Call]) -> None:
    for _, cache in caches:
        if cache.call.get(None) is reference:
            del cache.call[None]


def _busy(name: str, call: _Call | None) -> str:
    busy = f"the cache of this chain's level {name} is at work for another chain"
    busy = busy if name else "this chain is at work"
    if call is not None and call.thread is threading.current_thread():
        return (
            f"{busy} in this thread already: one of its own levels, drafters, processors or "
            "observers has made this call; expected calls one after another"
        )
    thread = "" if call is None else f" ({call.thread.name})"
    return (
        f"{busy} in another thread{thread}; expected calls one after another: use a lock of your "
        "own to wait, or a chain with levels of its own for each thread"
    )


def _ended(name: str) -> str:
    reason = "its chain has begun another request since, or it failed"
    if name:
        reason = (
            f"another chain that was given its level {name} has begun a request since, or one with "
            "a level in the same cache; expected one chain after another, or levels and caches for "
            "each"
        )
    return f"this stream has ended: {reason}"


class CacheOwner:
    """Owner of the caches of a chain's levels: the current call, and the batch in the caches. A
    level that shares the cache of another level names the other level as its `cache_owner`. The
    method `begin_batch` of a level, if any, is called when a batch begins with empty caches.

    Attributes:
        work: returns a context of a batch, in which no other call uses the caches. Entering it
            raises a RuntimeError while another call uses this chain or one of its caches, or unless
            the batch is the latest of every cache (None: any is).
    """

    def __init__(self, levels: Sequence[tuple[str, object]]) -> None:
        holders = [(name, getattr(level, "cache_owner", level)) for name, level in levels]
        self._told = [level.begin_batch for _, level in holders if hasattr(level, "begin_batch")]
        self._chain = _Cache()
        self._caches = [("", self._chain)]
        for name, holder in holders:
            try:
                cache = _caches.setdefault(holder, _Cache())
            except TypeError:  # its class has no hash, or slots
                continue
            self._caches.append((name, cache))
        self.work = partial(_Call, self._caches)

    def begin(self, batch: object) -> None:
        """Give the caches to `batch`, and notify levels that they have no tokens of it."""
        for _, cache in self._caches:
            cache.batch = weakref.ref(batch)
        for begin in self._told:
            begin()

    def end(self, batch: object) -> None:
        """End `batch`, if it is the latest batch of the chain."""
        if self._chain.batch is not None and self._chain.batch() is batch:
            self._chain.batch = None

    @property
    def latest(self) -> object:
        """Return the common batch of all caches; None: no common batch."""
        first, *rest = (cache.batch and cache.batch() for _, cache in self._caches)
        return first if all(other is first for other in rest) else None


class Batch:
    """Requests of a chain. The chain's caches belong to its latest batch.

    Args:
        engine: the chain's engine.
        owner: owner of the caches.
        rows: requests that begin together.
        policy: chooses the windows before each round of the target. None: constant windows.
        processors: change logits before they become a distribution, on every level alike
            (contract C1), after the processors of each row.
        observe: called with a row's number and the target's processed logits ``[e, V]``, of which
            its e committed tokens were drawn.
        stats: of the whole batch; None: new statistics.
        reports: whether to keep the steps of each row for `steps`.

    Attributes:
        rows: requests in their order.
        stats: the whole batch: counts added up, times and forward passes counted once.
    """

    def __init__(
        self,
        engine: Engine,
        owner: CacheOwner,
        rows: Sequence[Row],
        *,
        policy: WindowPolicy | None = None,
        processors: LogitsProcessors | None = None,
        observe: Observer | None = None,
        stats: Stats | None = None,
        reports: bool = False,
    ) -> None:
        self._engine, self._owner, self.rows = engine, owner, list(rows)
        self._policy = policy if engine.config.levels > 1 else None  # a target has no window
        if len(rows) == 1 and stats is None:
            self.stats = rows[0].stats
        else:
            levels = [LevelStats(name) for name in engine.config.names]
            self.stats = stats or Stats(levels, num_requests=0)
            self._count(rows)
        self._reports: rooms.adaptive.RoundRecorder | None = None
        if self._policy is not None or reports:
            # Processes that share a level must choose the same windows.
            timed = not any(member.capabilities.sharded for member in engine.parts)
            self._reports = rooms.adaptive.RoundRecorder(self.stats, timed)
        self._recorder = self._reports or StatsRecorder(self.stats)
        self._processors = RequestProcessors(processors)
        for row in rows:
            self._processors.add(row.number, row.request.processors)
        with torch.inference_mode(), owner.work():
            if isinstance(before := owner.latest, Batch):
                before.abandon()
            owner.begin(self)
            self._begin(observe)

    def _begin(self, observe: Observer | None) -> None:
        self._engine.traces = False
        self._engine.begin(self.rows, self._recorder, self._processors, observe)

    def abandon(self) -> None:
        """Leave the caches to another batch."""

    def _count(self, rows: Sequence[Row]) -> None:
        self.stats.num_requests += len(rows)
        self.stats.num_prompt_tokens += sum(row.stats.num_prompt_tokens for row in rows)

    @property
    def seeds(self) -> list[int]:
        """Return the seed of each row."""
        return [row.request.seed for row in self.rows]

    def steps(self, row: Row) -> Sequence[StepReport]:
        """Return and clear the steps of a row since the last call (with `reports`)."""
        return () if self._reports is None else self._reports.take(row.stats)

    # ---- rounds ----------------------------------------------------------------------------------

    def advance(self) -> Committed:
        """Run one round of the target; return its committed tokens by row number, none when every
        text is complete.

        Raises:
            RequestError: a row of logits has no distribution; names request, level and position.
            RuntimeError: the chain has begun another batch since, or this batch failed; or another
                call uses the chain.
        """
        with torch.inference_mode(), self._owner.work(self):
            return self._advance()

    def complete(self) -> None:
        """Run rounds until every text is complete, with no other call in between."""
        with torch.inference_mode(), self._owner.work(self):
            while self._advance():
                pass

    def _advance(self) -> Committed:
        began, recorder = time.perf_counter(), self._recorder
        prefilled = recorder.prefill_seconds
        committed: Committed = []
        try:
            if not all(map(_ENDED, self.rows)):
                if self._policy is not None:
                    self._choose_windows(self._policy)
                committed = self._round()
            seconds = time.perf_counter() - began - (recorder.prefill_seconds - prefilled)
            recorder.decoded(seconds)
        except BaseException:
            self._owner.end(self)
            raise
        return committed

    def _round(self) -> Committed:
        return self._engine.round()

    def end(self, row: Row, excess: int = 0) -> None:
        """End a row, and drop its pending tokens; do not count its last `excess` tokens."""
        if not row.ended:
            with torch.inference_mode():
                row.ended = True
                self._engine.end(row)
        for stats in {id(counts): counts for counts in (row.stats, self.stats)}.values():
            stats.num_new_tokens -= excess

    def _choose_windows(self, policy: WindowPolicy) -> None:
        rows = [row for row in self._engine.slots if row.active]
        for row in rows:
            now = self._engine.windows(row)
            new, row.num_reported = len(row.tokens) - row.num_reported, len(row.tokens)
            steps = self.steps(row)
            report = RoundReport(row.policy_number, now, row.tokens, new, steps, len(rows))
            windows = policy.next(report)
            if not (type(windows) is list and windows == list(now)):  # most rounds keep all
                name = f"policy ({type(policy).__name__})"
                windows = arguments.sizes(name, windows, len(now), len(now) + 1)
                self._engine.set_windows(row, windows)
