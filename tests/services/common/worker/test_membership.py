"""A worker's membership over a real stream and a real socket, with a coordinator that restarts."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import zmq
import zmq.asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.errors import Conflict
from paceline.services.common.serving.grpc_server import SERVER_OPTIONS, GrpcServer
from paceline.services.common.worker import exchange_connection
from paceline.services.common.worker.membership import Membership
from paceline.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import PROTOCOL

DEADLINE_S = 60.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


class Coordinator(worker_pb2_grpc.WorkerServiceServicer):
    """One stream at a time, and an exchange on a fixed port; `restart` begins a new term."""

    def __init__(self) -> None:
        self.term = 1
        self._welcomes = itertools.count(1)
        self._context = zmq.asyncio.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self.port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self.reports: asyncio.Queue[worker_pb2.ConnectRequest] = asyncio.Queue()
        self._ended = asyncio.Event()
        self.introductions: list[pb.ExchangeRequest] = []
        self._broken = False

    async def Connect(
        self, request_iterator: AsyncIterator[worker_pb2.ConnectRequest], context: Any
    ) -> AsyncIterator[worker_pb2.ConnectResponse]:
        """Send Welcome, then only read until the term ends or the stream breaks."""
        ended = self._ended
        listening = asyncio.create_task(self._listen(request_iterator))
        yield worker_pb2.ConnectResponse(
            welcome=worker_pb2.Welcome(
                term=self.term,
                exchange_endpoint=f"tcp://127.0.0.1:{self.port}",
                secret=f"secret {next(self._welcomes)}".encode(),
            )
        )
        await ended.wait()
        listening.cancel()
        if self._broken:
            self._broken = False
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the stream breaks")

    async def _listen(self, reports: AsyncIterator[worker_pb2.ConnectRequest]) -> None:
        async for report in reports:
            self.reports.put_nowait(report)

    async def hear_report(self, kind: str) -> None:
        """Return at the next report of a kind."""
        async with asyncio.timeout(DEADLINE_S):
            while (await self.reports.get()).WhichOneof("report") != kind:
                pass

    def break_stream(self) -> None:
        """End the stream with an error; new streams are accepted at once."""
        self._broken = True
        self.restart()

    def restart(self) -> None:
        """End the streams; the next Welcome has another term."""
        self.term += 1
        self._ended.set()
        self._ended = asyncio.Event()

    async def cut(self) -> None:
        """Break the exchange's connections, with messages in transit; new connections are accepted at once."""
        self._router.close()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        async with asyncio.timeout(DEADLINE_S):
            while True:
                try:
                    self._router.bind(f"tcp://127.0.0.1:{self.port}")
                    return
                except zmq.ZMQError:  # ZeroMQ frees the port in another thread, some time after close
                    await asyncio.sleep(0.01)

    async def hear(self) -> tuple[bytes, pb.ExchangeRequest]:
        """Return the next request and its sender; introductions of connections are skipped."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                identity, header, *_ = await self._router.recv_multipart()
                request = pb.ExchangeRequest.FromString(header)
                if request.WhichOneof("body") is not None:
                    return identity, request
                self.introductions.append(request)

    async def answer(self, to: tuple[bytes, pb.ExchangeRequest], term: int, status: pb.ReplyStatus.ValueType) -> None:
        """Answer a request in a term."""
        identity, request = to
        reply = pb.ExchangeReply(protocol=PROTOCOL, request_id=request.request_id, term=term, status=status)
        await self._router.send_multipart([identity, reply.SerializeToString()])

    def close(self) -> None:
        """End stream and socket."""
        self._ended.set()
        self._router.close()
        self._context.term()


@pytest.fixture
async def coordinator() -> AsyncIterator[Coordinator]:
    made = Coordinator()
    yield made
    made.close()


@pytest.fixture
async def membership(coordinator: Coordinator) -> AsyncIterator[Membership]:
    async def on_directive(directive: worker_pb2.ConnectResponse) -> None:
        if directive.WhichOneof("directive") == "welcome":
            await made.report(worker_pb2.ConnectRequest(run_report=worker_pb2.RunReport(run_id="run-1")))

    def hello() -> worker_pb2.Hello:
        return worker_pb2.Hello(role=common_pb2.ROLE_ROLLOUT, member_id="rollout-1", protocol=PROTOCOL)

    server = GrpcServer("127.0.0.1", 0)
    server.add(
        coordinator,
        worker_pb2_grpc.add_WorkerServiceServicer_to_server,
        "paceline.v1.WorkerService",
    )
    async with server:
        made = Membership(f"127.0.0.1:{server.port}", hello, on_directive)
        belonging = asyncio.create_task(made.run())
        yield made
        belonging.cancel()
        await asyncio.wait((belonging,))
        coordinator.restart()


def ask(membership: Membership) -> asyncio.Task[tuple[pb.ExchangeReply, list[bytes]]]:
    request = pb.ExchangeRequest(run_id="run-1", lease=pb.LeaseRequest(room=1))
    return asyncio.create_task(membership.request(request))


async def result(asked: asyncio.Task[tuple[pb.ExchangeReply, list[bytes]]]) -> pb.ReplyStatus.ValueType:
    async with asyncio.timeout(DEADLINE_S):
        reply, _ = await asked
    return reply.status


async def test_stale_is_the_answer_when_it_is_of_the_same_term(
    coordinator: Coordinator, membership: Membership
) -> None:
    asked = ask(membership)
    await coordinator.answer(await coordinator.hear(), 1, pb.REPLY_STATUS_STALE)
    assert await result(asked) == pb.REPLY_STATUS_STALE


async def test_stale_of_a_new_term_is_no_answer_before_its_welcome(
    coordinator: Coordinator, membership: Membership
) -> None:
    """A restarted exchange on the same port reads from the repaired socket before the stream is back."""
    early = ask(membership)
    await coordinator.answer(await coordinator.hear(), 2, pb.REPLY_STATUS_STALE)
    later = ask(membership)  # answered on the same connection, so the answer to the first has arrived before
    await coordinator.answer(await coordinator.hear(), 1, pb.REPLY_STATUS_OK)
    assert await result(later) == pb.REPLY_STATUS_OK
    assert not early.done()
    coordinator.restart()
    again = await coordinator.hear()
    assert again[1].term == 2
    await coordinator.answer(again, 2, pb.REPLY_STATUS_COMMITTED)
    assert await result(early) == pb.REPLY_STATUS_COMMITTED


async def test_what_came_with_an_earlier_secret_is_sent_again_with_the_next(
    coordinator: Coordinator, membership: Membership
) -> None:
    """The coordinator has expired the worker and answers so; the next Welcome, in the same term, is on its way."""
    asked, other = ask(membership), ask(membership)
    first = await coordinator.hear()
    assert first[1].secret == b"secret 1"
    await coordinator.answer(first, 0, pb.REPLY_STATUS_STALE)
    await coordinator.answer(await coordinator.hear(), 1, pb.REPLY_STATUS_OK)
    assert await result(other) == pb.REPLY_STATUS_OK  # so the answer to the first has arrived
    assert not asked.done()
    coordinator.break_stream()
    again = await coordinator.hear()
    assert again[1].secret == b"secret 2"
    assert again[1].lease == first[1].lease
    await coordinator.answer(again, 2, pb.REPLY_STATUS_OK)
    assert await result(asked) == pb.REPLY_STATUS_OK


async def until_resent(coordinator: Coordinator, number: int) -> list[tuple[bytes, pb.ExchangeRequest]]:
    """Return the next transmissions."""
    return [await coordinator.hear() for _ in range(number)]


SCORE = pb.ExchangeRequest(run_id="run-1", score=pb.ScoreResult(group_id=1, attempt=1))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_connection, "RESEND_S", 0.05)


async def test_few_requests_with_payloads_are_under_way_at_one_time(
    coordinator: Coordinator, membership: Membership
) -> None:
    """The exchange keeps all received payloads, so the rest waits at the worker; requests without payloads are not
    delayed."""
    results = [
        asyncio.create_task(membership.request(pb.ExchangeRequest(group=pb.GroupResult(group_id=number)), [b"arrays"]))
        for number in range(exchange_connection.MAX_BULK + 1)
    ]
    under_way = [await coordinator.hear() for _ in range(exchange_connection.MAX_BULK)]
    asked = ask(membership)
    lease = await coordinator.hear()
    assert lease[1].WhichOneof("body") == "lease"
    await coordinator.answer(lease, 1, pb.REPLY_STATUS_OK)
    await result(asked)
    await coordinator.answer(under_way[0], 1, pb.REPLY_STATUS_COMMITTED)
    under_way.append(await coordinator.hear())
    assert sorted(request.group.group_id for _, request in under_way) == list(range(exchange_connection.MAX_BULK + 1))
    for waiting in under_way[1:]:
        await coordinator.answer(waiting, 1, pb.REPLY_STATUS_COMMITTED)
    assert [await result(one) for one in results] == [pb.REPLY_STATUS_COMMITTED] * len(results)


async def test_many_turns_are_under_way_at_one_time_and_delay_no_group(
    coordinator: Coordinator, membership: Membership
) -> None:
    turns = [
        asyncio.create_task(
            membership.request(pb.ExchangeRequest(turn=pb.EpisodeTurn(group_id=number)), [b"arrays", b"note"])
        )
        for number in range(exchange_connection.MAX_TURNS + 1)
    ]
    under_way = [await coordinator.hear() for _ in range(exchange_connection.MAX_TURNS)]
    group = asyncio.create_task(membership.request(pb.ExchangeRequest(group=pb.GroupResult(group_id=99)), [b"arrays"]))
    under_way.append(await coordinator.hear())
    assert under_way[-1][1].group.group_id == 99
    for waiting in under_way:
        await coordinator.answer(waiting, 1, pb.REPLY_STATUS_COMMITTED)
    await coordinator.answer(await coordinator.hear(), 1, pb.REPLY_STATUS_COMMITTED)
    assert [await result(one) for one in [*turns, group]] == [pb.REPLY_STATUS_COMMITTED] * (len(turns) + 1)


@pytest.mark.usefixtures("impatient")
async def test_a_reply_to_any_sending_of_a_result_counts(coordinator: Coordinator, membership: Membership) -> None:
    asked = asyncio.create_task(membership.request(SCORE))
    first, second = await until_resent(coordinator, 2)
    assert (first[1].again, second[1].again) == (False, True)
    assert first[1].score == second[1].score
    await coordinator.answer(first, 1, pb.REPLY_STATUS_COMMITTED)
    assert await result(asked) == pb.REPLY_STATUS_COMMITTED
    assert membership.exchange._pending == {}


@pytest.mark.usefixtures("impatient")
async def test_of_a_request_for_leases_only_the_reply_to_the_newest_sending_counts(
    coordinator: Coordinator, membership: Membership
) -> None:
    """Leases of the first reply are revoked when the second request does not list them."""
    asked = ask(membership)
    first, second = await until_resent(coordinator, 2)
    await coordinator.answer(first, 1, pb.REPLY_STATUS_OK)
    other = asyncio.create_task(membership.request(SCORE))
    for heard in [second, *await until_resent(coordinator, 1)]:
        if heard[1].WhichOneof("body") == "score":
            await coordinator.answer(heard, 1, pb.REPLY_STATUS_COMMITTED)
    while not other.done():
        heard = await coordinator.hear()
        if heard[1].WhichOneof("body") == "score":
            await coordinator.answer(heard, 1, pb.REPLY_STATUS_COMMITTED)
    assert not asked.done()  # though the answer to its first sending came before
    asked.cancel()
    await asyncio.wait((asked,))
    assert membership.exchange._pending == {}


@pytest.mark.usefixtures("impatient")
async def test_each_pause_before_a_sending_is_twice_as_long(coordinator: Coordinator, membership: Membership) -> None:
    asked = asyncio.create_task(membership.request(SCORE))
    await until_resent(coordinator, 3)
    (pending,) = membership.exchange._unanswered()
    assert pending.pause_s >= 0.2
    asked.cancel()
    await asyncio.wait((asked,))


async def test_the_numbers_of_a_request_that_is_never_answered_are_bounded(
    coordinator: Coordinator, membership: Membership, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange_connection, "MAX_SENDINGS", 3)
    asked = asyncio.create_task(membership.request(SCORE))
    await coordinator.hear()
    (pending,) = membership.exchange._unanswered()
    for _ in range(10):
        await membership.exchange._send(pending)
    assert len(membership.exchange._pending) == len(pending.terms) == 3
    asked.cancel()
    await asyncio.wait((asked,))


async def test_every_connection_is_heard_of(coordinator: Coordinator) -> None:
    """A handshake can end before the next statement runs."""

    async def ignore(_: worker_pb2.ConnectResponse) -> None: ...

    made = Membership("127.0.0.1:1", worker_pb2.Hello, ignore)
    try:
        for term in range(300):
            welcome = worker_pb2.Welcome(term=term, exchange_endpoint=f"tcp://127.0.0.1:{coordinator.port}")
            await made._on_welcome(welcome)
            async with asyncio.timeout(DEADLINE_S):
                await made.exchange.connected.wait()
    finally:
        made.exchange.close()


async def test_what_waits_is_sent_again_when_the_connection_was_mended(
    coordinator: Coordinator, membership: Membership
) -> None:
    """Also without a restart, and long before a lost reply would be noticed."""
    asked = ask(membership)
    first = await coordinator.hear()
    await coordinator.cut()
    again = await coordinator.hear()
    assert again[1].lease == first[1].lease
    assert again[1].term == 1
    await coordinator.answer(again, 1, pb.REPLY_STATUS_OK)
    assert await result(asked) == pb.REPLY_STATUS_OK


async def test_what_is_reported_on_a_new_stream_is_not_lost_with_the_old_one(
    coordinator: Coordinator, membership: Membership
) -> None:
    """A worker reports on each stream that it is ready; a coordinator without that report gives it no work."""
    for _ in range(3):
        await coordinator.hear_report("run_report")
        coordinator.break_stream()
    await coordinator.hear_report("run_report")


async def test_gauges_that_cannot_be_had_silence_no_worker(coordinator: Coordinator, membership: Membership) -> None:
    def broken() -> dict[str, float]:
        raise ZeroDivisionError("no time has passed")

    membership._gauges = broken
    await coordinator.hear_report("heartbeat")
    await coordinator.hear_report("heartbeat")


class Refusing(worker_pb2_grpc.WorkerServiceServicer):
    """A coordinator of another protocol until `fits`; then it welcomes."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.fits = False
        self.refused = 0
        self._coordinator = coordinator

    async def Connect(
        self, request_iterator: AsyncIterator[worker_pb2.ConnectRequest], context: Any
    ) -> AsyncIterator[worker_pb2.ConnectResponse]:
        if not self.fits:
            self.refused += 1
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "update the coordinator")
        async for directive in self._coordinator.Connect(request_iterator, context):
            yield directive


async def test_a_worker_of_another_protocol_saves_what_it_has_and_waits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    coordinator = Coordinator()
    servicer = Refusing(coordinator)
    server = GrpcServer("127.0.0.1", 0)
    server.add(servicer, worker_pb2_grpc.add_WorkerServiceServicer_to_server, "paceline.v1.WorkerService")
    saved: list[str] = []
    welcomed = asyncio.Event()

    async def on_directive(directive: worker_pb2.ConnectResponse) -> None:
        welcomed.set()

    def hello() -> worker_pb2.Hello:
        return worker_pb2.Hello(role=common_pb2.ROLE_LEARNER, member_id="learner-1", protocol=PROTOCOL)

    def save() -> None:
        saved.append("checkpoint")

    async with server:
        address = f"127.0.0.1:{server.port}"
        membership = Membership(address, hello, on_directive, on_refused=save)
        await membership.report(worker_pb2.ConnectRequest(checkpoint=worker_pb2.CheckpointReport(step=3)))
        belonging = asyncio.create_task(membership.run())
        try:
            async with asyncio.timeout(DEADLINE_S):
                while servicer.refused < 3:  # noqa: ASYNC110 (the servicer has no other word for it)
                    await asyncio.sleep(0.05)
                servicer.fits = True
                await welcomed.wait()
                await coordinator.hear_report("checkpoint")
        finally:
            belonging.cancel()
            await asyncio.wait((belonging,))
            coordinator.restart()
            coordinator.close()
    assert saved == ["checkpoint"], "once for all the time that it is refused"
    assert "update the coordinator" in caplog.text


AWAY = (
    "no coordinator answers at 127.0.0.1:1: connection refused. This worker keeps its results and tries again every few "
    "seconds; start the coordinator with `paceline serve coordinator`, or name another with --coordinator"
)
TLS_FAULT = "the certificate of 127.0.0.1:1 has expired"


@pytest.mark.parametrize(
    ("fault", "line"),
    [("", AWAY), (TLS_FAULT, f"{TLS_FAULT}. This worker keeps its results and tries again")],
)
async def test_a_coordinator_that_cannot_be_reached_is_one_line_with_the_remedy(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, fault: str, line: str
) -> None:
    attempts = 0
    tried = asyncio.Event()

    async def away(self: Membership) -> None:
        nonlocal attempts
        attempts += 1
        if attempts == 4:
            tried.set()
        raise grpc.aio.AioRpcError(
            grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "connection refused"
        )

    monkeypatch.setattr(Membership, "_stream", away)
    monkeypatch.setattr(f"{Membership.__module__}.FIRST_BACKOFF_S", 0.001)
    monkeypatch.setattr(f"{Membership.__module__}.why_no_channel", lambda address: fault)

    async def ignore(directive: worker_pb2.ConnectResponse) -> None:
        raise AssertionError("no directive comes")

    membership = Membership("127.0.0.1:1", worker_pb2.Hello, ignore)
    belonging = asyncio.create_task(membership.run())
    async with asyncio.timeout(DEADLINE_S):
        await tried.wait()
    belonging.cancel()
    await asyncio.wait((belonging,))
    lines = [record.getMessage() for record in caplog.records if "127.0.0.1:1" in record.getMessage()]
    assert lines == [line]


async def test_a_port_in_use_is_refused_without_a_line_of_grpc(capfd: pytest.CaptureFixture[str]) -> None:
    server = GrpcServer("127.0.0.1", 0)
    async with server:
        with pytest.raises(Conflict, match=f"^cannot listen on 127.0.0.1:{server.port}; is another process there"):
            GrpcServer("127.0.0.1", server.port)
    assert capfd.readouterr().err == ""


async def test_connections_without_a_call_keep_nobody_out_for_ever() -> None:
    """Strangers take all connections of a port and send nothing; a client gets in once they have been idle long enough."""
    options = {**dict(SERVER_OPTIONS), "grpc.max_connection_idle_ms": 500}
    server = GrpcServer("127.0.0.1", 0, max_connections=2, options=list(options.items()))
    async with server, asyncio.timeout(DEADLINE_S), contextlib.AsyncExitStack() as opened:
        strangers = []
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            opened.callback(writer.close)
            writer.write(PREFACE)
            strangers.append((reader, await reader.read(1)))
        assert [bool(answered) for _, answered in strangers] == [True, True, False]
        for reader, _ in strangers:
            await reader.read()  # until it is closed
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            answer: Any = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
