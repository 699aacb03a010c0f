"""The publisher against receivers in this process, and against members that misbehave on purpose."""

from __future__ import annotations

import gc
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from learner.weights.member_sender import FIRST_BACKOFF_S
from learner.weights.publisher import Publisher, PublishResult
from paceline.errors import Conflict, Unavailable, WireError
from paceline.groups import Version
from paceline.rate_limited_log import unforeseen
from paceline.weights.offers import LinkOffer
from paceline.weights.packing import checksums, pack, plan
from paceline.weights.shared_memory_link import SharedLink
from rollout.weights.link_receiver import WeightReceiver

DEADLINE_S = 60.0
V1, V2, V3 = Version(0, 1), Version(0, 2), Version(0, 3)


class Bench:
    """A publisher whose offers go where a test says, and its results in order."""

    def __init__(self, max_wait_s: float, backend: str = "gloo") -> None:
        self.results: queue.Queue[PublishResult] = queue.Queue()
        self.offers: queue.Queue[LinkOffer] = queue.Queue()
        self.deliver: Callable[[LinkOffer], None] = self.offers.put
        self.receivers: list[WeightReceiver] = []
        self.on_result: Callable[[PublishResult], None] = self.results.put
        self.publisher = Publisher(
            run_id="run",
            send_offer=lambda offer: self.deliver(offer),
            on_result=lambda result: self.on_result(result),
            bucket_bytes=64,
            max_wait_s=max_wait_s,
            backend=backend,
        )

    def result(self) -> PublishResult:
        return self.results.get(timeout=DEADLINE_S)

    def receiver(
        self, on_weights: Callable[[Version, dict[str, torch.Tensor]], None]
    ) -> tuple[WeightReceiver, queue.Queue[tuple[Version, bool, str]]]:
        """A receiver for member `m` that answers to the publisher; also every answer, for the test."""
        acks: queue.Queue[tuple[Version, bool, str]] = queue.Queue()

        def on_ack(version: Version, ok: bool, message: str) -> None:
            acks.put((version, ok, message))
            self.publisher.acknowledge("m", version, ok, message)

        receiver = WeightReceiver(run_id="run", max_wait_s=5.0, on_weights=on_weights, on_ack=on_ack)
        self.deliver = receiver.offer
        self.receivers.append(receiver)
        return receiver, acks


@pytest.fixture
def bench() -> Iterator[Bench]:
    """For tests in which nothing times out."""
    yield from opened(max_wait_s=10.0)


@pytest.fixture
def hasty() -> Iterator[Bench]:
    """For tests that wait for a time-out."""
    yield from opened(max_wait_s=1.5)


@pytest.fixture
def shared() -> Iterator[Bench]:
    """Through memory of the host."""
    yield from opened(max_wait_s=10.0, backend="shared")


def opened(max_wait_s: float, backend: str = "gloo") -> Iterator[Bench]:
    bench = Bench(max_wait_s, backend)
    yield bench
    bench.publisher.close()
    for receiver in bench.receivers:
        receiver.close()


def ones(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((100,), value)}


def test_overtaken_versions_are_skipped(bench: Bench) -> None:
    entered, go_on = threading.Event(), threading.Event()
    served: list[float] = []

    def on_weights(version: Version, tensors: dict[str, torch.Tensor]) -> None:
        entered.set()
        assert go_on.wait(DEADLINE_S)
        served.append(float(tensors["weight"][0]))

    bench.receiver(on_weights)
    bench.publisher.set_members(1, ["m"])
    bench.publisher.stage(V1, ones(1.0))
    assert entered.wait(DEADLINE_S)
    bench.publisher.stage(V2, ones(2.0))
    bench.publisher.stage(V3, ones(3.0))
    go_on.set()
    assert [bench.result().version, bench.result().version] == [V1, V3]
    assert served == [1.0, 3.0]


def test_wrong_checksum_is_refused_by_name_and_the_next_version_goes_through(bench: Bench) -> None:
    served: list[Version] = []
    bench.receiver(lambda version, tensors: served.append(version))
    layout = plan(ones(1.0), bucket_bytes=64)
    foreign = layout.with_checksums(checksums(pack(ones(9.0), layout), layout))
    receive = bench.deliver

    def deliver(offer: LinkOffer) -> None:
        receive(replace(offer, manifest=foreign.to_bytes()) if offer.version == V1 else offer)

    bench.deliver = deliver
    bench.publisher.set_members(1, ["m"])
    bench.publisher.stage(V1, ones(1.0))
    refused = bench.result()
    assert (refused.ok, refused.version) == (False, V1)
    assert "the member refused: tensor 'weight' arrived with" in refused.error
    assert bench.publisher.acknowledged() == {"m": None}

    bench.publisher.stage(V2, ones(2.0))
    while not (result := bench.result()).ok:
        assert result.version == V1  # tried again before version 2 was there
    assert result.version == V2
    assert served == [V2]


def test_link_that_failed_once_is_not_used_again(bench: Bench) -> None:
    refusals = [RuntimeError("the engine is busy")]
    served: list[Version] = []
    prefixes: list[str] = []

    def on_weights(version: Version, tensors: dict[str, torch.Tensor]) -> None:
        if version == V2 and refusals:
            raise refusals.pop()
        served.append(version)

    receiver, _ = bench.receiver(on_weights)

    def deliver(offer: LinkOffer) -> None:
        prefixes.append(offer.prefix)
        receiver.offer(offer)

    bench.deliver = deliver
    bench.publisher.set_members(1, ["m"])
    bench.publisher.stage(V1, ones(1.0))
    assert bench.result().ok
    bench.publisher.stage(V2, ones(2.0))
    refused, taken = bench.result(), bench.result()
    assert (refused.ok, refused.attempt, refused.form_s) == (False, 1, 0.0)
    assert refused.error == "the member refused: the engine is busy"
    assert (taken.ok, taken.attempt, taken.version) == (True, 2, V2)
    assert taken.form_s > 0
    first, second, third = prefixes
    assert first == second != third
    assert served == [V1, V2]


@pytest.mark.parametrize(
    ("error", "keeps"), [(WireError("refused"), False), (KeyError("the engine may still copy these"), True)]
)
def test_memory_is_taken_again_only_after_the_engine_has_copied_or_refused_it(
    bench: Bench, error: Exception, keeps: bool
) -> None:
    arrived: list[torch.Tensor] = []
    refuse = [True]

    def on_weights(version: Version, tensors: dict[str, torch.Tensor]) -> None:
        arrived.append(tensors["weight"])
        assert torch.equal(tensors["weight"], ones(float(version.step))["weight"])
        if version == V1 and refuse.pop():
            refuse.append(False)
            raise error

    bench.receiver(on_weights)
    bench.publisher.set_members(1, ["m"])
    bench.publisher.stage(V1, ones(1.0))
    assert [bench.result().ok, bench.result().ok] == [False, True]
    for version in (V2, V3):
        bench.publisher.stage(version, ones(float(version.step)))
        assert bench.result().ok
    refused, first, second, third = (tensor.data_ptr() for tensor in arrived)
    assert first == second == third
    assert (refused != first) == keeps


def test_member_that_never_comes_is_reported_and_tried_with_fresh_prefixes(hasty: Bench) -> None:
    hasty.publisher.set_members(1, ["deaf"])
    hasty.publisher.stage(V1, ones(1.0))
    first, second = hasty.offers.get(timeout=DEADLINE_S), hasty.offers.get(timeout=DEADLINE_S)
    assert (first.attempt, second.attempt) == (1, 2)
    assert first.prefix != second.prefix
    result = hasty.result()
    assert (result.ok, result.attempt, result.version) == (False, 1, V1)
    assert result.error.startswith("form: ")
    assert result.failure == "link"
    hasty.publisher.set_members(2, [])
    hasty.publisher.set_members(3, ["deaf"])  # named again: it goes on with its attempts and its back-off
    third = hasty.offers.get(timeout=DEADLINE_S)
    while third.epoch != 3:
        third = hasty.offers.get(timeout=DEADLINE_S)
    assert third.attempt > second.attempt


def test_member_that_leaves_in_the_middle_is_not_reported_and_not_tried_again(bench: Bench) -> None:
    bench.publisher.set_members(1, ["deaf"])
    bench.publisher.stage(V1, ones(1.0))
    bench.offers.get(timeout=DEADLINE_S)
    bench.publisher.set_members(2, [])
    bench.publisher.close()  # joins the link's threads
    assert bench.results.empty()
    assert bench.offers.empty()
    assert bench.publisher.acknowledged() == {}


def test_late_yes_counts(hasty: Bench) -> None:
    """The member was slow to answer, not dead: it does hold the version, so nothing is sent again."""
    hasty.publisher.set_members(1, ["m"])
    hasty.publisher.stage(V1, ones(1.0))
    hasty.offers.get(timeout=DEADLINE_S)
    assert not hasty.result().ok
    hasty.publisher.acknowledge("m", V1, True)
    late = hasty.result()
    assert (late.ok, late.version) == (True, V1)
    assert hasty.publisher.acknowledged() == {"m": V1}


def test_offer_that_cannot_be_sent_is_a_failed_attempt(bench: Bench) -> None:
    def unreachable(offer: LinkOffer) -> None:
        raise ConnectionError("no route to m")

    bench.deliver = unreachable
    bench.publisher.set_members(1, ["m"])
    bench.publisher.stage(V1, ones(1.0))
    assert bench.result().error == "offer: no route to m"
    served: list[Version] = []
    bench.receiver(lambda version, tensors: served.append(version))
    while not bench.result().ok:
        pass
    assert served == [V1]


def test_a_listener_that_fails_costs_no_member_its_link(bench: Bench) -> None:
    before, told = unforeseen.total, bench.on_result

    def fail_once(result: PublishResult) -> None:
        bench.on_result = told
        raise KeyError(result.member_id)

    bench.on_result = fail_once
    _, acks = bench.receiver(lambda version, tensors: None)
    bench.publisher.set_members(1, ["m"])
    bench.publisher.stage(V1, ones(1.0))
    assert acks.get(timeout=DEADLINE_S) == (V1, True, "")
    bench.publisher.stage(V2, ones(2.0))
    assert bench.result().version == V2
    assert unforeseen.total == before + 1


def test_an_unforeseen_error_fails_its_attempt_and_is_counted(bench: Bench) -> None:
    before = unforeseen.total

    def fail(offer: LinkOffer) -> None:
        raise KeyError("nowhere")

    bench.deliver = fail
    bench.publisher.set_members(1, ["m"])
    bench.publisher.stage(V1, ones(1.0))
    result = bench.result()
    assert (result.ok, result.failure, result.error) == (False, "link", "offer: 'nowhere'")
    assert unforeseen.total > before


def test_answer_without_transfer_delivers_and_the_link_is_made_anew(hasty: Bench) -> None:
    """The acknowledgement was lost once; the member then says that it holds the version already."""
    served: list[Version] = []
    receiver, acks = hasty.receiver(lambda version, tensors: served.append(version))
    lost: list[Version] = []
    acknowledge = hasty.publisher.acknowledge

    def lose_the_first(member_id: str, version: Version, ok: bool, message: str = "") -> None:
        if not lost:
            lost.append(version)
        else:
            acknowledge(member_id, version, ok, message)

    hasty.publisher.acknowledge = lose_the_first  # type: ignore[method-assign]
    hasty.publisher.set_members(1, ["m"])
    hasty.publisher.stage(V1, ones(1.0))
    failed, delivered = hasty.result(), hasty.result()
    assert (failed.ok, failed.error) == (False, "answer: nothing within 1.5 s")
    assert (delivered.ok, delivered.attempt) == (True, 2)
    assert [acks.get(timeout=DEADLINE_S) for _ in range(2)] == [(V1, True, ""), (V1, True, "already held")]
    hasty.publisher.stage(V2, ones(2.0))
    result = hasty.result()
    assert (result.ok, result.version, result.attempt) == (True, V2, 3)
    assert served == [V1, V2]
    assert receiver.held == V2


def test_stale_stage_and_use_after_close_are_conflicts(bench: Bench) -> None:
    bench.publisher.stage(V2, ones(2.0))
    with pytest.raises(Conflict, match=r"version \(0, 1\) is staged after \(0, 2\)"):
        bench.publisher.stage(V1, ones(1.0))
    bench.publisher.acknowledge("unknown", V2, True)
    bench.publisher.close()
    bench.publisher.close()
    with pytest.raises(Conflict, match="closed"):
        bench.publisher.set_members(1, ["m"])


def test_sums_are_cryptographic_beyond_loopback() -> None:
    offers: queue.Queue[LinkOffer] = queue.Queue()
    publisher = Publisher(
        run_id="run",
        send_offer=offers.put,
        on_result=lambda result: None,
        bucket_bytes=64,
        max_wait_s=1.0,
        advertise_host="192.0.2.1",
    )
    publisher.set_members(1, ["m"])
    publisher.stage(V1, ones(1.0))
    offer = offers.get(timeout=DEADLINE_S)
    assert (offer.store_host, offer.store_port) == publisher.rendezvous_address
    assert offer.store_host == "192.0.2.1"
    assert b'"algorithm":"sha256"' in offer.manifest
    publisher.close()


def test_an_interrupted_transfer_begins_anew_at_once(bench: Bench) -> None:
    """The offer is lost with the control plane; without the interruption the member would wait for max_wait_s."""
    bench.publisher.set_members(1, ["m"])
    bench.publisher.stage(V1, {"w": torch.arange(4.0)})
    lost = bench.offers.get(timeout=DEADLINE_S)

    _, acks = bench.receiver(lambda version, tensors: None)
    bench.publisher.interrupt("the coordinator was away")

    first, second = bench.result(), bench.result()
    assert (first.ok, first.error) == (False, "the coordinator was away")
    assert (second.ok, second.attempt) == (True, lost.attempt + 1)
    assert acks.get(timeout=DEADLINE_S) == (V1, True, "")


def test_interrupting_without_a_transfer_changes_nothing(bench: Bench) -> None:
    _, acks = bench.receiver(lambda version, tensors: None)
    bench.publisher.set_members(1, ["m"])
    bench.publisher.stage(V1, {"w": torch.arange(4.0)})
    assert bench.result().ok
    bench.publisher.interrupt("the coordinator was away")
    bench.publisher.stage(V2, {"w": torch.arange(4.0)})

    assert bench.result().ok
    assert [acks.get(timeout=DEADLINE_S)[0] for _ in range(2)] == [V1, V2]


def test_shared_memory_carries_versions_and_leaves_nothing_open(shared: Bench) -> None:
    def open_memory(name: str = "paceline-weights") -> int:
        return sum(name in _target(fd) for fd in os.listdir("/proc/self/fd"))

    segments = open_memory("paceline-segment")  # of other tests, under links that are stuck
    served: list[float] = []
    shared.receiver(lambda version, tensors: served.append(float(tensors["weight"].sum())))
    shared.publisher.set_members(1, ["m"])
    for version in (V1, V2, V3):
        shared.publisher.stage(version, ones(float(version.step)))
        result = shared.result()
        assert (result.ok, result.attempt, result.error) == (True, 1, "")
    assert served == [100.0, 200.0, 300.0]
    assert open_memory() > 0
    shared.publisher.close()
    shared.receivers[0].close()
    deadline_s = time.monotonic() + DEADLINE_S
    while open_memory() + open_memory("paceline-segment") > segments and time.monotonic() < deadline_s:
        gc.collect()  # the links' threads end by themselves
    assert open_memory() == 0
    assert open_memory("paceline-segment") <= segments


def test_a_member_that_cannot_map_the_learners_memory_is_reached_by_tcp(
    shared: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "paceline.weights.shared_memory_link.os.getpid", lambda: 2**22 + 1
    )  # as a process of another host
    served: list[Version] = []
    shared.receiver(lambda version, tensors: served.append(version))
    shared.publisher.set_members(1, ["m"])
    shared.publisher.stage(V1, ones(1.0))
    refused, taken = shared.result(), shared.result()
    assert (refused.ok, refused.failure, refused.fallback) == (False, "refused", "gloo")
    assert "weights.backend=shared needs both processes on one host" in refused.error
    assert (taken.ok, taken.attempt, taken.fallback) == (True, 2, "")
    assert served == [V1]

    shared.publisher.set_members(2, [])
    shared.publisher.set_members(3, ["m"])  # named again, it is not tried by shared memory a second time
    shared.publisher.stage(V2, ones(2.0))
    again = shared.result()
    assert (again.ok, again.attempt) == (True, 3)


def test_a_swap_longer_than_the_longest_silence_neither_fails_nor_is_sent_again(bench: Bench) -> None:
    publisher_wait_s = 2.0
    bench.publisher.close()
    bench = Bench(publisher_wait_s)
    offered: list[Version] = []

    def on_weights(version: Version, tensors: dict[str, torch.Tensor]) -> None:
        """An engine that needs 1.5 times as long, while its worker says that it is at work."""
        until_s = time.monotonic() + 1.5 * publisher_wait_s
        while time.monotonic() < until_s:
            for progress in receiver.at_work:
                assert progress == (version, "loading", offers_bytes)
                bench.publisher.progress("m", progress.version)
            time.sleep(0.05)

    offers_bytes = plan(ones(1.0), bucket_bytes=64).total_bytes
    receiver, _ = bench.receiver(on_weights)

    def deliver(offer: LinkOffer) -> None:
        offered.append(offer.version)
        receiver.offer(offer)

    bench.deliver = deliver
    bench.publisher.set_members(1, ["m"])
    for version in (V1, V2):
        bench.publisher.stage(version, ones(float(version.step)))
        result = bench.result()
        assert (result.ok, result.version, result.attempt, result.error) == (True, version, 1, "")
    assert offered == [V1, V2]
    assert bench.results.empty()
    assert receiver.at_work == []
    bench.publisher.close()
    receiver.close()


def test_a_member_that_reports_for_ever_is_given_up(hasty: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.weights.transfer.longest_s", lambda max_wait_s, size_bytes: 2 * max_wait_s)
    ended = threading.Event()

    def on_weights(version: Version, tensors: dict[str, torch.Tensor]) -> None:
        while not ended.wait(0.05):
            hasty.publisher.progress("m", version)

    hasty.receiver(on_weights)
    hasty.publisher.set_members(1, ["m"])
    hasty.publisher.stage(V1, ones(1.0))
    result = hasty.result()
    ended.set()
    assert (result.ok, result.failure) == (False, "silent")
    assert result.error == "answer: not loaded 3 s after the last byte, though still working"


def test_nothing_newer_is_offered_to_a_member_that_is_still_at_work(hasty: Bench) -> None:
    """It was silent for too long, so the attempt failed; then it is heard of again, in the middle of its swap."""
    offered: queue.Queue[Version] = queue.Queue()
    go_on = threading.Event()

    def on_weights(version: Version, tensors: dict[str, torch.Tensor]) -> None:
        assert go_on.wait(DEADLINE_S)

    def on_result(result: PublishResult) -> None:
        if not result.ok:
            hasty.publisher.progress("m", V1)
            hasty.publisher.stage(V2, ones(2.0))
        hasty.results.put(result)

    receiver, _ = hasty.receiver(on_weights)

    def deliver(offer: LinkOffer) -> None:
        offered.put(offer.version)
        receiver.offer(offer)

    hasty.deliver, hasty.on_result = deliver, on_result
    hasty.publisher.set_members(1, ["m"])
    hasty.publisher.stage(V1, ones(1.0))
    assert hasty.result().failure == "silent"
    assert offered.get(timeout=DEADLINE_S) == V1
    for _ in range(5):  # five times the pause after a first failure
        hasty.publisher.progress("m", V1)
        with pytest.raises(queue.Empty):
            offered.get(timeout=FIRST_BACKOFF_S)
    go_on.set()
    late, newest = hasty.result(), hasty.result()
    assert (late.ok, late.version) == (True, V1)
    assert (newest.ok, newest.version) == (True, V2)
    assert offered.get(timeout=DEADLINE_S) == V2


def test_a_member_that_works_is_not_disturbed_when_the_control_plane_was_away(bench: Bench) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def on_weights(version: Version, tensors: dict[str, torch.Tensor]) -> None:
        entered.set()
        assert go_on.wait(DEADLINE_S)

    bench.receiver(on_weights)
    bench.publisher.set_members(1, ["m"])
    bench.publisher.stage(V1, ones(1.0))
    assert entered.wait(DEADLINE_S)
    bench.publisher.progress("m", V1)
    bench.publisher.interrupt("the coordinator was away")
    go_on.set()
    result = bench.result()
    assert (result.ok, result.attempt) == (True, 1)
    assert bench.results.empty()


@pytest.mark.parametrize("forms", [False, True])
def test_refused_attempts_leave_no_threads_and_no_descriptors(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, forms: bool
) -> None:
    """The member refuses at once, so that the learner waits for it in vain, or after the last byte."""
    monkeypatch.setattr("learner.weights.member_sender.FIRST_BACKOFF_S", 0.0)
    bench.publisher.close()
    bench = Bench(max_wait_s=600.0)
    refused, enough = 0, threading.Event()

    def on_result(result: PublishResult) -> None:
        nonlocal refused
        assert result.failure == "refused"
        refused += 1
        if refused == 50:
            bench.publisher.set_members(2, [])
            enough.set()

    def on_weights(version: Version, tensors: dict[str, torch.Tensor]) -> None:
        raise WireError("names differ")

    bench.on_result = on_result
    if forms:
        bench.receiver(on_weights)
    else:
        bench.deliver = lambda offer: bench.publisher.acknowledge("m", V1, False, "no link")
    threads, files = threading.active_count(), len(descriptors())
    bench.publisher.set_members(1, ["m"])
    bench.publisher.stage(V1, ones(1.0))
    assert enough.wait(4 * DEADLINE_S)
    deadline_s = time.monotonic() + DEADLINE_S
    while threading.active_count() > threads or len(descriptors()) > files + 2:
        assert time.monotonic() < deadline_s, (threading.active_count(), threads, len(descriptors()), files)
        gc.collect()
        time.sleep(0.01)
    bench.publisher.close()


def test_a_member_that_claims_what_was_never_published_gets_its_weights_all_the_same(bench: Bench) -> None:
    served: list[Version] = []
    bench.receiver(lambda version, tensors: served.append(version))
    bench.publisher.set_members(1, ["m"])
    bench.publisher.acknowledge("m", Version(2**63, 2**63), True)
    bench.publisher.stage(V1, ones(1.0))
    assert bench.result().ok
    bench.publisher.acknowledge("m", Version(2**63, 2**63), True)
    bench.publisher.stage(V2, ones(2.0))
    assert bench.result().version == V2
    assert served == [V1, V2]


class Keys:
    """The store of a shared link, with a path of a test's choice."""

    def __init__(self, path: str) -> None:
        self.path = path

    def get(self, key: str) -> bytes:
        return self.path.encode()


def test_only_memory_of_a_learner_is_mapped(tmp_path: Path) -> None:
    """A member must not map any file that a rendezvous names, nor memory that its owner can truncate, which would end it."""
    (tmp_path / "file").write_bytes(bytes(64))
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 64)
    with (tmp_path / "file").open() as file:
        for path, why in (
            (str(tmp_path / "file"), "is offered as the learner's memory, and is none"),
            ("/proc/self/mem", "is none"),
            ("/proc/1/fd/../mem", "is none"),
            (f"/proc/{os.getpid()}/fd/{file.fileno()}", "can be cut off"),
            (f"/proc/{os.getpid()}/fd/{unsealed}", "can be cut off"),
        ):
            with pytest.raises(Unavailable, match=why):
                SharedLink(Keys(path), 1.0)._open(64)
    os.close(unsealed)


def _target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:
        return ""  # another thread has closed it, or it was that of the listing


def descriptors() -> list[str]:
    """This process's open files; the one that lists them is closed again."""
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]
