"""The receiver against senders that die, stop, come late or send something else."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from paceline.errors import Conflict, Unavailable, WireError
from paceline.groups import Version
from paceline.rate_limited_log import unforeseen
from paceline.weights.host_weights import HostWeights
from paceline.weights.link import MEMBER, SENDER, WeightLink, form_link, serve_rendezvous
from paceline.weights.manifest import WeightManifest
from paceline.weights.offers import LinkOffer
from paceline.weights.packing import checksums, pack, plan
from rollout.weights.link_receiver import WeightReceiver

DEADLINE_S = 60.0
MAX_WAIT_S = 5.0
BUCKET_BYTES = 1 << 20
Ack = tuple[Version, bool, str]


class Engine:
    """A receiver with what it was asked to serve and what it answered."""

    def __init__(self, verify: bool = True) -> None:
        self.segments: list[tuple[int, int]] = []
        self.acks: queue.Queue[Ack] = queue.Queue()
        self.served: list[tuple[Version, float]] = []
        self.progress: queue.Queue[int] = queue.Queue()
        self.error: Exception | None = None
        self.receiver = WeightReceiver(
            run_id="run",
            max_wait_s=MAX_WAIT_S,
            on_weights=self.swap,
            on_ack=lambda version, ok, message: self.acks.put((version, ok, message)),
            on_progress=lambda version, size_bytes: self.progress.put(size_bytes),
            verify=verify,
        )

    def swap(self, version: Version, tensors: HostWeights) -> None:
        if self.error is not None:
            raise self.error
        tensors.verify()
        self.segments.append(tensors.segment.identity)
        self.served.append((version, float(tensors["weight"][-1])))

    def ack(self) -> Ack:
        return self.acks.get(timeout=DEADLINE_S)


class Sender:
    """A learner's side, driven by hand."""

    def __init__(self) -> None:
        self.store, self.port = serve_rendezvous("127.0.0.1", 0, MAX_WAIT_S)

    def offer(
        self,
        step: int,
        prefix: str,
        *,
        session: int = 0,
        attempt: int = 1,
        value: float = 1.0,
        size: int = 1 << 20,
    ) -> tuple[LinkOffer, torch.Tensor, WeightManifest]:
        tensors = {"weight": torch.full((size,), value)}
        manifest = plan(tensors, BUCKET_BYTES)
        flat = pack(tensors, manifest)
        manifest = manifest.with_checksums(checksums(flat, manifest))
        offer = LinkOffer(
            "run", 1, "m", attempt, "gloo", "127.0.0.1", self.port, prefix, session, step, manifest.to_bytes()
        )
        return offer, flat, manifest

    def form(self, prefix: str) -> WeightLink:
        return form_link(
            backend="gloo",
            store_host="127.0.0.1",
            store_port=self.port,
            prefix=prefix,
            rank=SENDER,
            max_wait_s=MAX_WAIT_S,
        )


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.receiver.close()


@pytest.fixture
def sender() -> Sender:
    return Sender()


def deliver(engine: Engine, sender: Sender, step: int, prefix: str, value: float) -> None:
    offer, flat, manifest = sender.offer(step, prefix, value=value)
    engine.receiver.offer(offer)
    sender.form(prefix).send(flat, manifest)
    assert engine.ack() == ((0, step), True, "")


def test_versions_arrive_one_after_another_over_one_link(engine: Engine, sender: Sender) -> None:
    offer, flat, manifest = sender.offer(1, "a", value=1.0)
    engine.receiver.offer(offer)
    link = sender.form("a")
    link.send(flat, manifest)
    assert engine.ack() == ((0, 1), True, "")
    offer, flat, manifest = sender.offer(2, "a", value=2.0)
    engine.receiver.offer(offer)
    link.send(flat, manifest)
    assert engine.ack() == ((0, 2), True, "")
    assert engine.served == [((0, 1), 1.0), ((0, 2), 2.0)]
    assert engine.receiver.held == (0, 2)


def test_every_version_is_received_into_the_same_memory(engine: Engine, sender: Sender) -> None:
    for step, prefix in enumerate("abc", start=1):
        deliver(engine, sender, step, prefix, float(step))
    assert [value for _, value in engine.served] == [1.0, 2.0, 3.0]
    assert len(set(engine.segments)) == 1
    assert engine.receiver._segments.size_bytes == 4 << 20


def test_memory_that_a_failed_link_may_still_write_takes_no_other_version(
    engine: Engine, sender: Sender
) -> None:
    deliver(engine, sender, 1, "a", 1.0)
    offer, flat, manifest = sender.offer(2, "b", attempt=2, value=2.0)
    engine.receiver.offer(offer)
    link = sender.form("b")
    link.send(flat, WeightManifest(manifest.entries, 2 * BUCKET_BYTES, BUCKET_BYTES))
    del link
    assert not engine.ack()[1]
    deliver(engine, sender, 3, "c", 3.0)
    assert len(set(engine.segments)) == 2


def test_a_version_with_other_bytes_or_nan_is_refused_and_its_memory_takes_the_next(
    engine: Engine, sender: Sender
) -> None:
    deliver(engine, sender, 1, "a", 1.0)
    offer, flat, manifest = sender.offer(2, "b", attempt=2, value=2.0)
    flat[5] += 1
    engine.receiver.offer(offer)
    sender.form("b").send(flat, manifest)
    version, ok, message = engine.ack()
    assert (version, ok) == ((0, 2), False)
    assert "tensor 'weight' arrived with xxh3_64" in message
    offer, flat, manifest = sender.offer(3, "c", attempt=3, value=float("nan"))
    engine.receiver.offer(offer)
    sender.form("c").send(flat, manifest)
    assert engine.ack() == (
        (0, 3),
        False,
        "weight 'weight' has NaN or infinite elements; the old weights go on serving",
    )
    deliver(engine, sender, 4, "d", 4.0)
    assert len(set(engine.segments)) == 1
    assert [value for _, value in engine.served] == [1.0, 4.0]


def test_an_engine_that_verifies_gets_bytes_that_were_not_compared(sender: Sender) -> None:
    engine = Engine(verify=False)
    offer, flat, manifest = sender.offer(1, "a", value=1.0)
    flat[-1] += 1
    engine.receiver.offer(offer)
    sender.form("a").send(flat, manifest)
    version, ok, message = engine.ack()
    assert (version, ok) == ((0, 1), False)
    assert "tensor 'weight' arrived with xxh3_64" in message
    assert engine.served == []
    engine.receiver.close()


def test_sender_that_dies_half_way_leaves_the_old_weights(engine: Engine, sender: Sender) -> None:
    deliver(engine, sender, 1, "a", 1.0)
    while not engine.progress.empty():
        engine.progress.get()
    offer, flat, manifest = sender.offer(2, "b", attempt=2, value=2.0)
    engine.receiver.offer(offer)
    link = sender.form("b")
    half = WeightManifest(manifest.entries, 2 * BUCKET_BYTES, BUCKET_BYTES)
    link.send(flat, half)
    assert engine.progress.get(timeout=DEADLINE_S) == BUCKET_BYTES  # it is in the middle
    del link
    version, ok, message = engine.ack()
    assert (version, ok) == ((0, 2), False)
    assert "weights stopped before byte" in message
    assert engine.served == [((0, 1), 1.0)]
    assert engine.receiver.held == (0, 1)
    deliver(engine, sender, 3, "c", 3.0)


def test_stuck_receive_does_not_hold_up_a_newer_offer(engine: Engine, sender: Sender) -> None:
    offer, flat, manifest = sender.offer(1, "silent")
    engine.receiver.offer(offer)
    silent = sender.form("silent")  # formed, then nothing is ever sent
    offer, flat, manifest = sender.offer(2, "alive", attempt=2, value=2.0)
    engine.receiver.offer(offer)
    sender.form("alive").send(flat, manifest)
    assert engine.ack() == ((0, 2), True, "")
    assert engine.served == [((0, 2), 2.0)]
    del silent


def test_what_a_link_left_behind_still_receives_is_thrown_away(engine: Engine, sender: Sender) -> None:
    old, old_flat, old_manifest = sender.offer(1, "old", value=1.0)
    engine.receiver.offer(old)
    old_link = sender.form("old")
    new, new_flat, new_manifest = sender.offer(2, "new", attempt=2, value=2.0)
    engine.receiver.offer(new)
    old_link.send(old_flat, old_manifest)
    while engine.progress.get(timeout=DEADLINE_S) < old_manifest.total_bytes:
        pass
    sender.form("new").send(new_flat, new_manifest)
    assert engine.ack() == ((0, 2), True, "")
    assert engine.served == [((0, 2), 2.0)]
    assert engine.acks.empty()


def test_stale_and_foreign_offers_are_answered_without_receiving(engine: Engine, sender: Sender) -> None:
    deliver(engine, sender, 5, "a", 5.0)
    same, *_ = sender.offer(5, "b", attempt=2, value=5.0)
    engine.receiver.offer(same)
    assert engine.ack() == ((0, 5), True, "already held")
    other_bytes, *_ = sender.offer(5, "c", attempt=3, value=6.0)
    engine.receiver.offer(other_bytes)
    assert engine.ack() == ((0, 5), False, "offered (0, 5), but (0, 5) is held")
    older, *_ = sender.offer(4, "d", attempt=4)
    engine.receiver.offer(older)
    assert engine.ack() == ((0, 4), False, "offered (0, 4), but (0, 5) is held")
    foreign = LinkOffer(**{**vars(older), "run_id": "other", "step": 9})
    engine.receiver.offer(foreign)
    assert engine.ack() == ((0, 9), False, "offer is of run 'other', this member serves 'run'")
    changed, *_ = sender.offer(6, "e", attempt=5, size=7)
    engine.receiver.offer(changed)
    version, ok, message = engine.ack()
    assert (version, ok) == ((0, 6), False)
    assert "a run's layout cannot change" in message
    assert engine.served == [((0, 5), 5.0)]


def test_late_offer_of_an_earlier_attempt_does_not_disturb(engine: Engine, sender: Sender) -> None:
    offer, flat, manifest = sender.offer(3, "new", attempt=2, value=3.0)
    engine.receiver.offer(offer)
    link = sender.form("new")
    late, *_ = sender.offer(2, "old", attempt=1)
    engine.receiver.offer(late)
    link.send(flat, manifest)
    assert engine.ack() == ((0, 3), True, "")
    assert engine.acks.empty()


def test_later_session_wins_over_a_higher_step_of_an_attempt_under_way(
    engine: Engine, sender: Sender
) -> None:
    dead, *_ = sender.offer(7, "dead", session=1, attempt=9)
    engine.receiver.offer(dead)
    offer, flat, manifest = sender.offer(8, "heir", session=2, attempt=1, value=8.0)
    engine.receiver.offer(offer)
    engine.receiver.offer(dead)  # again, late
    sender.form("heir").send(flat, manifest)
    assert engine.ack() == ((2, 8), True, "")


def test_engine_that_refuses_is_reported_and_keeps_its_version(engine: Engine, sender: Sender) -> None:
    deliver(engine, sender, 1, "a", 1.0)
    engine.error = WireError("names differ: weight")
    offer, flat, manifest = sender.offer(2, "b", attempt=2)
    engine.receiver.offer(offer)
    sender.form("b").send(flat, manifest)
    assert engine.ack() == ((0, 2), False, "names differ: weight")
    assert engine.receiver.held == (0, 1)


def test_an_engine_s_unforeseen_error_refuses_its_version_and_is_counted(
    engine: Engine, sender: Sender
) -> None:
    before, engine.error = unforeseen.total, KeyError("layer")
    offer, flat, manifest = sender.offer(1, "p1")
    engine.receiver.offer(offer)
    sender.form("p1").send(flat, manifest)
    assert engine.ack() == ((0, 1), False, "'layer'")
    assert unforeseen.total == before + 1
    engine.error = None
    deliver(engine, sender, 2, "p2", 2.0)
    assert unforeseen.total == before + 1


def test_a_listener_that_fails_does_not_end_the_receiving(engine: Engine, sender: Sender) -> None:
    before, heard = unforeseen.total, engine.receiver._on_ack

    def fail_once(version: Version, ok: bool, message: str) -> None:
        engine.receiver._on_ack = heard
        raise KeyError("stream")

    engine.receiver._on_ack = fail_once
    link = None
    for step in (1, 2):
        offer, flat, manifest = sender.offer(step, "p", value=float(step))
        engine.receiver.offer(offer)
        link = link or sender.form("p")
        link.send(flat, manifest)
    assert engine.ack() == ((0, 2), True, "")
    assert unforeseen.total == before + 1


def test_swap_of_a_link_left_behind_ends_before_the_next_begins(sender: Sender) -> None:
    entered, go_on = threading.Event(), threading.Event()
    order: list[tuple[str, Version]] = []
    acks: queue.Queue[Ack] = queue.Queue()

    def swap(version: Version, tensors: HostWeights) -> None:
        order.append(("begin", version))
        entered.set()
        assert go_on.wait(DEADLINE_S)
        order.append(("end", version))

    receiver = WeightReceiver(
        run_id="run",
        max_wait_s=DEADLINE_S,
        on_weights=swap,
        on_ack=lambda version, ok, message: acks.put((version, ok, message)),
    )
    for step, prefix in ((1, "a"), (2, "b")):
        offer, flat, manifest = sender.offer(step, prefix, attempt=step)
        receiver.offer(offer)
        sender.form(prefix).send(flat, manifest)
        assert entered.wait(DEADLINE_S)
    go_on.set()
    assert {acks.get(timeout=DEADLINE_S)[:2] for _ in range(2)} == {((0, 1), True), ((0, 2), True)}
    assert order == [("begin", (0, 1)), ("end", (0, 1)), ("begin", (0, 2)), ("end", (0, 2))]
    receiver.close()


def test_a_version_offered_again_while_it_is_loaded_is_loaded_once(sender: Sender) -> None:
    entered, go_on = threading.Event(), threading.Event()
    loaded: list[Version] = []
    acks: queue.Queue[Ack] = queue.Queue()

    def swap(version: Version, tensors: HostWeights) -> None:
        loaded.append(version)
        entered.set()
        assert go_on.wait(DEADLINE_S)

    receiver = WeightReceiver(
        run_id="run",
        max_wait_s=DEADLINE_S,
        on_weights=swap,
        on_ack=lambda version, ok, message: acks.put((version, ok, message)),
    )
    for attempt, prefix in ((1, "a"), (2, "b")):
        offer, flat, manifest = sender.offer(1, prefix, attempt=attempt)
        receiver.offer(offer)
        sender.form(prefix).send(flat, manifest)
        assert entered.wait(DEADLINE_S)
    assert ((0, 1), "loading", manifest.total_bytes) in receiver.at_work
    go_on.set()
    assert [acks.get(timeout=DEADLINE_S) for _ in range(2)] == [((0, 1), True, "")] * 2
    assert loaded == [(0, 1)]
    assert receiver.at_work == []
    receiver.close()


def test_a_rendezvous_reached_late_still_leaves_the_wait_for_the_peer() -> None:
    """As behind a resolver that loses an answer, for which torch waits before it connects."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))  # nobody listens yet
    port = listener.getsockname()[1]
    stores: list[object] = []

    def answer_late() -> None:
        time.sleep(1.5)
        listener.listen()
        stores.append(
            dist.TCPStore(  # type: ignore[attr-defined]
                "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
        )

    late = threading.Thread(target=answer_late)
    late.start()
    with pytest.raises(Unavailable, match=r"did not come within 0\.5 s"):
        form_link(
            backend="gloo", store_host="127.0.0.1", store_port=port, prefix="a", rank=MEMBER, max_wait_s=0.5
        )
    late.join()


def test_garbage_is_refused_at_once_and_closed_is_closed(engine: Engine, sender: Sender) -> None:
    offer, *_ = sender.offer(1, "a")
    with pytest.raises(WireError, match="cannot be read"):
        engine.receiver.offer(LinkOffer(**{**vars(offer), "manifest": b"{"}))
    engine.receiver.close()
    with pytest.raises(Conflict, match="closed"):
        engine.receiver.offer(offer)
