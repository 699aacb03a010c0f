"""The load of benchmarks/exchange.py: workers that speak the real protocol and compute nothing.

Every rollout worker is a member with a gRPC stream and a DEALER socket of its own. All sockets are driven by one loop
around one poller, so that the load takes as little of the machine as it can from the coordinator: a group's bytes are
made once for each policy version and sent again and again under other group ids.

  members   one thread, an asyncio loop: hello, heartbeats, acknowledged versions
  exchange  the calling thread: leases, groups, scores, batches, receipts
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import zmq
from zmq.utils import z85

from paceline.calls.proof import AioProver
from paceline.calls.token import known_token
from paceline.groups import Completion, Group, VersionSpan
from paceline.services.common.worker.membership import CONNECT
from paceline.tls.channels import open_aio_channel
from paceline.tls.folder import tls_folder
from paceline.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import PROTOCOL, encode_result

COMPLETIONS = 4
BYTES_PER_TOKEN = 12
"""Token id, log-probability, and 4 characters of text."""

LEARNER = "learner-0"
REWARD_WORKERS = 2
CHANNELS = 8
PUBLISH_S = 1.0
"""Pause between two versions that the workers acknowledge, as a publisher needs it."""

REPLIES_AT_ONCE = 32

RETRY_S = 0.2
"""Pause of a worker that was given no lease."""


class Members:
    """The control streams of all workers."""

    def __init__(self, address: str, names: dict[str, common_pb2.Role.ValueType]):
        self.run_id = ""
        self.session = 0
        self.term = 0
        self.endpoint = ""
        self.keys: dict[str, tuple[bytes, bytes]] = {}
        """Public and secret CURVE keys in Z85, where the exchange is encrypted."""
        self.exchange_key = b""
        self.secrets: dict[str, bytes] = {}
        """By member id; complete when `ready` is set."""
        self.ready = threading.Event()
        self._step = 0
        """Step of the newest version."""
        self._address = address
        self._names = names
        self._outboxes: dict[str, asyncio.Queue[worker_pb2.ConnectRequest]] = {}
        self._waiting = set(names)
        self._offered: dict[str, int] = {}
        """Newest version that the learner offered each rollout worker that an epoch has named."""
        self._held: dict[str, int] = {}
        """Newest version that each rollout worker was offered."""
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()

    def acknowledge(self, step: int) -> None:
        """Every rollout worker holds version `step` now. From any thread."""
        self._loop.call_soon_threadsafe(self._acknowledge, step)

    def all_hold(self, step: int) -> bool:
        """Return whether the coordinator has offered version `step` to every rollout worker. May be called from any
        thread."""
        return all(
            self._held.get(name, -1) >= step for name, role in self._names.items() if role == common_pb2.ROLE_ROLLOUT
        )

    def stop(self) -> None:
        """End the streams."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        # Channels with the same options would share a connection.
        options = [[("paceline.channel", index)] for index in range(CHANNELS)]
        channels = [open_aio_channel(self._address, option) for option in options]
        streams = [
            asyncio.create_task(self._stream(channels[index % CHANNELS], name, role))
            for index, (name, role) in enumerate(self._names.items())
        ]
        await self._stop.wait()
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        for channel in channels:
            await channel.close()

    async def _stream(self, channel: grpc.aio.Channel, name: str, role: common_pb2.Role.ValueType) -> None:
        outbox = self._outboxes[name] = asyncio.Queue()
        hello = worker_pb2.Hello(role=role, member_id=name, protocol=PROTOCOL)
        if tls_folder() is not None:
            self.keys[name] = zmq.curve_keypair()
            hello.exchange_key = z85.decode(self.keys[name][0])
        outbox.put_nowait(worker_pb2.ConnectRequest(hello=hello))
        signed = await AioProver(channel, self._address, known_token(self._address)).sign(CONNECT)
        async for directive in worker_pb2_grpc.WorkerServiceStub(channel).Connect(
            _reports(outbox), metadata=signed.metadata
        ):
            match directive.WhichOneof("directive"):
                case "welcome":
                    self.term, self.endpoint = directive.welcome.term, directive.welcome.exchange_endpoint
                    self.exchange_key = directive.welcome.exchange_key
                    self.secrets[name] = directive.welcome.secret
                case "run":
                    self.run_id = directive.run.run_id
                    self.session = max(self.session, directive.run.session)
                    report = worker_pb2.RunReport(run_id=self.run_id, session=directive.run.session)
                    outbox.put_nowait(worker_pb2.ConnectRequest(run_report=report))
                    self._waiting.discard(name)
                    if not self._waiting:
                        self.ready.set()
                case "epoch":
                    self._offer(directive.epoch.member_ids)
                case "weight_offer":
                    self._held[name] = directive.weight_offer.version.step
                    outbox.put_nowait(self._ack(name, directive.weight_offer.version.step))

    def _acknowledge(self, step: int) -> None:
        self._step = step
        self._offer(list(self._offered))

    def _offer(self, names: Sequence[str]) -> None:
        """Offer the newest version, as the learner, to members without an offer, which acknowledge it at
        once."""
        for name in names:
            if self._offered.get(name) != self._step:
                self._offered[name] = self._step
                offer = worker_pb2.WeightOffer(run_id=self.run_id, member_id=name)
                offer.version.session, offer.version.step = 1, self._step
                self._outboxes[LEARNER].put_nowait(worker_pb2.ConnectRequest(weight_offer=offer))

    def _ack(self, name: str, step: int) -> worker_pb2.ConnectRequest:
        ack = worker_pb2.WeightAck(run_id=self.run_id, member_id=name, ok=True)
        ack.version.session, ack.version.step = 1, step
        return worker_pb2.ConnectRequest(weight_ack=ack)


async def _reports(
    outbox: asyncio.Queue[worker_pb2.ConnectRequest],
) -> AsyncIterator[worker_pb2.ConnectRequest]:
    while True:
        try:
            async with asyncio.timeout(1.0):
                report = await outbox.get()
        except TimeoutError:
            report = worker_pb2.ConnectRequest(heartbeat=worker_pb2.Heartbeat())
        yield report


def _random_completion(seed: int, tokens: int) -> Completion:
    """Without its version."""
    random = np.random.default_rng(seed)
    return Completion(
        random.integers(0, 50_000, tokens, dtype=np.int32),
        random.normal(-1, 0.1, tokens).astype(np.float32),
        (),
        "stop",
        "".join(map(chr, random.integers(97, 123, 4 * tokens))),
    )


class Load:
    """The traffic over the exchange: a lease, a group and the next lease for each rollout worker, as fast as they are answered
    or so many groups a second; with `whole_life` also scores, batches and receipts.
    """

    def __init__(
        self,
        members: Members,
        workers: int,
        group_bytes: int,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        whole_life: bool,
        groups_per_s: float | None = None,
    ):
        self.lease_s: list[float] = []
        """Seconds from every lease request to its answer."""
        self.committed = 0
        """Groups that were acknowledged."""
        self.step = 0
        """Steps trained."""
        self._members = members
        self._interval_s = 1 / groups_per_s if groups_per_s else 0.0
        """Between the groups of all workers together."""
        self._next_s = time.perf_counter()
        self._generating: deque[tuple[float, zmq.Socket[bytes], pb.Lease]] = deque()
        """The end of a group, with its worker."""
        self._tokens = group_bytes // (COMPLETIONS * BYTES_PER_TOKEN)
        self._completions = [_random_completion(seed, self._tokens) for seed in range(COMPLETIONS)]
        self._version = -1
        self._published, self._publish_s = 0, time.perf_counter()
        self._switch(0)
        self._poller = zmq.Poller()
        self._on_reply: dict[zmq.Socket[bytes], Callable[[zmq.Socket[bytes], pb.ExchangeReply, Any], None]] = {}
        self._names: dict[zmq.Socket[bytes], str] = {}
        self._asked_s: dict[zmq.Socket[bytes], float] = {}
        self._arrived_s = 0.0
        """Time at which the current reply was received."""
        self._arrived: deque[tuple[zmq.Socket[bytes], list[zmq.Frame], float]] = deque()
        self._retries: deque[tuple[float, zmq.Socket[bytes]]] = deque()
        self._context = context
        for index in range(workers):
            self._ask_lease(self._connect(f"rollout-{index}", self._on_rollout))
        if not whole_life:
            return
        self._unscored: dict[zmq.Socket[bytes], int] = {}
        for index in range(REWARD_WORKERS):
            self._ask_task(self._connect(f"reward-{index}", self._on_reward))
        self._ask_batch(self._connect(LEARNER, self._on_learner))

    def run_until(self, done: Callable[[], bool]) -> None:
        """Answer replies until `done`."""
        while not done():
            # Arrivals are noted every few replies, so that waiting in this process does not count as the exchange's.
            for socket, _ in self._poller.poll(0 if self._arrived else 2):
                self._arrived.append((socket, socket.recv_multipart(copy=False), time.perf_counter()))
            for _ in range(min(len(self._arrived), REPLIES_AT_ONCE)):
                socket, (header, *payloads), self._arrived_s = self._arrived.popleft()
                self._on_reply[socket](socket, pb.ExchangeReply.FromString(header.buffer), payloads)
            now_s = time.perf_counter()
            while self._retries and self._retries[0][0] <= now_s:
                self._ask_lease(self._retries.popleft()[1])
            while self._generating and self._generating[0][0] <= now_s:
                self._send_group(*self._generating.popleft()[1:])

    def close(self) -> None:
        """Close the sockets."""
        for socket in self._names:
            socket.close()

    def _connect(self, name: str, on_reply: Any) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        if self._members.exchange_key:
            socket.curve_publickey, socket.curve_secretkey = self._members.keys[name]
            socket.curve_serverkey = z85.encode(self._members.exchange_key)
        socket.connect(self._members.endpoint)
        self._poller.register(socket, zmq.POLLIN)
        self._on_reply[socket], self._names[socket] = on_reply, name
        return socket

    def _send(self, socket: zmq.Socket[bytes], payloads: Sequence[bytes] = (), **body: Any) -> None:
        request = pb.ExchangeRequest(
            protocol=PROTOCOL,
            term=self._members.term,
            run_id=self._members.run_id,
            session=self._members.session,
            member_id=self._names[socket],
            secret=self._members.secrets[self._names[socket]],
            request_id=1,
            **body,
        )
        socket.send_multipart([request.SerializeToString(), *payloads], copy=False)

    # Rollout

    def _publish(self, step: int) -> None:
        """Version `step` is on its way to the workers."""
        self._members.acknowledge(step)
        self._published, self._publish_s = step, time.perf_counter()

    def _switch(self, step: int) -> None:
        """From now on groups are of version `step`."""
        self._version = step
        span = VersionSpan(1, step, 0, self._tokens)
        completions = [replace(completion, spans=(span,)) for completion in self._completions]
        prompt_ids = np.arange(1, 20, dtype=np.int32)
        self._payloads = encode_result(prompt_ids, completions)
        self._digest = Group(0, prompt_ids, tuple(completions)).digest()

    def _ask_lease(self, socket: zmq.Socket[bytes]) -> None:
        self._asked_s[socket] = time.perf_counter()
        self._send(socket, lease=pb.LeaseRequest(room=COMPLETIONS, held=pb.Held()))

    def _on_rollout(self, socket: zmq.Socket[bytes], reply: pb.ExchangeReply, payloads: Any) -> None:
        if reply.WhichOneof("body") != "lease":
            assert reply.status == pb.REPLY_STATUS_COMMITTED, reply.message
            self.committed += 1
            self._ask_lease(socket)
            return
        self.lease_s.append(self._arrived_s - self._asked_s[socket])
        if not reply.lease.leases:
            self._retries.append((self._arrived_s + RETRY_S, socket))
            return
        (lease,) = reply.lease.leases
        if not self._interval_s:
            self._send_group(socket, lease)
            return
        self._next_s = max(self._next_s + self._interval_s, self._arrived_s)
        self._generating.append((self._next_s, socket, lease))

    def _send_group(self, socket: zmq.Socket[bytes], lease: pb.Lease) -> None:
        group = pb.GroupResult(group_id=lease.group_id, attempt=lease.attempt, digest=self._digest)
        self._send(socket, self._payloads, group=group)

    # Reward

    def _ask_task(self, socket: zmq.Socket[bytes]) -> None:
        self._unscored[socket] = 0
        self._send(socket, task=pb.TaskRequest(room=64, wait_s=10.0))

    def _on_reward(self, socket: zmq.Socket[bytes], reply: pb.ExchangeReply, payloads: Any) -> None:
        if reply.WhichOneof("body") != "task":
            assert reply.status == pb.REPLY_STATUS_COMMITTED, reply.message
            self._unscored[socket] -= 1
        for task in reply.task.tasks:
            self._unscored[socket] += 1
            score = pb.ScoreResult(
                group_id=task.group_id,
                attempt=task.attempt,
                digest=task.digest,
                rewards=[0.0, 1.0] * (COMPLETIONS // 2),
                functions=["exact_match"],
            )
            self._send(socket, score=score)
        if self._unscored[socket] == 0:
            self._ask_task(socket)

    # Learner

    def _ask_batch(self, socket: zmq.Socket[bytes]) -> None:
        self._send(socket, batch=pb.BatchRequest(step=self.step, rank=0, world_size=1, wait_s=10.0))

    def _on_learner(self, socket: zmq.Socket[bytes], reply: pb.ExchangeReply, payloads: Any) -> None:
        if reply.WhichOneof("body") == "batch":
            if reply.batch.state != pb.BATCH_STATE_READY:
                self._ask_batch(socket)
                return
            groups = [
                pb.BatchGroup(group_id=g.group_id, digest=g.digest, scores_digest=g.scores_digest)
                for g in reply.batch.groups
            ]
            tokens = len(groups) * COMPLETIONS * self._tokens
            receipt = pb.Receipt(step=self.step, rank=0, world_size=1, groups=groups, tokens=tokens)
            self._send(socket, receipt=receipt)
            return
        assert reply.status == pb.REPLY_STATUS_COMMITTED, reply.message
        self.step += 1
        if self._version < self._published:
            if self._members.all_hold(self._published):
                self._switch(self._published)
        elif time.perf_counter() - self._publish_s > PUBLISH_S:
            self._publish(self.step)
        self._ask_batch(socket)
