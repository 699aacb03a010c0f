"""What isolates programs on this host, for people: which backends hold, and by which means each goal is reached."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.host.landlock import landlock_abi
from paceline.reward.sandbox.choosing import AUTO, probe
from paceline.reward.sandbox.readable import Readable
from paceline.reward.sandbox.supervisor import LOOK_S

READ_ALL = 3  # SYSLOG_ACTION_READ_ALL
LOOKS = f"a look every {1000 * LOOK_S:.0f} ms"
SOCKETS = "no sockets but pairs (filter of system calls)"
MEANS = {
    "bwrap": {
        "files": "mount namespace: sees the interpreter and its folder, which is a tmpfs of bounded size",
        "network": f"{SOCKETS}, network namespace",
        "processes": "pid namespace, as many as allowed",
        "memory limit": f"address space of each process (RLIMIT_AS), resident memory of several ({LOOKS})",
    },
    "landlock": {
        "files": "Landlock ABI {abi}: reads the interpreter, writes its folder; sees names and sizes outside",
        "network": SOCKETS,
        "processes": "one with threads, which can signal itself alone (filter of system calls)",
        "memory limit": "address space (RLIMIT_AS)",
    },
}
"""What reaches each goal, by the backend."""


@dataclass(frozen=True)
class Report:
    """The backends of a host."""

    holding: tuple[str, ...]
    """Those that hold, in the order of `auto`."""
    reasons: dict[str, str]
    """Why the others do not."""
    means: dict[str, str]
    """What isolates files, network, processes, memory and kernel with the first that holds; empty where none does."""


def report(backends: Sequence[str] = AUTO, kernel: Callable[[], str] | None = None) -> Report:
    """Probe each backend and return what was found."""
    paths = Readable.of_interpreter()
    holding, reasons = [], {}
    for name in backends:
        made = probe(name, paths)
        if isinstance(made, str):
            reasons[name] = made
        else:
            holding.append(name)
    if not holding:
        return Report((), reasons, {})
    means = {goal: text.format(abi=landlock_abi()) for goal, text in MEANS[holding[0]].items()}
    return Report(tuple(holding), reasons, {**means, "kernel": (kernel or describe_kernel)()})


def describe_kernel(cpuinfo: Path = Path("/proc/cpuinfo"), log: Callable[[], bytes] | None = None) -> str:
    """Return whose kernel serves the programs: every local backend shares it with this process."""
    if b"gVisor" in (log or _kernel_log)():
        return "gVisor's, which stands between the programs and the host's"
    try:
        flags = [line.split() for line in cpuinfo.read_text().splitlines() if line.startswith("flags")]
    except OSError:
        flags = []
    if any("hypervisor" in line for line in flags):
        return "shared with all of this virtual machine: a bug of it ends at the hypervisor"
    return "shared with the host: a bug of it is not held; docs/sandbox.md names gVisor and Kata"


def _kernel_log() -> bytes:
    """Return the kernel's log, which in gVisor everybody may read; empty where it may not be read."""
    if not sys.platform.startswith("linux"):
        return b""
    buffer = ctypes.create_string_buffer(1 << 16)
    length = ctypes.CDLL(None, use_errno=True).klogctl(READ_ALL, buffer, len(buffer))
    return buffer.raw[: max(0, length)]
