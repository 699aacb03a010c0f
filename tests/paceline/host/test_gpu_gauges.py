"""Gauges of GPUs, from a recorded NVML; tests/gpu has the real one."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.host import gpu_gauges
from paceline.host.gpu_gauges import GpuReader, GpuSampler, open_reader, visible_handles


class Nvml:
    """Two GPUs, the second of which has no energy counter and is slowed down by heat."""

    nvmlEventTypeXidCriticalError = 8
    nvmlClocksEventReasonSwPowerCap = 0x4
    nvmlClocksEventReasonHwSlowdown = 0x8
    nvmlClocksEventReasonSwThermalSlowdown = 0x20
    nvmlClocksEventReasonHwThermalSlowdown = 0x40
    nvmlClocksEventReasonHwPowerBrakeSlowdown = 0x80

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.errors: list[int] = []

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, name: str) -> int:
        if name != "GPU-bbbb":
            raise self.NVMLError
        return 1

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:
        return (b"GPU-aaaa1111-2222-3333", b"GPU-bbbb")[handle]

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=(80, 15)[handle])

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=(20_000_000_000, 1_000_000_000)[handle])

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return (350_000, 50_000)[handle]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        if handle:
            raise self.NVMLError
        return 7_500_000

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:
        return (0x4, 0x24)[handle]

    def nvmlEventSetCreate(self) -> object:
        return object()

    def nvmlDeviceRegisterEvents(self, handle: int, kind: int, events: object) -> None:
        if handle:
            raise self.NVMLError

    def nvmlEventSetWait_v2(self, events: object, wait_ms: int) -> Any:
        if not self.errors:
            raise self.NVMLError
        return SimpleNamespace(eventData=self.errors.pop(0))


def test_gauges_are_sums_over_the_gpus() -> None:
    nvml = Nvml()
    reader = GpuReader(nvml, visible_handles(nvml, None))
    assert reader.read() == {
        "gpu_use": pytest.approx(0.95),
        "gpu_memory_used_gb": 21.0,
        "gpu_power_w": 400.0,
        "gpu_throttled": 1.0,
        "gpu_energy_j/aaaa1111-222": 7500.0,
        "gpu_xid_errors": 0.0,
    }
    nvml.errors = [79, 31]
    assert {"gpu_xid_errors": 2.0, "gpu_xid": 31.0}.items() <= reader.read().items()
    assert {"gpu_xid_errors": 2.0, "gpu_xid": 31.0}.items() <= reader.read().items()


@pytest.mark.parametrize(
    ("visible", "handles"),
    [
        (None, {0: 0, 1: 1}),
        ("", {}),
        ("1", {0: 1}),
        ("1,0", {0: 1, 1: 0}),
        ("GPU-bbbb,0", {0: 1, 1: 0}),
        ("0,7,1", {0: 0}),
        ("GPU-gone", {}),
    ],
)
def test_gpus_are_those_that_cuda_shows(visible: str | None, handles: dict[int, int]) -> None:
    assert visible_handles(Nvml(), visible) == handles


def test_only_gpus_that_torch_computes_on_count(monkeypatch: pytest.MonkeyPatch) -> None:
    reserved = {0: 0, 1: 1 << 20}
    cuda = SimpleNamespace(is_initialized=lambda: True, device_count=lambda: 2, memory_reserved=reserved.get)
    monkeypatch.setitem(gpu_gauges.sys.modules, "torch", SimpleNamespace(cuda=cuda))
    nvml = Nvml()
    assert GpuReader(nvml, visible_handles(nvml, None)).read()["gpu_power_w"] == 50.0
    reserved[1] = 0
    assert GpuReader(nvml, visible_handles(nvml, None)).read()["gpu_power_w"] == 400.0


def test_a_gpu_that_hangs_holds_nothing_up() -> None:
    begun, over = threading.Event(), threading.Event()

    class Hanging:
        def read(self) -> dict[str, float]:
            begun.set()
            over.wait(60)
            return {"gpu_use": 1.0}

    sampler = GpuSampler(lambda: Hanging(), 0.01)  # type: ignore[arg-type, return-value]
    assert sampler.gauges() == {}
    assert begun.wait(30)
    assert sampler.gauges() == {}
    over.set()
    while not sampler.gauges():
        threading.Event().wait(0.01)
    assert sampler.gauges() == {"gpu_use": 1.0}


def test_readings_that_are_too_old_are_left_out() -> None:
    readings = threading.Semaphore(0)

    class Reader:
        def read(self) -> dict[str, float]:
            readings.release()
            return {"gpu_use": 1.0}

    sampler = GpuSampler(lambda: Reader(), 0.01, stale_s=0.0)  # type: ignore[arg-type, return-value]
    assert sampler.gauges() == {}
    for _ in range(2):  # the second reading begins after the first was stored
        assert readings.acquire(timeout=30)
    assert sampler.gauges() == {}


def test_without_nvml_there_are_no_gauges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu_gauges.sys.modules, "pynvml", None)
    assert open_reader() is None
    assert GpuSampler(open_reader).gauges() == {}
