"""Which batch the caches of a chain belong to: the latest one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .batch import Batch


class CacheOwner:
    """The batch that may go on with a chain's caches, or none."""

    def __init__(self) -> None:
        self._current: Batch | None = None

    def begin(self, batch: Batch) -> None:
        """The caches belong to `batch` from now on."""
        self._current = batch

    def end(self, batch: Batch) -> None:
        """`batch` is done with the caches, if they are still its own."""
        if self._current is batch:
            self._current = None

    def require(self, batch: Batch) -> None:
        """An older batch must not go on with the caches.

        Raises:
            RuntimeError: they belong to another batch, or to none.
        """
        if batch is not self._current:
            raise RuntimeError(
                "this stream has ended: its chain has begun another request since, or it failed"
            )
