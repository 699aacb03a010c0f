"""Answers the coordinator's read-only calls from a ledger in this process, with or without a running coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from paceline.errors import Unavailable
from paceline.services.coordinator.audit.verify import verify_apart
from paceline.services.coordinator.records.lists import page, run_message
from paceline.services.coordinator.records.reader import RecordsReader
from paceline.v1 import records_pb2, run_pb2

EVENTS_AT_ONCE = 500


class Called(Protocol):
    """A called method of a gRPC service."""

    @property
    def path(self) -> str:
        """Name of the method as `package.Service/Method`."""


class LedgerCalls:
    """Answers calls from a read-only ledger, which one thread reads."""

    def __init__(self, path: Path):
        self._path = path
        self._thread = ThreadPoolExecutor(1, "records")
        self._reader: RecordsReader | None = None

    async def call(self, method: Called, request: Any, token: str = "") -> Any:
        if isinstance(request, records_pb2.VerifyRunRequest):
            await self._on_thread(lambda: self._opened().ledger.run(request.run_id))  # raises NotFound
            return await verify_apart(self._path, request)
        return await self._on_thread(self._answer, method, request)

    async def stream(self, method: Called, request: Any, token: str = "") -> AsyncIterator[Any]:
        """Yield the recorded events; only Watch is answered."""
        if not isinstance(request, run_pb2.WatchRequest):
            raise _needs_coordinator(method)
        page_request = records_pb2.ListEventsRequest(
            run_id=request.run_id, after=request.after, page_size=EVENTS_AT_ONCE
        )
        while True:
            found = await self._on_thread(lambda: self._opened().ListEvents(page_request))
            for event in found.events:
                yield run_pb2.WatchResponse(sequence=event.sequence, kind=event.kind, json=event.json)
            page_request.after = found.next_after
            if not found.more:
                return

    async def close(self) -> None:
        if self._reader is not None:
            await self._on_thread(self._reader.close)
        self._thread.shutdown()

    async def _on_thread(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    def _opened(self) -> RecordsReader:
        if self._reader is None:
            self._reader = RecordsReader.opened(self._path)
        return self._reader

    def _answer(self, method: Called, request: Any) -> Any:
        service, _, name = method.path.rpartition("/")
        reader = self._opened()
        if service == "paceline.v1.RecordsService":
            return getattr(reader, name)(request)
        match request:
            case run_pb2.ListRequest():
                return page(reader.ledger, request)
            case run_pb2.GetRequest():
                row = reader.ledger.run(request.run_id)
                run = run_message(reader.ledger, row)
                run.spec_yaml = row["spec_yaml"]
                return run_pb2.GetResponse(run=run)
        raise _needs_coordinator(method)


def _needs_coordinator(method: Called) -> Unavailable:
    return Unavailable(
        f"{method.path} needs a coordinator, and this dashboard reads files; start the dashboard with --coordinator"
    )
