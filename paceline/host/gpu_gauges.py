"""Reads use, memory, power, slowdowns and errors of this process's GPUs from NVML, for its heartbeats. A thread queries
NVML every five seconds, because a call can hang if a GPU has left the bus; heartbeats do not wait. Without the
package nvidia-ml-py, a driver or GPUs there are no gauges. A gauge that a GPU lacks is left out."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

INTERVAL_S = 5.0
STALE_S = 30.0
"""Age in seconds from which the newest reading counts as stale."""
XID_WAIT_MS = 1
ENERGY = "gpu_energy_j/"
"""Prefix of gauges of a GPU's joules since its driver was loaded. The GPU's UUID follows: a shared GPU counts once."""
XID = "gpu_xid"
"""Gauge with the code of the newest Xid error. Codes cannot be summed over members."""
ID_LENGTH = 12
SLOWDOWNS = ("SwThermalSlowdown", "HwSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown")
"""NVML's reasons for lower clocks that show faulty cooling or power; a power cap is left out, as usual under load."""
log = logging.getLogger(__name__)


class GpuReader:
    """Reads GPUs by their handles; `nvml` is the initialized module pynvml."""

    def __init__(self, nvml: Any, handles: Mapping[int, Any]):
        """`handles` are keyed by the GPU's CUDA index in this process."""
        self._nvml, self._handles = nvml, dict(handles)
        self._names = {index: _text(self._call("nvmlDeviceGetUUID", handle)) for index, handle in handles.items()}
        self._xid, self._xid_errors = 0, 0
        self._events = self._watch_errors()

    def read(self) -> dict[str, float]:
        """Return sums over the GPUs on which this process computes: `gpu_use` in GPUs, `gpu_memory_used_gb` (of all
        processes), `gpu_power_w`, `gpu_throttled` in GPUs; errors since the start; the energy of each GPU."""
        used = [index for index in self._handles if index in _used_by_torch(list(self._handles))]
        gauges: dict[str, float] = {}
        for index in used:
            for name, value in self._read_one(index).items():
                gauges[name] = gauges.get(name, 0.0) + value
        self._take_errors()
        if used and self._events is not None:
            gauges["gpu_xid_errors"] = float(self._xid_errors)
            if self._xid:
                gauges[XID] = float(self._xid)
        return gauges

    def _read_one(self, index: int) -> dict[str, float]:
        handle, gauges = self._handles[index], {}
        if (use := self._call("nvmlDeviceGetUtilizationRates", handle)) is not None:
            gauges["gpu_use"] = use.gpu / 100
        if (memory := self._call("nvmlDeviceGetMemoryInfo", handle)) is not None:
            gauges["gpu_memory_used_gb"] = memory.used / 1e9
        if (power := self._call("nvmlDeviceGetPowerUsage", handle)) is not None:
            gauges["gpu_power_w"] = power / 1e3
        if (energy := self._call("nvmlDeviceGetTotalEnergyConsumption", handle)) is not None:
            gauges[ENERGY + self._names[index].removeprefix("GPU-")[:ID_LENGTH]] = energy / 1e3
        if (reasons := self._slowdown_reasons(handle)) is not None:
            gauges["gpu_throttled"] = float(bool(reasons & self._slowdown_mask()))
        return gauges

    def _slowdown_reasons(self, handle: Any) -> int | None:
        for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
            if (reasons := self._call(name, handle)) is not None:
                return int(reasons)
        return None

    def _slowdown_mask(self) -> int:
        mask = 0
        for reason in SLOWDOWNS:
            for prefix in ("nvmlClocksEventReason", "nvmlClocksThrottleReason"):
                mask |= int(getattr(self._nvml, prefix + reason, 0))
        return mask

    def _watch_errors(self) -> Any:
        """Register for Xid errors; return the event set, or None if that is impossible."""
        events = self._call("nvmlEventSetCreate")
        if events is None:
            return None
        kind, registered = getattr(self._nvml, "nvmlEventTypeXidCriticalError", 0x8), 0
        for handle in self._handles.values():
            try:
                self._nvml.nvmlDeviceRegisterEvents(handle, kind, events)
                registered += 1
            except self._nvml.NVMLError:  # in some containers and MIG slices
                continue
        return events if registered else None

    def _take_errors(self) -> None:
        wait = getattr(self._nvml, "nvmlEventSetWait_v2", None) or self._nvml.nvmlEventSetWait
        while self._events is not None:
            try:
                event = wait(self._events, XID_WAIT_MS)
            except self._nvml.NVMLError:  # a time-out: no further error
                return
            self._xid, self._xid_errors = int(event.eventData), self._xid_errors + 1
            log.warning("a GPU of this process reports Xid %d; see the kernel's log", self._xid)

    def _call(self, name: str, *arguments: Any) -> Any:
        """Return the result of an NVML function; None if the GPU or the driver does not support it."""
        function = getattr(self._nvml, name, None)
        try:
            return None if function is None else function(*arguments)
        except self._nvml.NVMLError:
            return None


class GpuSampler:
    def __init__(
        self, open_reader: Callable[[], GpuReader | None], interval_s: float = INTERVAL_S, stale_s: float = STALE_S
    ):
        self._open_reader, self._interval_s, self._stale_s = open_reader, interval_s, stale_s
        self._latest: tuple[float, dict[str, float]] = (0.0, {})
        self._started = threading.Lock()

    def gauges(self) -> dict[str, float]:
        """Return the newest gauges; empty if none are fresh. The first call starts the thread."""
        if self._started.acquire(blocking=False):
            threading.Thread(target=self._run, name="gpu gauges", daemon=True).start()
        taken_s, gauges = self._latest
        return dict(gauges) if time.monotonic() - taken_s < self._stale_s else {}

    def _run(self) -> None:
        try:
            reader = self._open_reader()
            while reader is not None:
                self._latest = (time.monotonic(), reader.read())
                time.sleep(self._interval_s)
        except Exception:
            log.warning("the thread that measures GPUs has stopped", exc_info=True)


def open_reader(environment: Mapping[str, str] = os.environ) -> GpuReader | None:
    """Return a reader of the GPUs that CUDA shows to this process; None without NVML or GPUs."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # no package, no driver, or a driver of another version
        return None
    handles = visible_handles(nvml, environment.get("CUDA_VISIBLE_DEVICES"))
    return GpuReader(nvml, handles) if handles else None


def visible_handles(nvml: Any, visible: str | None) -> dict[int, Any]:
    """Return the handles of the GPUs that CUDA_VISIBLE_DEVICES names (all if it is unset), keyed by CUDA index."""
    try:
        count = int(nvml.nvmlDeviceGetCount())
        names = [str(index) for index in range(count)] if visible is None else visible.split(",")
        handles: dict[int, Any] = {}
        for name in (each.strip() for each in names):
            if name.isdecimal() and int(name) < count:
                handles[len(handles)] = nvml.nvmlDeviceGetHandleByIndex(int(name))
            elif name.startswith(("GPU-", "MIG-")):
                handles[len(handles)] = nvml.nvmlDeviceGetHandleByUUID(name)
            else:
                break  # as CUDA does: the first name that does not exist ends the list
        return handles
    except nvml.NVMLError:
        return {}


def _used_by_torch(indices: list[int]) -> list[int]:
    """Return the GPUs on which torch holds memory in this process; all if another process computes, as with vLLM."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not hasattr(cuda, "is_initialized") or not cuda.is_initialized():
        return indices
    held = [index for index in indices if index < cuda.device_count() and cuda.memory_reserved(index)]
    return held or indices


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value or "")


SAMPLER = GpuSampler(open_reader)
