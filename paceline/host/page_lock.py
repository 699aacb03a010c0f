"""Memory that a GPU copies at the speed of its bus, because its driver keeps the pages in place.

The promise: a range is locked once, whoever asks again; where the driver refuses, copies still work, only slower, and the
log says so once. The memory itself is the caller's, who unlocks before it is unmapped.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterable
from typing import Any, Protocol

log = logging.getLogger(__name__)


class Runtime(Protocol):
    """The two calls of CUDA's runtime, as `torch.cuda.cudart()` has them; 0 is success."""

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> Any:
        """Lock pages."""

    def cudaHostUnregister(self, address: int) -> Any:
        """Unlock the pages that were locked at `address`."""


class PageLocks:
    """The locked ranges of one mapping. One thread at a time."""

    def __init__(self, runtime: Runtime | None = None) -> None:
        self._runtime = runtime
        self._locked: set[tuple[int, int]] = set()
        self._refused = False

    @property
    def num_bytes(self) -> int:
        """Bytes that are locked."""
        return sum(end - start for start, end in self._locked)

    def lock(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Lock the pages of the address ranges [start, end) that are not locked yet: CUDA refuses to lock one twice."""
        for start, end in without(merged(ranges), sorted(self._locked)):
            if self._refused:
                return
            result = self._cuda().cudaHostRegister(start, end - start, 0)
            code = int(getattr(result, "value", result))
            if code:
                self._refused = True
                log.warning(
                    "CUDA refuses to lock %d bytes of memory for weights (error %d); they are copied more slowly. The limit on "
                    "locked memory (ulimit -l) must allow it",
                    end - start,
                    code,
                )
                return
            self._locked.add((start, end))

    def unlock(self) -> None:
        """Unlock everything."""
        for start, _ in self._locked:
            self._cuda().cudaHostUnregister(start)
        self._locked.clear()

    def _cuda(self) -> Runtime:
        if self._runtime is None:
            import torch

            self._runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        return self._runtime


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges in whole pages, sorted, with no page in two of them."""
    whole: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        start, end = start - start % mmap.PAGESIZE, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
        if whole and start <= whole[-1][1]:
            whole[-1] = (whole[-1][0], max(whole[-1][1], end))
        else:
            whole.append((start, end))
    return whole


def without(ranges: list[tuple[int, int]], taken: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return what is left of sorted `ranges` outside of sorted `taken`."""
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
