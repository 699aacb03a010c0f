"""The launcher of ranks with small children that really die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from process_ends import has_ended
from python_path import python_path

from paceline.host.resources import threads_beside
from paceline.services.learner.rank_group import interface_of

DEADLINE_S = 60.0
Launch = Callable[..., subprocess.Popen[str]]
READY = "import os, pathlib, signal, sys, time\nrank = os.environ['RANK']\npathlib.Path(rank).write_text(str(os.getpid()))\n"


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Starts two ranks of a module with this code; whatever happens, the launcher ends with the test."""
    launchers = []

    def launch(code: str, grace_s: float = 30.0, threads: str = "1") -> subprocess.Popen[str]:
        (tmp_path / "toy_rank.py").write_text(READY + code)
        environment = os.environ | {"PYTHONPATH": python_path(Path(__file__).parents[3], tmp_path)}
        environment.pop("OMP_NUM_THREADS", None)
        process = subprocess.Popen(
            [sys.executable, "-m", "paceline.services.learner.launcher", "2", str(grace_s), "toy_rank"],
            cwd=tmp_path,
            env=environment | ({"OMP_NUM_THREADS": threads} if threads else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        launchers.append(process)
        return process

    yield launch
    for process in launchers:
        process.kill()
        process.communicate()


def pid_of(tmp_path: Path, rank: int) -> int:
    """Return the process id that a rank wrote when its code began."""
    path = tmp_path / str(rank)
    wait_until(lambda: path.exists() and path.read_text() != "", f"rank {rank} did not start")
    return int(path.read_text())


def wait_until(condition: Callable[[], bool], failure: str) -> None:
    """Wait for something that another process does."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, failure
        time.sleep(0.01)


def test_ranks_meet_in_a_file_that_no_folder_has_and_listen_on_loopback(launch: Launch) -> None:
    process = launch(
        "import psutil, torch, torch.distributed as dist\n"
        "from paceline.services.learner.rank_group import form_rank_group\n"
        "form_rank_group('127.0.0.1', cuda=False)\n"
        "ours = torch.tensor([1 + int(rank)])\n"
        "dist.all_reduce(ours)\n"
        "listening = {c.laddr.ip for c in psutil.Process().net_connections('all') if c.status == 'LISTEN'}\n"
        "dist.barrier()\n"
        "sys.stdout.write(f'{ours.item()} {dist.get_world_size()} {sorted(listening)}\\n')\n"
        "sys.stdout.flush()\n"
        "os._exit(0)\n"
    )
    out, errors = process.communicate(timeout=DEADLINE_S)
    assert out.splitlines() == ["3 2 ['127.0.0.1']"] * 2, errors
    assert process.returncode == 0


@pytest.mark.parametrize(("given", "expected"), [("", threads_beside(2)), ("3", 3)])
def test_ranks_share_the_cores_unless_threads_are_set(launch: Launch, given: str, expected: int) -> None:
    process = launch("os.write(1, os.environ['OMP_NUM_THREADS'].encode() + b'\\n')\n", threads=given)
    out, errors = process.communicate(timeout=DEADLINE_S)
    assert out.split() == [str(expected)] * 2, errors


def test_one_rank_that_fails_ends_the_others_and_its_status_is_the_launchers(launch: Launch, tmp_path: Path) -> None:
    process = launch(
        "if rank == '1': sys.exit(7)\n"
        "while not pathlib.Path('ended').exists(): time.sleep(0.01)\n"  # as a collective that notices
        "sys.exit(1)\n"
    )
    first = pid_of(tmp_path, 1)
    wait_until(lambda: not psutil.pid_exists(first), "the launcher has not seen the end of rank 1")
    (tmp_path / "ended").touch()
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 7
    assert "rank 1 ended with exit status 7; rank 0 cannot continue without it" in errors


def test_a_rank_killed_from_outside_shows_as_that_signal(launch: Launch, tmp_path: Path) -> None:
    process = launch("while not pathlib.Path('ended').exists(): time.sleep(0.01)\n")
    pid_of(tmp_path, 1)
    os.kill(pid_of(tmp_path, 0), signal.SIGKILL)
    wait_until(lambda: has_ended(pid_of(tmp_path, 0)), "rank 0 is still there")
    (tmp_path / "ended").touch()
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == -signal.SIGKILL
    assert "rank 0 was killed by SIGKILL" in errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_reaches_every_rank_and_a_good_end_is_status_0(
    launch: Launch, tmp_path: Path, number: signal.Signals
) -> None:
    process = launch(
        "def told(*_):\n"
        "    pathlib.Path(rank + '.told').touch()\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, told)\n"
        "pathlib.Path(rank + '.ready').touch()\n"
        "while True: signal.pause()\n"
    )
    wait_until(lambda: all((tmp_path / f"{rank}.ready").exists() for rank in (0, 1)), "the ranks are not ready")
    process.send_signal(number)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    assert all((tmp_path / f"{rank}.told").exists() for rank in (0, 1))


def test_no_rank_outlives_a_killed_launcher(launch: Launch, tmp_path: Path) -> None:
    process = launch("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: signal.pause()\n")
    pids = [pid_of(tmp_path, rank) for rank in (0, 1)]
    process.kill()
    wait_until(lambda: all(map(has_ended, pids)), "a rank is still there")


def test_an_address_belongs_to_an_interface() -> None:
    loopback = interface_of("127.0.0.1")
    assert loopback is not None
    assert interface_of("localhost") == loopback
    assert interface_of("192.0.2.254") is None
    assert interface_of("no such host") is None
