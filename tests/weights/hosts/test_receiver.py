"""A worker loads the versions that its host's relay brings."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping

import pytest
import torch
from host_relays import LearnerHost, LocalClient, content, layout, numbers, plan

from paceline.errors import InvalidInput, Unavailable, WireError
from paceline.groups import Version
from paceline.v1 import host_agent_pb2, worker_pb2
from paceline.weights.hosts.members import HostMembers
from paceline.weights.hosts.receiver import HostReceiver, check_plan
from paceline.weights.hosts.relay import Relay
from paceline.weights.hosts.transport import Transport
from paceline.weights.progress import PublishResult

V1, V2, V3 = (Version(1, step) for step in (1, 2, 3))
WAIT_S = 60.0
LONGEST_SILENCE_S = 1.0


class Client(LocalClient):
    """The interface of `RelayClient`, without a process to start."""

    def __init__(self, relay: Relay) -> None:
        super().__init__(relay)
        self.told: queue.Queue[Version] = queue.Queue()
        """Complete versions that the relay has reported, after the receiver has got the report."""
        self.forget()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def forget(self) -> None:
        self.on_connected, self.on_reply = (lambda: None), (lambda reply, fd: None)

    def send(self, request: host_agent_pb2.AgentRequest) -> None:  # type: ignore[override]
        self.connection.send(request)

    def _follow(self) -> None:
        try:
            while True:
                received = self.connection.receive(host_agent_pb2.AgentReply, None)
                assert received is not None
                self.on_reply(*received)
                if received[0].held.complete:
                    self.told.put(numbers(received[0].held))
        except Unavailable:
            pass


class Worker:
    """A worker on a separate host unless `relay` is given, and its learner's host."""

    def __init__(self, learner: LearnerHost | None = None, relay: Relay | None = None) -> None:
        self.learner = learner or LearnerHost(layout())
        self.relay = relay or Relay(Transport(), "127.0.0.1")
        self.client = Client(self.relay)
        self.loaded: queue.Queue[tuple[Version, bytes]] = queue.Queue()
        self.acks: queue.Queue[tuple[Version, bool, str, worker_pb2.HostTransfer | None]] = queue.Queue()
        self.go_on, self.refusal = threading.Event(), ""
        self.go_on.set()
        self.receiver = self.receive()

    def receive(self) -> HostReceiver:
        return HostReceiver(
            run_id="run",
            client=self.client,  # type: ignore[arg-type]
            on_weights=self._load,
            on_ack=lambda *ack: self.acks.put(ack),
            on_relay=lambda: None,
        )

    def _load(self, version: Version, tensors: Mapping[str, torch.Tensor]) -> None:
        self.loaded.put((version, bytes(tensors["t0"].numpy())))
        assert self.go_on.wait(WAIT_S)
        if self.refusal:
            raise InvalidInput(self.refusal)

    def publish(self, version: Version) -> None:
        self.receiver.take_plan(plan(self.learner.stage(version)), None)

    def close(self) -> None:
        self.receiver.close()
        self.client.connection.close()
        self.relay.close()
        self.learner.close()


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.close()


def test_a_version_is_loaded_as_the_learner_staged_it_and_acknowledged(worker: Worker) -> None:
    worker.publish(V1)
    version, ok, message, transfer = worker.acks.get(timeout=WAIT_S)
    assert (version, ok, message) == (V1, True, "")
    assert transfer is not None
    assert transfer.received_bytes == worker.learner.manifest.size_bytes
    assert worker.loaded.get_nowait() == (V1, content(V1, 1000))
    assert worker.receiver.held == V1
    assert worker.receiver.at_work == []


def test_while_one_is_loaded_the_next_ones_arrive_and_only_the_newest_follows(worker: Worker) -> None:
    worker.go_on.clear()
    worker.publish(V1)
    assert worker.loaded.get(timeout=WAIT_S)[0] == V1
    worker.publish(V2)
    worker.publish(V3)
    with worker.relay.versions.changed:
        assert worker.relay.versions.changed.wait_for(
            lambda: (n := worker.relay.versions.newest_complete()) is not None and n.version == V3, WAIT_S
        )
    assert [(p.version, p.phase) for p in worker.receiver.at_work] == [(V1, "loading")]
    worker.go_on.set()
    assert worker.acks.get(timeout=WAIT_S)[0] == V1
    newest = worker.acks.get(timeout=WAIT_S)
    while newest[0] != V3:  # the second may have been complete before the third was
        newest = worker.acks.get(timeout=WAIT_S)
    assert newest[1]


def test_a_swap_of_ten_times_the_longest_silence_is_served_once_with_one_transfer(worker: Worker) -> None:
    results: queue.Queue[PublishResult] = queue.Queue()
    now = {"s": 0.0}
    members = HostMembers(LONGEST_SILENCE_S, results.put, lambda: now["s"])
    members.set_members(1, ["m"])
    worker.go_on.clear()
    worker.publish(V1)
    members.publish(V1, worker.learner.manifest.size_bytes)
    assert worker.loaded.get(timeout=WAIT_S)[0] == V1
    for _ in range(20):  # a report in half of the longest silence each
        now["s"] += LONGEST_SILENCE_S / 2
        (progress,) = worker.receiver.at_work
        members.progress("m", progress.version, progress.received_bytes, progress.phase == "loading")
        with members._changed:
            members._changed.notify_all()
    assert results.empty()
    worker.go_on.set()
    version, ok, message, _ = worker.acks.get(timeout=WAIT_S)
    members.answer("m", version, ok, message)
    result = results.get(timeout=WAIT_S)
    assert (result.ok, result.version, result.attempt) == (True, V1, 1)
    assert worker.learner.relays[0].sender.sent_bytes == worker.learner.manifest.size_bytes
    assert worker.loaded.empty()
    members.close()


def test_a_refused_version_is_not_tried_again_and_the_next_one_is(worker: Worker) -> None:
    worker.refusal = "a NaN"
    worker.publish(V1)
    assert worker.acks.get(timeout=WAIT_S)[:3] == (V1, False, "a NaN")
    worker.refusal = ""
    worker.publish(V2)
    assert worker.acks.get(timeout=WAIT_S)[:2] == (V2, True)


def test_a_version_that_is_complete_before_its_plan_comes_is_loaded_with_the_plan() -> None:
    # Of two channels, the relay's socket and the control plane, either may be faster.
    learner = LearnerHost(layout())
    worker = Worker(learner, learner.relays[0])
    worker.publish(V1)
    assert worker.acks.get(timeout=WAIT_S)[:2] == (V1, True)
    announced = learner.stage(V2)
    assert worker.client.told.get(timeout=WAIT_S) == V1
    assert worker.client.told.get(timeout=WAIT_S) == V2
    assert worker.acks.empty()
    worker.receiver.take_plan(plan(announced), None)
    assert worker.acks.get(timeout=WAIT_S)[:2] == (V2, True)
    worker.close()


def test_a_worker_that_sets_its_run_up_again_gets_the_version_that_the_host_holds(worker: Worker) -> None:
    announced = plan(worker.learner.stage(V1))
    for _ in range(2):
        worker.receiver.take_plan(announced, None)
        assert worker.acks.get(timeout=WAIT_S)[:3] == (V1, True, "")
        worker.receiver.close()
        worker.receiver = worker.receive()


def test_the_same_plan_again_is_answered_again(worker: Worker) -> None:
    announced = plan(worker.learner.stage(V1))
    for message in ("", "already held"):
        worker.receiver.take_plan(announced, None)
        assert worker.acks.get(timeout=WAIT_S)[:3] == (V1, True, message)


def test_a_manifest_that_the_plan_does_not_vouch_for_is_never_loaded(worker: Worker) -> None:
    lie = plan(worker.learner.stage(V1))
    lie.manifest_sha256 = b"x" * 32
    worker.receiver.take_plan(lie, None)
    worker.publish(V2)
    assert worker.acks.get(timeout=WAIT_S)[:2] == (V2, True)


@pytest.mark.parametrize("change", [{"manifest_sha256": b"short"}, {"upstreams": []}])
def test_a_plan_that_no_coordinator_makes_is_refused(worker: Worker, change: dict[str, object]) -> None:
    made = plan(worker.learner.stage(V1))
    for name, value in change.items():
        made.ClearField(name)  # type: ignore[arg-type]
        if value:
            setattr(made, name, value)
    with pytest.raises(WireError):
        check_plan(made)
