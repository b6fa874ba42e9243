"""Which batch the caches of a chain belong to, the latest one, and which call works on them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial

# One entry while a call is at work. An entry is made if there is none, in one step that no thread
# and no signal can come between.
_Calls = dict[None, "weakref.ref[_Call]"]


class _Cache:
    """Who works with the cache of a level.

    Attributes:
        batch: the latest that has begun with it.
        calls: at work on it.
    """

    __slots__ = ("batch", "calls")

    def __init__(self) -> None:
        self.batch: weakref.ref[object] | None = None
        self.calls: _Calls = {}


# By level: several chains may have been given the same one, or levels that share one cache.
_caches: weakref.WeakKeyDictionary[object, _Cache] = weakref.WeakKeyDictionary()


class _Call:
    """A call at work inside a ``with``, which ends with its frame at the latest.

    Args:
        places: where it makes its entries, and what these places are called.
    """

    __slots__ = ("__weakref__", "_own", "_places", "_thread")

    def __init__(self, places: Sequence[tuple[str, _Calls]]) -> None:
        self._places, self._thread = places, threading.current_thread()
        # The call of an interrupt that came before the entries could be removed is gone with its
        # frames.
        self._own = weakref.ref(self, partial(_leave, places))

    def __enter__(self) -> None:
        for name, calls in self._places:
            held = calls.setdefault(None, self._own)
            if held is not self._own:
                _leave(self._places, self._own)
                raise RuntimeError(_busy(name, held()))

    def __exit__(self, *error: object) -> None:
        _leave(self._places, self._own)
        # Nothing is left for the reference to do, and what is raised in its callback is lost.
        del self._own


def _leave(places: Sequence[tuple[str, _Calls]], own: weakref.ref[_Call]) -> None:
    for _, calls in places:
        if calls.get(None) is own:  # nobody but this call removes its entry
            del calls[None]


class CacheOwner:
    """The batch that may go on with a chain's caches, or none, and the call at work on them, or
    none.

    Args:
        levels: names of the chain's levels, and of each what holds a cache. One that shares the
            cache of another names that other as its `cache_owner`. A `begin_batch` is called where
            a batch begins with empty caches.
    """

    def __init__(self, levels: Sequence[tuple[str, object]]) -> None:
        self._current: object = None  # a `Batch`
        holders = [(name, getattr(level, "cache_owner", level)) for name, level in levels]
        self._told = [own.begin_batch for _, own in holders if hasattr(own, "begin_batch")]
        self._caches = [
            (name, _caches.setdefault(holder, _Cache()))
            for name, holder in holders
            if _is_known(holder)
        ]
        own: _Calls = {}
        self._places = [("", own), *((name, cache.calls) for name, cache in self._caches)]

    def work(self) -> AbstractContextManager[None]:
        """What happens inside works on the caches, and nothing else does meanwhile. Does not wait.

        Raises:
            RuntimeError: another call is at work, of this chain or on one of its caches: in another
                thread, or around this one.
        """
        return _Call(self._places)

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
        for _, cache in self._caches:
            cache.batch = weakref.ref(batch)

    def forget(self) -> None:
        """Nothing that is in the caches is the batch's."""
        for begin in self._told:
            begin()

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
        for name, cache in self._caches:
            if cache.batch is None or cache.batch() is not batch:
                raise RuntimeError(
                    f"this stream has ended: another chain that was given its level {name} has "
                    "begun a request since, or one with a level in the same cache; expected one "
                    "chain after another, or levels and caches for each"
                )


def _is_known(level: object) -> bool:
    """Whether it can be told apart from other levels: not where its class has no hash, or slots."""
    try:
        _caches.get(level)
    except TypeError:
        return False
    return True


def _busy(level: str, call: _Call | None) -> str:
    """What is at work is the chain itself, or a level of another chain."""
    if level:
        what = f"the cache of this chain's level {level} is at work for another chain"
    else:
        what = "this chain is at work"
    if call is not None and call._thread is threading.current_thread():
        return (
            f"{what} in this thread already: one of its own levels, drafters, processors or "
            "observers has made this call; expected calls one after another"
        )
    name = "" if call is None else f" ({call._thread.name})"
    return (
        f"{what} in another thread{name}; expected calls one after another: use a lock of your own "
        "to wait, or a chain with levels of its own for each thread"
    )
