"""Real ranks for a test: processes of one script, which meet over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from free_ports import free_port
from python_path import python_path

SCRIPTS = Path(__file__).parent / "processes"
ROOT = SCRIPTS.parents[2]
PATHS = python_path(ROOT, ROOT / "tests" / "support", ROOT / "tests" / "support" / "models")


def run_ranks(script: str, ranks: int, *arguments: object, timeout_s: float = 300) -> None:
    """Run a script of `tests/support/processes` in this many ranks, and fail with its errors unless all ranks end well."""
    command = [sys.executable, SCRIPTS / script, *map(str, arguments)]
    port = free_port()
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    shared |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": PATHS}
    with tempfile.TemporaryFile("w+") as errors:
        processes = [
            subprocess.Popen(
                command,
                env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )
            for rank in range(ranks)
        ]
        try:
            _wait(processes, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        errors.seek(0)
        assert not any(process.returncode for process in processes), errors.read()[-4000:]


def _wait(processes: list[subprocess.Popen[bytes]], deadline_s: float) -> None:
    """Wait until all have ended, or one has failed. Raises TimeoutError."""
    while any(process.poll() is None for process in processes) and not any(p.returncode for p in processes):
        if time.monotonic() > deadline_s:
            raise TimeoutError("the ranks have not ended")
        time.sleep(0.05)
