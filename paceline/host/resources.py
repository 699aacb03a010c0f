"""Measures the memory that this process holds and may still allocate (the host's, or less in a container), sets how
glibc handles freed memory, and divides the cores among processes. Linux grants more memory than there is and kills the
process that then uses it, so code that is about to allocate much calls this module first."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
"""Path of a container's control group (cgroup v2)."""


def available_bytes(cgroup: Path = CGROUP) -> int:
    """Return the bytes that can be allocated without a process being killed; caches that the kernel can free count."""
    import psutil

    available = int(psutil.virtual_memory().available)
    return min(available, _left_to_group(cgroup, available))


def process_gauges() -> dict[str, float]:
    """Return the memory of this process in GB (10⁹ bytes): of the host if known, and of GPUs if torch uses them."""
    gauges = {"memory_gb": resident / 1e9} if (resident := _resident_bytes()) else {}
    cuda = getattr(sys.modules.get("torch"), "cuda", None)  # another thread may have imported torch in part
    if cuda is not None and hasattr(cuda, "is_initialized") and cuda.is_initialized():
        reserved = sum(cuda.memory_reserved(device) for device in range(cuda.device_count()))
        gauges["gpu_memory_gb"] = reserved / 1e9
    return gauges


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _left_to_group(cgroup: Path, otherwise: int) -> int:
    try:
        limit, used = ((cgroup / name).read_text().strip() for name in ("memory.max", "memory.current"))
        reclaimable = _value_of("inactive_file", (cgroup / "memory.stat").read_text())
        return max(0, int(limit) - int(used) + reclaimable)
    except (OSError, ValueError):  # no such group, or its limit is `max`
        return otherwise


def _value_of(name: str, text: str) -> int:
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name} ")), 0)


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGE_TENSOR_BYTES = 8 << 20


def keep_freed_memory() -> None:
    """Keep up to 256 MB of freed memory at the end of the heap for reuse. For services that handle messages: otherwise
    glibc returns every large block at once, and the next message of some hundred kilobytes needs pages that the
    kernel has to find and clear first (docs/operate/performance.md, "The exchange")."""
    _set(32 << 20, 256 << 20)  # the largest threshold that glibc accepts


def return_large_tensors() -> None:
    """Return the memory of each freed tensor of 8 MB or more to the system. For processes that train on CPUs: otherwise
    glibc raises that threshold to 32 MB by itself, and activations of changing lengths leave holes in the heap, up
    to 40 % more than the tensors take (docs/operate/performance.md, "Memory plan")."""
    _set(LARGE_TENSOR_BYTES, LARGE_TENSOR_BYTES)


def give_freed_memory_back() -> None:
    """Return all free pages to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _set(mmap_bytes: int, trim_bytes: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, mmap_bytes)
        mallopt(M_TRIM_THRESHOLD, trim_bytes)


THREADS_VARIABLE = "OMP_NUM_THREADS"


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_beside(processes: int, cores: int | None = None) -> int:
    """Return the compute threads of one of `processes` equal processes that share this machine's cores, at least 1."""
    return max(1, (cores or usable_cores()) // max(1, processes))


def thread_variables(processes: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that gives each of `processes` its share of the cores; empty if `environment` has it."""
    return {} if THREADS_VARIABLE in environment else {THREADS_VARIABLE: str(threads_beside(processes))}
