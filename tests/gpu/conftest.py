"""The GPU of these tests. `PACELINE_GPU_TESTS=cpu` runs them on a CPU, to check the tests themselves."""

from __future__ import annotations

import os

import pytest
import torch

ON_CPU = os.environ.get("PACELINE_GPU_TESTS") == "cpu"


@pytest.fixture(scope="session")
def device() -> torch.device:
    if ON_CPU:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.backends.cuda.matmul.allow_tf32 = False
    return torch.device("cuda", 0)
