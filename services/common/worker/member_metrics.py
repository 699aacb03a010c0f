"""Serves the numbers of a worker's last heartbeat at `/metrics`; a scrape calls nothing of the worker. Names are
bounded, and sums that a heartbeat only carries to the coordinator are left out. Nothing listens without
--metrics-port."""

from __future__ import annotations

import re
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from paceline.services.common.access.callers import WorkerCallers
from paceline.services.common.serving.scrape import metrics_endpoint
from paceline.services.common.worker.membership import Membership
from paceline.services.common.worker.score_extras import COUNT, PREFIX, SUM
from paceline.tracing import set_up_metrics

NAMES = "paceline.member."
MAX_NAMES = 256
"""Largest number of gauges of one process; further names are left out."""
_SUMS = (PREFIX, SUM, COUNT)


class MemberMetrics:
    """The gauges of one worker as instruments, made when a name is first seen. Any thread may call its methods."""

    def __init__(self, role: str, is_connected: Callable[[], bool]) -> None:
        self._attributes = {"paceline.role": role}
        self._meter = metrics.get_meter("paceline")
        self._lock = threading.Lock()
        self._newest: dict[str, float] = {}
        self._names: set[str] = set()
        self._meter.create_observable_gauge(
            f"{NAMES}connected",
            [lambda _: [Observation(float(is_connected()), self._attributes)]],
            description="1 while this worker has a control stream to the coordinator",
        )

    def note(self, gauges: Mapping[str, float]) -> None:
        """Update the gauges from a heartbeat."""
        named = {_name(gauge): value for gauge, value in gauges.items() if not gauge.startswith(_SUMS)}
        with self._lock:
            self._newest = named
            new = sorted(named.keys() - self._names)[: MAX_NAMES - len(self._names)]
            self._names.update(new)
        for name in new:
            self._meter.create_observable_gauge(f"{NAMES}{name}", [self._observer(name)])

    def _observer(self, name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            with self._lock:
                value = self._newest.get(name)
            return [] if value is None else [Observation(value, self._attributes)]

        return observe


@asynccontextmanager
async def member_metrics(role: str, membership: Membership, host: str, port: int | None) -> AsyncIterator[int | None]:
    """Serve a worker's numbers while the context is open, on a free port for 0; None serves nothing. Yields the port.
    Raises Conflict if the port is taken."""
    if port is not None:
        set_up_metrics(role, scraped=True)
        membership.on_beat = MemberMetrics(role, lambda: membership.has_stream).note
    callers = WorkerCallers(membership.coordinator)
    async with metrics_endpoint(host, port, callers) as used:
        yield used


def _name(gauge: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.]", "_", gauge)[:200]
