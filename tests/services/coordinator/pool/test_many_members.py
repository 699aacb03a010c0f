"""More members than a coordinator's soft limit of open files allows are all served, over real connections."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[4] / "benchmarks" / "members.py"
MEMBERS, RANKS = 80, 8


@pytest.mark.slow
def test_members_beyond_the_soft_limit_of_files_are_served() -> None:
    counts = ["--members", str(MEMBERS), "--ranks", str(RANKS), "--files", "96"]
    ended = subprocess.run(
        [sys.executable, str(BENCHMARK), *counts, "--json"], capture_output=True, text=True, timeout=240
    )
    assert ended.returncode == 0, ended.stderr
    figures = json.loads(ended.stdout.splitlines()[-1])
    assert (figures["served"], figures["session"]) == (MEMBERS, 1)
    # Each rank is welcomed; only rank 0 gets epochs and acknowledgements, which travel together.
    assert figures["directives_to_ranks"] < RANKS + 3 * MEMBERS
