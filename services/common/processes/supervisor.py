"""Supervises one child process: starts it, notices its death, logs the reason, and starts it again.

Promises: a service that dies is started again, at first after half a second and ever more slowly while it keeps dying
(`RestartPolicy`). It is given up, with the reason, only if `max_deaths` is set. All its lives write into one log, and a
line marks the end of each. No process of its process group outlives it, and it does not outlive this process.

One thread (the keeper) owns each child: it alone starts, waits for and reaps it. Callers only send signals, under the
lock that also covers reaping, so a signal never meets a process id that the system has given to another process.
Nothing waits for a keeper except `stop`, which has a deadline.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from paceline.calls.backoff import pause_after
from paceline.errors import PacelineError
from paceline.services.common.processes.fork_server import Forked, ForkServer
from paceline.services.common.processes.tether import tethered
from paceline.user_code.left_over import end_strays, reaped, starting

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 60.0
MAX_BACKOFF_AFTER_SIGNAL_S = 10.0
HEALTHY_S = 30.0
"""A life of at least this many seconds counts as progress, because by then the pool has started and worked."""
LOGGED_EACH = 4
"""Number of deaths in a row that are each logged; afterwards only the fifth, tenth, twentieth and so on are logged."""
FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE})
"""Signals that come from outside the program: from a person, or from the kernel for lack of memory."""
CHANGING = re.compile(r"0x[0-9a-fA-F]+|\d+")


@dataclass(frozen=True)
class Death:
    """The end of one life of a service's process."""

    status: int
    life_s: float
    reason: str = ""
    """Line of the service's log with the reason of the death."""
    by_supervisor: bool = False
    """True if the supervisor itself killed the service, for a known reason."""

    @property
    def way(self) -> tuple[int, str]:
        """Return the status, and the reason without its numbers; the result is equal for two deaths of one cause."""
        return self.status, CHANGING.sub("#", self.reason)


class RestartPolicy:
    """The rule for one service's restarts and for the log lines about its deaths; it starts and logs nothing.

    If a service dies by a signal from outside or of a new cause, after a life of at least HEALTHY_S, the death is
    unlikely to repeat. Then the back-off begins anew; otherwise the pause grows."""

    def __init__(self, max_backoff_s: float = MAX_BACKOFF_S):
        self._max_backoff_s = max_backoff_s
        self._way: tuple[int, str] | None = None
        self.in_a_row = 0
        """Deaths since the service last worked, without those that the supervisor caused."""
        self.same_way = 0
        """Deaths of one cause in a row, however long the lives between them."""
        self.pause_s = FIRST_BACKOFF_S
        """Seconds until the service is started again."""

    def count(self, death: Death) -> None:
        if death.by_supervisor:
            self.pause_s = FIRST_BACKOFF_S
            return
        from_outside = -death.status in FROM_OUTSIDE
        self.same_way = self.same_way + 1 if death.way == self._way else 1
        self._way = death.way
        well = death.life_s >= HEALTHY_S and (from_outside or self.same_way == 1)
        self.in_a_row = 1 if well else self.in_a_row + 1
        longest_s = min(MAX_BACKOFF_AFTER_SIGNAL_S, self._max_backoff_s) if from_outside else self._max_backoff_s
        self.pause_s = pause_after(self.in_a_row, FIRST_BACKOFF_S, longest_s)

    @property
    def is_logged(self) -> bool:
        times = max(self.in_a_row, self.same_way)
        return times <= LOGGED_EACH or (times % 5 == 0 and (times // 5) & (times // 5 - 1) == 0)

    def in_words(self, name: str, how: str) -> str:
        """Return the death as a clause with its repetitions, such as "ended with exit status 1"."""
        if self.same_way > LOGGED_EACH:
            return f"{name} has died {self.same_way} times the same way: it {how}"
        if self.in_a_row > LOGGED_EACH:
            return f"{name} has died {self.in_a_row} times in a row; the last time it {how}"
        return f"{name} {how}"


KILL_WAIT_S = 10.0
CANNOT_START = 127
"""Exit status of a service that could not be started, as in shells."""
KEPT_DEATHS = 1000
SHOWN_LINES = 5
"""Number of the log's last lines that are shown when a service is given up."""


class Service:
    """A supervised child. A change of `command` or `max_deaths` takes effect at the child's next death."""

    def __init__(
        self,
        name: str,
        command: list[str],
        environment: dict[str, str],
        log_path: Path,
        say: Callable[[str], None],
        gave_up: Callable[[PacelineError], None],
        max_deaths: int | None = None,
        max_backoff_s: float = MAX_BACKOFF_S,
        fork_server: ForkServer | None = None,
    ):
        self.name = name
        self.command = command
        self.log_path = log_path
        self.max_deaths = max_deaths
        """Deaths in a row, without those by `kill`, after which the service is given up; None means never."""
        self.deaths: deque[str] = deque(maxlen=KEPT_DEATHS)
        """How the service's last lives ended, as sentences, oldest first."""
        self._environment = environment
        self._say = say
        self._gave_up = gave_up
        self._fork_server = fork_server
        self._process: subprocess.Popen[bytes] | Forked | None = None
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._meant_to_die = False
        self._policy = RestartPolicy(max_backoff_s)
        self._keeper = threading.Thread(target=self._keep, name=f"keeper of {name}", daemon=True)

    def start(self) -> None:
        self._keeper.start()

    @property
    def pid(self) -> int | None:
        """Return the process id of the child, which also is its process group; None without a child."""
        with self._lock:
            return self._process.pid if self._process else None

    def kill(self, number: signal.Signals = signal.SIGKILL) -> bool:
        """Send a signal to the child's whole group and let the keeper restart it; return False if there is no child."""
        with self._lock:
            self._meant_to_die = self._process is not None and number in (signal.SIGKILL, signal.SIGTERM)
            return self._signal(number)

    def terminate(self) -> None:
        """Ask the child to end permanently; `wait_ended` waits for it."""
        with self._lock:
            self._stopping.set()
            if self._process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._process.pid, signal.SIGTERM)

    @property
    def ends(self) -> bool:
        """Return whether `terminate` was called and the child has not ended yet."""
        return self._stopping.is_set() and self._keeper.is_alive()

    @property
    def has_ended(self) -> bool:
        """Return whether `terminate` was called and the child has ended."""
        return self._stopping.is_set() and not self._keeper.is_alive()

    @property
    def stays(self) -> bool:
        """Return whether `terminate` was not called."""
        return not self._stopping.is_set()

    def wait_ended(self, grace_s: float) -> None:
        """Wait for the child to end after `terminate`, and kill its group after `grace_s` seconds."""
        self._keeper.join(grace_s)
        if self._keeper.is_alive():
            self._say(f"{self.name} did not stop within {grace_s:.0f} s and is killed")
            with self._lock:
                self._signal(signal.SIGKILL)
            self._keeper.join(KILL_WAIT_S)

    def _signal(self, number: signal.Signals) -> bool:
        if self._process is None:
            return False
        elsewhere = _outside_group(self._process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
        for process in elsewhere:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        return True

    def _keep(self) -> None:
        while True:
            log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
            started_s = time.monotonic()
            try:
                status = self._live_once()
            except OSError as error:
                how, death = f"cannot be started: {error}", Death(CANNOT_START, 0.0, str(error))
                lines = []
            else:
                if status is None or self._stopping.is_set():
                    return
                how, lines = ending(status), last_lines(self.log_path, log_start)
                # A signal leaves no message, so the child survived an error that the log names.
                reason = reason_in(lines if status >= 0 else lines[-1:])
                death = Death(status, time.monotonic() - started_s, reason, self._meant_to_die)
                self._note_end(how)
            self._meant_to_die = False
            if not self._goes_on(how, death, lines) or self._stopping.wait(self._policy.pause_s):
                return

    def start_no_more(self) -> None:
        """Stop restarting the child; it runs until `terminate`."""
        self._stopping.set()

    def _live_once(self) -> int | None:
        """Run one life of the child until it is reaped; return its code, or None if `terminate` came before the start."""
        if self._fork_server is not None:
            self._fork_server.wait_ready()
        with self._lock:
            if self._stopping.is_set():
                return None
            with self.log_path.open("ab") as log, starting(user_code=False) as started:
                process = self._forked(log) or subprocess.Popen(
                    tethered(self.command),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._environment,
                    start_new_session=True,
                )
                started(process.pid)
            self._process = process
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            # Not reaped yet, so the system has not reused the group's number: kill the rest of the group.
            self._signal(signal.SIGKILL)
            self._process = None
            status = process.wait()
        reaped(process.pid)
        end_strays()
        return status

    def _forked(self, log: IO[bytes]) -> Forked | None:
        if self._fork_server is None:
            return None
        return self._fork_server.fork(self.name, self.command, self._environment, log)

    def _note_end(self, how: str) -> None:
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        with contextlib.suppress(OSError), self.log_path.open("a") as log:
            log.write(f"{now} WARNING {__name__}: {self.name} {how}\n")

    def _goes_on(self, how: str, death: Death, lines: list[str]) -> bool:
        """Log the death, or give the service up; return whether the child is started again."""
        self.deaths.append(f"{self.name} {how}")
        policy = self._policy
        policy.count(death)
        what = policy.in_words(self.name, how)
        if self.max_deaths is not None and policy.in_a_row >= self.max_deaths:
            shown = lines[-SHOWN_LINES:]
            if lines and death.reason not in shown:
                shown = [death.reason, "...", *shown]
            tail = "".join(f"\n  {line}" for line in shown) or " nothing"
            self._gave_up(PacelineError(f"{what}. Its log {self.log_path} ends with:{tail}"))
            return False
        if policy.is_logged:
            why = f"; its log says: {death.reason}" if lines else ""
            self._say(f"{what}, and starts again in {policy.pause_s:g} s{why}")
        return True


def _outside_group(pid: int) -> list[psutil.Process]:
    """Return processes that a child, such as a launcher, has started in other process groups."""
    try:
        started = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    outside = []
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(process.pid) != pid:
                outside.append(process)
    return outside


def ending(status: int) -> str:
    """Describe how a process with this return code ended."""
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


LOG_TAIL_BYTES = 1 << 16
"""Bytes to read from a log's end: vLLM writes lines of several thousand characters before the reason of its end."""
MAX_REASON_CHARS = 500
FRAME = " |+-"
"""Characters before the text in lines of an exception group."""
TRACEBACK = "Traceback (most recent call last):"
LAST_WORDS = "Error: "
"""Prefix of the error message of a command."""
LEVEL = re.compile(r"(?:\S+ \S+ |\([^)]*\) )?(?:ERROR|CRITICAL) (?:\d\d-\d\d [\d:]+ \[[^\]]*\] )?")
"""Prefix of the message in an error's log line, Paceline's or vLLM's; vLLM repeats it in each traceback line."""
FOLLOWS = re.compile(
    r"(?i:(stack trace|root cause)[^.]* (above|for)\b|(stack trace|root cause) \(above)"
    r"|RuntimeError: (Executor failed\.|cancelled)$|\[dump_input\.py:"
)
"""Text of an error that results from an earlier one, such as vLLM's "See stack trace (above) for the root cause."."""
WARNING = re.compile(r"^\S+:\d+: \w*Warning: ")
"""First line of a Python warning; the second is the line of source, indented."""


def last_lines(log_path: Path, start: int = 0, count: int | None = None) -> list[str]:
    """Return the last `count` lines (None: LOG_TAIL_BYTES) after byte `start`, but no blank lines and Python warnings."""
    if not log_path.exists():
        return []
    with log_path.open("rb") as log:
        end = log.seek(0, os.SEEK_END)
        log.seek(max(start, end - LOG_TAIL_BYTES))
        lines = log.read().decode(errors="replace").splitlines()
    kept = list(_without_warnings(line.rstrip() for line in lines if line.strip()))
    return kept if count is None else kept[-count:]


def reason_in(lines: Sequence[str]) -> str:
    """Return the line of a log's end with the reason of the service's death, shortened to MAX_REASON_CHARS: the last
    error that does not result from an earlier one, else the last error, else the last line; "" without lines."""
    errors = _errors(lines)
    reasons = [line for line in errors if not FOLLOWS.search(line)] or errors or lines
    line = reasons[-1].strip() if reasons else ""
    return line if len(line) <= MAX_REASON_CHARS else line[: MAX_REASON_CHARS - 3] + "..."


def _errors(lines: Sequence[str]) -> list[str]:
    """Return the lines that name an error; for a traceback its last line, which replaces the log line before it."""
    errors: list[str] = []
    before_is_error = False
    margin = -1  # inside a traceback: the lines of an exception group are indented and framed
    for line in lines:
        level = LEVEL.match(line)
        message = line[level.end() :] if level else line.lstrip(FRAME)
        is_error = False
        if message.removeprefix("Exception Group ").startswith(TRACEBACK):
            margin = -1 if level else len(line) - len(message)
            if before_is_error:
                errors.pop()
        elif level or line.startswith(LAST_WORDS):
            is_error = not message.startswith(" ")
        elif 0 <= margin == len(line) - len(message):
            is_error, margin = True, -1
        if is_error:
            errors.append(line.lstrip(FRAME))
        before_is_error = is_error
    return errors


def _without_warnings(lines: Iterator[str]) -> Iterator[str]:
    in_warning = False
    for line in lines:
        if in_warning and line[0].isspace():
            in_warning = False
            continue
        in_warning = WARNING.match(line) is not None
        if not in_warning:
            yield line
