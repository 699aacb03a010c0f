"""Members that are behind, silent, or to read the object store."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest

from paceline.groups import Version
from paceline.weights.hosts.members import PATIENCE, HostMembers
from paceline.weights.progress import PublishResult

V1, V2, V3 = (Version(1, step) for step in (1, 2, 3))
SIZE, WAIT_S, MAX_WAIT_S = 1000, 30.0, 4.0


class Bench:
    def __init__(self) -> None:
        self.results: queue.Queue[PublishResult] = queue.Queue()
        self.now_s = 0.0
        self.is_heard, self.asked = True, threading.Semaphore(0)
        self.members = HostMembers(MAX_WAIT_S, self.results.put, lambda: self.now_s, self._hears)

    def after(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds
        with self.members._changed:
            self.members._changed.notify_all()

    def _hears(self) -> bool:
        self.asked.release()
        return self.is_heard

    def result(self) -> PublishResult:
        return self.results.get(timeout=WAIT_S)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.members.close()


def test_a_version_is_delivered_when_its_member_says_so(bench: Bench) -> None:
    bench.members.set_members(3, ["a", "b"])
    bench.members.publish(V1, SIZE)
    bench.members.progress("a", V1, 500, False)
    bench.members.progress("a", V1, 1000, True)
    bench.members.answer("a", V1, True, "")
    result = bench.result()
    assert (result.member_id, result.version, result.ok, result.epoch) == ("a", V1, True, 3)
    assert result.size_bytes == SIZE
    assert {name: member.held for name, member in bench.members._members.items()} == {"a": V1, "b": None}
    bench.members.answer("a", V1, True, "")  # again, after a broken stream
    bench.members.answer("b", V3, True, "")  # a version that nobody published
    bench.members.answer("stranger", V1, True, "")
    assert bench.results.empty()


def test_a_member_that_says_nothing_is_given_up_however_many_versions_follow(bench: Bench) -> None:
    bench.members.set_members(1, ["a"])
    bench.members.publish(V1, SIZE)
    bench.after(0.75 * MAX_WAIT_S)
    bench.members.publish(V2, SIZE)
    bench.after(0.5 * MAX_WAIT_S)
    result = bench.result()
    assert (result.ok, result.failure) == (False, "link")
    assert "no report within 4.0 s" in result.error


def test_a_member_that_loads_slowly_and_says_so_is_waited_for(bench: Bench) -> None:
    bench.members.set_members(1, ["a"])
    bench.members.publish(V1, SIZE)
    for _ in range(40):  # ten times the longest silence
        bench.members.progress("a", V1, SIZE, True)
        bench.after(0.25 * MAX_WAIT_S)
    bench.members.publish(V2, SIZE)  # it is not behind because of this one
    bench.members.progress("a", V1, SIZE, True)
    bench.members.answer("a", V1, True, "")
    assert bench.result().ok
    bench.after(0.75 * MAX_WAIT_S)
    bench.members.progress("a", V2, SIZE, True)
    bench.members.answer("a", V2, True, "")
    assert bench.result().version == V2
    assert bench.results.empty()


def test_a_member_that_reports_and_gets_no_bytes_is_given_up_in_the_end(bench: Bench) -> None:
    bench.members.set_members(1, ["a"])
    bench.members.publish(V1, SIZE)
    for _ in range(60):
        bench.members.progress("a", V1, 400, False)
        bench.after(0.25 * MAX_WAIT_S)
    bench.members.progress("a", V1, 500, False)  # bytes begin the longer limit anew
    for _ in range(60):
        bench.members.progress("a", V1, 500, False)
        bench.after(0.25 * MAX_WAIT_S)
    assert bench.results.empty()
    for _ in range(30):
        bench.members.progress("a", V1, 500, False)
        bench.after(0.25 * MAX_WAIT_S)
    assert "no new bytes" in bench.result().error


def test_newer_versions_alone_are_no_progress_of_a_member_that_gets_no_bytes(bench: Bench) -> None:
    bench.members.set_members(1, ["a"])
    for step in range(1, 200):
        version = Version(1, step)
        bench.members.publish(version, SIZE)
        bench.members.progress("a", version, 0, False)
        bench.after(0.25 * MAX_WAIT_S)
        if not bench.results.empty():
            break
    result = bench.result()
    assert (result.ok, result.failure) == (False, "link")
    assert "no new bytes" in result.error


def test_a_member_that_fails_often_is_to_read_the_store_until_it_succeeds(bench: Bench) -> None:
    bench.members.set_members(1, ["a"])
    bench.members.publish(V1, SIZE)
    for attempt in range(PATIENCE):
        assert not bench.members.failed_often("a")
        bench.members.answer("a", V1, False, "a NaN")
        assert bench.result().failure == "refused"
        bench.members.set_members(attempt, [])  # expelled, and back
        bench.members.set_members(attempt, ["a"])
    assert bench.members.failed_often("a")
    bench.members.publish(V2, SIZE)
    bench.members.answer("a", V2, True, "")
    assert not bench.members.failed_often("a")


def test_nobody_is_silent_while_there_is_no_coordinator_to_hear_them(bench: Bench) -> None:
    bench.members.set_members(1, ["a"])
    bench.members.publish(V1, SIZE)
    bench.is_heard = False
    for _ in range(2 * PATIENCE):
        bench.after(1.5 * MAX_WAIT_S)
        assert bench.asked.acquire(timeout=WAIT_S)
    bench.is_heard = True
    bench.members.extend()
    bench.after(0.5 * MAX_WAIT_S)
    assert bench.results.empty()
    bench.after(0.75 * MAX_WAIT_S)
    assert bench.result().failure == "link"


def test_failures_before_the_coordinator_was_back_do_not_count(bench: Bench) -> None:
    bench.members.set_members(1, ["a", "b"])
    bench.members.publish(V1, SIZE)
    for _ in range(PATIENCE):
        bench.members.answer("a", V1, False, "cut off")
        bench.members.answer("b", V1, False, "cut off")
    bench.members.set_members(2, ["a"])
    assert bench.members.failed_often("a")
    assert bench.members.failed_often("b")
    bench.members.extend()
    assert not bench.members.failed_often("a")
    assert not bench.members.failed_often("b")
