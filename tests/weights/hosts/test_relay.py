"""A host's relay, as its workers and learner ranks see it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from host_relays import RUN, WAIT_S, LearnerHost, LocalClient, address, content, layout, message, plan

from paceline.groups import Version
from paceline.rate_limited_log import RateLimitedLog
from paceline.v1 import host_agent_pb2
from paceline.weights.hosts import frames, sending
from paceline.weights.hosts.relay import Relay
from paceline.weights.hosts.transport import Transport

V1, V2 = Version(1, 1), Version(1, 2)


@pytest.fixture
def learner() -> Iterator[LearnerHost]:
    made = LearnerHost(layout())
    yield made
    made.close()


@pytest.fixture
def relay() -> Iterator[Relay]:
    made = Relay(Transport(), "127.0.0.1")
    yield made
    made.close()


def test_a_version_reaches_a_host_once_and_all_its_workers(learner: LearnerHost, relay: Relay) -> None:
    workers = [LocalClient(relay) for _ in range(3)]
    announced = learner.stage(V1)
    segments = []
    for worker in workers:
        worker.send(plan=plan(announced))
        held, segment = worker.complete(V1)
        with segment.reading(held.generation):
            assert bytes(segment.memory()[:1000]) == content(V1, 1000)
        segments.append(segment.identity)
        worker.connection.close()
    assert len(set(segments)) == 1
    assert learner.relays[0].sender.sent_bytes == learner.manifest.size_bytes


def test_a_worker_of_the_learner_s_host_reads_what_the_ranks_wrote(learner: LearnerHost) -> None:
    worker = LocalClient(learner.relays[0])
    worker.send(plan=plan(learner.stage(V1)))
    held, segment = worker.complete(V1)
    assert held.transfer.received_bytes == 0
    with segment.reading(held.generation):
        assert bytes(segment.memory()[:1000]) == content(V1, 1000)
    worker.connection.close()
    assert learner.relays[0].sender.sent_bytes == 0


def test_each_plan_is_answered_with_the_complete_version_also_one_that_was_told_before(
    learner: LearnerHost,
) -> None:
    worker = LocalClient(learner.relays[0])
    worker.send(plan=plan(learner.stage(V1)))
    worker.complete(V1)
    announced = learner.stage(V2)
    worker.complete(V2)  # the relay has it before the coordinator knows
    for _ in range(2):
        worker.send(plan=plan(announced))
        worker.complete(V2)
    worker.connection.close()


def test_a_version_is_staged_when_the_last_rank_of_the_host_has_written(relay: Relay) -> None:
    ranks = [LocalClient(relay) for _ in range(2)]
    for rank in ranks:
        stage = host_agent_pb2.StageLayout(run_id=RUN, manifest=layout().to_bytes(), local_ranks=2)
        rank.send(layout=stage)
        rank.send(begin=host_agent_pb2.StageBegin(run_id=RUN, version=message(V1)))
        rank.reply(lambda reply: reply.WhichOneof("reply") == "buffer")
    ranks[0].send(end=host_agent_pb2.StageEnd(run_id=RUN, version=message(V1)))
    ranks[0].send(alive=host_agent_pb2.Alive(number=7))
    reply, _ = ranks[0].reply(lambda reply: True)
    assert reply.alive.number == 7  # and nothing of a staged version before it
    ranks[1].send(end=host_agent_pb2.StageEnd(run_id=RUN, version=message(V1)))
    for rank in ranks:
        reply, _ = rank.reply(lambda reply: reply.WhichOneof("reply") == "staged")
        assert len(reply.staged.digests) == len(layout().pieces)
        rank.connection.close()


def test_a_rank_that_dies_while_it_writes_leaves_no_version(relay: Relay) -> None:
    rank = LocalClient(relay)
    rank.send(layout=host_agent_pb2.StageLayout(run_id=RUN, manifest=layout().to_bytes(), local_ranks=1))
    rank.send(begin=host_agent_pb2.StageBegin(run_id=RUN, version=message(V1)))
    rank.reply(lambda reply: reply.WhichOneof("reply") == "buffer")
    assert relay.versions.find(RUN, V1) is not None
    rank.connection.close()
    with relay.versions.changed:
        assert relay.versions.changed.wait_for(lambda: relay.versions.find(RUN, V1) is None, 30)


@pytest.mark.parametrize(
    "request_fields",
    [
        {"layout": host_agent_pb2.StageLayout(run_id=RUN, manifest=b"{}")},
        {"layout": host_agent_pb2.StageLayout(run_id="another", manifest=layout().to_bytes())},
        {"layout": host_agent_pb2.StageLayout(run_id=RUN, manifest=layout().to_bytes(), source=5)},
        {"begin": host_agent_pb2.StageBegin(run_id=RUN, version=message(V1))},
        {"end": host_agent_pb2.StageEnd(run_id=RUN, version=message(V1))},
        {},
    ],
)
def test_a_request_that_makes_no_sense_is_refused_and_the_relay_goes_on(
    learner: LearnerHost, request_fields: dict[str, object]
) -> None:
    client = LocalClient(learner.relays[0])
    client.send(**request_fields)
    reply, _ = client.reply(lambda reply: reply.WhichOneof("reply") == "refusal")
    assert reply.refusal.message
    client.send(plan=plan(learner.stage(V2)))
    client.complete(V2)
    client.connection.close()


def read_as_a_stranger(relay: Relay) -> bytes:
    """Ask a relay for a manifest with a wrong proof; return its answer."""
    channel = Transport().connect(address(relay), WAIT_S)
    try:
        nonce = frames.receive(channel, frames.NONCE_BYTES)
        request = host_agent_pb2.ReadRequest(protocol=frames.PROTOCOL, run_id=RUN, manifest=True, proof=nonce)
        frames.send_request(channel, request)
        kind, _, length = frames.receive_head(channel)
        assert kind == frames.Kind.REFUSED
        return frames.receive(channel, length)
    finally:
        channel.close()


def test_readers_of_the_present_run_alone_are_admitted(
    learner: LearnerHost, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "seldom", RateLimitedLog(logging.getLogger(sending.__name__), 0.0))
    (relay,) = learner.relays
    for _ in range(2):
        assert b"no proof that its sender belongs to run" in read_as_a_stranger(relay)
    assert "refused a reader at 127.0.0.1:" in caplog.text
    sender, nonce = relay.sender, b"n" * frames.NONCE_BYTES

    def refusal(run_id: str, secret: bytes) -> str:
        request = host_agent_pb2.ReadRequest(
            protocol=frames.PROTOCOL, run_id=run_id, manifest=True, proof=frames.proof(secret, nonce)
        )
        return sender._refusal(request, nonce)

    sender.admit_readers_of("a", b"secret a")
    assert refusal("a", b"secret a") == ""
    assert "no proof" in refusal("a", b"another")
    sender.admit_readers_of("b", b"secret b")
    assert "no proof" in refusal("a", b"secret a")
    assert "no proof" in refusal("a", b"secret b")
    assert refusal("b", b"secret b") == ""
    sender.admit_readers_of("c", b"")
    assert "no proof" in refusal("c", b"")
