"""Nodes on loopback with small ranks that really die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from free_ports import free_port
from python_path import python_path

ROOT = Path(__file__).parents[4]
DEADLINE_S = 60.0
NODE = """
import logging, sys
from paceline.services.learner.nodes.launcher import NodeLauncher, Rendezvous
from paceline.services.learner.nodes.settings import node_settings
logging.basicConfig(level=logging.INFO)
settings = node_settings(sys.argv[1], int(sys.argv[2]), sys.argv[3], {}, "")
try:
    rendezvous = Rendezvous(settings, 1, "127.0.0.1", float(sys.argv[4]))
    sys.exit(NodeLauncher(settings, rendezvous, "toy_rank", []).run(1, 5.0))
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""
RANK = """
import os, pathlib, signal, sys, time
rank, world_size, session = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "PACELINE_RANKS_SESSION"))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
with open(f"lives.{rank}", "a") as lives:
    lives.write(f"{session} {world_size} {os.getpid()}\\n")
while not pathlib.Path("end").exists():
    time.sleep(0.01)
"""
Start = Callable[[int], subprocess.Popen[str]]

pytestmark = pytest.mark.slow  # each node imports torch


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(node_rank)`: one of two nodes, with one rank."""
    (tmp_path / "toy_rank.py").write_text(RANK)
    (tmp_path / "node.py").write_text(NODE)
    address = f"127.0.0.1:{free_port()}"
    started = []

    def start(node_rank: int) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "node.py", "2", str(node_rank), address, str(DEADLINE_S)],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": python_path(ROOT, tmp_path), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def lives(folder: Path, rank: int, number: int) -> list[list[str]]:
    """Return the lives of a rank, once there are so many: session, world size, process id."""
    deadline_s, path = time.monotonic() + DEADLINE_S, folder / f"lives.{rank}"
    while True:
        found = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        if len(found) >= number:
            return found
        assert time.monotonic() < deadline_s, f"rank {rank} has begun {len(found)} times, not {number}"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("lost", "said"),
    [(0, "node 0, which hosts the rendezvous, does not answer"), (1, "node 1 was started again")],
)
def test_a_lost_node_ends_the_session_and_the_next_one_forms_when_it_is_back(
    start: Start, tmp_path: Path, lost: int, said: str
) -> None:
    nodes, other = [start(0), start(1)], 1 - lost
    first = [lives(tmp_path, rank, 1)[0] for rank in (0, 1)]
    assert [life[:2] for life in first] == [[first[0][0], "2"]] * 2
    nodes[lost].kill()
    nodes[lost].wait()
    nodes[lost] = start(lost)
    second = [lives(tmp_path, rank, 2)[1] for rank in (0, 1)]
    assert second[0][:2] == second[1][:2] != first[0][:2]

    os.kill(int(second[lost][2]), signal.SIGKILL)  # a rank alone: both nodes stay and begin anew
    third = [lives(tmp_path, rank, 3)[2] for rank in (0, 1)]
    assert third[0][:2] == third[1][:2]

    (tmp_path / "end").touch()
    for node in nodes:
        node.send_signal(signal.SIGTERM)
    logs = [node.communicate(timeout=DEADLINE_S)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], logs
    assert f"the session is over, because {said}" in logs[other]
    assert f"the session is over, because node {lost} has lost rank {lost} was killed by SIGKILL" in logs[other]
