"""The GPU of these tests."""

from __future__ import annotations

import pytest
import torch
from gpu_device import gpu_device


@pytest.fixture(scope="session")
def device() -> torch.device:
    found = gpu_device()
    torch.backends.cuda.matmul.allow_tf32 = False
    return found
