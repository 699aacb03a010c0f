"""Chooses a backend: the named one, or the first of `AUTO` that holds on this host.

A backend holds if a small program runs in it and fails at everything that is forbidden. A run whose backend does not
hold is refused; there is no weaker fallback.

Backend `none` is for trusted code, and for hosts where something else isolates the whole worker: a program may do
whatever the caller's user may. Output, disk in the folder, time, memory and threads are bounded as in the other
backends.

Backend `landlock` uses Landlock, a filter of system calls and rlimits, applied by the program's own process before it
starts. A restricted pod can use it without privilege, namespace or cgroup. A program is one process, which may have
threads.
"""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import InvalidInput
from paceline.host.landlock import landlock_abi
from paceline.reward.sandbox.bwrap import BwrapSandbox
from paceline.reward.sandbox.launching import PopenChild, launch_command, new_ready
from paceline.reward.sandbox.protocol import Limits, Outcome, Sandbox, SandboxFailed, check_request
from paceline.reward.sandbox.readable import Readable, command, environment
from paceline.reward.sandbox.remote import RemoteSandbox
from paceline.reward.sandbox.seccomp_filter import ARCHITECTURES
from paceline.reward.sandbox.supervisor import LOOK_S, supervise
from paceline.reward.sandbox.workspace import Workspace

MIN_ABI = 3
"""First ABI version of Landlock that restricts truncation (Linux 6.2)."""


class LandlockSandbox:
    name = "landlock"

    def __init__(self, readable: Readable) -> None:
        """Raises SandboxFailed if the kernel or the architecture lacks what is needed."""
        self._readable = readable
        self._abi = landlock_abi()
        if self._abi < MIN_ABI:
            raise SandboxFailed(f"this kernel has Landlock ABI {self._abi}, but ABI {MIN_ABI} (Linux 6.2) is needed")
        if platform.machine() not in ARCHITECTURES:
            raise SandboxFailed(f"this version has no filter for the system calls of {platform.machine()}")

    def run(self, argv: Sequence[str], files: Mapping[str, bytes], limits: Limits, stdin: bytes = b"") -> Outcome:
        """Run a program like `Sandbox.run`. Raises InvalidInput for more than one process."""
        check_request(argv, files, stdin)
        if limits.processes > 1:
            raise InvalidInput(
                f"sandbox limit processes is {limits.processes}, but backend landlock runs one process; "
                "set processes to 1, or use bwrap or a remote sandbox"
            )
        rules = [f"landlock {self._abi}"]
        rules += [f"read {path}" for path in self._readable.folders]
        rules += [f"file {path}" for path in self._readable.files]
        rules += [f"write {path}" for path in self._readable.writable]
        return _run_in_folder(argv, files, limits, stdin, rules)


LOCAL: Mapping[str, Callable[[Readable], Sandbox]] = {"bwrap": BwrapSandbox, "landlock": LandlockSandbox}
AUTO = tuple(LOCAL)
"""Backends in the order that `auto` tries them."""
NAMES = ("auto", *AUTO, "remote", "none")
PROBE_LIMITS = Limits(time_s=20)
PROBE = b"""
import os, socket, sys
port, outside, parent = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
def tries(name, attempt):
    try:
        attempt()
    except OSError:
        return
    print("not held:", name)
tries("files outside", lambda: open(outside).read())
tries("writing outside", lambda: open(outside, "w"))
tries("the network", lambda: socket.create_connection(("127.0.0.1", port), 2))
tries("signals to other processes", lambda: os.kill(parent, 0) if parent != os.getpid() else os.kill(-1, 0))
tries("starting processes", lambda: os._exit(9) if os.fork() == 0 else os.wait())
open("own", "w").write("x")
print("the program ran")
"""


def make_sandbox(name: str = "auto", *, readable: Sequence[str] = (), url: str | None = None) -> Sandbox:
    """Return a sandbox that isolates programs on this host. readable: further absolute paths that programs may read;
    url: of `remote`.

    Raises InvalidInput for an unknown name; also, with the reason of each backend, if no backend holds.
    """
    if name not in NAMES:
        raise InvalidInput(f"sandbox {name!r} is none of {', '.join(NAMES)}")
    if (name == "remote") != (url is not None):
        raise InvalidInput(
            "sandbox remote needs the setting url, such as url: http://sandbox:8080"
            if url is None
            else f"url {url!r} is for sandbox remote, but sandbox is {name}"
        )
    if url is not None:
        return RemoteSandbox(url)
    if name == "none":
        return NoSandbox()
    paths = Readable.of_interpreter(readable)
    reasons = []
    for candidate in AUTO if name == "auto" else (name,):
        made = probe(candidate, paths)
        if not isinstance(made, str):
            return made
        reasons.append(f"{candidate}: {made}")
    raise InvalidInput(
        f"sandbox {name} does not hold on this host ({'; '.join(reasons)}); install bubblewrap, use a kernel with "
        "Landlock, name a remote sandbox, or write sandbox: none for code that you trust"
    )


def probe(name: str, readable: Readable) -> Sandbox | str:
    """Return the local backend `name` if it isolates a program on this host, else the reason why not."""
    listener = socket.socket()
    try:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        sandbox = LOCAL[name](readable)
        outside = f"/proc/{os.getpid()}/environ"  # a file of this process's user that no program may read
        arguments = [str(listener.getsockname()[1]), outside, str(os.getpid())]
        outcome = sandbox.run(["python", "probe.py", *arguments], {"probe.py": PROBE}, PROBE_LIMITS)
    except (SandboxFailed, InvalidInput, OSError) as error:
        return str(error)
    finally:
        listener.close()
    lines = outcome.stdout.decode(errors="replace").splitlines()
    if outcome.succeeded and lines == ["the program ran"]:
        return sandbox
    text = "; ".join(lines) or outcome.stderr.decode(errors="replace").strip()[-300:]
    return f"the probe {outcome.describe()}: {text}"


class NoSandbox:
    """Runs programs without isolation."""

    name = "none"

    def run(self, argv: Sequence[str], files: Mapping[str, bytes], limits: Limits, stdin: bytes = b"") -> Outcome:
        check_request(argv, files, stdin)
        return _run_in_folder(argv, files, limits, stdin, None)


def _run_in_folder(
    argv: Sequence[str], files: Mapping[str, bytes], limits: Limits, stdin: bytes, rules: Sequence[str] | None
) -> Outcome:
    """Run a program in a new folder, confined by Landlock's `rules`, or not confined if they are None."""
    ready = new_ready()
    try:
        workspace = Workspace(files)
    except OSError as error:
        raise SandboxFailed(f"no folder could be created for the program: {error}") from error
    with workspace:
        lines = [] if rules is None else [*rules, f"workspace {workspace.path}"]
        launched = launch_command(command(argv), limits, ready, confined=rules is not None, landlock=lines)
        return supervise(
            lambda: PopenChild(launched, workspace.path, environment(workspace.path)),
            limits,
            workspace,
            ready.encode(),
            stdin,
        )


READ_ALL = 3  # SYSLOG_ACTION_READ_ALL
LOOKS = f"measured every {1000 * LOOK_S:.0f} ms"
SOCKETS = "no sockets except socket pairs (filter of system calls)"
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
        "processes": "one process with threads, which can signal itself alone (filter of system calls)",
        "memory limit": "address space (RLIMIT_AS)",
    },
}
"""Maps a backend to its mechanism for each goal."""


@dataclass(frozen=True)
class Report:
    holding: tuple[str, ...]
    """Backends that passed the probe, in the order of `auto`."""
    reasons: dict[str, str]
    """Maps a backend that failed the probe to the reason."""
    means: dict[str, str]
    """Maps a goal (files, network, processes, memory limit, kernel) to its mechanism in the first backend that
    passed the probe."""


def report(backends: Sequence[str] = AUTO, kernel: Callable[[], str] | None = None) -> Report:
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
    if b"gVisor" in (log or _kernel_log)():
        return "gVisor's kernel, which isolates programs from the host's"
    try:
        flags = [line.split() for line in cpuinfo.read_text().splitlines() if line.startswith("flags")]
    except OSError:
        flags = []
    if any("hypervisor" in line for line in flags):
        return "shared with all of this virtual machine: the hypervisor contains a bug of the kernel"
    return "shared with the host: nothing contains a bug of the kernel; docs/use/sandbox.md names gVisor and Kata"


def _kernel_log() -> bytes:
    """Return the kernel's log, which everybody may read in gVisor; empty if it is not readable."""
    if not sys.platform.startswith("linux"):
        return b""
    buffer = ctypes.create_string_buffer(1 << 16)
    length = ctypes.CDLL(None, use_errno=True).klogctl(READ_ALL, buffer, len(buffer))
    return buffer.raw[: max(0, length)]
