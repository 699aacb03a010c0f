"""Launches the ranks of one host: `python -m paceline.services.learner.launcher RANKS GRACE_S MODULE [OPTION]...`

Promises: no rank outlives the launcher, however the launcher ends; the launcher ends once all ranks have ended, with
the status of the first that failed; SIGTERM, SIGINT and SIGHUP reach every rank as SIGTERM. The ranks of one host meet
without a listening socket, in a file without a name (`rank_group.py`) whose descriptor they inherit, so no other
process reaches it and no file is left behind. One thread for each rank waits for its end; the main thread decides, from
a queue that these threads and the signal handler fill.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.host.resources import thread_variables
from paceline.services.common.processes.starting import STARTER_VARIABLE, die_with_starter
from paceline.services.common.processes.supervisor import FROM_OUTSIDE, ending
from paceline.services.common.processes.tether import tethered

MEETING_VARIABLE = "PACELINE_RANKS_FILE"
"""Environment variable with the path of the file in which the ranks meet."""
KILL_AFTER_S = 10.0
"""A rank that must stop is killed this many seconds after its grace."""
OTHERS_END_S = 10.0
"""If a rank fails, the other ranks have this many seconds to notice it in a collective and to end by themselves."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
log = logging.getLogger(__name__)


class Ended(NamedTuple):
    local_rank: int
    status: int


class EndAll(NamedTuple):
    """An order to end all ranks, for a reason outside of the ranks."""

    reason: str
    orderly: bool
    """True if the ranks may end in the same way as after a signal; otherwise they have only OTHERS_END_S seconds."""


@dataclass
class Ranks:
    """The processes of one group of ranks, and their ends."""

    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    first_rank: int = 0
    """Rank of the first process on this host; other hosts may have lower ranks."""
    events: queue.SimpleQueue[Ended | EndAll | None] = field(default_factory=queue.SimpleQueue)
    """Queue of ended ranks by index on this host; `EndAll` orders the end of all ranks, None reports a signal to stop.
    """
    is_stopping: bool = False
    status: int = 0
    """Return code of the first rank that failed, negative for a signal as in `subprocess`; 0 if none failed."""
    on_loss: Callable[[str], None] = field(default=lambda _: None)
    """Called after a rank has failed, before the wait for the other ranks, with a sentence about the failure."""

    def start(self, module: str, options: list[str], ranks: int) -> None:
        """Start the processes `python -m module options`, with torchrun's variables for ranks of one host."""
        meeting = os.memfd_create("paceline-ranks")
        variables = {"WORLD_SIZE": str(ranks), MEETING_VARIABLE: f"/proc/self/fd/{meeting}"}
        self.start_with(variables, module, options, ranks, pass_fds=(meeting,))
        os.close(meeting)

    def start_with(
        self, variables: Mapping[str, str], module: str, options: list[str], ranks: int, pass_fds: tuple[int, ...] = ()
    ) -> None:
        """Start the processes with environment variables that say where their group meets and how large it is. They
        share this host's cores unless OMP_NUM_THREADS is set."""
        environment = {name: value for name, value in os.environ.items() if name != STARTER_VARIABLE}
        environment |= {**variables, "LOCAL_WORLD_SIZE": str(ranks), **thread_variables(ranks, environment)}
        command = tethered([sys.executable, "-m", module, *options])
        for index in range(ranks):
            variables_of_rank = environment | {"RANK": str(self.first_rank + index), "LOCAL_RANK": str(index)}
            process = subprocess.Popen(command, env=variables_of_rank, pass_fds=pass_fds)
            self.processes.append(process)
            threading.Thread(target=self._wait_for, args=(index, process), daemon=True).start()

    def see_through(self, grace_s: float) -> None:
        """Wait until all ranks have ended, and kill ranks that take too long."""
        alive, deadline_s = set(range(len(self.processes))), float("inf")
        while alive:
            left_s = min(deadline_s - time.monotonic(), threading.TIMEOUT_MAX)
            try:
                event = self.events.get(timeout=max(0.0, left_s))
            except queue.Empty:
                log.error("killing ranks that did not end in time: %s", self._named(alive))
                self._send(alive, signal.SIGKILL)
                self.status = self.status or 1
                deadline_s = float("inf")
                continue
            wait_s = grace_s + KILL_AFTER_S
            if event is None:
                self.is_stopping = True
                self._send(alive, signal.SIGTERM)
            elif isinstance(event, EndAll):
                log.warning("the session is over, because %s", event.reason)
                if event.orderly:
                    self._send(alive, signal.SIGTERM)
                else:
                    wait_s, self.status = OTHERS_END_S, self.status or 1
            else:
                alive.discard(event.local_rank)
                if self._failed(event):
                    wait_s = OTHERS_END_S
                    lost = f"rank {self.first_rank + event.local_rank} {ending(event.status)}"
                    others = f"; {self._named(alive)} cannot continue without it" if alive else ""
                    log.error("%s%s", lost, others)
                    self.on_loss(lost)
                    self.status = self.status or event.status
            deadline_s = min(deadline_s, time.monotonic() + wait_s)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def _failed(self, event: Ended) -> bool:
        """Return whether an end is a fault. A rank that a signal kills during the rank's imports did not fail."""
        return event.status != 0 and not (self.is_stopping and event.status == -signal.SIGTERM)

    def _send(self, indices: set[int], number: signal.Signals) -> None:
        for index in indices:
            self.processes[index].send_signal(number)

    def _wait_for(self, index: int, process: subprocess.Popen[bytes]) -> None:
        self.events.put(Ended(index, process.wait()))

    def _named(self, indices: set[int]) -> str:
        ranks = sorted(self.first_rank + index for index in indices)
        return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


@contextmanager
def at_signals(stop: Callable[[], object]) -> Iterator[None]:
    before = {number: signal.signal(number, lambda *_: stop()) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_ranks(module: str, options: list[str], ranks: int, grace_s: float) -> int:
    """Start the ranks, wait for their end, and return the return code of the first that failed, or 0. Main thread only."""
    started = Ranks()
    with at_signals(lambda: started.events.put(None)):
        try:
            started.start(module, options, ranks)
            started.see_through(grace_s)
        finally:
            started.kill()
    return started.status


def end_as(status: int) -> None:
    """End this process as a rank ended, by return code or signal, so that a supervisor can tell a fault from a signal."""
    if -status in FROM_OUTSIDE:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status if status >= 0 else 128 - status)


def main(arguments: list[str]) -> None:
    """Run the ranks of any module, as given on the command line."""
    die_with_starter()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    ranks, grace_s, module, *options = arguments
    end_as(run_ranks(module, options, int(ranks), float(grace_s)))


if __name__ == "__main__":
    main(sys.argv[1:])
