"""Three ranks gather what one has, whatever the rows, the type and the bucket."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gather_rank import Uneven
from safetensors.torch import load_file

RANK = Path(__file__).parents[2] / "support" / "gather_rank.py"
ROOT = RANK.parents[2]


@pytest.fixture(scope="module")
def three_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("gathered")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    done = subprocess.run(
        [*launcher, RANK, out],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return out


@pytest.mark.parametrize("bucket_bytes", [64, 1 << 20])
@pytest.mark.parametrize(("name", "dtype"), [("same", None), ("bf16", torch.bfloat16)])
def test_rank_0_has_every_tensor_whole(
    three_ranks: Path, name: str, dtype: torch.dtype | None, bucket_bytes: int
) -> None:
    gathered = load_file(three_ranks / f"{name}.{bucket_bytes}.safetensors")
    expected = Uneven().state_dict()
    assert gathered.keys() == expected.keys()
    for key, tensor in expected.items():
        wanted = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        assert gathered[key].dtype == wanted.dtype
        assert torch.equal(gathered[key], wanted), key
