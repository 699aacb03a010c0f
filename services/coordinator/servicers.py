"""The control plane's services for people and workers: runs, members, identities of callers, status."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from paceline.errors import AccessDenied, InvalidInput, NotFound, Unavailable
from paceline.services.common.access.callers import TokenCallers
from paceline.services.common.access.rights import RPCS, current_caller
from paceline.services.common.access.sessions import check_ticket_method, issue
from paceline.services.common.access.token_guard import Call, check_roles
from paceline.services.common.processes.starting import Capacity
from paceline.services.common.serving.grpc_server import with_status, with_stream_status
from paceline.services.coordinator.lifecycle.coordinator import Coordinator
from paceline.services.coordinator.members.introduction import check_certificate, check_hello, check_key
from paceline.services.coordinator.members.registry import Member, Members
from paceline.services.coordinator.records.lists import page, run_message
from paceline.services.coordinator.scaling.scaler import Sized
from paceline.v1 import (
    access_pb2,
    access_pb2_grpc,
    run_pb2,
    run_pb2_grpc,
    status_pb2,
    status_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

HEARTBEAT_INTERVAL_S = 1.0
HELLO_WAIT_S = 30.0
"""Seconds to wait for the first message of a stream."""
EVENTS_AT_ONCE = 100
ENDED = {"succeeded", "failed", "cancelled"}
Context = grpc.aio.ServicerContext[Any, Any]


class RunServicer(run_pb2_grpc.RunServiceServicer):
    def __init__(self, coordinator: Coordinator):
        self._coordinator = coordinator

    @with_status
    async def Submit(self, request: run_pb2.SubmitRequest, context: Context) -> run_pb2.SubmitResponse:
        run_id = await self._coordinator.runs.queue.submit(request.spec_yaml, request.submission, request.bundle)
        return run_pb2.SubmitResponse(run=self._run(run_id))

    @with_status
    async def Get(self, request: run_pb2.GetRequest, context: Context) -> run_pb2.GetResponse:
        return run_pb2.GetResponse(run=self._run(request.run_id))

    @with_status
    async def List(self, request: run_pb2.ListRequest, context: Context) -> run_pb2.ListResponse:
        return page(self._coordinator.committed, request)

    @with_stream_status
    async def Watch(self, request: run_pb2.WatchRequest, context: Context) -> AsyncIterator[run_pb2.WatchResponse]:
        ledger, after = self._coordinator.committed, request.after
        ledger.run(request.run_id)
        while True:
            async with (
                self._coordinator.context.watchers.changed
            ):  # held from the query to the wait, so that no event is missed in between
                ended = ledger.run(request.run_id)["state"] in ENDED
                events = ledger.events(request.run_id, after, EVENTS_AT_ONCE)
                if not events and not ended and not self._coordinator.context.watchers.stopping:
                    await self._coordinator.context.watchers.changed.wait()
                    continue
            await self._coordinator.ledger.sync_off_loop()  # sent events must survive a power cut
            for event in events:
                after = event["sequence"]
                text = event["json"]
                yield run_pb2.WatchResponse(sequence=after, kind=event["kind"], json=text)
            if ended and not events:
                return
            if self._coordinator.context.watchers.stopping:
                raise Unavailable("the coordinator is stopping; watch again when it is back")

    @with_status
    async def Cancel(self, request: run_pb2.CancelRequest, context: Context) -> run_pb2.CancelResponse:
        await self._coordinator.runs.commands.cancel(request.run_id)
        return run_pb2.CancelResponse(run=self._run(request.run_id))

    @with_status
    async def Pause(self, request: run_pb2.PauseRequest, context: Context) -> run_pb2.PauseResponse:
        await self._coordinator.runs.commands.pause(request.run_id)
        return run_pb2.PauseResponse(run=self._run(request.run_id))

    @with_status
    async def Resume(self, request: run_pb2.ResumeRequest, context: Context) -> run_pb2.ResumeResponse:
        await self._coordinator.runs.commands.resume(request.run_id, request.bundle)
        return run_pb2.ResumeResponse(run=self._run(request.run_id))

    @with_status
    async def DropGroups(self, request: run_pb2.DropGroupsRequest, context: Context) -> run_pb2.DropGroupsResponse:
        await self._coordinator.runs.commands.drop_groups(request.run_id, list(request.group_ids))
        return run_pb2.DropGroupsResponse(run=self._run(request.run_id))

    @with_status
    async def Checkpoint(
        self, request: run_pb2.RunServiceCheckpointRequest, context: Context
    ) -> run_pb2.RunServiceCheckpointResponse:
        sequence, path = self._coordinator.runs.commands.checkpoint(request.run_id)
        return run_pb2.RunServiceCheckpointResponse(sequence=sequence, path=path)

    def _run(self, run_id: str) -> run_pb2.Run:
        row = self._coordinator.committed.run(run_id)
        message = run_message(self._coordinator.committed, row)
        message.spec_yaml, message.bundle = row["spec_yaml"], self._coordinator.committed.bundle(run_id)
        return message


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(self, coordinator: Coordinator, exchange_endpoint: str, capacity: Capacity | None = None):
        """`capacity` limits the number of members; None means no limit."""
        self._coordinator = coordinator
        self._exchange_endpoint = exchange_endpoint
        self._capacity = capacity

    @with_stream_status
    async def Connect(
        self, request_iterator: AsyncIterator[worker_pb2.ConnectRequest], context: Context
    ) -> AsyncIterator[worker_pb2.ConnectResponse]:
        check_certificate(context)
        hello = await _hello(request_iterator)
        self._check_room(hello.member_id)
        owner = self._coordinator.exchange.senders.owner_of(hello.exchange_key)
        check_key(hello, owner, encrypted=bool(self._coordinator.server.public_key))
        if self._coordinator.context.delays.waits_for:
            raise Unavailable(self._coordinator.context.delays.waits_for)
        member = await self._coordinator.pool.join(hello)
        reports = asyncio.create_task(self._read(member, request_iterator))
        try:
            yield self._welcome(member)
            await self._coordinator.pool.joined(member)
            while (directive := await member.stream.outbox.get()) is not None:
                yield directive
            if member.stream.error is not None:
                raise member.stream.error
        finally:
            reports.cancel()
            member.stream.error = None  # the member stays, and the error's traceback would keep this call in memory
            await self._coordinator.pool.disconnected(member)

    @with_status
    async def ListMembers(
        self, request: worker_pb2.ListMembersRequest, context: Context
    ) -> worker_pb2.ListMembersResponse:
        now_s, response = time.monotonic(), worker_pb2.ListMembersResponse()
        held = self._coordinator.committed.group_queries.num_held()
        for member in self._coordinator.members.all():
            entry = response.members.add(
                member_id=member.member_id,
                role=member.role,
                address=member.introduction.address,
                silent_s=now_s - member.last_report_s,
                held=held.get(member.member_id, 0),
                http_address=member.introduction.http_address,
            )
            if member.weights.version is not None:
                entry.version.session, entry.version.step = member.weights.version
        return response

    @with_status
    async def Drain(
        self, request: worker_pb2.WorkerServiceDrainRequest, context: Context
    ) -> worker_pb2.WorkerServiceDrainResponse:
        member = self._coordinator.runs.commands.drain(request.member_id, request.grace_s)
        held = self._coordinator.committed.group_queries.num_held()
        return worker_pb2.WorkerServiceDrainResponse(held=held.get(member.member_id, 0))

    async def _read(self, member: Member, reports: AsyncIterator[worker_pb2.ConnectRequest]) -> None:
        """Process the member's reports. When its stream ends, or a report fails, end the stream of its directives."""
        try:
            with contextlib.suppress(grpc.aio.BaseError):  # the stream broke
                async for report in reports:
                    await self._coordinator.pool.report(member, report)
        except Exception as error:  # `Connect` raises the error, so that the member gets it and it is counted
            member.stream.error = error
        finally:
            member.end_stream()

    def _check_room(self, member_id: str) -> None:
        """Raise Unavailable if there are too many members. The worker retries, and others may have left by then."""
        members = self._coordinator.members
        if self._capacity is None or members.get(member_id) is not None:
            return
        if refusal := self._capacity.refusal(len(members)):
            raise Unavailable(refusal)

    def _welcome(self, member: Member) -> worker_pb2.ConnectResponse:
        return worker_pb2.ConnectResponse(
            welcome=worker_pb2.Welcome(
                term=self._coordinator.ledger.term,
                exchange_endpoint=self._exchange_endpoint,
                heartbeat_interval_s=HEARTBEAT_INTERVAL_S,
                heartbeat_timeout_s=self._coordinator.members.timeout_s,
                secret=member.stream.secret,
                exchange_key=self._coordinator.server.public_key,
                call_key=member.stream.call_key,
            )
        )


async def _hello(reports: AsyncIterator[worker_pb2.ConnectRequest]) -> worker_pb2.Hello:
    """Return the first message of a stream. Raises InvalidInput, Conflict; Unavailable if none comes."""
    try:
        async with asyncio.timeout(HELLO_WAIT_S):
            first = await anext(aiter(reports), None)
    except TimeoutError:
        raise Unavailable(f"no hello within {HELLO_WAIT_S:g} s") from None
    if first is None or first.WhichOneof("report") != "hello":
        raise InvalidInput("the first message of a stream must be hello")
    check_hello(first.hello)
    return first.hello


SHA256_BYTES = 32
IDENTIFY = "paceline.v1.AccessService/Identify"


class AccessServicer(access_pb2_grpc.AccessServiceServicer):
    """Identifies the callers of one coordinator by their tokens, and issues tickets for calls of workers."""

    def __init__(
        self, callers: TokenCallers, note: Callable[[Call], None] = lambda call: None, members: Members | None = None
    ):
        """`note` is called with each request about an unknown or invalid token. `members` may get tickets for their
        calls of each other."""
        self._callers, self._note, self._members = callers, note, members

    @with_status
    async def Identify(self, request: access_pb2.IdentifyRequest, context: Context) -> access_pb2.IdentifyResponse:
        if not request.token_id and len(request.token_sha256) != SHA256_BYTES:
            raise InvalidInput(f"token_sha256 has {len(request.token_sha256)} bytes, but must have {SHA256_BYTES}")
        try:
            digest = self._callers.digest(request.token_id) if request.token_id else request.token_sha256.hex()
            caller = self._callers.by_digest(digest) if digest else None
        except AccessDenied as denied:
            self._note_refusal(request, context, str(denied))
            return access_pb2.IdentifyResponse(refusal=str(denied))
        if caller is None:
            self._note_refusal(request, context, "the token is not a token of this coordinator")
            return access_pb2.IdentifyResponse()
        return access_pb2.IdentifyResponse(name=caller.name, roles=sorted(caller.roles))

    async def Prove(self, request: access_pb2.ProveRequest, context: Context) -> access_pb2.ProveResponse:
        raise AssertionError("the token guard answers this call, of workers too")

    @with_status
    async def IssueTicket(
        self, request: access_pb2.IssueTicketRequest, context: Context
    ) -> access_pb2.IssueTicketResponse:
        check_ticket_method(request.method)
        caller = current_caller()
        if caller is not None:
            check_roles(request.method, RPCS[request.method].roles, caller)
        member = self._members.get(request.member_id) if self._members is not None else None
        if member is None:
            raise NotFound(f"no worker {request.member_id[:80]!r} belongs to this coordinator")
        return access_pb2.IssueTicketResponse(
            ticket=issue(member.stream.call_key, member.member_id, request.method, caller)
        )

    def _note_refusal(self, request: access_pb2.IdentifyRequest, context: Context, why: str) -> None:
        asker = current_caller()
        details = f"a service of {asker.name if asker else 'a worker'} was called with a refused token: {why}"
        code = grpc.StatusCode.UNAUTHENTICATED
        self._note(Call(IDENTIFY, asker, context.peer(), request, code, details))


class StatusServicer(status_pb2_grpc.StatusServiceServicer):
    """The status of the run that trains: what limits it, and its pools."""

    def __init__(self, coordinator: Coordinator):
        self._coordinator = coordinator

    @with_status
    async def Status(self, request: status_pb2.StatusRequest, context: Context) -> status_pb2.StatusResponse:
        ledger, report = self._coordinator.committed, self._coordinator.scaler.report()
        pools = [_pool_status(name, sized) for name, sized in report.pools.items()]
        response = status_pb2.StatusResponse(
            advice=report.text,
            insecurity=self._coordinator.insecurity,
            learner_wait_fraction=report.wait_fraction,
            queued_runs=len(ledger.queue()),
            pools=[pool for pool in pools if pool is not None],
        )
        row = ledger.active_run()
        if row is not None:
            response.run_id, response.state, response.step = row["run_id"], row["state"], row["next_step"]
            response.max_num_steps = row["max_num_steps"]
        return response


def _pool_status(name: str, sized: Sized) -> status_pb2.PoolStatus | None:
    """Return the pool's status; None before its first decision, and for a pool without run, scaler and workers."""
    measured, state, is_scaled = sized.measured, sized.state, sized.requested_s is not None
    if measured is None or state is None:
        return None
    if not (is_scaled or measured.has_run or measured.ready + measured.starting):
        return None
    return status_pb2.PoolStatus(
        name=name,
        is_scaled=is_scaled,
        cost_per_hour=sized.config.cost,
        desired=state.desired,
        rate=state.rate,
        demand=state.demand,
        need=state.need if state.is_known else 0.0,
        ready=measured.ready,
        starting=measured.starting,
        occupied=min(1.0, measured.occupied),
    )
