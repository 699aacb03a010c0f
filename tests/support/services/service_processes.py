"""Services as separate processes, started and stopped one by one."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from paceline.services.coordinator.ledger.ledger import Ledger

PACELINE = [sys.executable, "-c", "from paceline.services.cli.main import main; main()"]


COMMANDS = {
    "coordinator": ["paceline.services.coordinator.main"],
    "rollout": ["paceline.services.rollout.main"],
    "reward": ["paceline.services.reward.main"],
    "learner": ["paceline.services.learner.main", "--ranks", "2"],
}


class Services:
    """One process of each role, and its log."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, role: str, *options: str) -> None:
        """Start a role, with 30 s from SIGTERM to its end less the time for leaving."""
        self.directory.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", *COMMANDS[role], "--grace", "25", *options]
        with (self.directory / f"{role}.log").open("ab") as log:
            self.processes[role] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment())

    def log(self, role: str) -> str:
        """Return all output of a role."""
        return (self.directory / f"{role}.log").read_text()


def environment() -> dict[str, str]:
    """Return the environment of processes that stay on CPUs."""
    return os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@contextlib.contextmanager
def opened(directory: Path) -> Iterator[Ledger]:
    """Open the ledger as it is."""
    with contextlib.closing(Ledger(directory / "ledger.sqlite", read_only=True)) as ledger:
        yield ledger


def wait_for(file: Path, process: subprocess.Popen[bytes], limit_s: float = 120.0) -> None:
    """Wait until a service has written its address. Fails if it ends, or takes longer."""
    deadline_s = time.monotonic() + limit_s
    while not file.exists():
        assert time.monotonic() < deadline_s, f"no {file.name} within {limit_s} s"
        with contextlib.suppress(subprocess.TimeoutExpired):
            assert process.wait(0.05) is None, "it ended"
