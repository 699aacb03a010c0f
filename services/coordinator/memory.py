"""Reuse of the memory that large messages leave behind, where the C library is glibc."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3)."""


def keep_freed_memory() -> None:
    """Keep freed memory in this process for later use, up to 256 MB at the end of the heap.

    Otherwise glibc returns every large block at once, and the next message of some hundred kilobytes is written into
    pages that the kernel has to find and clear first (docs/performance.md, "The exchange").
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 32 << 20)  # the largest value that it takes
        mallopt(M_TRIM_THRESHOLD, 256 << 20)


def give_freed_memory_back() -> None:
    """Return free pages to the system, wherever they lie."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
