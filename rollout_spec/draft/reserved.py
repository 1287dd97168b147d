"""Memory that is reserved at its largest size at once and taken from the system page by page as it is written."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

_MAP_FIXED = 0x10  # on Linux and macOS; Python's mmap has no name for it


def reserve(size_bytes: int) -> NDArray[np.uint8]:
    """uint8[size_bytes] of zeros, at the start of a page, that take no memory until they are written."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return np.zeros(size_bytes, np.uint8)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    region = mmap.mmap(-1, size_bytes, flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # One entry of the page table for 2 MB, since lookups are spread widely.
        with contextlib.suppress(OSError):  # a kernel without them
            region.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(region, np.uint8)


def map_file(region: NDArray[np.uint8], file: BinaryIO, offset: int, size_bytes: int) -> bool:
    """Lays the end of a file, from a multiple of the page size on, over the start of a reserved region.

    Pages are read when they are first used and copied when they are first written; the file never changes. Returns
    False, having done nothing, where the system can't.
    """
    if not hasattr(mmap, "MAP_PRIVATE") or offset % mmap.ALLOCATIONGRANULARITY or size_bytes == 0:
        return False
    system_map = ctypes.CDLL(None, use_errno=True).mmap
    system_map.restype = ctypes.c_void_p
    system_map.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,
    ]
    address = system_map(
        region.ctypes.data,
        size_bytes,
        mmap.PROT_READ | mmap.PROT_WRITE,
        mmap.MAP_PRIVATE | _MAP_FIXED,
        file.fileno(),
        offset,
    )
    return bool(address == region.ctypes.data)
