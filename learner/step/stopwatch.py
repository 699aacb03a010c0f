"""Seconds of a step by phase.

Promise: measuring does not slow the step; on CUDA events are recorded in the stream and read once at the end.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Sums of the seconds spent in named phases on one device."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Count the time of the block, on the device, towards `phase`."""
        if self._cuda:
            begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            begin.record()
            yield
            end.record()
            self._events.append((phase, begin, end))
        else:
            start_s = time.perf_counter()
            yield
            self._seconds[phase] += time.perf_counter() - start_s

    def seconds(self) -> dict[str, float]:
        """Wait for the device, and return the seconds by phase so far."""
        if self._cuda:
            torch.cuda.synchronize()
            for phase, begin, end in self._events:
                self._seconds[phase] += begin.elapsed_time(end) / 1000
            self._events.clear()
        return dict(self._seconds)
