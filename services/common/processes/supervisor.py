"""Supervision of one child process: start it, notice its death, log why, start it again.

Promises: a service that dies is started again, at first after half a second and ever more slowly while it keeps dying
(`restart_policy.py`). It is given up, with the reason, only if `max_deaths` is set. All its lives write into one log, in
which a line ends each. No process of its process group outlives it, and it does not outlive this process.

One thread (the keeper) owns each child: it alone starts, waits for and reaps it. Callers only send signals, under the
lock that also covers reaping, so a signal never meets a process id that the system has given to another process.
Nothing waits for a keeper except `stop`, which has a deadline.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import psutil

from paceline.errors import PacelineError
from paceline.services.common.processes.log_tail import last_lines, reason_in
from paceline.services.common.processes.restart_policy import MAX_BACKOFF_S, Death, RestartPolicy
from paceline.services.common.processes.tether import tethered

KILL_WAIT_S = 10.0
CANNOT_START = 127
"""Status of a life that never began, as in shells."""

KEPT_DEATHS = 1000
SHOWN_LINES = 5
"""Lines of the log that are shown when a service is given up."""


class Service:
    """A supervised child. `command` and `max_deaths` may be changed while it runs; they count from its next death."""

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
    ):
        self.name = name
        self.command = command
        self.log_path = log_path
        self.max_deaths = max_deaths
        """Deaths in a row after which it is given up; None is never. Deaths that `kill` caused do not count."""
        self.deaths: deque[str] = deque(maxlen=KEPT_DEATHS)
        """Ends of its last lives, oldest first."""
        self._environment = environment
        self._say = say
        self._gave_up = gave_up
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._meant_to_die = False
        self._policy = RestartPolicy(max_backoff_s)
        self._keeper = threading.Thread(target=self._keep, name=f"keeper of {name}", daemon=True)

    def start(self) -> None:
        """Start the child and its keeper."""
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
        """Ask the child to end for good; `wait_ended` waits for it."""
        with self._lock:
            self._stopping.set()
            if self._process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._process.pid, signal.SIGTERM)

    @property
    def ends(self) -> bool:
        """Return whether the child was told to end and has not ended yet."""
        return self._stopping.is_set() and self._keeper.is_alive()

    @property
    def has_ended(self) -> bool:
        """Return whether the child was told to end and has ended."""
        return self._stopping.is_set() and not self._keeper.is_alive()

    @property
    def stays(self) -> bool:
        """Return whether the child was not told to end."""
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

    # The keeper

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
                # A signal leaves no words, so an error that the log names came earlier and was survived.
                reason = reason_in(lines if status >= 0 else lines[-1:])
                death = Death(status, time.monotonic() - started_s, reason, self._meant_to_die)
                self._note_end(how)
            self._meant_to_die = False
            if not self._goes_on(how, death, lines) or self._stopping.wait(self._policy.pause_s):
                return

    def _live_once(self) -> int | None:
        """Run one life of the child, from start to reaping; return its return code, None when it must not start any
        more."""
        with self._lock:
            if self._stopping.is_set():
                return None
            with self.log_path.open("ab") as log:
                process = subprocess.Popen(
                    tethered(self.command),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._environment,
                    start_new_session=True,
                )
            self._process = process
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            # Not reaped yet, so the system has not reused the group's number: kill the rest of the group.
            self._signal(signal.SIGKILL)
            self._process = None
            return process.wait()

    def _note_end(self, how: str) -> None:
        """End this life in the log, whatever its last line was."""
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        with contextlib.suppress(OSError), self.log_path.open("a") as log:
            log.write(f"{now} WARNING {__name__}: {self.name} {how}\n")

    def _goes_on(self, how: str, death: Death, lines: list[str]) -> bool:
        """Log the death, or give the service up; return whether there is a next life."""
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
            self._say(f"{what}, starts again in {policy.pause_s:g} s{why}")
        return True


def _outside_group(pid: int) -> list[psutil.Process]:
    """Return processes that a child, such as a launcher, has started in other groups."""
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
    """Return in words how a process with this return code ended."""
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
