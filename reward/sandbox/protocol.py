"""What a sandbox is: `run(argv, files, limits) -> Outcome`, whatever isolates the program.

Promises of every backend but `none`: the program reads the interpreter and its own folder only, writes its own folder only,
reaches no network, no other process and nothing of the caller's environment, and nothing of it is left after `run`. Output,
disk and time are bounded by the caller's side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from paceline.errors import InvalidInput, Unavailable

Ending = Literal["exited", "signal", "time", "output", "disk", "processes", "memory"]
"""How a program ended: by itself, by a signal, or ended for passing a limit of that name."""

PYTHON = "python"
"""As argv[0]: the interpreter of the caller's environment, or the remote sandbox's."""

MAX_INPUT_BYTES = 16 << 20


class SandboxFailed(Unavailable, ConnectionError):
    """The sandbox itself could not run the program: no fault of the program, and never a score. A reward worker returns the
    task, as for a service that cannot be reached."""


@dataclass(frozen=True)
class Limits:
    """What one program may use."""

    time_s: float = 10.0
    """Seconds by the clock; also the processor seconds of each process."""
    memory_mb: int = 512
    """Address space of each process, in MiB; with several processes also their resident memory together."""
    processes: int = 1
    """Processes at one time. 1: the program cannot start another one. Backend `landlock` allows 1 only."""
    threads: int = 64
    """Threads at one time, of all processes."""
    output_bytes: int = 1 << 20
    """Bytes of standard output and of standard error, each. The program is ended when it writes more."""
    disk_mb: int = 64
    """MiB of files in its folder, and of a single file."""

    def __post_init__(self) -> None:
        """Raises InvalidInput for a limit that is not positive."""
        for name in ("time_s", "memory_mb", "processes", "threads", "output_bytes", "disk_mb"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 2**40:
                raise InvalidInput(f"sandbox limit {name} is {value!r}, it has to be a positive number")

    @property
    def memory_bytes(self) -> int:
        return self.memory_mb << 20

    @property
    def disk_bytes(self) -> int:
        return self.disk_mb << 20


@dataclass(frozen=True)
class Outcome:
    """What became of one program."""

    ended: Ending
    exit_code: int | None
    """None unless it exited by itself."""
    signal: int | None
    """Number of the signal that ended it, where it was one."""
    stdout: bytes
    stderr: bytes
    """What was written, up to `Limits.output_bytes`."""
    duration_s: float
    """Seconds from the start to the end, those of the sandbox included."""

    @property
    def succeeded(self) -> bool:
        return self.ended == "exited" and self.exit_code == 0

    def describe(self) -> str:
        """Return one phrase for people: `exited with status 1`, `passed its time limit`."""
        if self.ended == "exited":
            return f"exited with status {self.exit_code}"
        if self.ended == "signal":
            return f"was ended by signal {self.signal}"
        return f"passed its {self.ended} limit"


class Sandbox(Protocol):
    """One way of running programs that are not trusted. Used from several threads at a time."""

    name: str
    """The backend's: `bwrap`, `landlock`, `remote` or `none`."""

    def run(self, argv: Sequence[str], files: Mapping[str, bytes], limits: Limits, stdin: bytes = b"") -> Outcome:
        """Run `argv` in a new folder with `files` (relative path → content) and wait for its end.

        argv[0] is PYTHON, a command's name or an absolute path. The thread that calls has to last until the return. Raises
        InvalidInput for files, arguments or limits that no sandbox of this kind takes; SandboxFailed when the sandbox
        could not run the program.
        """
        ...


def check_request(argv: Sequence[str], files: Mapping[str, bytes], stdin: bytes) -> None:
    """Raises InvalidInput for a command, file names or sizes that no sandbox takes."""
    if not argv or any(not isinstance(part, str) or "\0" in part for part in argv):
        raise InvalidInput(f"a sandbox runs a list of texts without NUL, not {argv!r:.80}")
    for path in files:
        parts = path.split("/")
        if not path or "\0" in path or len(path) > 255 or len(parts) > 8 or {"", ".", ".."} & set(parts):
            raise InvalidInput(
                f"file {path!r:.80} of a sandboxed program has to be a relative path of at most 255 characters, "
                "without '.' and '..'"
            )
    size_bytes = len(stdin) + sum(map(len, files.values()))
    if size_bytes > MAX_INPUT_BYTES or len(files) > 256:
        raise InvalidInput(
            f"{len(files)} files and an input of {size_bytes} bytes together; a sandboxed program gets at most 256 files "
            f"and {MAX_INPUT_BYTES} bytes"
        )
