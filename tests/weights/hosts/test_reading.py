"""Versions along a chain of hosts: verified, passed on at once, and read from another host if one is dead, lies or has
lost them."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from host_relays import TOKEN, WAIT_S, LearnerHost, LocalClient, address, content, layout, plan

from paceline.errors import Unavailable
from paceline.groups import Version
from paceline.weights.hosts import frames
from paceline.weights.hosts.frames import Kind
from paceline.weights.hosts.relay import Relay
from paceline.weights.hosts.transport import Channel, Transport

V1, V2, V3 = (Version(1, step) for step in (1, 2, 3))


class Site:
    """The learner's hosts, and others."""

    def __init__(self) -> None:
        self.relays: list[Relay] = []
        self.clients: list[LocalClient] = []
        self.learners: list[LearnerHost] = []

    def learner(self, hosts: int = 1) -> LearnerHost:
        self.learners.append(LearnerHost(layout(hosts=hosts)))
        return self.learners[-1]

    def host(self) -> tuple[Relay, LocalClient]:
        relay = Relay(Transport(), "127.0.0.1", silence_s=2.0)
        self.relays.append(relay)
        self.clients.append(LocalClient(relay))
        return relay, self.clients[-1]


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    yield made
    for client in made.clients:
        client.connection.close()
    for relay in made.relays:
        relay.close()
    for learner in made.learners:
        learner.close()


def loaded(client: LocalClient, version: Version) -> bytes:
    """The version's bytes, once the host has them."""
    held, segment = client.complete(version)
    with segment.reading(held.generation):
        return bytes(segment.memory())


@pytest.mark.parametrize("hosts", [1, 3])
def test_a_version_goes_down_the_chain_and_leaves_the_learner_once(site: Site, hosts: int) -> None:
    learner = site.learner(hosts)
    members = [site.host() for _ in range(3)]
    for version in (V1, V2, V3):
        announced = learner.stage(version)
        chain: list[list[str]] = []
        for position, (relay, client) in enumerate(members):
            client.send(plan=plan(announced, *reversed(chain), position=position))
            chain.append([address(relay)])
        for _, client in members:
            assert has_content(learner, client, version)
    sent = sum(relay.sender.sent_bytes for relay in learner.relays)
    assert sent == 3 * learner.manifest.size_bytes
    assert members[-1][0].sender.sent_bytes == 0


def has_content(learner: LearnerHost, client: LocalClient, version: Version) -> bool:
    """Return whether the host has the bytes that the learner staged."""
    data = loaded(client, version)
    expected = content(version, len(data))
    return all(data[one.begin : one.end] == expected[one.begin : one.end] for one in learner.manifest.owned)


def silent_host() -> tuple[socket.socket, str]:
    """A host that accepts connections and sends nothing, like a stopped process."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    return listener, f"127.0.0.1:{listener.getsockname()[1]}"


def test_a_dead_and_a_stopped_host_are_skipped(site: Site) -> None:
    learner, (_, client) = site.learner(), site.host()
    announced = learner.stage(V1)
    listener, stopped = silent_host()
    with listener:
        client.send(plan=plan(announced, ["127.0.0.1:9"], [stopped]))
        held, _ = client.complete(V1)
    assert held.transfer.skipped >= 2
    assert held.transfer.upstream == address(learner.relays[0])


def test_a_host_that_changes_bytes_is_read_no_further(site: Site) -> None:
    learner, (_, client) = site.learner(), site.host()
    announced = learner.stage(V1)
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)

    def lie() -> None:
        """Send the right manifest, and pieces of zeros."""
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            channel = Channel(connection, "liar", 5.0)
            channel.send(bytes(frames.NONCE_BYTES))
            request = frames.receive_request(channel)
            if request.manifest:
                frames.send_frame(channel, Kind.MANIFEST, data=learner.relays[0].versions._held[-1].manifest_bytes)
            else:
                size_bytes = learner.manifest.pieces[request.stream].size_bytes
                frames.send_frame(channel, Kind.PIECE, request.stream, bytes(size_bytes))
            channel.close()

    liar = threading.Thread(target=lie, daemon=True)
    liar.start()
    client.send(plan=plan(announced, [f"127.0.0.1:{listener.getsockname()[1]}"]))
    assert has_content(learner, client, V1)
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    liar.join(10)


def test_a_joiner_reads_from_a_neighbour_though_the_learner_is_gone(site: Site) -> None:
    learner, (first, client), (_, joiner) = site.learner(), site.host(), site.host()
    announced = learner.stage(V1)
    client.send(plan=plan(announced))
    client.complete(V1)
    learner.close()
    joiner.send(plan=plan(announced, [address(first)], position=1))
    held, _ = joiner.complete(V1)
    assert held.transfer.upstream == address(first)


def test_a_version_that_is_gone_everywhere_is_left_for_the_newer_one(site: Site) -> None:
    learner, (_, client) = site.learner(), site.host()
    first = learner.stage(V1)
    learner.stage(V2)
    newest = learner.stage(V3)  # took the memory of the first
    client.send(plan=plan(first))
    client.send(plan=plan(newest))
    assert has_content(learner, client, V3)


def test_a_plan_with_other_upstreams_redirects_a_version_under_way(site: Site) -> None:
    learner, (_, client) = site.learner(), site.host()
    announced = learner.stage(V1)
    lost = plan(announced)
    del lost.upstreams[:]
    lost.upstreams.add(addresses=["127.0.0.1:9"])
    client.send(plan=lost)
    client.reply(lambda reply: reply.WhichOneof("reply") == "held")  # it is being read, and no host has it
    client.send(plan=plan(announced))
    assert has_content(learner, client, V1)


def until_read(relay: Relay) -> None:
    """Wait until another host requests something from this one."""
    end_s = time.monotonic() + WAIT_S
    while not relay.sender._channels:
        assert time.monotonic() < end_s, "nobody asks"
        time.sleep(0.01)


def hosts_of_a_run(site: Site) -> tuple[LearnerHost, list[tuple[Relay, LocalClient]]]:
    """Return two hosts that hold a version, so that they answer each other."""
    learner, members = site.learner(), [site.host(), site.host()]
    announced = learner.stage(V1)
    for _, client in members:
        client.send(plan=plan(announced))
        client.complete(V1)
    return learner, members


def test_two_hosts_that_change_places_do_not_wait_for_each_other(site: Site) -> None:
    learner, ((first, client), (second, other)) = hosts_of_a_run(site)
    announced = learner.stage(V2)
    client.send(plan=plan(announced, [address(second)], position=1))
    until_read(second)
    other.send(plan=plan(announced, [address(first)], position=1))  # it comes before the first host's
    until_read(first)
    client.send(plan=plan(announced))
    assert has_content(learner, client, V2)
    assert has_content(learner, other, V2)


def test_a_host_that_goes_for_the_next_version_says_that_the_one_before_will_not_come(site: Site) -> None:
    learner, ((first, client), (second, other)) = hosts_of_a_run(site)
    announced = learner.stage(V2)
    client.send(plan=plan(announced, [address(second)], position=1))
    until_read(second)
    newest = learner.stage(V3)
    other.send(plan=plan(newest, [address(first)], position=1))
    client.send(plan=plan(newest))
    assert has_content(learner, client, V3)
    assert has_content(learner, other, V3)


def test_a_version_that_has_begun_and_stands_still_is_left_for_a_newer_one(site: Site) -> None:
    learner, (_, client) = site.learner(), site.host()
    announced, ended = learner.stage(V1), threading.Event()
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)

    def stand_still(connection: socket.socket) -> None:
        """Send the manifest, and then signs of life forever."""
        channel = Channel(connection, "waits", 5.0)
        channel.send(bytes(frames.NONCE_BYTES))
        if frames.receive_request(channel).manifest:
            data = learner.relays[0].versions._held[0].manifest_bytes
            frames.send_frame(channel, Kind.MANIFEST, data=data)
        with contextlib.suppress(Unavailable):
            while not ended.wait(0.05):
                frames.send_frame(channel, Kind.WAIT)
        channel.close()

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=stand_still, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    stuck = plan(announced)
    del stuck.upstreams[:]
    stuck.upstreams.add(addresses=[f"127.0.0.1:{listener.getsockname()[1]}"])
    stuck.max_wait_s = 0.5
    client.send(plan=stuck)
    client.reply(lambda reply: reply.WhichOneof("reply") == "held")
    client.send(plan=plan(learner.stage(V2)))
    assert has_content(learner, client, V2)
    ended.set()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


@pytest.mark.parametrize("token", [b"", b"x" * 32])
def test_nobody_reads_without_the_run_s_secret(site: Site, token: bytes) -> None:
    learner = site.learner()
    announced = learner.stage(V1)
    channel = Transport().connect(address(learner.relays[0]), 5.0)
    nonce = frames.receive(channel, frames.NONCE_BYTES)
    request = frames.host_agent_pb2.ReadRequest(
        protocol=frames.PROTOCOL,
        run_id="run",
        version=announced.version,
        proof=frames.proof(token, nonce),
        manifest=True,
    )
    frames.send_request(channel, request)
    kind, _, length = frames.receive_head(channel)
    assert kind == Kind.REFUSED
    assert b"no proof" in frames.receive(channel, length)
    channel.close()
    assert token != TOKEN


def test_what_is_no_request_ends_that_connection_only(site: Site) -> None:
    learner, (_, client) = site.learner(), site.host()
    channel = Transport().connect(address(learner.relays[0]), 5.0)
    frames.receive(channel, frames.NONCE_BYTES)
    channel.send(b"\xff" * 64)
    with pytest.raises(Unavailable):
        frames.receive(channel, 1)
    channel.close()
    client.send(plan=plan(learner.stage(V1)))
    client.complete(V1)
