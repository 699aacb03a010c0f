"""Refusals are summed, bounded and taken at growing intervals; none is lost from the sums."""

from __future__ import annotations

import threading

from paceline.refusal_sums import (
    MAX_AT_ONCE,
    MAX_COUNT,
    MAX_KINDS,
    MAX_NAME,
    MAX_REASON,
    PAUSES_S,
    SEVERAL,
    RefusalSums,
)
from protos.paceline.v1 import worker_pb2


class Time:
    """A clock that stands still."""

    now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


def taken(sums: RefusalSums, *, last: bool = False) -> list[worker_pb2.Refusal]:
    """Return all that may be taken now."""
    found: list[worker_pb2.Refusal] = []
    while (message := sums.take(last=last)) is not None:
        assert len(message.refusals) <= MAX_AT_ONCE
        found += message.refusals
    return found


def test_equal_refusals_of_one_host_are_one_with_their_number() -> None:
    sums = RefusalSums(clock=Time())
    for port in range(5):
        sums.note("x/Y", "UNAUTHENTICATED", f"10.0.0.1:{port}", "no token")
    sums.note("x/Y", "UNAUTHENTICATED", "10.0.0.2:1", "no token")
    sums.note("x/Y", "PERMISSION_DENIED", "[::1]:1", "a viewer", who="ann")
    sums.note("http/metrics", "UNAUTHENTICATED", "::1", "no token")
    found = [(each.what, each.address, each.who, each.count) for each in taken(sums)]
    assert found == [
        ("x/Y", "10.0.0.1:4", "", 5),
        ("x/Y", "10.0.0.2:1", "", 1),
        ("x/Y", "[::1]:1", "ann", 1),
        ("http/metrics", "::1", "", 1),
    ]
    assert sums.take() is None


def test_the_first_is_taken_at_once_and_equal_ones_after_a_pause() -> None:
    clock = Time()
    sums = RefusalSums(clock=clock)
    for _ in range(2):
        sums.note_handshake("10.0.0.1:5")
        assert [each.count for each in taken(sums)] == [1]
        sums.note_handshake("10.0.0.1:6", 3)
        clock.now_s += PAUSES_S[0] - 0.1
        assert sums.take() is None
        clock.now_s += 0.1
        (rest,) = taken(sums)
        assert (rest.what, rest.result, rest.count) == ("tls/handshake", "UNAUTHENTICATED", 3)
        clock.now_s += PAUSES_S[1] + PAUSES_S[-1]  # long enough for the host to begin anew
        assert sums.take() is None


def test_all_that_waits_can_be_taken_at_the_end() -> None:
    sums = RefusalSums(clock=Time())
    for port in (7, 8):
        sums.note_handshake(f"10.0.0.1:{port}")
        assert [each.address for each in taken(sums, last=True)] == [f"10.0.0.1:{port}"]


def test_pauses_follow_each_other_for_one_that_tries_for_ever() -> None:
    clock = Time()
    sums = RefusalSums(clock=clock)
    times_s = []
    while clock.now_s < 1_000.0 + 2 * PAUSES_S[-1]:
        sums.note_handshake("10.0.0.1:5")
        if sums.take() is not None:
            times_s.append(clock.now_s - 1_000.0)
        clock.now_s += 10.0
    assert times_s == [0.0, 60.0, 660.0, 4260.0]


def test_any_number_of_kinds_costs_little_and_is_counted() -> None:
    clock = Time()
    sums = RefusalSums(clock=clock)
    for number in range(5_000):
        sums.note(f"http/{number}", "UNAUTHENTICATED", f"10.0.{number % 250}.1:5", "no token")
    found = taken(sums)
    assert len(found) == MAX_KINDS + 1
    assert sum(each.count for each in found) == 5_000
    assert found[-1].why == f"{SEVERAL}no token"
    sums.note("http/new", "UNAUTHENTICATED", "10.0.0.1:5", "no token")  # takes the place of a quiet one
    assert [each.what for each in taken(sums)] == ["http/new"]


def test_what_could_not_be_sent_is_taken_again_with_what_came_meanwhile() -> None:
    sums = RefusalSums(clock=Time())
    sums.note_handshake("10.0.0.1:5", 2)
    message = sums.take()
    assert message is not None
    sums.note_handshake("10.0.0.1:6")
    sums.put_back(message)
    assert [each.count for each in taken(sums)] == [3]


def test_texts_and_numbers_of_callers_are_made_to_fit() -> None:
    sums = RefusalSums()
    sums.note("http/\udcff" + "x" * 500, "UNAUTHENTICATED", "a" * 500, "y" * 5_000, count=-3)
    sums.note_handshake("10.0.0.1:5", 2**40)
    odd, many = taken(sums)
    assert odd.what == "http/?" + "x" * (MAX_NAME - 6)
    assert (len(odd.address), len(odd.why), odd.count) == (MAX_NAME, MAX_REASON, 1)
    assert many.count == MAX_COUNT


def test_those_of_another_process_are_added() -> None:
    agent, worker = RefusalSums(pauses_s=(0.0,)), RefusalSums()
    for _ in range(2):
        agent.note("agent/read", "PERMISSION_DENIED", "10.0.0.1:5", "no proof")
        message = agent.take()
        assert message is not None
        worker.add(message)
    assert [each.count for each in taken(worker)] == [2]


def test_threads_may_note_while_another_takes() -> None:
    sums = RefusalSums(pauses_s=(0.0,))
    threads = [
        threading.Thread(target=lambda: [sums.note_handshake("10.0.0.1:5") for _ in range(500)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    count = 0
    while any(thread.is_alive() for thread in threads):
        count += sum(each.count for each in taken_once(sums))
    count += sum(each.count for each in taken_once(sums))
    assert count == 2_000


def taken_once(sums: RefusalSums) -> list[worker_pb2.Refusal]:
    message = sums.take()
    return [] if message is None else list(message.refusals)
