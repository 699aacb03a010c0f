"""Backend `sandlock`: the library of that name (Landlock, seccomp and a supervisor of system calls), with our filter and
rlimits inside and our bounds outside.

The library alone keeps all output and does not hold its disk limit, so neither is left to it. The version is pinned, because
minor releases change what it does.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from reward.sandbox import usage
from reward.sandbox.launching import OPEN_FILES, STREAMS, launch_command, new_ready
from reward.sandbox.protocol import Limits, Outcome, SandboxFailed, check_request
from reward.sandbox.readable import Readable, command, environment, launcher
from reward.sandbox.supervisor import supervise
from reward.sandbox.workspace import Workspace

VERSIONS = ("0.9.0",)
"""Versions that the attacks in tests/ were tried with."""


class SandlockSandbox:
    """As `reward.sandbox.protocol.Sandbox`."""

    name = "sandlock"

    def __init__(self, readable: Readable) -> None:
        """Set what programs may read. Raises SandboxFailed without the library, with another version of it, or where its
        kernel features are missing."""
        self._readable = readable
        try:
            version = importlib.metadata.version("sandlock")
            if version not in VERSIONS:
                raise SandboxFailed(
                    f"sandlock {version} is not one of {', '.join(VERSIONS)}, which were tested"
                )
            import sandlock
        except (ImportError, OSError) as error:
            if isinstance(error, SandboxFailed):
                raise
            raise SandboxFailed("sandlock is not installed (pip install 'paceline[sandbox]')") from error
        if sandlock.landlock_abi_version() < sandlock.min_landlock_abi():
            raise SandboxFailed(
                f"Landlock of this kernel is ABI {sandlock.landlock_abi_version()}, sandlock needs "
                f"{sandlock.min_landlock_abi()} (Linux 6.12)"
            )

    def run(
        self, argv: Sequence[str], files: Mapping[str, bytes], limits: Limits, stdin: bytes = b""
    ) -> Outcome:
        """As `Sandbox.run`."""
        check_request(argv, files, stdin)
        ready = new_ready()
        try:
            workspace = Workspace(files)
        except OSError as error:
            raise SandboxFailed(f"no folder could be made for the program: {error}") from error
        with workspace:
            launched = launch_command(command(argv), limits, ready, parent=False)
            return supervise(
                lambda: SandlockChild(launched, workspace.path, self._readable, limits),
                limits,
                workspace,
                ready.encode(),
                stdin,
            )


class SandlockChild:
    """A program under sandlock, as `reward.sandbox.supervisor.Child`."""

    helpers = 0

    def __init__(self, argv: Sequence[str], folder: str, readable: Readable, limits: Limits) -> None:
        """Start `argv` in `folder`. Raises RuntimeError where the library cannot."""
        import sandlock

        piped = sandlock.StdioMode.PIPED
        self._process: Any = sandlock.Sandbox(
            fs_readable=[*readable.folders, *readable.files, str(launcher())],
            fs_writable=[folder, *readable.writable],
            cwd=folder,
            clean_env=True,
            env=dict(environment(folder)),
            max_processes=limits.processes,
            max_open_files=OPEN_FILES,
        ).popen(list(argv), stdin=piped, stdout=piped, stderr=piped)
        self.pid = int(self._process.pid)
        self.stdin, self.stdout, self.stderr = (
            os.dup(getattr(self._process, name).fileno()) for name in STREAMS
        )
        for name in STREAMS:
            getattr(self._process, name).close()
        self._waited = False

    def ended(self) -> bool:
        """Return whether the program has ended; the library reaps it in `wait`."""
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def kill(self) -> None:
        """Kill the program and everything below it."""
        if self._waited:
            return
        for pid in reversed(usage.descendants(self.pid)):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self._process.kill()

    def wait(self, timeout_s: float) -> int:
        """Wait for the end. Raises TimeoutError."""
        result = self._process.wait(timeout_s)
        self._waited = True
        if result.signal > 0:
            return -int(result.signal)
        return int(result.exit_code)
