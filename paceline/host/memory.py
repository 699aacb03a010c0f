"""Memory that this process may still take: the host's, or its container's where that is less.

Linux grants more memory than there is and kills the process that then uses it, so code that is about to take much calls
this module first.
"""

from __future__ import annotations

from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
"""Path of a container's control group (cgroup v2)."""


def available_bytes(cgroup: Path = CGROUP) -> int:
    """Return the bytes that can be allocated without a process being killed; caches that the kernel can free are included."""
    import psutil

    available = int(psutil.virtual_memory().available)
    return min(available, _left_to_group(cgroup, available))


def _left_to_group(cgroup: Path, otherwise: int) -> int:
    try:
        limit, used = ((cgroup / name).read_text().strip() for name in ("memory.max", "memory.current"))
        reclaimable = _value_of("inactive_file", (cgroup / "memory.stat").read_text())
        return max(0, int(limit) - int(used) + reclaimable)
    except (OSError, ValueError):  # no such group, or its limit is `max`
        return otherwise


def _value_of(name: str, text: str) -> int:
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name} ")), 0)
