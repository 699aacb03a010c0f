"""A rank's versions in its host's memory, across the deaths of its host's relays."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest
import torch
from host_relays import RUN, LocalClient, content, layout

from paceline.errors import Unavailable
from paceline.groups import Version
from paceline.v1 import host_agent_pb2
from paceline.weights.hosts.relay import Relay
from paceline.weights.hosts.segment import HostSegment
from paceline.weights.hosts.stage import RankStage
from paceline.weights.hosts.transport import Transport

V1, V2 = Version(1, 1), Version(1, 2)
WAIT_S = 60.0


class Client:
    """The interface of `RelayClient`; the test replaces the relay. `sent` names all requests, in their order."""

    def __init__(self) -> None:
        self.forget()
        self.sent: list[str] = []
        self._local: LocalClient | None = None

    def forget(self) -> None:
        self.on_connected, self.on_reply = (lambda: None), (lambda reply, fd: None)

    def connect(self, relay: Relay) -> None:
        local = LocalClient(relay)
        self._local, earlier = local, self._local
        if earlier is not None:
            earlier.connection.close()
        threading.Thread(target=self._follow, args=(local,), daemon=True).start()

    def send(self, request: host_agent_pb2.AgentRequest) -> None:
        if self._local is None:
            raise Unavailable("no relay")
        self.sent.append(request.WhichOneof("request") or "")
        self._local.connection.send(request)

    def close(self) -> None:
        local, self._local = self._local, None
        if local is not None:
            local.connection.close()

    def _follow(self, local: LocalClient) -> None:
        self.on_connected()
        try:
            while True:
                received = local.connection.receive(host_agent_pb2.AgentReply, None)
                assert received is not None
                self.on_reply(*received)
        except Unavailable:
            pass


class Ranks:
    """The ranks of one host."""

    def __init__(self, number: int) -> None:
        self.relays: list[Relay] = []
        self.clients = [Client() for _ in range(number)]
        self.staged: queue.Queue[tuple[int, Version]] = queue.Queue()
        self.write_begun, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        self.replace_relay()
        self.stages = [self._stage(index, client) for index, client in enumerate(self.clients)]

    def _stage(self, index: int, client: Client) -> RankStage:
        return RankStage(
            client,  # type: ignore[arg-type]
            layout(),
            source=0,
            local_ranks=len(self.clients),
            token=b"t" * 32,
            on_staged=lambda version, digests: self.staged.put((index, version)),
            on_held=lambda held, segment: None,
            on_replaced=lambda: None,
        )

    def replace_relay(self) -> None:
        self.relays.append(Relay(Transport(), "127.0.0.1"))
        for client in self.clients:
            client.connect(self.relays[-1])

    def publish(self, index: int, version: Version) -> None:
        def write(segment: HostSegment) -> None:
            flat = segment.flat()
            self.write_begun.set()
            assert self.go_on.wait(WAIT_S)
            part = flat.numel() // len(self.clients)
            data = torch.frombuffer(bytearray(content(version, flat.numel())), dtype=torch.uint8)
            mine = slice(index * part, None if index + 1 == len(self.clients) else (index + 1) * part)
            flat[mine] = data[mine]

        self.stages[index].publish(version, write)

    def all_staged(self, version: Version) -> None:
        waiting = set(range(len(self.clients)))
        while waiting:
            index, staged = self.staged.get(timeout=WAIT_S)
            if staged == version:
                waiting.discard(index)

    def held(self, version: Version) -> bytes:
        held = self.relays[-1].versions.find(RUN, version)
        assert held is not None
        return bytes(held.memory[: layout().layout.total_bytes])

    def close(self) -> None:
        for stage, client in zip(self.stages, self.clients, strict=True):
            stage.close()
            client.close()
        for relay in self.relays:
            relay.close()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks(2)
    yield made
    made.close()


def test_another_relay_gets_the_newest_version_from_the_memory_of_the_one_that_died(ranks: Ranks) -> None:
    for version in (V1, V2):
        for index in range(2):
            ranks.publish(index, version)
        ranks.all_staged(version)
    expected = ranks.held(V2)
    assert expected == content(V2, len(expected))
    ranks.replace_relay()
    ranks.all_staged(V2)
    assert ranks.held(V2) == expected
    assert ranks.relays[-1].versions.find(RUN, V1) is None


def test_a_version_published_to_another_relay_is_not_begun_again(ranks: Ranks) -> None:
    for index in range(2):
        ranks.publish(index, V1)
    ranks.all_staged(V1)
    for client in ranks.clients:
        client.close()
    publishing = [threading.Thread(target=ranks.publish, args=(index, V2)) for index in range(2)]
    for thread in publishing:
        thread.start()
    ranks.replace_relay()
    ranks.all_staged(V2)
    for thread in (*publishing, *(t for t in threading.enumerate() if t.name == "weights-again")):
        thread.join(WAIT_S)
        assert not thread.is_alive()
    expected = ranks.held(V2)
    assert expected == content(V2, len(expected))
    for client in ranks.clients:
        # Beginning it again would drop what the other rank has written meanwhile.
        assert client.sent.count("begin") <= 3, client.sent
        assert client.sent[client.sent.index("layout", 1) :].count("begin") == 1


def test_a_version_that_is_written_while_the_relay_dies_is_staged_with_the_next_one(ranks: Ranks) -> None:
    ranks.publish(1, V1)
    ranks.write_begun.clear()
    ranks.go_on.clear()
    publishing = threading.Thread(target=ranks.publish, args=(0, V1))
    publishing.start()
    assert ranks.write_begun.wait(WAIT_S)
    ranks.replace_relay()
    ranks.go_on.set()
    publishing.join(WAIT_S)
    ranks.all_staged(V1)
    expected = ranks.held(V1)
    assert expected == content(V1, len(expected))
