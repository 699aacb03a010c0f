"""The control plane's RecordsService: the records of runs, for people and their tools. Promise: reading never blocks
the exchange. One thread with a read-only connection answers one request after the other. A request does a bounded
amount of work, and a bounded number of requests waits; a comparison of all records runs in a separate process. Only the
current members are read on the event loop."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from paceline.errors import Busy
from paceline.services.common.serving.grpc_server import with_status
from paceline.services.coordinator.audit.verify import verify_apart
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.members.registry import Member, Members
from paceline.services.coordinator.records.reader import RecordsReader
from paceline.v1 import records_pb2 as pb
from paceline.v1 import records_pb2_grpc

MAX_WAITING = 32
"""Largest number of requests that wait for the reading thread; further ones are refused."""
VERIFY_AGAIN_S = 10.0
"""Seconds after which a client may retry while a run's records are compared."""

Context = grpc.aio.ServicerContext[Any, Any]


def _read(method: str) -> Any:
    """Return a method for the servicer that calls the reader's method of the same name."""

    async def call(self: RecordsServicer, request: Any, context: Context) -> Any:
        return await self.answer(method, request)

    call.__name__ = method
    return with_status(call)


class RecordsServicer(records_pb2_grpc.RecordsServiceServicer):
    def __init__(self, path: Path, members: Members, committed: Ledger):
        """The ledger is at `path`; `committed` is a read-only connection of the event loop's thread."""
        self._path = path
        self._members = members
        self._committed = committed
        self._thread = ThreadPoolExecutor(1, "records")
        self._reader: RecordsReader | None = None
        self._waiting = 0
        self._is_verifying = False

    async def close(self) -> None:
        """Close the ledger, after the active request."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown()

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    GetMetrics = _read("GetMetrics")
    ListEvents = _read("ListEvents")
    ListSamples = _read("ListSamples")
    ListAttempts = _read("ListAttempts")
    GetGroupLife = _read("GetGroupLife")
    GetBooks = _read("GetBooks")
    ListBatches = _read("ListBatches")
    ListCheckpoints = _read("ListCheckpoints")
    GetSpec = _read("GetSpec")
    CompareSpecs = _read("CompareSpecs")
    ReadLog = _read("ReadLog")
    GetGaugeHistory = _read("GetGaugeHistory")
    GetTokenStatistics = _read("GetTokenStatistics")

    @with_status
    async def ListGauges(self, request: pb.ListGaugesRequest, context: Context) -> pb.ListGaugesResponse:
        held, now_s = self._committed.group_queries.num_held(), time.monotonic()
        return pb.ListGaugesResponse(
            members=[_gauges(member, held.get(member.member_id, 0), now_s) for member in self._members.all()]
        )

    @with_status
    async def VerifyRun(self, request: pb.VerifyRunRequest, context: Context) -> pb.VerifyRunResponse:
        self._committed.run(request.run_id)  # raises NotFound
        if self._is_verifying:
            raise Busy("the records of a run are being compared; try again when that has ended", VERIFY_AGAIN_S)
        self._is_verifying = True
        try:
            return await verify_apart(self._path, request)
        finally:
            self._is_verifying = False

    async def answer(self, method: str, request: Any) -> Any:
        """Return the reader's answer. Raises Busy if too many requests wait."""
        if self._waiting >= MAX_WAITING:
            raise Busy(f"{self._waiting} requests for records wait; try again later")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._answer, method, request)
        finally:
            self._waiting -= 1

    def _answer(self, method: str, request: Any) -> Any:
        if self._reader is None:
            self._reader = RecordsReader.opened(self._path)
        return getattr(self._reader, method)(request)


def _gauges(member: Member, held: int, now_s: float) -> pb.MemberGauges:
    found = pb.MemberGauges(
        member_id=member.member_id,
        role=member.role,
        address=member.introduction.address,
        http_address=member.introduction.http_address,
        held=held,
        silent_s=now_s - member.last_report_s,
        connected=member.connected,
        suspected=member.suspected,
        draining=member.draining,
        fault=member.fault.message if member.fault is not None else "",
        session=member.session,
        epoch=member.weights.named_in,
        gauges=member.measures.gauges,
    )
    if member.weights.version is not None:
        found.version.session, found.version.step = member.weights.version
    return found
