"""Locks memory pages so that a GPU copies them at the speed of its bus. Promise: a range is locked once, however often
it is requested. If the driver refuses, copies still work, only slower, and the log says so once. The caller owns the
memory and unlocks before it is unmapped. Each lock runs on a short-lived thread, because CUDA keeps a refusal as the
calling thread's last error, which the next kernel that torch launches there would raise; torch has no call that
clears it."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

log = logging.getLogger(__name__)


class PageLocks:
    """Locked ranges of one mapping of memory. Not for several threads at once."""

    def __init__(self, runtime: Any = None) -> None:
        """`runtime` has two functions of the CUDA runtime, which return 0 on success."""
        self._runtime = runtime
        self._locked: set[tuple[int, int]] = set()
        self._refused = False

    @property
    def num_bytes(self) -> int:
        return sum(end - start for start, end in self._locked)

    def lock(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Lock the pages of the ranges [start, end) that are not locked yet; CUDA refuses to lock a page twice."""
        unlocked = without(merged(ranges), sorted(self._locked))
        if not unlocked or self._refused:
            return
        runtime = self._cuda()
        with ThreadPoolExecutor(1, "page-lock") as thread:
            thread.submit(self._lock, runtime, unlocked).result()

    def _lock(self, runtime: Any, ranges: list[tuple[int, int]]) -> None:
        for start, end in ranges:
            result = runtime.cudaHostRegister(start, end - start, 0)
            if code := int(getattr(result, "value", result)):
                self._refused = True
                log.warning(
                    "CUDA refuses to lock %d bytes of memory for weights (error %d), so weights are copied more "
                    "slowly; raise the limit on locked memory (ulimit -l)",
                    end - start,
                    code,
                )
                return
            self._locked.add((start, end))

    def unlock(self) -> None:
        for start, _ in self._locked:
            self._cuda().cudaHostUnregister(start)
        self._locked.clear()

    def _cuda(self) -> Any:
        if self._runtime is None:
            import torch

            self._runtime = TorchRuntime(torch.cuda)
        return self._runtime


class TorchRuntime:
    """The CUDA runtime for the current GPU of the thread that makes this object; other threads start on the first GPU."""

    def __init__(self, cuda: Any) -> None:
        self._cuda, self._device = cuda, cuda.current_device()

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> Any:
        with self._cuda.device(self._device):
            return self._cuda.cudart().cudaHostRegister(address, size_bytes, flags)

    def cudaHostUnregister(self, address: int) -> Any:
        with self._cuda.device(self._device):
            return self._cuda.cudart().cudaHostUnregister(address)


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges in whole pages, sorted, without overlap."""
    whole: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        start, end = start - start % mmap.PAGESIZE, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
        if whole and start <= whole[-1][1]:
            whole[-1] = (whole[-1][0], max(whole[-1][1], end))
        else:
            whole.append((start, end))
    return whole


def without(ranges: list[tuple[int, int]], taken: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the parts of sorted `ranges` outside of sorted `taken`."""
    left = []
    for start, end in ranges:
        for first, last in taken:
            if last <= start or first >= end:
                continue
            if first > start:
                left.append((start, first))
            start = last
        if start < end:
            left.append((start, end))
    return left
