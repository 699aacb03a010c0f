"""However the owner ends, its engine's processes end, and their shared memory is removed."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import psutil
import pytest
from process_ends import has_ended

from paceline.rollout.vllm.process_guard import SHARED_MEMORY, ProcessGuard, watch_folder

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the guard reads /proc")

WORKER = """
import time
from multiprocessing import shared_memory
memory = shared_memory.SharedMemory(create=True, size=4096)
print(memory.name, flush=True)
time.sleep(600)
"""
OWNER = f"""
import json, os, subprocess, sys, time
from paceline.rollout.vllm.process_guard import ProcessGuard
guard = ProcessGuard()
workers = [
    subprocess.Popen([sys.executable, "-c", {WORKER!r}], stdout=subprocess.PIPE, text=True,
                     env=os.environ | guard.environment, start_new_session=alone)
    for alone in (False, True)
]
names = [worker.stdout.readline().strip() for worker in workers]
from multiprocessing import shared_memory
memory = shared_memory.SharedMemory(create=True, size=4096)
names.append(memory.name)
guard.started()
print(json.dumps([[worker.pid for worker in workers], names, guard.directory]), flush=True)
time.sleep(600)
"""


def wait_for(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


@pytest.fixture
def owner() -> Iterator[tuple[subprocess.Popen[str], Any]]:
    process = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    yield process, json.loads(line)
    process.kill()
    process.communicate()


@pytest.mark.parametrize("how", ["killed", "terminated", "killed with everything that it started"])
def test_nothing_is_left_of_an_engine_whose_owner_was(owner: tuple[subprocess.Popen[str], Any], how: str) -> None:
    process, (pids, names, directory) = owner
    paths = [Path("/dev/shm") / name.lstrip("/") for name in names]
    assert not any(has_ended(pid) for pid in pids)
    assert all(path.exists() for path in [*paths, Path(directory)])
    if how == "killed with everything that it started":
        started = psutil.Process(process.pid).children(recursive=True)
        for child in started:  # the resource trackers too, which would have removed the shared memory
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.send_signal(signal.SIGKILL if how == "killed" else signal.SIGTERM)
    wait_for(lambda: not any(path.exists() for path in [*paths, Path(directory)]))
    assert all(has_ended(pid) for pid in pids)


def test_what_is_not_the_engines_stays() -> None:
    guard = ProcessGuard()
    stranger = subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, text=True)
    mine = shared_memory.SharedMemory(create=True, size=4096)
    try:
        assert stranger.stdout is not None
        name = stranger.stdout.readline().strip()
        guard.started()
        assert guard.close()
        assert not Path(guard.directory).exists()
        assert guard.close()
        assert stranger.poll() is None
        assert (Path("/dev/shm") / name.lstrip("/")).exists()
        assert (Path("/dev/shm") / mine.name.lstrip("/")).exists()
    finally:
        stranger.terminate()  # its resource tracker removes its memory
        stranger.communicate()
        mine.close()
        mine.unlink()
    wait_for(lambda: not (Path("/dev/shm") / name.lstrip("/")).exists())


def test_semaphores_of_the_owner_go_with_it_although_it_lives_on_without_its_engine() -> None:
    script = """
import multiprocessing, os
from paceline.rollout.vllm.process_guard import ProcessGuard
guard = ProcessGuard()
os.environ.update(guard.environment)
lock = multiprocessing.get_context("spawn").Lock()
assert guard.close()
print(lock._semlock.name.lstrip("/"), flush=True)
input()
os._exit(0)  # so only its resource tracker can remove them, which the guard must have left alone
"""
    owner = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    semaphore = Path(SHARED_MEMORY, f"sem.{owner.stdout.readline().strip()}")
    assert semaphore.exists()
    owner.communicate("\n")
    wait_for(lambda: not semaphore.exists())


def test_the_guard_hears_of_what_is_created(tmp_path: Path) -> None:
    events = watch_folder(str(tmp_path))
    assert select.select([events], [], [], 0)[0] == []
    (tmp_path / "new").touch()
    assert select.select([events], [], [], 60)[0] == [events]
    os.close(events)
    assert watch_folder(str(tmp_path / "nowhere")) == -1
