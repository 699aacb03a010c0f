"""Gauges of the real GPU, by the real NVML."""

from __future__ import annotations

import pytest
import torch

from paceline.host.gpu_gauges import open_reader

pytestmark = pytest.mark.gpu


def test_the_gpu_tells_its_memory_power_and_energy(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed; the extra `gpus` has it")
    reader = open_reader()
    assert reader is not None
    gauges = reader.read()
    assert gauges["gpu_power_w"] > 1.0
    assert gauges["gpu_memory_used_gb"] > 0.0
    assert 0.0 <= gauges["gpu_use"] <= torch.cuda.device_count()
