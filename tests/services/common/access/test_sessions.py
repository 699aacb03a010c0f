"""Proofs of tokens and tickets, against servers that prove themselves and against programs that cannot: what another
user of the host, a worker or a reader of the network gets, and what it is good for."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
import zmq
import zmq.asyncio

from paceline.calls.proof import (
    PROOF,
    PROVE,
    SESSION,
    AioProver,
    Credential,
    ProvenChannel,
    Session,
    is_unproven,
    judged,
)
from paceline.calls.token import PORT_VARIABLE, known_token, make_token
from paceline.client import Client
from paceline.errors import AccessDenied
from paceline.services.common.access import callers as callers_module
from paceline.services.common.access.callers import FRESH_S, KEPT_S, TokenCallers, WorkerCallers, _Answer
from paceline.services.common.access.rights import Caller, CallerRole
from paceline.services.common.access.sessions import Sessions, issue
from paceline.services.common.access.token_guard import Call, TokenGuard, worker_guard
from paceline.services.common.access.token_table import create, digest_of, revoke
from paceline.services.common.serving.grpc_server import GrpcServer
from paceline.services.common.worker.membership import Membership
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.lifecycle.coordinator import Coordinator
from paceline.services.coordinator.main import CoordinatorService
from paceline.services.coordinator.members.registry import Members
from paceline.services.coordinator.records.servicer import RecordsServicer
from paceline.services.coordinator.servicers import AccessServicer
from paceline.services.reward.main import RewardServicer
from paceline.v1 import (
    access_pb2,
    access_pb2_grpc,
    common_pb2,
    exchange_pb2,
    reward_pb2,
    reward_pb2_grpc,
    run_pb2,
    run_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from paceline.wire import PROTOCOL

DEADLINE_S = 60.0
LIST = "paceline.v1.RunService/List"
LIST_FUNCTIONS = "paceline.v1.RewardService/ListFunctions"


@dataclass
class Recorder(grpc.GenericRpcHandler):  # type: ignore[misc]  # its base is untyped
    """A program on a port that is not its own: it keeps what it receives and answers with `answers`, or refuses."""

    answers: dict[str, Callable[[Any], Any]] = field(default_factory=dict)
    methods: list[str] = field(default_factory=list)
    received: list[bytes] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def service(self, details: Any) -> Any:
        self.methods.append(details.method)
        sent = dict(details.invocation_metadata or ())
        for key, value in sent.items():
            self.received += [key.encode(), value if isinstance(value, bytes) else str(value).encode()]
        self.changed.set()

        async def answer(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            if details.method not in self.answers:
                async with asyncio.timeout(1.0):
                    async for request in requests:
                        self.received.append(request)
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no")
            answered = self.answers[details.method](sent)
            yield await answered if asyncio.iscoroutine(answered) else answered

        return grpc.stream_stream_rpc_method_handler(answer)

    async def until(self, number: int) -> None:
        """Wait for so many calls."""
        async with asyncio.timeout(DEADLINE_S):
            while len(self.methods) < number:
                self.changed.clear()
                await self.changed.wait()

    def holds(self, *tokens: str) -> list[str]:
        """Return the tokens of which anything helpful was received: the token, its digest in either form, a bearer."""
        content = b"\0".join(self.received)
        found = []
        for token in tokens:
            sha256 = hashlib.sha256(token.encode()).digest()
            if any(each in content for each in (token.encode(), sha256, sha256.hex().encode(), b"Bearer")):
                found.append(token)
        return found


@asynccontextmanager
async def squatting(port: int, recorder: Recorder, host: str = "127.0.0.1") -> AsyncIterator[int]:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((recorder,))
    bound = server.add_insecure_port(f"{host}:{port}")
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(0.0)


@asynccontextmanager
async def coordinator_at(directory: Path, port: int = 0, noted: list[Call] | None = None) -> AsyncIterator[int]:
    """A guarded coordinator; its port."""
    token = make_token(directory / "token")
    ledger = Ledger(directory / "ledger.sqlite")
    coordinator = Coordinator(ledger, directory, Members(60.0), "127.0.0.1", 0)
    callers = TokenCallers(
        lambda: token, directory / "token", directory / "tokens.json", server=f"coordinator {directory}"
    )
    calls: list[Call] = [] if noted is None else noted
    server = GrpcServer("127.0.0.1", port, TokenGuard(callers, ledger.submitter, calls.append))
    records = RecordsServicer(ledger.path, coordinator.members, coordinator.committed)
    access = AccessServicer(callers, calls.append, coordinator.members)
    service = cast(Any, SimpleNamespace(capacity=None))
    endpoint = f"tcp://127.0.0.1:{coordinator.server.port}"
    CoordinatorService._add_servicers(service, server, coordinator, records, access, endpoint)
    await coordinator.runs.recover()
    await server.start()
    loop = asyncio.create_task(coordinator.server.serve())
    try:
        yield server.port
    finally:
        stopped = asyncio.create_task(server.stop(0.0))
        await asyncio.sleep(0)
        await coordinator.end_streams()
        await stopped
        loop.cancel()
        await asyncio.wait((loop,))
        await records.close()
        coordinator.close()
        ledger.close()


@asynccontextmanager
async def joined(port: int, welcomes: asyncio.Queue[int], **hello: Any) -> AsyncIterator[Membership]:
    """A worker that stays a member; the terms of its Welcomes go to `welcomes`."""
    said = worker_pb2.Hello(protocol=PROTOCOL, **{"role": common_pb2.ROLE_ROLLOUT, "member_id": "r-1"} | hello)

    async def on_directive(directive: worker_pb2.ConnectResponse) -> None:
        if directive.WhichOneof("directive") == "welcome":
            welcomes.put_nowait(directive.welcome.term)

    membership = Membership(f"127.0.0.1:{port}", lambda: said, on_directive)
    running = asyncio.create_task(membership.run())
    try:
        yield membership
    finally:
        running.cancel()
        await asyncio.wait((running,))


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A coordinator's directory, whose token this process uses."""
    make_token(tmp_path / "token")
    monkeypatch.setenv("PACELINE_TOKEN_FILE", str(tmp_path / "token"))
    return tmp_path


def token_in(directory: Path) -> str:
    return (directory / "token").read_text().strip()


def wrong_proof(sent: dict[str, Any]) -> bytes:
    nonce = secrets.token_bytes(24)
    proof = access_pb2.ProveResponse(nonce=nonce, proof=secrets.token_bytes(32), server="coordinator /runs")
    return proof.SerializeToString()


async def test_a_squatted_port_gets_no_token_and_the_worker_goes_on_with_the_real_coordinator(directory: Path) -> None:
    welcomes: asyncio.Queue[int] = asyncio.Queue()
    async with asyncio.timeout(DEADLINE_S):
        async with coordinator_at(directory) as port:
            worker = joined(port, welcomes)
            await worker.__aenter__()
            first = await welcomes.get()
        try:
            welcome = worker_pb2.ConnectResponse(welcome=worker_pb2.Welcome(term=99)).SerializeToString()
            wrong = {PROVE: wrong_proof, "/paceline.v1.WorkerService/Connect": lambda sent: welcome}
            for answers in ({}, {PROVE: lambda sent: b"\xff"}, wrong):
                recorder = Recorder(answers)
                async with squatting(port, recorder):
                    await recorder.until(2)
                    with pytest.raises(AccessDenied, match=r"has not proven .* end that program"):
                        await asyncio.to_thread(_list_runs, port)
                assert set(recorder.methods) == {PROVE}
                assert not recorder.holds(token_in(directory))
            async with coordinator_at(directory, port):
                assert await welcomes.get() == first + 1, "no welcome of the other program counts"
        finally:
            await worker.__aexit__(None, None, None)


async def test_without_a_token_and_tls_nothing_is_sent(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_TOKEN_FILE", str(directory / "late"))
    welcome = worker_pb2.ConnectResponse(welcome=worker_pb2.Welcome(term=99)).SerializeToString()
    recorder, welcomes = Recorder({"/paceline.v1.WorkerService/Connect": lambda sent: welcome}), asyncio.Queue[int]()
    async with squatting(0, recorder) as port, asyncio.timeout(DEADLINE_S):
        async with joined(port, welcomes):
            for _ in range(2):
                with pytest.raises(
                    AccessDenied, match=r"has no token, because the file .*/late is missing.*--token-file"
                ):
                    await asyncio.to_thread(_list_runs, port)
                await asyncio.sleep(0.3)
            assert recorder.methods == []
            assert welcomes.empty()
            (directory / "late").write_text(token_in(directory))
            await recorder.until(1)
            assert set(recorder.methods) == {PROVE}
        address = f"127.0.0.1:{port}"
        (directory / "late").unlink()
        async with grpc.aio.insecure_channel(address) as channel:
            prover = AioProver(channel, address, lambda: ())
            signed = await prover.sign("x")
            call = worker_pb2_grpc.WorkerServiceStub(channel).Connect(metadata=signed.metadata)  # type: ignore[call-arg]
            with pytest.raises(grpc.aio.AioRpcError, match="neither a token nor TLS"):
                await prover.check_stream(call, signed)


async def test_a_server_cannot_pass_for_the_clients_own_error(directory: Path) -> None:
    async with coordinator_at(directory) as port, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        prover = AioProver(channel, "there", known_token(f"127.0.0.1:{port}"))
        signed = await prover.sign(LIST)
        trailing = grpc.aio.Metadata(("paceline-unproven", "1"))
        for code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED):
            forged = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, "no", None)
            error = judged("there", signed, forged)
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED
            assert is_unproven(error)
            assert not is_unproven(forged)
        unknown = channel.unary_unary("/paceline.v1.RunService/Newer")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await prover.call("paceline.v1.RunService/Newer", lambda sent: unknown(b"", metadata=sent))
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED, "a proven answer"


async def _hang(sent: dict[str, Any]) -> bytes:
    await asyncio.sleep(DEADLINE_S)
    return b""


async def test_calls_wait_for_a_proof_no_longer_than_their_own_limit(directory: Path) -> None:
    recorder = Recorder({PROVE: _hang})
    async with squatting(0, recorder) as port, asyncio.timeout(DEADLINE_S):
        address = f"127.0.0.1:{port}"
        async with grpc.aio.insecure_channel(address) as channel:
            prover = AioProver(channel, address, known_token(address))
            failed = await asyncio.gather(*(prover.sign(LIST, 0.3) for _ in range(8)), return_exceptions=True)
            assert {cast(grpc.aio.AioRpcError, each).code() for each in failed} == {grpc.StatusCode.DEADLINE_EXCEEDED}
        with grpc.insecure_channel(address) as plain:
            call = ProvenChannel(plain, address, known_token(address)).unary_unary(f"/{LIST}")
            calls = [asyncio.to_thread(call, b"", 0.3) for _ in range(4)]
            failed = await asyncio.gather(*calls, return_exceptions=True)
            assert {cast(grpc.aio.AioRpcError, each).code() for each in failed} == {grpc.StatusCode.DEADLINE_EXCEEDED}
        assert set(recorder.methods) == {PROVE}


async def test_a_worker_goes_on_without_its_coordinator_and_keeps_refusing(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callers_module, "CALL_S", 0.2)
    recorder = Recorder({PROVE: _hang})
    async with squatting(0, recorder) as port, asyncio.timeout(DEADLINE_S):
        callers = WorkerCallers(f"127.0.0.1:{port}")
        ticketed = Caller("ann", frozenset({CallerRole.VIEWER}))
        assert await callers._caller(b"ann", ticketed) == ticketed, "the coordinator hangs"
        long_ago_s = time.monotonic() - 2 * KEPT_S
        callers._answers[b"ann"] = _Answer(None, "the token ann was revoked", long_ago_s)
        with pytest.raises(AccessDenied, match="was revoked"):
            await callers._caller(b"ann", ticketed)

        async def ask(token_id: bytes) -> _Answer:
            return _Answer(ticketed, "", time.monotonic() - FRESH_S)

        monkeypatch.setattr(callers, "_ask", ask)
        monkeypatch.setattr(callers_module, "MAX_KEPT", 2)
        for name in (b"ben", b"eve", b"dan"):
            await callers._caller(name, None)
        assert list(callers._answers) == [b"ann", b"dan"], "refusals stay"


async def test_a_program_on_the_exchanges_port_cannot_answer_for_the_coordinator(directory: Path) -> None:
    welcomes: asyncio.Queue[int] = asyncio.Queue()
    async with asyncio.timeout(DEADLINE_S):
        async with coordinator_at(directory) as port:
            worker = joined(port, welcomes)
            membership = await worker.__aenter__()
            await welcomes.get()
            assert membership.exchange._connection is not None
            endpoint = membership.exchange._connection.socket.getsockopt(zmq.LAST_ENDPOINT)
        try:
            with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as false:
                false.bind(endpoint)
                asked = asyncio.create_task(membership.request(exchange_pb2.ExchangeRequest(task={"room": 1})))
                answering = asyncio.create_task(_answer_falsely(false))
                await asyncio.wait((asked,), timeout=2.0)
                answering.cancel()
                assert not asked.done()
            async with coordinator_at(directory, port):
                answer, _ = await asked
                assert answer.message != "false"
        finally:
            await worker.__aexit__(None, None, None)


async def _answer_falsely(socket: zmq.asyncio.Socket) -> None:
    while True:
        sender, header = await socket.recv_multipart()
        request = exchange_pb2.ExchangeRequest.FromString(header)
        reply = exchange_pb2.ExchangeReply(request_id=request.request_id, term=request.term, message="false")
        await socket.send_multipart([sender, reply.SerializeToString()])


def _list_runs(port: int, token_file: Path | None = None) -> int:
    with Client(f"127.0.0.1:{port}", token_file=token_file) as client:
        return len(client.runs())


async def test_a_program_that_passes_calls_on_from_another_port_proves_nothing(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with coordinator_at(directory) as port, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as real:

        async def pass_on(sent: dict[str, Any]) -> bytes:
            try:
                answer: bytes = await real.unary_unary(PROVE)(b"", metadata=((SESSION, sent[SESSION]),))
                return answer
            except grpc.aio.AioRpcError as error:
                refusals.append(error.details() or "")
                raise

        refusals: list[str] = []
        recorder = Recorder({PROVE: pass_on})
        async with squatting(0, recorder) as other:
            with pytest.raises(AccessDenied, match="has not proven"):
                await asyncio.to_thread(_list_runs, other)
            assert recorder.methods == [PROVE]
            assert f"listens on port {port} of 127.0.0.1, but its caller dials port {other} of 127.0.0.1" in refusals[0]
            monkeypatch.setenv(PORT_VARIABLE, str(port))  # the user's own tunnel
            with pytest.raises(AccessDenied):
                await asyncio.to_thread(_list_runs, other)
            assert recorder.methods == [PROVE, PROVE, f"/{LIST}"], "the proof is the coordinator's"
            assert not recorder.holds(token_in(directory))


async def test_a_program_at_another_loopback_address_proves_nothing(directory: Path) -> None:
    async with coordinator_at(directory) as port, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as real:

        async def pass_on(sent: dict[str, Any]) -> bytes:
            answer: bytes = await real.unary_unary(PROVE)(b"", metadata=((SESSION, sent[SESSION]),))
            return answer

        recorder = Recorder({PROVE: pass_on})
        async with squatting(port, recorder, "127.0.0.2"):
            with Client(f"127.0.0.2:{port}") as client, pytest.raises(AccessDenied, match="has not proven"):
                await asyncio.to_thread(client.runs)
        assert recorder.methods == [PROVE]
        with Client(f"localhost:{port}") as client:
            assert await asyncio.to_thread(client.runs) == []


@pytest.mark.parametrize(
    ("listening", "reached", "refused"),
    [
        ({"127.0.0.1"}, ["127.0.0.1", ""], ["::1", "127.0.0.2", "10.0.0.1", "host", "0.0.0.0", "::ffff:127.0.0.2"]),
        ({"::1", "127.0.0.1"}, ["127.0.0.1", "::1", "::ffff:127.0.0.1"], ["127.0.0.2"]),
        ({"0.0.0.0"}, ["127.0.0.1", "10.0.0.1", "coordinator.pool.svc"], []),
        ({"10.0.0.1"}, ["10.0.0.1", "10.9.0.1", "coordinator"], ["127.0.0.1", "::1", "::"]),
    ],
)
def test_the_dialled_host_must_lead_to_the_server(listening: set[str], reached: list[str], refused: list[str]) -> None:
    sessions = Sessions(TokenCallers(lambda: "secret", Path("token")))
    sessions.ports, sessions.hosts = frozenset({7070}), frozenset(listening)
    for host in reached + refused:
        offer = Session(Credential.of_token("secret", 7070, host)).metadata[0][1]
        if host in reached:
            sessions.answer(offer)
            continue
        with pytest.raises(AccessDenied, match=f"but its caller dials port 7070 of {host}, so another"):
            sessions.answer(offer)


async def test_a_proof_counts_once_and_for_its_method_alone(directory: Path) -> None:
    noted: list[Call] = []
    async with coordinator_at(directory, 0, noted) as port, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        session = Session(Credential.of_token(token_in(directory), port))
        assert session.open(await channel.unary_unary(PROVE)(b"", metadata=session.metadata)) == ""
        stub = run_pb2_grpc.RunServiceStub(channel)
        signed, later = session.sign(LIST), session.sign(LIST)

        async def code_of(sent: Any, method: str = "List") -> grpc.StatusCode:
            call: Any = getattr(stub, method)(getattr(run_pb2, f"{method}Request")(), metadata=sent)
            return cast(grpc.StatusCode, await call.code())

        refused = grpc.StatusCode.UNAUTHENTICATED
        assert await code_of(later.metadata) is grpc.StatusCode.OK, "calls may arrive in another order"
        assert await code_of(signed.metadata, "Cancel") is refused
        assert await code_of(signed.metadata) is grpc.StatusCode.OK
        assert await code_of(signed.metadata) is refused, "a replay"
        header, proof = dict(session.sign(LIST).metadata).values()
        for sent in (
            ((SESSION, header),),
            ((PROOF, proof),),
            ((SESSION, header[:-1]), (PROOF, proof)),
            ((SESSION, bytes(8) + header[8:]), (PROOF, proof)),
            ((SESSION, b"\xff" * 40), (PROOF, b"\xff" * 40)),
            ((SESSION, header), (PROOF, b"")),
        ):
            assert await code_of(sent) is refused
        assert {call.caller for call in noted if call.code is refused} == {None}
    async with coordinator_at(directory, port), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = run_pb2_grpc.RunServiceStub(channel)
        assert await code_of(session.sign(LIST).metadata) is refused, "a session of the earlier life"


async def test_a_client_begins_a_new_session_with_a_new_life_of_the_coordinator(directory: Path) -> None:
    async with asyncio.timeout(DEADLINE_S):
        async with coordinator_at(directory) as port:
            client = Client(f"127.0.0.1:{port}", wait_s=DEADLINE_S)
            assert await asyncio.to_thread(client.runs) == []
        async with coordinator_at(directory, port):
            assert await asyncio.to_thread(client.runs) == []
    client.close()


async def test_named_tokens_are_proven_and_a_revoked_one_is_refused_with_its_reason(directory: Path) -> None:
    table, file = directory / "tokens.json", directory / "ann"
    file.write_text(create(table, "ann", CallerRole.VIEWER, 0.0))
    async with coordinator_at(directory) as port:
        assert await asyncio.to_thread(_list_runs, port, file) == 0
        revoke(table, "ann")
        async with asyncio.timeout(DEADLINE_S):
            while True:
                try:
                    await asyncio.to_thread(_list_runs, port, file)
                except AccessDenied as denied:
                    assert str(denied).startswith("the token ann was revoked")  # noqa: PT017
                    return
                await asyncio.sleep(0.05)


async def test_a_worker_that_gives_a_false_address_gets_no_token(directory: Path) -> None:
    """With the token of a worker alone: the calls of an operator and a submitter come, and help with nothing."""
    table, hostile = directory / "tokens.json", Recorder({PROVE: wrong_proof})
    tokens = {role: create(table, role.value, role, 0.0) for role in (CallerRole.OPERATOR, CallerRole.SUBMITTER)}
    async with asyncio.timeout(DEADLINE_S):
        async with coordinator_at(directory) as port, squatting(0, hostile) as lure:
            for kind, number in (("rollout", common_pb2.ROLE_ROLLOUT), ("reward", common_pb2.ROLE_REWARD)):
                welcomes: asyncio.Queue[int] = asyncio.Queue()
                said = {"role": number, "member_id": f"{kind}-eve", "address": f"127.0.0.1:{lure}"}
                async with joined(port, welcomes, **said):
                    await welcomes.get()
                    for role, token in tokens.items():
                        (directory / role.value).write_text(token)
                        with pytest.raises(AccessDenied, match="has not proven"):
                            await asyncio.to_thread(_ask, port, directory / role.value, kind)
            assert set(hostile.methods) == {PROVE}
            assert not hostile.holds(token_in(directory), *tokens.values())


def _ask(port: int, token_file: Path, kind: str) -> None:
    with Client(f"127.0.0.1:{port}", token_file=token_file) as client:
        client.generate("1+1=") if kind == "rollout" else client.score(["1+1="], ["2"])


@asynccontextmanager
async def worker_with(call_key: Callable[[], bytes]) -> AsyncIterator[Callable[..., Any]]:
    """A worker's server; yields a function that lists its reward functions with a ticket."""
    server = GrpcServer("127.0.0.1", 0, worker_guard("", call_key))
    servicer = RewardServicer(cast(Any, SimpleNamespace(functions=())))
    server.add(servicer, reward_pb2_grpc.add_RewardServiceServicer_to_server, "paceline.v1.RewardService")
    address = f"127.0.0.1:{server.port}"
    async with server, grpc.aio.insecure_channel(address) as channel:
        stub: Any = reward_pb2_grpc.RewardServiceStub(channel)
        provers: dict[bytes, AioProver] = {}

        async def functions(ticket: access_pb2.Ticket) -> int:
            prover = provers.setdefault(
                ticket.SerializeToString(), AioProver(channel, address, lambda: Credential.of_ticket(ticket))
            )
            request = reward_pb2.ListFunctionsRequest()
            answer = await prover.call(LIST_FUNCTIONS, lambda sent: stub.ListFunctions(request, metadata=sent))
            return len(answer.functions)

        yield functions


async def test_a_ticket_is_for_one_worker_one_method_and_one_term(directory: Path) -> None:
    keys = {"mine": secrets.token_bytes(32)}
    viewer = Caller("ann", frozenset({CallerRole.VIEWER}), digest_of("plt_ann"))
    async with worker_with(lambda: keys["mine"]) as functions:
        ticket = issue(keys["mine"], "reward-1", LIST_FUNCTIONS, viewer)
        assert await functions(ticket) > 0
        assert await functions(ticket) > 0, "one handshake serves many calls"
        for other in (
            issue(secrets.token_bytes(32), "reward-2", LIST_FUNCTIONS, viewer),
            access_pb2.Ticket(claims=ticket.claims, key=secrets.token_bytes(32)),
            access_pb2.Ticket(claims=ticket.claims.replace(b"viewer", b"worker"), key=ticket.key),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match="has not proven"):
                await functions(other)
        with pytest.raises(grpc.aio.AioRpcError, match=r"the ticket is for paceline\.v1\.RewardService/Score"):
            await functions(issue(keys["mine"], "reward-1", "paceline.v1.RewardService/Score", viewer))
        scraper = Caller("prometheus", frozenset({CallerRole.SCRAPER}))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await functions(issue(keys["mine"], "reward-1", LIST_FUNCTIONS, scraper))
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        keys["mine"] = secrets.token_bytes(32)  # the next Welcome
        with pytest.raises(grpc.aio.AioRpcError, match="has not proven"):
            await functions(ticket)
        keys["mine"] = b""
        with pytest.raises(grpc.aio.AioRpcError, match="belongs to no coordinator"):
            await functions(ticket)


async def test_a_coordinator_issues_tickets_for_permitted_calls_of_its_members_alone(directory: Path) -> None:
    table = directory / "tokens.json"
    viewer = create(table, "ann", CallerRole.VIEWER, 0.0)
    welcomes: asyncio.Queue[int] = asyncio.Queue()
    async with coordinator_at(directory) as port, joined(port, welcomes), asyncio.timeout(DEADLINE_S):
        await welcomes.get()
        address = f"127.0.0.1:{port}"
        async with grpc.aio.insecure_channel(address) as channel:
            stub: Any = access_pb2_grpc.AccessServiceStub(channel)
            prover = AioProver(channel, address, known_token(address, token=viewer))

            async def code_of(**fields: str) -> grpc.StatusCode:
                request = access_pb2.IssueTicketRequest(**fields)
                method = "paceline.v1.AccessService/IssueTicket"
                try:
                    await prover.call(method, lambda sent: stub.IssueTicket(request, metadata=sent))
                except grpc.aio.AioRpcError as error:
                    return error.code()
                return grpc.StatusCode.OK

            status, export = "paceline.v1.RolloutService/Status", "paceline.v1.LearnerService/Export"
            assert await code_of(member_id="r-1", method=status) is grpc.StatusCode.OK
            assert await code_of(member_id="r-2", method=status) is grpc.StatusCode.NOT_FOUND
            assert await code_of(member_id="r-1", method=export) is grpc.StatusCode.PERMISSION_DENIED
            assert await code_of(member_id="r-1", method="paceline.v1.RunService/List") is grpc.StatusCode.NOT_FOUND


def test_the_session_in_use_does_not_end_for_newer_ones() -> None:
    sessions = Sessions(TokenCallers(lambda: "secret", Path("token")), max_sessions=2)
    sessions.ports = frozenset({7070})
    used = None
    for _ in range(4):
        session = Session(Credential.of_token("secret", 7070))
        assert session.open(sessions.answer(session.metadata[0][1]).SerializeToString()) == ""
        used = used or session
        for each in (session, used):
            sent = dict(each.sign(LIST).metadata)
            sessions.check(sent[SESSION], sent[PROOF], LIST)


def test_sessions_are_bounded_and_an_ended_one_takes_no_old_proof() -> None:
    keys = TokenCallers(lambda: "secret", Path("token"))
    sessions = Sessions(keys, max_sessions=2)
    sessions.ports = frozenset({7070})
    opened = []
    for _ in range(3):
        session = Session(Credential.of_token("secret", 7070))
        assert session.open(sessions.answer(session.metadata[0][1]).SerializeToString()) == ""
        opened.append(session)
        used = dict(session.sign(LIST).metadata)
        sessions.check(used[SESSION], used[PROOF], LIST)
        assert len(sessions._numbers) <= 2
        with pytest.raises(AccessDenied, match="used before"):
            sessions.check(used[SESSION], used[PROOF], LIST)
    first = dict(opened[0].sign(LIST).metadata)
    with pytest.raises(AccessDenied, match="begin a new session"):
        sessions.check(first[SESSION], first[PROOF], LIST)
    last = dict(opened[2].sign(LIST).metadata)
    sessions.check(last[SESSION], last[PROOF], LIST)
