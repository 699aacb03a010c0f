"""A local cluster whose services are forks of one process, which has imported torch, transformers and gRPC once for all
clusters of this process of the tests. The ranks of a learner are forks of their launcher.

The process is the fork server of `paceline up` (`services/common/processes/fork_server.py`). Here each service gets the
variables and the folder of its start, so clusters of several tests share the process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any
from unittest import mock

from python_path import python_path

from paceline.host.process import die_with_parent
from paceline.services.common.processes import fork_server
from paceline.services.common.processes.fork_server import Forked, ForkServer
from paceline.services.learner import launcher
from paceline.services.local.cluster import READERS, LocalCluster
from paceline.user_code.left_over import PR_SET_CHILD_SUBREAPER

MODULES = (
    *(f"paceline.services.{role}.main" for role in ("coordinator", "environment", "reward", "rollout", "learner")),
    *("paceline.services.learner.rank", "paceline.services.learner.training.run"),
    *("paceline.rollout.native.engine", "transformers.models.qwen3.modeling_qwen3"),
)
PR_GET_CHILD_SUBREAPER = 37
ANY_VALUE = ("PACELINE_", "PYTEST_")
"""Prefixes of variables that no import reads, so each service may have its own values of them."""


class ForkedCluster(LocalCluster):
    """A local cluster that forks its services, except those with a launcher and those with GPUs."""

    def __init__(self, *arguments: Any, **settings: Any):
        super().__init__(*arguments, **settings)
        if not self._visible:
            self._fork_server = ServerOfCluster()

    def _gains_by_fork(self, role: str) -> bool:
        return role not in (*self._launchers, *READERS)


class SharedForkServer(ForkServer):
    """The fork server of this process. This process adopts no processes other than services, at their forks."""

    def __init__(self) -> None:
        folder = tempfile.mkdtemp(prefix="paceline-fork-server-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        self._imported_with = _read_by_imports(_of_services(os.environ))
        variables = _of_services(os.environ) | {"PYTHONPATH": python_path(Path(__file__).parent)}
        with mock.patch.object(fork_server, "adopt"):
            super().__init__(variables, Path(folder, "log"), MODULES, print)
        atexit.register(self.close)

    def fork(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: IO[bytes]) -> Forked | None:
        if list(command[:2]) != [sys.executable, "-m"] or _read_by_imports(environment) != self._imported_with:
            return None
        start = json.dumps({"name": name, "folder": os.getcwd(), "variables": dict(environment)})
        here = [sys.executable, "-m", "forked_services", start, *command[2:]]
        with self._lock, _adopting():
            return super().fork(name, here, self._environment, log)


class ServerOfCluster(ForkServer):
    """The shared fork server, as far as one cluster uses it: the end of the cluster closes only this object."""

    def __init__(self) -> None:
        self._shared = shared_fork_server()

    def wait_ready(self) -> None:
        self._shared.wait_ready()

    def fork(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: IO[bytes]) -> Forked | None:
        return self._shared.fork(name, command, environment, log)

    def close(self) -> None:
        pass


@functools.cache
def shared_fork_server() -> SharedForkServer:
    """Return the fork server of this process; the main thread of the tests makes it."""
    assert threading.current_thread() is threading.main_thread()
    return SharedForkServer()


def _of_services(variables: Mapping[str, str]) -> dict[str, str]:
    return {**variables, "CUDA_VISIBLE_DEVICES": "", "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}


def _read_by_imports(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if not name.startswith(ANY_VALUE)}


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Let this process adopt what its descendants leave behind, as `adopt` does but without its thread, which would
    reap other processes of tests too."""
    prctl, before = ctypes.CDLL(None).prctl, ctypes.c_int()
    prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


class _ForkedRank(subprocess.Popen[bytes]):
    """A rank as a fork of its launcher: `python -m MODULE` with other variables, behind `tethered`."""

    def _execute_child(self, args: list[str], *rest: Any) -> None:
        """Fork instead of a start of a program; `Popen` keeps the process id and waits for it."""
        environment, launcher_pid = rest[5], os.getpid()
        self.pid = os.fork()
        self._child_created = True
        if self.pid == 0:
            for number in launcher.SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            die_with_parent(launcher_pid, signal.SIGKILL)
            command = args[args.index("-m") - 1 :]
            _end_after(command, environment)


def _end_after(command: Sequence[str], variables: Mapping[str, str]) -> None:
    """Run a program in a fork that must not return to the code of its parent, and end the process as Python ends it."""
    status = 1
    try:
        _become("rank", command, variables)
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


def _become(name: str, command: Sequence[str], variables: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)
    fork_server._set_names(name, command)
    _, _, module, *arguments = command
    sys.modules["numpy"].random.seed()
    sys.modules.pop(module, None)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def main(start: str, module: str, *arguments: str) -> None:
    """Run a service in a fork, with the variables and the folder of its start."""
    here = json.loads(start)
    os.chdir(here["folder"])
    launcher.subprocess = SimpleNamespace(Popen=_ForkedRank)  # type: ignore[attr-defined,assignment]
    _become(here["name"], [sys.executable, "-m", module, *arguments], here["variables"])


if __name__ == "__main__":
    main(*sys.argv[1:])
