"""Which batch the caches of a chain belong to, the latest one, and which call works on them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

# The latest batch of each level: several chains may have been given the same one.
_latest: weakref.WeakKeyDictionary[object, weakref.ref[object]] = weakref.WeakKeyDictionary()


class _Call:
    """A call at work, which ends with its frame at the latest."""

    __slots__ = ("__weakref__", "thread")

    def __init__(self) -> None:
        self.thread = threading.current_thread()


class CacheOwner:
    """The batch that may go on with a chain's caches, or none, and the call at work on them, or
    none.

    Args:
        levels: of the chain by name; what holds a cache.
    """

    def __init__(self, levels: Mapping[str, object]) -> None:
        self._current: object = None  # a `Batch`
        self._levels = {name: level for name, level in levels.items() if _is_known(level)}
        # One entry while a call is at work. An entry is made if there is none, in one step that no
        # thread and no signal can come between.
        self._calls: dict[None, weakref.ref[_Call]] = {}

    @contextmanager
    def work(self) -> Iterator[None]:
        """What happens inside works on the caches, and nothing else does meanwhile. Does not wait.

        Raises:
            RuntimeError: another call is at work: in another thread, or around this one.
        """
        call = _Call()
        # The call of an interrupt that came before the entry could be removed is gone with its
        # frames.
        own = weakref.ref(call, self._leave)
        try:
            held = self._calls.setdefault(None, own)
            if held is not own:
                raise RuntimeError(_busy(held()))
            yield
        finally:
            self._leave(own)

    def _leave(self, call: weakref.ref[_Call]) -> None:
        if self._calls.get(None) is call:  # nobody but this call removes its entry
            del self._calls[None]

    def require_idle(self) -> None:
        """No call is at work.

        Raises:
            RuntimeError: one is.
        """
        with self.work():
            pass

    def begin(self, batch: object) -> None:
        """The caches belong to `batch` from now on."""
        self._current = batch
        for level in self._levels.values():
            _latest[level] = weakref.ref(batch)

    def end(self, batch: object) -> None:
        """`batch` is done with the caches, if they are still its own."""
        if self._current is batch:
            self._current = None

    def require(self, batch: object) -> None:
        """An older batch must not go on with the caches.

        Raises:
            RuntimeError: they belong to another batch, or to none.
        """
        if batch is not self._current:
            raise RuntimeError(
                "this stream has ended: its chain has begun another request since, or it failed"
            )
        for name, level in self._levels.items():
            if _latest[level]() is not batch:
                raise RuntimeError(
                    f"this stream has ended: another chain that was given its level {name} has "
                    "begun a request since; expected one chain after another, or a level for each"
                )


def _is_known(level: object) -> bool:
    """Whether it can be told apart from other levels: not where its class has no hash, or slots."""
    try:
        _latest.get(level)
    except TypeError:
        return False
    return True


def _busy(call: _Call | None) -> str:
    if call is not None and call.thread is threading.current_thread():
        return (
            "this chain is at work in this thread already: one of its own levels, drafters, "
            "processors or observers has called it; expected calls one after another"
        )
    name = "" if call is None else f" ({call.thread.name})"
    return (
        f"this chain is at work in another thread{name}; expected calls one after another: use a "
        "lock of your own to wait, or a chain for each thread"
    )
