"""Real ranks for a test: processes of one script, which meet over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parent / "processes"
ROOT = SCRIPTS.parents[2]
PATHS = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "support", ROOT / "tests" / "support" / "models")))


def run_ranks(script: str, ranks: int, *arguments: object, timeout_s: float = 300) -> None:
    """Run a script of `tests/support/processes` in this many ranks, and fail with its errors unless all ranks end well."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*torchrun, SCRIPTS / script, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATHS},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr[-4000:]
