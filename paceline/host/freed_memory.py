"""What becomes of freed memory, where the C library is glibc: kept for reuse, or returned to the system."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3)."""
LARGE_TENSOR_BYTES = 8 << 20


def keep_freed_memory() -> None:
    """Keep freed memory in this process for later use, up to 256 MB at the end of the heap. For services of messages.

    Otherwise glibc returns every large block at once, and the next message of some hundred kilobytes is written into
    pages that the kernel has to find and clear first (docs/performance.md, "The exchange").
    """
    _set(32 << 20, 256 << 20)  # the largest threshold that it takes


def return_large_tensors() -> None:
    """Return the memory of every tensor of 8 MB or more to the system when it is freed. For processes that train on CPUs.

    Otherwise glibc raises that threshold to 32 MB by itself, and activations of changing lengths leave holes in the heap:
    up to 40 % more than the tensors take (docs/performance.md, "Memory plan").
    """
    _set(LARGE_TENSOR_BYTES, LARGE_TENSOR_BYTES)


def give_freed_memory_back() -> None:
    """Return free pages to the system, wherever they lie."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _set(mmap_bytes: int, trim_bytes: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, mmap_bytes)
        mallopt(M_TRIM_THRESHOLD, trim_bytes)
