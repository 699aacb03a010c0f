"""Backend `landlock`: Landlock, a filter of system calls and rlimits, applied by the program's own process before it starts.

It needs no privilege, no namespace and no cgroup, so it holds in a restricted pod. A program is one process with threads.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence

from paceline.errors import InvalidInput
from paceline.host.landlock import landlock_abi
from paceline.reward.sandbox.launching import PopenChild, launch_command, new_ready
from paceline.reward.sandbox.protocol import Limits, Outcome, SandboxFailed, check_request
from paceline.reward.sandbox.readable import Readable, command, environment
from paceline.reward.sandbox.seccomp_filter import ARCHITECTURES
from paceline.reward.sandbox.supervisor import supervise
from paceline.reward.sandbox.workspace import Workspace

MIN_ABI = 3
"""The first that handles truncation (Linux 6.2)."""


class LandlockSandbox:
    """As `paceline.reward.sandbox.protocol.Sandbox`."""

    name = "landlock"

    def __init__(self, readable: Readable) -> None:
        """Set what programs may read. Raises SandboxFailed where the kernel or the architecture does not have what is needed."""
        self._readable = readable
        self._abi = landlock_abi()
        if self._abi < MIN_ABI:
            raise SandboxFailed(
                f"Landlock of this kernel is ABI {self._abi}, at least {MIN_ABI} is needed (Linux 6.2)"
            )
        if platform.machine() not in ARCHITECTURES:
            raise SandboxFailed(f"system calls of {platform.machine()} are not filtered by this version")

    def run(
        self, argv: Sequence[str], files: Mapping[str, bytes], limits: Limits, stdin: bytes = b""
    ) -> Outcome:
        """As `Sandbox.run`. Raises InvalidInput for more than one process."""
        check_request(argv, files, stdin)
        if limits.processes > 1:
            raise InvalidInput(
                f"sandbox limit processes is {limits.processes}, but backend landlock runs one process; "
                "set processes to 1, or use bwrap or a remote sandbox"
            )
        ready = new_ready()
        try:
            workspace = Workspace(files)
        except OSError as error:
            raise SandboxFailed(f"no folder could be made for the program: {error}") from error
        with workspace:
            rules = [f"landlock {self._abi}", f"workspace {workspace.path}"]
            rules += [f"read {path}" for path in self._readable.folders]
            rules += [f"file {path}" for path in self._readable.files]
            rules += [f"write {path}" for path in self._readable.writable]
            launched = launch_command(command(argv), limits, ready, landlock=rules)
            return supervise(
                lambda: PopenChild(launched, workspace.path, environment(workspace.path)),
                limits,
                workspace,
                ready.encode(),
                stdin,
            )
