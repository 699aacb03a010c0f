"""Real ranks for a test: processes of one script, which meet over gloo."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from free_ports import free_port
from python_path import python_path

SUPPORT = Path(__file__).parents[1]
SCRIPTS = SUPPORT / "processes"
ROOT = SUPPORT.parents[1]
PATHS = python_path(ROOT, *(folder for folder in sorted(SUPPORT.iterdir()) if folder != SCRIPTS))


def run_ranks(script: str, ranks: int, *arguments: object, timeout_s: float = 300) -> None:
    """Run a script of `tests/support/processes` in this many ranks, and fail with its errors unless all ranks end well."""
    forker = Path(__file__).parent / "forked_ranks.py"
    command = [sys.executable, forker, SCRIPTS / script, str(ranks), *map(str, arguments)]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    shared |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": PATHS}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, env={**os.environ, **shared}, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
        )
        try:
            process.wait(timeout_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        errors.seek(0)
        assert not process.returncode, errors.read()[-4000:]
