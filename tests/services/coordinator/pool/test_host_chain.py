"""The order of hosts, and the upstreams of each one."""

from __future__ import annotations

import pytest

from paceline.services.coordinator.pool.host_plans import TREE_BYTES, Hop, ordered, parent, upstreams, width

HOPS = [Hop(f"a{i}", f"10.0.0.{i}:1") for i in range(6)]
LARGE = TREE_BYTES + 1


def addresses(position: int, size_bytes: int = LARGE) -> list[list[str]]:
    return [list(up.addresses) for up in upstreams(position, HOPS, ["learner:1", "learner:2"], size_bytes)]


def test_the_first_host_reads_from_the_learner_and_every_other_one_from_the_host_before_it() -> None:
    assert addresses(0) == [["learner:1", "learner:2"]]
    assert addresses(2) == [["10.0.0.1:1"], ["10.0.0.0:1"], ["learner:1", "learner:2"]]


def test_a_host_far_behind_knows_a_few_others_and_the_learner() -> None:
    assert addresses(5) == [
        ["10.0.0.4:1"],
        ["10.0.0.3:1"],
        ["10.0.0.2:1"],
        ["10.0.0.1:1"],
        ["learner:1", "learner:2"],
    ]


def test_a_small_version_goes_through_a_tree() -> None:
    assert width(LARGE) == 1
    assert width(TREE_BYTES) == 8
    assert [parent(position, 2) for position in range(7)] == [-1, -1, 0, 0, 1, 1, 2]
    assert addresses(5, TREE_BYTES) == [["learner:1", "learner:2"]]


@pytest.mark.parametrize("fan_out", [1, 2, 8])
def test_nobody_reads_in_a_circle(fan_out: int) -> None:
    assert all(-1 <= parent(position, fan_out) < position for position in range(500))


def test_zones_are_crossed_once_and_slow_hosts_come_last_in_theirs() -> None:
    given = [
        Hop("far-1", "", "far"),
        Hop("near-1", "", "near", is_slow=True),
        Hop("near-2", "", "near"),
        Hop("far-2", "", "far"),
        Hop("near-3", "", "near"),
    ]
    found = [hop.relay_id for hop in ordered(given, "near")]
    assert found == ["near-2", "near-3", "near-1", "far-1", "far-2"]
