"""Reports that wait to be sent to the coordinator: bounded, however long it is away.

For some reports only the newest counts: the offer to a member, the result of a publish to it, the last staged version, token statistics. Such
a report replaces its waiting predecessor. All others (checkpoints, set-up, the end of a run) wait in order and are never
dropped; a session has a few of them.

`put` may be called from any thread; one coroutine takes the reports out.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Awaitable, Callable

from paceline.v1 import worker_pb2

MAX_REPLACEABLE = 1024
"""Replaceable reports that may wait; beyond this number the oldest is dropped."""

TOKEN_STATISTICS = 8
"""Steps whose token statistics may wait; those of an older one are replaced."""

Key = tuple[str, str | int]


class ReportQueue:
    """Reports on their way to `send`, which waits while there is no stream. Any thread may make it; `call` calls a function in
    the loop that runs `run`."""

    def __init__(
        self,
        call: Callable[[Callable[[], None]], object],
        send: Callable[[worker_pb2.ConnectRequest], Awaitable[None]],
    ) -> None:
        self._call = call
        self._send = send
        self._lock = threading.Lock()
        self._waiting: dict[Key, worker_pb2.ConnectRequest] = {}
        self._numbers = itertools.count()
        self._news, self._idle = asyncio.Event(), asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, report: worker_pb2.ConnectRequest) -> None:
        """Send `report` as soon as there is a stream."""
        newer = _replaces(report)
        with self._lock:
            if newer is not None:
                self._waiting.pop(newer, None)
            self._waiting[newer or ("kept", next(self._numbers))] = report
            replaceable = [key for key in self._waiting if key[0] != "kept"]
            if len(replaceable) > MAX_REPLACEABLE:
                del self._waiting[replaceable[0]]
        self._call(self._news.set)

    async def run(self) -> None:
        """Send the waiting reports, oldest first, until cancelled."""
        while True:
            self._news.clear()
            while (report := self._take()) is not None:
                self._idle.clear()
                await self._send(report)
            self._idle.set()
            # No deadline: there may be no report for as long as a step takes.
            await self._news.wait()

    async def emptied(self) -> None:
        """Wait until all reports that were put before are sent."""
        while self._waiting or not self._idle.is_set():
            self._idle.clear()
            self._news.set()
            await self._idle.wait()

    def _take(self) -> worker_pb2.ConnectRequest | None:
        with self._lock:
            return self._waiting.pop(next(iter(self._waiting)), None) if self._waiting else None


def _replaces(report: worker_pb2.ConnectRequest) -> Key | None:
    """Return the key under which a newer report replaces this one; None when each report counts."""
    match report.WhichOneof("report"):
        case "weight_offer":
            return "offer", report.weight_offer.member_id
        case "publish":
            return "publish", report.publish.member_id
        case "staged":
            return "staged", report.staged.run_id
        case "host_version":
            return "host_version", report.host_version.run_id
        case "token_statistics":
            return "token_statistics", report.token_statistics.step % TOKEN_STATISTICS
        case "run_report" if report.run_report.warning:
            return "warning", report.run_report.warning
    return None
