"""Defines a sandbox: `run(argv, files, limits) -> Outcome`, whatever isolates the program.

Promises of every backend but `none`: the program reads only the interpreter and its own folder, writes only its own
folder, and reaches no network, no other process and nothing of the caller's environment. Nothing of the program is left
after `run`. The caller's side bounds output, disk and time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from paceline.errors import InvalidInput, Unavailable

Ending = Literal["exited", "signal", "time", "output", "disk", "processes", "memory"]
"""Way in which a program ended: by itself, by a signal, or because it exceeded the limit of that name."""

PYTHON = "python"
"""As argv[0], this name means the interpreter of the caller's environment, or of the remote sandbox."""

MAX_INPUT_BYTES = 16 << 20


class SandboxFailed(Unavailable, ConnectionError):
    """The sandbox failed, not the program: the program gets no score, and a reward worker returns the task."""


@dataclass(frozen=True)
class Limits:
    time_s: float = 10.0
    """Limit of the elapsed seconds, and of the processor seconds of each process."""
    memory_mb: int = 512
    """Address space of each process, in MiB; for several processes also their total resident memory."""
    processes: int = 1
    """Number of concurrent processes. With 1, the program cannot start another; `landlock` allows only 1."""
    threads: int = 64
    """Number of concurrent threads of all processes together."""
    output_bytes: int = 1 << 20
    """Largest number of bytes of standard output, and of standard error. A program that writes more is ended."""
    disk_mb: int = 64
    """Largest size in MiB of all files in the program's folder together, and of a single file."""

    def __post_init__(self) -> None:
        for name in ("time_s", "memory_mb", "processes", "threads", "output_bytes", "disk_mb"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 2**40:
                raise InvalidInput(f"sandbox limit {name} is {value!r}; it must be a positive number")

    @property
    def memory_bytes(self) -> int:
        return self.memory_mb << 20

    @property
    def disk_bytes(self) -> int:
        return self.disk_mb << 20


@dataclass(frozen=True)
class Outcome:
    ended: Ending
    exit_code: int | None
    """Exit status; None unless the program exited by itself."""
    signal: int | None
    """Number of the signal that ended the program; None without one."""
    stdout: bytes
    stderr: bytes
    """Bytes written to standard error, up to `Limits.output_bytes`."""
    duration_s: float
    """Seconds from start to end, including the seconds of the sandbox itself."""

    @property
    def succeeded(self) -> bool:
        return self.ended == "exited" and self.exit_code == 0

    def describe(self) -> str:
        """Return one phrase for people: `exited with status 1`, `exceeded its time limit`."""
        if self.ended == "exited":
            return f"exited with status {self.exit_code}"
        if self.ended == "signal":
            return f"was ended by signal {self.signal}"
        return f"exceeded its {self.ended} limit"


class Sandbox(Protocol):
    """Runs untrusted programs. Used from several threads at a time."""

    name: str
    """Name of the backend: `bwrap`, `landlock`, `remote` or `none`."""

    def run(self, argv: Sequence[str], files: Mapping[str, bytes], limits: Limits, stdin: bytes = b"") -> Outcome:
        """Run `argv` in a new folder with `files` (relative path → content) and wait for its end.

        argv[0] is PYTHON, the name of a command or an absolute path. The calling thread must live until the return.
        Raises InvalidInput for files, arguments or limits that this kind of sandbox does not accept; SandboxFailed if
        the sandbox could not run the program.
        """
        ...


def check_request(argv: Sequence[str], files: Mapping[str, bytes], stdin: bytes) -> None:
    """Raise InvalidInput for a command, file names or sizes that no sandbox accepts."""
    if not argv or any(not isinstance(part, str) or "\0" in part for part in argv):
        raise InvalidInput(f"a sandbox runs a list of texts without NUL, not {argv!r:.80}")
    for path in files:
        parts = path.split("/")
        if not path or "\0" in path or len(path) > 255 or len(parts) > 8 or {"", ".", ".."} & set(parts):
            raise InvalidInput(
                f"file {path!r:.80} of a sandboxed program must be a relative path of at most 255 characters, "
                "without '.' and '..'"
            )
    size_bytes = len(stdin) + sum(map(len, files.values()))
    if size_bytes > MAX_INPUT_BYTES or len(files) > 256:
        raise InvalidInput(
            f"a sandboxed program got {len(files)} files and {size_bytes} bytes of input, but may get at most 256 "
            f"files and {MAX_INPUT_BYTES} bytes"
        )
