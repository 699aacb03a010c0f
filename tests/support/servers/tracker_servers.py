"""Real servers of trackers on this machine, and a recorded run to send to them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from free_ports import free_port
from trained_ledger import RUN_ID, Writer

from paceline.records import Records
from paceline.services.cli.recorded.source import ledger_source

START_S = 300.0
HOSTILE = "<script>alert(1)</script>\x1b[31m"


class RecordedRun:
    """A ledger with one run: a trained step with samples, and as many events as are added."""

    def __init__(self, directory: Path):
        self.writer = Writer(directory, str(directory / "model"), {"prompt": HOSTILE, "answer": "2"})
        self.writer.train_a_step()
        self.path = directory / "runs" / "ledger.sqlite"
        self.steps = 0
        self.is_closed = False

    def add_steps(self, number: int) -> None:
        """Record steps."""
        for step in range(self.steps, self.steps + number):
            self.add("step", step=step, time=1.7e9 + step, reward=step / 8, **{"reward/exact_match": step / 4})
        self.steps += number

    def add(self, kind: str, **content: Any) -> None:
        """Record an event."""
        with self.writer.ledger.transaction():
            self.writer.ledger.add_event(RUN_ID, kind, content)

    def close(self) -> None:
        """Let go of the ledger; may be repeated."""
        if not self.is_closed:
            self.is_closed = True
            self.writer.ledger.close()

    def records(self) -> Callable[[], AbstractContextManager[Records]]:
        """Return what opens the records."""

        @contextlib.contextmanager
        def opened() -> Iterator[Records]:
            with ledger_source(self.path) as source:
                yield source.records

        return opened


@contextlib.contextmanager
def mlflow_server(directory: Path) -> Iterator[int]:
    """Run an MLflow server with SQLite; give its port."""
    port = free_port()
    store, artifacts = f"sqlite:///{directory}/mlflow.db", str(directory / "artifacts")
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--workers",
        "1",
    ]
    command += ["--backend-store-uri", store, "--artifacts-destination", artifacts, "--serve-artifacts"]
    with _serving(command, directory / "mlflow.log", f"http://127.0.0.1:{port}/health"):
        yield port


@contextlib.contextmanager
def _serving(command: list[str], log: Path, health: str) -> Iterator[None]:
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "HF_HUB_OFFLINE": "1", "GIT_PYTHON_REFRESH": "quiet"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | quiet,
            start_new_session=True,
        )
    try:
        deadline_s = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(health, timeout=2):
                break
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline_s, log.read_text()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
