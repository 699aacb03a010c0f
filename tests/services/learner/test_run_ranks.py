"""Two real ranks of a session: one batch for all before a step, and an export for which rank 0 has no memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).parents[2] / "support" / "idle_rank.py"
ROOT = WORKER.parents[2]


@pytest.fixture(scope="module")
def met(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank met."""
    out = tmp_path_factory.mktemp("ranks")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, WORKER, out],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((out / f"rank.{rank}.json").read_text()) for rank in range(2)]


def test_ranks_whose_parts_are_of_different_batches_fetch_again(met: list[dict[str, Any]]) -> None:
    assert [rank["chain"] for rank in met] == ["after", "after"]
    assert [rank["fetched"] for rank in met] == [2, 2]


def test_an_export_without_memory_on_rank_0_leaves_both_where_they_were(met: list[dict[str, Any]]) -> None:
    assert "no memory for a copy of the whole model (MemoryError: no room)" in met[0]["failure"]
    assert [rank["gathered"] for rank in met] == [["bias", "weight"], []]
