"""Services that are forked from a process with imports, by a starter in a process of its own that adopts its descendants."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from process_ends import has_ended

from paceline.services.common.processes.starting import LIBRARY_VARIABLES

DEADLINE_S = 120.0
STARTER = """
import json, os, sys
from pathlib import Path
from paceline.services.common.processes import fork_server
from paceline.services.common.processes.supervisor import Service

def answer(value):
    print(json.dumps(value), flush=True)

def start(name, *arguments, forked=True):
    command = [sys.executable, "-m", "probe", *arguments]
    log = folder / f"{name}.log"
    services[name] = Service(name, command, dict(os.environ), log, said.append, print, fork_server=server if forked else None)
    services[name].start()

fork_server.SAY_AFTER_S = 300.0
folder, said, services = Path(sys.argv[1]), [], {}
server = fork_server.ForkServer(dict(os.environ), folder / "fork-server.log", sys.argv[2:], said.append)
for line in sys.stdin:
    answer(eval(line))
for service in services.values():
    service.terminate()
for service in services.values():
    service.wait_ended(60.0)
server.close()
"""
"""Evaluates lines of the test, and prints each value as JSON."""
PROBE = """
import ctypes, json, os, random, resource, signal, sys, threading
from pathlib import Path

import numpy

def status(name):
    return next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name + ":"))

def of(folder):
    return sorted(os.listdir(f"/proc/self/{folder}"), key=int)

path = Path(sys.argv[1])
if "exit" in sys.argv:
    sys.exit(7)
print("a line of the service", file=sys.stderr)
facts = {
    "variables": dict(os.environ), "folder": os.getcwd(), "arguments": sys.argv[2:], "program": Path(sys.argv[0]).name,
    "leads": os.getsid(0) == os.getpid() == os.getpgrp(), "parent": os.getppid(), "main": [__name__, __spec__.name],
    "signals": [int(status(name), 16) & (1 << 31) - 1 for name in ("SigBlk", "SigIgn", "SigCgt")], "threads": len(of("task")),
    "files": [os.readlink(f"/proc/self/fd/{fd}") for fd in of("fd")[:-1]], "niceness": os.nice(0), "umask": os.umask(0o77),
    "limits": [resource.getrlimit(each) for each in range(10)], "flags": list(sys.flags), "path": sys.path,
    "dumpable": ctypes.CDLL(None).prctl(3, 0, 0, 0, 0), "is_main_thread": threading.current_thread() is threading.main_thread(),
    "commands": [word for word in Path("/proc/self/cmdline").read_text().split("\\0") if word],
}
preloaded = getattr(sys.modules.get("preloaded"), "PID", None)
own = {"pid": os.getpid(), "preloaded_by": preloaded, "random": [random.random(), numpy.random.rand()], "name": Path("/proc/self/comm").read_text()}
path.with_suffix(".part").write_text(json.dumps({"facts": facts, "own": own}))
path.with_suffix(".part").replace(path)
signal.pause()
"""


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that another process makes true; fail at the deadline."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, "waited too long"
        time.sleep(0.01)


class Starter:
    """A starter in a process, with a folder for its services."""

    def __init__(self, folder: Path, modules: list[str]):
        self.folder = folder
        (folder / "probe.py").write_text(PROBE)
        (folder / "preloaded.py").write_text("import os\nPID = os.getpid()\n")
        (folder / "threaded.py").write_text(
            "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", STARTER, str(folder), *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "2"},
        )

    def __call__(self, expression: str) -> Any:
        """Return the value of an expression in the starter."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def facts(self, name: str, *arguments: str, forked: bool = True) -> dict[str, Any]:
        """Start a service; return what it finds out about itself."""
        path = self.folder / f"{name}.json"
        self(f"start({name!r}, {str(path)!r}, *{arguments!r}, forked={forked})")
        return self.read(name)

    def read(self, name: str) -> dict[str, Any]:
        path = self.folder / f"{name}.json"
        until(path.exists)
        found: dict[str, Any] = json.loads(path.read_text())
        path.unlink()
        return found


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Starter]]:
    """Return a function that starts a starter with the modules that are to be imported."""
    started: list[Starter] = []

    def start(*modules: str) -> Starter:
        started.append(Starter(tmp_path, list(modules)))
        return started[-1]

    yield start
    for starter in started:
        starter.process.communicate(timeout=DEADLINE_S)


def test_a_forked_service_is_like_a_plain_one(start: Callable[..., Starter]) -> None:
    starter = start("no_such_module", "preloaded")
    forked, plain = starter.facts("a", "--x", "1"), starter.facts("b", "--x", "1", forked=False)
    assert forked["own"]["preloaded_by"] == starter("server.pid")
    assert plain["own"]["preloaded_by"] is None
    for facts, name in ((forked["facts"], "a"), (plain["facts"], "b")):
        log = str(starter.folder / f"{name}.log")
        assert facts.pop("files") == ["/dev/null", log, log]
        assert facts.pop("commands")[:3] == [sys.executable, "-m", "probe"]
        assert facts["parent"] == starter.process.pid
    variables = forked["facts"]["variables"]
    for name in LIBRARY_VARIABLES:  # every service that is forked sets them
        plain["facts"]["variables"].setdefault(name, variables[name])
    assert forked["facts"] == plain["facts"] | {"threads": 1}  # numpy starts no thread
    assert forked["own"]["name"] == "a\n"
    assert forked["own"]["pid"] == starter("services['a'].pid")
    assert starter.folder.joinpath("a.log").read_text() == "a line of the service\n"
    assert "No module named 'no_such_module'" in starter.folder.joinpath("fork-server.log").read_text()
    assert not starter("said")


def test_forks_share_no_random_numbers_and_no_memory_and_are_started_again(start: Callable[..., Starter]) -> None:
    starter = start("preloaded")
    first, second = starter.facts("a", "the" + "-first-secret"), starter.facts("b", "the" + "-second-secret")
    assert not set(first["own"]["random"]) & set(second["own"]["random"])
    memory = memory_of(second["own"]["pid"])
    assert b"the-second-secret" in memory
    assert b"the-first-secret" not in memory

    os.kill(first["own"]["pid"], signal.SIGKILL)
    assert starter.read("a")["own"]["preloaded_by"] == starter("server.pid")
    assert starter("list(services['a'].deaths)") == ["a was killed by SIGKILL"]
    starter(f"start('c', {str(starter.folder)!r}, 'exit')")
    until(lambda: starter("list(services['c'].deaths)") == ["c ended with exit status 7"])


def memory_of(pid: int) -> bytes:
    """Return the private writable memory of a process."""
    found = []
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            begin, end = (int(word, 16) for word in line.split()[0].split("-"))
            if " rw-p " in line:
                memory.seek(begin)
                found.append(memory.read(end - begin) or b"")
    return b"".join(found)


def test_services_go_on_without_their_fork_server(start: Callable[..., Starter]) -> None:
    starter = start("preloaded")
    first, server = starter.facts("a")["own"]["pid"], starter("server.pid")
    os.kill(server, signal.SIGKILL)
    until(lambda: has_ended(server))
    assert not has_ended(first)
    os.kill(first, signal.SIGKILL)
    assert starter.read("a")["own"]["preloaded_by"] is None
    assert starter.facts("b")["own"]["preloaded_by"] is None
    death, line = starter("said")
    assert death.startswith("a was killed by SIGKILL, and starts again in 0.5 s")
    assert line.startswith("services start without the fork server, some seconds later: ")


def test_a_service_starts_in_a_folder_that_is_gone(start: Callable[..., Starter], tmp_path: Path) -> None:
    starter = start("preloaded")
    gone = tmp_path / "gone"
    gone.mkdir()
    starter(f"os.chdir({str(gone)!r})")
    gone.rmdir()
    assert starter.facts("a")["own"]["preloaded_by"] == starter("server.pid")


def test_long_imports_are_mentioned(start: Callable[..., Starter]) -> None:
    starter = start("preloaded")
    starter("setattr(fork_server, 'SAY_AFTER_S', 1e-6)")
    assert starter.facts("a")["own"]["preloaded_by"] == starter("server.pid")
    assert starter("said") == ["the services wait for the imports of torch and transformers"]


def test_a_process_with_threads_does_not_fork(start: Callable[..., Starter]) -> None:
    starter = start("preloaded", "threaded")
    assert starter.facts("a")["own"]["preloaded_by"] is None
    (line,) = starter("said")
    assert line.startswith("services start without the fork server")
    assert "must not fork" in starter.folder.joinpath("fork-server.log").read_text()


def test_a_fork_for_which_the_starter_does_not_wait_runs_nothing(start: Callable[..., Starter]) -> None:
    starter = start("preloaded")
    starter("server.wait_ready()")
    starter("setattr(fork_server, 'FORK_S', 1e-6)")
    assert starter.facts("a")["own"]["preloaded_by"] is None
    assert len(starter("said")) == 1
    assert starter.folder.joinpath("a.log").read_text() == "a line of the service\n"


def test_forked_services_and_their_server_die_with_the_starter(start: Callable[..., Starter]) -> None:
    starter = start("preloaded")
    pids = [starter.facts("a")["own"]["pid"], starter("server.pid")]
    starter.process.kill()
    until(lambda: all(map(has_ended, pids)))
