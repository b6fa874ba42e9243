"""Memory in huge pages for weights that every pass reads from one end to the other.

A product that waits for its weights also waits for the addresses of their pages; 2 MiB at a time it
hardly does. The system is asked for such pages (``madvise``), and gives them where it has them.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref

import torch

_PAGE = 2 << 20
_ALIGNMENT = 64
_CHUNK = 64 << 20  # what tensors are cut from; what is not touched takes no memory


class _Chunk:
    """Memory of which parts are given away, one behind the other. The tensors hold it, so that it
    goes with the last of them."""

    def __init__(self, held: mmap.mmap) -> None:
        self._held = weakref.ref(held)
        self._at = -torch.frombuffer(held, dtype=torch.uint8).data_ptr() % _PAGE
        self._size = len(held)

    def cut(self, size: int) -> torch.Tensor | None:
        """So many bytes; None: there is not that much room."""
        held = self._held()
        if held is None or size > self._size - self._at:
            return None
        part = torch.frombuffer(held, dtype=torch.uint8, count=size, offset=self._at)
        self._at += -(-size // _ALIGNMENT) * _ALIGNMENT
        return part


_lock = threading.Lock()
_last: _Chunk | None = None


def kept(packed: torch.Tensor) -> torch.Tensor:
    """A copy of `packed`, uint8 ``[n]`` on the CPU, n > 0, in huge pages where the system has them,
    at a multiple of 64 bytes. Copies made one after the other lie beside each other."""
    global _last
    size = packed.numel()
    with _lock:
        part = None if _last is None else _last.cut(size)
        if part is None:
            # One page more than asked for, since the first one begins anywhere.
            held = mmap.mmap(
                -1, max(size, _CHUNK) + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
            with contextlib.suppress(OSError):  # a system without huge pages
                held.madvise(mmap.MADV_HUGEPAGE)
            _last = _Chunk(held)
            part = _last.cut(size)
    assert part is not None
    return part.copy_(packed)
