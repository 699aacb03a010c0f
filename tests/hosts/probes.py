"""Strangers on a host of their own, against a deployment that trains: `python probes.py PLAN [--stay]`.

PLAN is a JSON file with the addresses, certificates and tokens that the strangers have. Each probe prints a line of JSON: its name,
whether it was refused, and what it was told. Probes whose name begins with `control` have every right, and show that the others fail
for no other reason. With `--stay` a worker joins alone, and tells when its stream has ended.
"""

from __future__ import annotations

import json
import socket
import ssl
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import zmq
from zmq.utils import z85

from paceline.calls.token import metadata
from paceline.errors import PacelineError, Unavailable
from paceline.tls.channels import open_plain_or_tls
from paceline.tls.folder import TlsFolder
from paceline.tls.peers import PeerTls
from paceline.v1 import (
    common_pb2,
    exchange_pb2,
    host_agent_pb2,
    run_pb2,
    run_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from paceline.weights.hosts import frames
from paceline.weights.hosts.frames import Kind
from paceline.weights.hosts.transport import Channel, TlsTransport, Transport
from paceline.wire import PROTOCOL

WAIT_S = 15.0
GREETING, HELLO, WELCOME = 64, 202, 170
"""Bytes of the parts of a CURVE handshake with their heads: both greet, then one says HELLO and the other WELCOME."""
SILENCE_S = 3.0
"""Seconds without an answer after which a ZeroMQ peer counts as refused; a member's answer takes milliseconds."""
REFUSALS = {
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAVAILABLE,
}


@dataclass(frozen=True)
class Plan:
    """What the strangers know."""

    coordinator: str
    people: str
    metrics: str
    http: str
    """OpenAI-compatible endpoint of a rollout worker."""
    agents: list[str]
    """Ports of host agents."""
    victim: str
    """Id of a member that works."""
    folders: dict[str, str]
    tokens: dict[str, str]
    links: list[str]
    """Files of the coordinator's host that lead to its secrets."""

    def folder(self, name: str) -> TlsFolder:
        """Return a folder of certificates."""
        return TlsFolder(Path(self.folders[name]))


class Refused(Exception):
    """A probe was refused, with what it was told."""


class Control:
    """A control stream, from its Hello to its end."""

    def __init__(
        self,
        plan: Plan,
        folder: str,
        token: str,
        member_id: str,
        address: str = "",
        role: common_pb2.Role = common_pb2.ROLE_REWARD,
        gives: str = "",
    ) -> None:
        """Join by the coordinator at `address`, and give the address `gives`. Raises Refused unless Welcome comes."""
        public, self.secret_key = zmq.curve_keypair()
        self.public_key = public
        self.member_id = member_id
        hello = worker_pb2.Hello(
            role=role,
            member_id=member_id,
            address=gives,
            protocol=PROTOCOL,
            exchange_key=z85.decode(public),
        )
        self._left = threading.Event()
        self._channel = open_plain_or_tls(address or plan.coordinator, folder=plan.folder(folder))

        def reports() -> Iterator[worker_pb2.ConnectRequest]:
            yield worker_pb2.ConnectRequest(hello=hello)
            while not self._left.wait(1.0):
                yield worker_pb2.ConnectRequest(heartbeat=worker_pb2.Heartbeat())
            yield worker_pb2.ConnectRequest(leave=worker_pb2.Leave())

        stub = worker_pb2_grpc.WorkerServiceStub(self._channel)
        self._call: Any = stub.Connect(reports(), metadata=metadata(plan.tokens[token]), timeout=120.0)
        try:
            self.welcome = next(self._call).welcome
        except grpc.RpcError as error:
            self._channel.close()
            raise refusal(error) from None

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave in good order."""
        self._left.set()
        self.until_ended()

    def until_ended(self) -> str:
        """Wait until the stream ends; return what was told."""
        said = ""
        try:
            for _directive in self._call:
                pass
        except grpc.RpcError as error:
            said = str(refusal(error))
        self._left.set()
        self._channel.close()
        return said

    def request(self, member_id: str) -> exchange_pb2.ExchangeRequest:
        """Return a request for a task, by a member's name."""
        request = exchange_pb2.ExchangeRequest(
            protocol=PROTOCOL,
            request_id=1,
            member_id=member_id,
            term=self.welcome.term,
            secret=self.welcome.secret,
            run_id="none",
        )
        request.task.SetInParent()
        return request


def refusal(error: Any) -> Exception:
    """Return Refused for an error that is a refusal, else the error."""
    if error.code() not in REFUSALS:
        return error  # type: ignore[no-any-return]
    return Refused(f"{error.code().name}: {(error.details() or '')[:300]}")


def list_runs(address: str, token: str, folder: TlsFolder | None) -> None:
    """Ask for the runs."""
    channel = open_plain_or_tls(address, folder=folder) if folder else grpc.insecure_channel(address)
    with channel:
        call(
            lambda: run_pb2_grpc.RunServiceStub(channel).List(
                run_pb2.ListRequest(), metadata=metadata(token), timeout=WAIT_S
            )
        )


def submit(plan: Plan, token: str) -> None:
    """Submit a run that nobody could train."""
    with open_plain_or_tls(plan.people, folder=plan.folder("person")) as channel:
        request = run_pb2.SubmitRequest(spec_yaml="name: stranger")
        call(
            lambda: run_pb2_grpc.RunServiceStub(channel).Submit(
                request, metadata=metadata(plan.tokens[token]), timeout=WAIT_S
            )
        )


def submit_link(plan: Plan, path: str) -> None:
    """Submit a run whose data are a link to a secret of the coordinator's host."""
    tree = {"policy": {"model_name": "none"}, "data": {"train": path}, "rewards": [{"function": "think_answer_format"}]}
    with open_plain_or_tls(plan.people, folder=plan.folder("person")) as channel:
        request = run_pb2.SubmitRequest(spec_yaml=json.dumps(tree))
        call(
            lambda: run_pb2_grpc.RunServiceStub(channel).Submit(
                request, metadata=metadata(plan.tokens["submitter"]), timeout=WAIT_S
            )
        )


def cancel_run(plan: Plan, token: str, run_id: str) -> None:
    """Cancel somebody's run."""
    with open_plain_or_tls(plan.people, folder=plan.folder("person")) as channel:
        request = run_pb2.CancelRequest(run_id=run_id)
        call(
            lambda: run_pb2_grpc.RunServiceStub(channel).Cancel(
                request, metadata=metadata(plan.tokens[token]), timeout=WAIT_S
            )
        )


def call(made: Callable[[], object]) -> None:
    """Make a call. Raises Refused."""
    try:
        made()
    except grpc.RpcError as error:
        raise refusal(error) from None


def join(plan: Plan, folder: str, token: str, member_id: str = "", address: str = "") -> None:
    """Join as a worker, and leave."""
    with Control(plan, folder, token, member_id or f"stranger-{uuid.uuid4().hex[:8]}", address):
        pass


# ZeroMQ


def endpoint_of(plan: Plan, welcome: worker_pb2.Welcome) -> str:
    """Return the exchange's endpoint."""
    return str(welcome.exchange_endpoint).replace("0.0.0.0", plan.coordinator.rpartition(":")[0])


def ask_exchange(
    endpoint: str,
    request: exchange_pb2.ExchangeRequest,
    server_key: bytes,
    keys: tuple[bytes, bytes] | None,
) -> None:
    """Send a request, over CURVE with `keys`. Raises Refused where no answer comes, or a refusal."""
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    try:
        peer.linger = 0
        if keys is not None:
            peer.curve_publickey, peer.curve_secretkey = keys
            peer.curve_serverkey = z85.encode(server_key)
        peer.connect(endpoint)
        peer.send(request.SerializeToString())
        if not peer.poll(int(SILENCE_S * 1000)):
            raise Refused("no connection")
        reply = exchange_pb2.ExchangeReply.FromString(peer.recv_multipart()[0])
        if reply.status == exchange_pb2.REPLY_STATUS_INVALID:
            raise Refused(reply.message)
    finally:
        peer.close()
        context.term()


def replay_member(plan: Plan) -> None:
    """Record what a member sends to the exchange, and send the same bytes on a connection of its own."""
    recorded = bytearray()
    with Control(plan, "insider", "worker", "insider-recorded") as control:
        host, _, port = endpoint_of(plan, control.welcome).removeprefix("tcp://").rpartition(":")
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def forward() -> None:
                client, _ = listener.accept()
                server = socket.create_connection((host, int(port)), WAIT_S)
                threading.Thread(target=copy, args=(server, client, None), daemon=True).start()
                copy(client, server, recorded)

            recorder = threading.Thread(target=forward, daemon=True)
            recorder.start()
            through = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
            keys = (control.public_key, control.secret_key)
            ask_exchange(through, control.request(control.member_id), control.welcome.exchange_key, keys)
            recorder.join(WAIT_S)
        # While the member is there: the coordinator would take its key.
        with socket.create_connection((host, int(port)), WAIT_S) as again:
            again.settimeout(SILENCE_S)
            greeting, hello = bytes(recorded[:GREETING]), bytes(recorded[GREETING : GREETING + HELLO])
            for sent, answer in ((greeting, GREETING), (hello, WELCOME)):
                again.sendall(sent)
                frames.receive(Channel(again.dup(), "exchange", SILENCE_S), answer)
            # What follows is sealed for the connection that was recorded.
            again.sendall(bytes(recorded[GREETING + HELLO :]))
            answered = received(again)
    if not answered:
        raise Refused(f"{len(recorded)} bytes replayed, the handshake ends at its second command")


def copy(source: socket.socket, target: socket.socket, kept: bytearray | None) -> None:
    """Copy bytes until one side closes."""
    try:
        while data := source.recv(1 << 16):
            if kept is not None:
                kept += data
            target.sendall(data)
    except OSError:
        pass
    finally:
        for side in (source, target):
            side.close()


def received(connection: socket.socket) -> bytes:
    """Return what comes until the end, or silence."""
    data = b""
    try:
        while part := connection.recv(1 << 16):
            data += part
    except OSError:
        pass
    return data


# Agents and HTTP


def read_agent(plan: Plan, folder: str) -> None:
    """Ask every host agent for weights, without the run's secret; without certificates for no `folder`."""
    told = ""
    for agent in plan.agents:
        transport = TlsTransport(PeerTls(plan.folder(folder))) if folder else Transport()
        try:
            channel = transport.connect(agent, WAIT_S)
            try:
                nonce = frames.receive(channel, frames.NONCE_BYTES)
                request = host_agent_pb2.ReadRequest(protocol=frames.PROTOCOL, run_id="x", manifest=True, proof=nonce)
                frames.send_request(channel, request)
                kind, _, length = frames.receive_head(channel)
                said = frames.receive(channel, length).decode(errors="replace")
            finally:
                channel.close()
        except (Unavailable, PacelineError) as error:
            told = str(error)
            continue
        if kind != Kind.REFUSED:
            return
        told = said
    raise Refused(f"{len(plan.agents)} agents: {told[:200]}")


def get(plan: Plan, url: str, token: str = "", folder: str = "person") -> None:
    """Get a page over TLS. Raises Refused for 401 and 403."""
    context = ssl.create_default_context(cafile=str(Path(plan.folders[folder]) / "ca.crt"))
    headers = {"Authorization": f"Bearer {plan.tokens[token]}"} if token else {}
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S, context=context) as answer:
            answer.read()
    except urllib.error.HTTPError as error:
        if error.code not in (401, 403):
            raise
        raise Refused(f"{error.code}: {error.read().decode()[:200]}") from None


def probes(plan: Plan, run_id: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield all probes by name, in order."""
    ports = {"people": plan.people, "workers": plan.coordinator}
    yield (
        "control: a person lists runs",
        lambda: list_runs(plan.people, plan.tokens["viewer"], plan.folder("person")),
    )
    yield "control: a worker joins and leaves", lambda: join(plan, "insider", "worker")
    for port, address in ports.items():
        yield f"no TLS, port of {port}", lambda at=address: list_runs(at, plan.tokens["viewer"], None)
    yield "no certificate", lambda: join(plan, "person", "worker")
    for name in ("other-authority", "expired"):
        yield f"certificate: {name}", lambda name=name: join(plan, name, "worker")
    yield "a coordinator's certificate joins", lambda: join(plan, "wrong-role", "worker")
    yield (
        "a worker without certificate at the people's port",
        lambda: join(plan, "person", "worker", address=plan.people),
    )
    yield "wrong token joins", lambda: join(plan, "insider", "wrong")
    yield "no token joins", lambda: join(plan, "insider", "none")
    yield "a viewer's token joins", lambda: join(plan, "insider", "viewer")
    yield "a revoked token joins", lambda: join(plan, "insider", "revoked")
    yield "an expired token joins", lambda: join(plan, "insider", "expired")
    for token in ("wrong", "none", "revoked", "expired", "viewer", "worker", "scraper"):
        yield f"submits with token: {token}", lambda token=token: submit(plan, token)
    yield "another submitter cancels the run", lambda: cancel_run(plan, "submitter", run_id)
    for path in plan.links:
        yield f"names a secret: {path}", lambda path=path: submit_link(plan, path)
    yield "a worker with the id of another", lambda: join(plan, "insider", "worker", plan.victim)
    yield "control: a member asks the exchange", lambda: ask_as(plan)
    yield "a member speaks for another", lambda: ask_as(plan, speaks_for=plan.victim)
    yield "a foreign peer without CURVE", lambda: ask_as(plan, keys="none")
    yield "a foreign peer with a key of its own", lambda: ask_as(plan, keys="foreign")
    yield "a peer that has left", lambda: ask_after_leaving(plan)
    yield "a replayed connection", lambda: replay_member(plan)
    for folder in ("", "other-authority", "expired", "wrong-role", "insider"):
        yield f"reads weights: {folder or 'no TLS'}", lambda folder=folder: read_agent(plan, folder)
    yield "control: a scraper reads metrics", lambda: get(plan, plan.metrics, "scraper")
    yield "control: a submitter lists models", lambda: get(plan, plan.http, "submitter")
    for token in ("", "wrong", "worker", "revoked"):
        yield f"metrics with token: {token or 'none'}", lambda token=token: get(plan, plan.metrics, token)
    for token in ("", "wrong", "scraper", "revoked"):
        yield f"completions with token: {token or 'none'}", lambda token=token: get(plan, plan.http, token)


def ask_as(plan: Plan, speaks_for: str = "", keys: str = "own") -> None:
    """Join, and send a request to the exchange, by the own name or another's, with the own keys, others or none."""
    with Control(plan, "insider", "worker", f"insider-{uuid.uuid4().hex[:8]}") as control:
        pairs = {
            "own": (control.public_key, control.secret_key),
            "foreign": zmq.curve_keypair(),
            "none": None,
        }
        request = control.request(speaks_for or control.member_id)
        ask_exchange(endpoint_of(plan, control.welcome), request, control.welcome.exchange_key, pairs[keys])


def ask_after_leaving(plan: Plan) -> None:
    """Send a request with the keys and the secret of a member that has left."""
    with Control(plan, "insider", "worker", f"insider-{uuid.uuid4().hex[:8]}") as control:
        pass
    keys = (control.public_key, control.secret_key)
    request = control.request(control.member_id)
    ask_exchange(endpoint_of(plan, control.welcome), request, control.welcome.exchange_key, keys)


def stay(plan: Plan) -> None:
    """Join, and stay until the coordinator ends the stream."""
    control = Control(plan, "insider", "short-lived", "insider-revoked")
    print(json.dumps({"joined": time.time()}), flush=True)
    said = control.until_ended()
    print(json.dumps({"ended": time.time(), "said": said}), flush=True)


def main(path: str, *options: str) -> None:
    """Run all probes and print a line for each."""
    document = json.loads(Path(path).read_text())
    run_id = document.pop("run_id")
    if "--stay" in options:
        stay(Plan(**document))
        return
    for name, probe in probes(Plan(**document), run_id):
        began_s, is_refused, said = time.monotonic(), False, ""
        try:
            probe()
        except Refused as refused:
            is_refused, said = True, str(refused)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        seconds = round(time.monotonic() - began_s, 2)
        print(json.dumps({"name": name, "refused": is_refused, "said": said, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
