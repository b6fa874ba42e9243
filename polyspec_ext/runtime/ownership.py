"""Which batch the caches of a chain belong to, the latest one, and which call works on them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial


class _Latest:
    """The latest batch that has begun with a level."""

    __slots__ = ("batch",)

    def __init__(self) -> None:
        self.batch: weakref.ref[object] | None = None


# Of each level: several chains may have been given the same one.
_latest: weakref.WeakKeyDictionary[object, _Latest] = weakref.WeakKeyDictionary()


# One entry while a call is at work. An entry is made if there is none, in one step that no thread
# and no signal can come between.
_Calls = dict[None, "weakref.ref[_Call]"]


class _Call:
    """A call at work inside a ``with``, which ends with its frame at the latest."""

    __slots__ = ("__weakref__", "_calls", "_own", "_thread")

    def __init__(self, calls: _Calls) -> None:
        self._calls, self._thread = calls, threading.current_thread()
        # The call of an interrupt that came before the entry could be removed is gone with its
        # frames.
        self._own = weakref.ref(self, partial(_leave, calls))

    def __enter__(self) -> None:
        held = self._calls.setdefault(None, self._own)
        if held is not self._own:
            raise RuntimeError(_busy(held()))

    def __exit__(self, *error: object) -> None:
        _leave(self._calls, self._own)


def _leave(calls: _Calls, own: weakref.ref[_Call]) -> None:
    if calls.get(None) is own:  # nobody but this call removes its entry
        del calls[None]


class CacheOwner:
    """The batch that may go on with a chain's caches, or none, and the call at work on them, or
    none.

    Args:
        levels: of the chain by name; what holds a cache.
    """

    def __init__(self, levels: Mapping[str, object]) -> None:
        self._current: object = None  # a `Batch`
        known = {name: level for name, level in levels.items() if _is_known(level)}
        self._latest = {n: _latest.setdefault(level, _Latest()) for n, level in known.items()}
        self._calls: _Calls = {}

    def work(self) -> AbstractContextManager[None]:
        """What happens inside works on the caches, and nothing else does meanwhile. Does not wait.

        Raises:
            RuntimeError: another call is at work: in another thread, or around this one.
        """
        return _Call(self._calls)

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
        for latest in self._latest.values():
            latest.batch = weakref.ref(batch)

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
        for name, latest in self._latest.items():
            if latest.batch is None or latest.batch() is not batch:
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
    if call is not None and call._thread is threading.current_thread():
        return (
            "this chain is at work in this thread already: one of its own levels, drafters, "
            "processors or observers has called it; expected calls one after another"
        )
    name = "" if call is None else f" ({call._thread.name})"
    return (
        f"this chain is at work in another thread{name}; expected calls one after another: use a "
        "lock of your own to wait, or a chain for each thread"
    )
