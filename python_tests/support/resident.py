"""Memory of this process."""

import ctypes
import gc
import os
import sys
from pathlib import Path


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def allocated() -> tuple[int, int]:
    """Return the blocks of Python objects, and the bytes of glibc's `malloc`, that are in use."""
    gc.collect()
    info = ctypes.CDLL(None).mallinfo2
    info.restype = type("Info", (ctypes.Structure,), {"_fields_": [("of", ctypes.c_size_t * 10)]})
    numbers = info().of
    return sys.getallocatedblocks(), numbers[4] + numbers[7]  # mapped, and in use of the heaps
