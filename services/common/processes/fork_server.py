"""Runs the fork server: a process that has imported what services need, and from which `paceline up` forks the
services. `ForkServer` is the side of the starter, and `main` runs in the process. Imports of torch and transformers
take seconds, and a fork takes milliseconds.

Promises: a forked service is like one that `python -m` starts: a child of the starter with a separate session, the same
variables, folder, streams and handlers of signals, and it is killed if the starter ends. The fork server reads no
request: the fork does, so nothing of one service is in the memory of another. The fork server never imports user code,
and it forks only while it has a single thread. If it ends or does not answer, the starter starts services without it.

The fork is a grandchild of the fork server, and the process between the two ends at once. The starter has called
`adopt`, so the system makes the service a child of the starter, which waits for it and reaps it like any other child.
The service reports its start and waits for the answer, so that a starter that has given up waiting never gets a second
service. Linux only.

Python's `multiprocessing.forkserver` does not serve here. Its processes stay children of the fork server, so `paceline
up` cannot reap them or read their exit codes. They share one output, and their work arrives as a pickle.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from paceline.host.process import die_with_parent, keep_private
from paceline.services.common.processes.starting import set_library_variables
from paceline.services.common.processes.tether import tethered
from paceline.user_code.left_over import adopt, reaped, starting

MODULE = "paceline.services.common.processes.fork_server"
SAY_AFTER_S, IMPORT_S, FORK_S = 3.0, 300.0, 20.0
"""Seconds after which a line mentions the imports; longest time for the imports; longest time for one fork."""
REQUEST_BYTES = 1 << 20
"""Largest request; the kernel's limit for one message is lower."""
BLAS_VARIABLE = "OPENBLAS_NUM_THREADS"
PR_SET_DUMPABLE, PR_SET_NAME = 4, 15
ARGUMENTS_FIELD = 45
"""Index of `arg_start` among the fields of /proc/self/stat that follow the name (proc_pid_stat(5), field 48)."""
READY, GO = b"ready", b"go"


class Forked(NamedTuple):
    """A service that was forked, with the members of `subprocess.Popen` that a supervisor needs."""

    pid: int

    def wait(self) -> int:
        """Reap the process; return its code, negative for a signal."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class ForkServer:
    """The fork server of this process. Make it in a thread that lives as long as the process does, because the fork
    server is killed when that thread ends. Any thread may call the methods."""

    def __init__(
        self, environment: Mapping[str, str], log_path: Path, modules: Sequence[str], say: Callable[[str], None]
    ):
        """Start importing `modules` without waiting. Services get `environment`, and `log_path` has the output of the
        imports. `say` gets one line if the imports take long, and one if the fork server cannot be used any more."""
        adopt()
        self._environment = dict(environment)
        self._log_path = log_path
        self._say = say
        self._lock = threading.RLock()
        self._is_ready = self._is_closed = False
        with log_path.open("ab") as log, starting(user_code=False) as started:
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                try:
                    self._process = subprocess.Popen(
                        tethered([sys.executable, "-m", MODULE, str(theirs.fileno()), *modules]),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=self._environment,
                        start_new_session=True,
                        pass_fds=(theirs.fileno(),),
                    )
                except OSError:
                    self._control.close()
                    raise
            started(self._process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> None:
        """Wait until the modules are imported, or until the fork server cannot be used."""
        with self._lock:
            if self._is_ready or self._is_closed:
                return
            try:
                self._control.settimeout(SAY_AFTER_S)
                try:
                    answer = self._control.recv(len(READY))
                except TimeoutError:
                    self._say("the services wait for the imports of torch and transformers")
                    self._control.settimeout(IMPORT_S)
                    answer = self._control.recv(len(READY))
                if answer != READY:
                    raise ConnectionError("it ended during the imports")
                self._is_ready = True
            except OSError as error:
                self._give_up(error)

    def fork(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: IO[bytes]) -> Forked | None:
        """Start `command` as a child of this process that writes to `log`; return None if only a plain start is
        possible: the program or the environment differs, or there is no fork server. The service has the folder in
        which the fork server was started."""
        if list(command[:2]) != [sys.executable, "-m"] or environment != self._environment:
            return None
        request = {"name": name, "command": list(command), "starter": os.getpid()}
        with self._lock:
            if not self._is_ready or self._is_closed:
                return None
            try:
                return self._forked(json.dumps(request).encode(), log)
            except (OSError, ValueError) as error:
                self._give_up(error)
                return None

    def close(self) -> None:
        """End the fork server, also during its imports; services go on."""
        self._is_closed = True
        self._process.kill()
        self._process.wait()
        reaped(self._process.pid)
        with self._lock:  # a thread that waits for the imports holds the lock until it sees the end
            self._control.close()

    def _forked(self, request: bytes, log: IO[bytes]) -> Forked:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            ours.settimeout(FORK_S)
            self._control.settimeout(FORK_S)
            ours.send(request)
            socket.send_fds(self._control, [GO], [theirs.fileno(), log.fileno()])
            theirs.close()
            if not (pid := ours.recv(32)):
                raise ConnectionError("it forked no service")
            ours.send(GO)
            return Forked(int(pid))

    def _give_up(self, error: Exception) -> None:
        if not self._is_closed:
            self.close()
            self._say(
                f"services start without the fork server, some seconds later: {error or 'it did not answer'}; see {self._log_path}"
            )


def main(arguments: Sequence[str]) -> None:
    """Import the named modules, and fork until the starter closes the socket. In a fork this runs the service."""
    keep_private()
    control = socket.socket(fileno=int(arguments[0]))
    import_all(arguments[1:])
    control.send(READY)
    while (descriptors := _next_request(control)) is not None:
        if (pid := os.fork()) == 0:
            control.close()
            _become_service(*descriptors)
            return
        for each in descriptors:
            os.close(each)
        os.waitpid(pid, 0)


def import_all(modules: Sequence[str]) -> None:
    """Import modules without starting threads. A module that cannot be imported is left out; its service says why."""
    set_library_variables()
    gc.disable()
    # With numpy, OpenBLAS starts its threads. No service multiplies matrices in numpy, and torch has its own library.
    is_free = BLAS_VARIABLE not in os.environ
    os.environ.setdefault(BLAS_VARIABLE, "1")
    importlib.import_module("numpy.random")
    if is_free:
        del os.environ[BLAS_VARIABLE]
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception:
            traceback.print_exc()
    gc.freeze()  # a collection in a service would copy the pages of all these objects


def _next_request(control: socket.socket) -> list[int] | None:
    """Return the descriptors of the next service, its channel and its log; None once the starter has gone."""
    _message, descriptors, _flags, _address = socket.recv_fds(control, len(GO), 2)
    threads = len(os.listdir("/proc/self/task"))
    if descriptors and threads > 1:
        sys.exit(f"an import has started threads ({threads - 1}), and a process with threads must not fork")
    return descriptors or None


def _become_service(channel_fd: int, log_fd: int) -> None:
    """Let a child of this process run the service; this process ends, so that the starter becomes the child's
    parent."""
    parent = os.getpid()
    if os.fork() != 0:
        os._exit(0)
    os.setsid()
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    os.close(log_fd)
    with socket.socket(fileno=channel_fd) as channel:
        request = json.loads(channel.recv(REQUEST_BYTES))
        deadline_s = time.monotonic() + FORK_S
        while os.getppid() == parent and time.monotonic() < deadline_s:
            time.sleep(0.001)
        die_with_parent(request["starter"], signal.SIGKILL)
        if not _is_wanted(channel):
            os._exit(1)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
    _, _, module, *arguments = request["command"]
    _set_names(request["name"], request["command"])
    sys.modules["numpy"].random.seed()  # forks share NumPy's state; `random` reseeds itself
    gc.enable()
    sys.modules.pop(module, None)  # runs as __main__, as with `python -m`
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _is_wanted(channel: socket.socket) -> bool:
    """Tell the starter this process's id; return whether the starter takes the process."""
    try:
        channel.send(str(os.getpid()).encode())
        return channel.recv(len(GO)) == GO
    except OSError:  # it has closed the socket
        return False


def _set_names(name: str, command: Sequence[str]) -> None:
    """Show the service's name and command line in `ps`, as far as the command line fits in the place of this process's
    own."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)
    with open("/proc/self/stat") as stat:
        begin, end = map(int, stat.read().rpartition(")")[2].split()[ARGUMENTS_FIELD : ARGUMENTS_FIELD + 2])
    text = b"\0".join(map(os.fsencode, command))[: end - begin - 1]
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


if __name__ == "__main__":
    main(sys.argv[1:])
