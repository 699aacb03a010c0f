"""Memory of a process, as in its heartbeats."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from paceline.host.resources import process_gauges


@pytest.mark.parametrize("is_initialized", [False, True])
def test_memory_of_the_host_and_of_gpus_in_use(is_initialized: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(
        is_initialized=lambda: is_initialized,
        device_count=lambda: 2,
        memory_reserved=lambda device: 10**9 * (device + 1),
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    gauges = process_gauges()
    assert 0.01 < gauges.pop("memory_gb") < 1000
    assert gauges == ({"gpu_memory_gb": 3.0} if is_initialized else {})
