"""Refusals beyond the limits are counted, and one record stands for them."""

from __future__ import annotations

from dataclasses import replace

from services.coordinator.audit_log.record import Entry
from services.coordinator.audit_log.refusal_limits import (
    FIRST,
    FIRST_REPORTED,
    MAX_SOURCES,
    MOST,
    WINDOW_S,
    RefusalLimits,
)


def refused(host: int | str, port: int = 1, who: str = "") -> Entry:
    return Entry("x/Y", "UNAUTHENTICATED", who, address=f"{host}:{port}", why="no token")


def test_a_source_has_some_records_in_a_window_and_then_one_for_the_rest() -> None:
    limits = RefusalLimits()
    admitted = [limits.admits(refused("10.0.0.1", port), 5.0) for port in range(FIRST + 7)]
    assert admitted == [True] * FIRST + [False] * 7
    assert limits.admits(refused("10.0.0.2"), 6.0)  # others are not held up
    assert limits.due(5.0 + WINDOW_S - 0.1) == []
    (rest,) = limits.due(5.0 + WINDOW_S)
    assert (rest.count, rest.address) == (7, f"10.0.0.1:{FIRST + 6}")
    assert rest.why == "7 more refusals of 10.0.0.1; this is the newest: no token"
    assert limits.due(1000.0) == []
    assert limits.admits(refused("10.0.0.1"), 100.0)  # the next window


def test_a_caller_is_one_source_from_wherever_it_calls() -> None:
    limits = RefusalLimits()
    assert [limits.admits(refused(n, who="ann"), 0.1) for n in range(FIRST + 1)] == [True] * FIRST + [False]
    (rest,) = limits.due(0.2, last=True)
    assert (rest.who, rest.count) == ("ann", 1)


def test_any_number_of_sources_leaves_few_records_and_little_in_memory() -> None:
    limits = RefusalLimits()
    admitted = sum(limits.admits(refused(f"10.0.{n // 250}.{n % 250}"), 0.1) for n in range(5_000))
    rest = limits.due(0.1 + WINDOW_S)
    assert admitted == MAX_SOURCES + FIRST <= MOST
    assert admitted + sum(entry.count for entry in rest) == 5_000
    assert len(rest) <= MAX_SOURCES + 1


def test_a_member_is_one_source_whatever_addresses_and_callers_it_names() -> None:
    limits = RefusalLimits(FIRST_REPORTED)
    reported = [
        replace(refused(f"10.0.0.{n}", who=f"caller-{n}"), reported_by="rollout-a", count=1_000)
        for n in range(FIRST_REPORTED + 3)
    ]
    assert sum(limits.admits(entry, 0.1) for entry in reported) == FIRST_REPORTED
    assert limits.admits(replace(refused("10.0.0.1"), reported_by="rollout-b"), 0.1)
    (rest,) = limits.due(0.1 + WINDOW_S)
    assert (rest.count, rest.reported_by) == (3_000, "rollout-a")
    assert rest.why == "3000 more refusals reported by rollout-a; this is the newest: no token"
