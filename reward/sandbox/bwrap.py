"""Backend `bwrap`: bubblewrap's namespaces (user, mount, pid, network, IPC), with the filter and rlimits of `landlock`.

Needs a user namespace, which restricted pods refuse. The program's folder is a tmpfs, so the kernel bounds the disk,
and the end of the pid namespace ends all processes of the program.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from paceline.reward.sandbox.launching import PopenChild, launch_command, new_ready
from paceline.reward.sandbox.protocol import Limits, Outcome, SandboxFailed, check_request
from paceline.reward.sandbox.readable import Readable, command, environment, launcher
from paceline.reward.sandbox.supervisor import supervise
from paceline.reward.sandbox.workspace import ENTRY_BYTES

FOLDER = "/paceline-program"
HELPERS = 2
"""Number of processes besides the program's: bwrap, and the first process of the pid namespace."""
NEEDED = ("--disable-userns", "--size")
"""Options of bwrap 0.8, the oldest accepted version."""


class BwrapSandbox:
    name = "bwrap"

    def __init__(self, readable: Readable) -> None:
        """Raises SandboxFailed if bwrap is missing or too old."""
        self._readable = readable
        found = shutil.which("bwrap")
        if found is None:
            raise SandboxFailed("bwrap is not installed (apt install bubblewrap)")
        self._bwrap = found
        options = subprocess.run([found, "--help"], capture_output=True, text=True, timeout=10, check=False).stdout
        if missing := [option for option in NEEDED if option not in options]:
            raise SandboxFailed(f"{found} has no {missing[0]}; version 0.8 or newer is needed")

    def run(self, argv: Sequence[str], files: Mapping[str, bytes], limits: Limits, stdin: bytes = b"") -> Outcome:
        check_request(argv, files, stdin)
        ready = new_ready()
        with ExitStack() as opened:
            contents: dict[str, int] = {}
            for name, content in files.items():
                try:
                    contents[name] = os.memfd_create("paceline")
                    opened.callback(os.close, contents[name])
                    os.write(contents[name], content)
                    os.lseek(contents[name], 0, os.SEEK_SET)
                except OSError as error:
                    raise SandboxFailed(f"no memory for file {name!r}: {error}") from error
            launched = [
                *self._namespaces(limits.disk_bytes, contents),
                *launch_command(command(argv), limits, ready, parent=False),
            ]
            return supervise(
                lambda: PopenChild(
                    launched, "/", environment(FOLDER), helpers=HELPERS, pass_fds=list(contents.values())
                ),
                limits,
                InnerFolder(),
                ready.encode(),
                stdin,
            )

    def _namespaces(self, disk_bytes: int, contents: Mapping[str, int]) -> list[str]:
        """Return the part of bwrap's command that is before the program's command. The root, a tmpfs without a size
        limit, is read-only."""
        words = [self._bwrap, "--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534", "--disable-userns"]
        words += ["--die-with-parent", "--new-session", "--cap-drop", "ALL"]
        for path in (*self._readable.folders, *self._readable.files, str(launcher())):
            words += _bind(path)
        for path in self._readable.writable:
            words += ["--dev-bind", path, path]
        words += ["--size", str(disk_bytes), "--tmpfs", FOLDER]
        for name, number in contents.items():
            words += ["--file", str(number), f"{FOLDER}/{name}"]
        return [*words, "--remount-ro", "/", "--chdir", FOLDER, "--"]


class InnerFolder:
    """The tmpfs of a program. The kernel bounds its bytes but not its entries, so it is measured too."""

    def used_bytes(self, most_bytes: int, pids: Sequence[int]) -> int:
        """Return the bytes in the tmpfs, read through a process that has it mounted; an entry counts as at least
        ENTRY_BYTES."""
        for pid in reversed(pids):
            with contextlib.suppress(OSError):
                state = os.statvfs(f"/proc/{pid}/root{FOLDER}")
                blocks_bytes = (state.f_blocks - state.f_bfree) * state.f_frsize
                return max(blocks_bytes, (state.f_files - state.f_ffree) * ENTRY_BYTES)
        return 0


def _bind(path: str) -> list[str]:
    """Return the arguments that mount `path` read-only; a link in the root folder (`/bin`) stays a link."""
    if os.path.islink(path) and path.count("/") == 1:
        return ["--symlink", os.readlink(path), path]
    return ["--dev-bind-try" if path.startswith("/dev/") else "--ro-bind-try", path, path]
