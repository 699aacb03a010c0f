"""Rate of requests of one process: its share of a limit that holds for the whole reward pool.

Promise: processes that keep their shares keep the limit together, without talking to each other. A pause that the service
asks for holds for all requests of the process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

MAX_PAUSE_S = 300.0
"""Longest pause that a service may ask for."""


class RequestRate:
    """Starts of requests, spaced evenly."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._next_s = self._paused_until_s = 0.0

    async def turn(self, per_minute: float | None) -> None:
        """Wait until the next request may start; `per_minute` is this process's share, None without a limit."""
        now_s = self._clock()
        start_s = max(now_s, self._paused_until_s)
        if per_minute is not None:
            start_s = max(start_s, self._next_s)
            self._next_s = start_s + 60.0 / per_minute
        if start_s > now_s:
            await self._sleep(start_s - now_s)

    def pause(self, seconds: float) -> None:
        """Start no request for so many seconds, MAX_PAUSE_S at most."""
        self._paused_until_s = max(self._paused_until_s, self._clock() + min(seconds, MAX_PAUSE_S))


def share_of(limit: float, num_processes: int) -> float:
    """Return one process's part of a limit."""
    return limit / max(1, num_processes)


def slots_of(limit: int, num_processes: int) -> int:
    """Return the requests that one process may have under way, of `limit` in the pool; at least one."""
    return max(1, limit // max(1, num_processes))
