"""The GPU of the tests marked gpu. `PACELINE_GPU_TESTS=cpu` runs them on a CPU, which checks the tests themselves; those of NCCL
and NVML alone stay out."""

from __future__ import annotations

import os

import pytest
import torch

ON_CPU = os.environ.get("PACELINE_GPU_TESTS") == "cpu"


def gpu_device() -> torch.device:
    """Return the device, or skip the test."""
    if ON_CPU:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda", 0)
