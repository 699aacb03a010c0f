"""Memory that this process has, and that it may still take: the host's, or its container's where that is less.

Linux grants more memory than there is and kills the process that then uses it, so code that is about to take much calls
this module first.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
"""Path of a container's control group (cgroup v2)."""


def available_bytes(cgroup: Path = CGROUP) -> int:
    """Return the bytes that can be allocated without a process being killed; caches that the kernel can free are included."""
    import psutil

    available = int(psutil.virtual_memory().available)
    return min(available, _left_to_group(cgroup, available))


def process_gauges() -> dict[str, float]:
    """Return the memory that this process holds, in GB (10⁹ bytes): of the host, and of GPUs where torch has begun to use
    them. Without the host's where the system does not tell it."""
    gauges = {"memory_gb": resident / 1e9} if (resident := _resident_bytes()) else {}
    cuda = getattr(sys.modules.get("torch"), "cuda", None)  # another thread may be importing torch
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
