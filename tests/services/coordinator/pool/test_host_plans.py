"""Plans of hosts follow the order of the chain, and are sent only to hosts whose plan has changed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.groups import Version
from paceline.services.coordinator.members.registry import Introduction, Member, Members
from paceline.services.coordinator.pool.host_plans import SLOW_VERSIONS, HopSpeeds, HostPlans
from paceline.v1 import common_pb2, worker_pb2


class Bench:
    """A pool whose directives are read from the members' queues."""

    def __init__(self) -> None:
        self.members = Members(10.0)
        self.offered: list[tuple[str, Version]] = []
        run = SimpleNamespace(run_id="run", spec=SimpleNamespace(weights=SimpleNamespace(max_wait_s=30.0)))
        exchange: Any = SimpleNamespace(
            active=run, workers=SimpleNamespace(offer=lambda *offer: self.offered.append(offer))
        )
        self.learner = Member("learner", Introduction(common_pb2.ROLE_LEARNER), 0.0)
        self.plans = HostPlans(self.members, exchange, lambda: self.learner)

    def add(self, member_id: str, agent: str, zone: str = "") -> Member:
        member = Member(member_id, Introduction(common_pb2.ROLE_ROLLOUT), 0.0)
        member.host = worker_pb2.HostAgent(agent_id=agent, address=f"{agent}:1", zone=zone) if agent else None
        self.members.add(member)
        return member

    async def sent(self, member: Member) -> list[worker_pb2.HostPlan]:
        found = []
        while len(member.stream.outbox):
            directive = await member.stream.outbox.get()
            assert directive is not None
            found.append(directive.host_plan)
        return found


@pytest.fixture
def bench() -> Bench:
    return Bench()


def version(step: int, agents: tuple[str, ...] = ("source",)) -> worker_pb2.HostVersion:
    return worker_pb2.HostVersion(
        run_id="run",
        version=common_pb2.PolicyVersion(session=1, step=step),
        manifest_sha256=b"d" * 32,
        size_bytes=1 << 30,
        sources=[f"{agent}:1" for agent in agents],
        source_agent_ids=agents,
        token=b"t" * 32,
    )


def first_upstreams(plans: list[worker_pb2.HostPlan]) -> list[str]:
    return [plan.upstreams[0].addresses[0] for plan in plans]


async def test_each_host_reads_from_the_one_before_and_workers_of_a_host_get_one_plan(bench: Bench) -> None:
    a, a2, b = bench.add("a", "A"), bench.add("a2", "A"), bench.add("b", "B")
    without = bench.add("old", "")
    bench.plans.take(version(1), 7, ["a", "a2", "b", "old"])
    (plan,), (plan2,), (plan_b,) = [await bench.sent(member) for member in (a, a2, b)]
    assert plan == plan2
    assert first_upstreams([plan, plan_b]) == ["source:1", "A:1"]
    assert (plan.epoch, plan.max_wait_s, plan_b.position) == (7, 30.0, 1)
    assert await bench.sent(without) == []
    assert bench.offered == [(i, Version(1, 1)) for i in ("a", "a2", "b")]
    assert Version(1, 1) in a.weights.offered


async def test_a_change_of_the_roster_reaches_those_whose_upstreams_it_changes(bench: Bench) -> None:
    a, b, c, d = (bench.add(name, name.upper()) for name in "abcd")
    bench.plans.take(version(1), 1, ["a", "b", "c"])
    for member in (a, b, c):
        await bench.sent(member)
    bench.plans.update(2, ["a", "c", "d"])  # b is dead, d joins in the middle of the transfer
    assert await bench.sent(a) == []
    assert await bench.sent(b) == []
    assert first_upstreams(await bench.sent(c)) == ["A:1"]
    assert first_upstreams(await bench.sent(d)) == ["C:1"]
    bench.plans.update(3, ["a", "c", "d"])
    assert [await bench.sent(member) for member in (a, c, d)] == [[], [], []]
    c.stream.host_plan = None  # as on a new stream
    bench.plans.update(3, ["a", "c", "d"])
    assert len(await bench.sent(c)) == 1


async def test_the_learner_s_own_hosts_read_from_each_other_and_are_no_hops(bench: Bench) -> None:
    own, other = bench.add("own", "S2"), bench.add("other", "B")
    bench.plans.take(version(1, ("S1", "S2")), 1, ["own", "other"])
    assert [list(up.addresses) for up in (await bench.sent(own))[0].upstreams] == [["S1:1", "S2:1"]]
    assert [list(up.addresses) for up in (await bench.sent(other))[0].upstreams] == [["S1:1", "S2:1"]]


async def test_the_learner_s_zone_comes_first(bench: Bench) -> None:
    far, near = bench.add("far", "F", "west"), bench.add("near", "N", "east")
    bench.learner.host = worker_pb2.HostAgent(agent_id="source", address="source:1", zone="east")
    bench.plans.take(version(1), 1, ["far", "near"])
    assert first_upstreams(await bench.sent(near)) == ["source:1"]
    assert first_upstreams(await bench.sent(far)) == ["N:1"]


async def test_a_version_of_another_run_is_planned_for_nobody(bench: Bench) -> None:
    a = bench.add("a", "A")
    other = version(1)
    other.run_id = "another"
    bench.plans.take(other, 1, ["a"])
    assert await bench.sent(a) == []


def measured(agent: str, seconds: float, waited_s: float = 0.0) -> worker_pb2.HostTransfer:
    return worker_pb2.HostTransfer(agent_id=agent, received_bytes=1000, seconds=seconds, waited_s=waited_s)


async def test_a_host_that_is_slow_twice_goes_to_the_end(bench: Bench) -> None:
    members = {name: bench.add(name, name.upper()) for name in "abcd"}
    for _ in range(SLOW_VERSIONS):
        texts = [
            bench.plans.note(members[name], measured(name.upper(), 10.0 if name == "a" else 1.0)) for name in "bcda"
        ]
    assert "the host of a receives weights at" in texts[-1]
    assert texts[:-1] == ["", "", ""]
    bench.plans.take(version(1), 1, list("abcd"))
    assert first_upstreams(await bench.sent(members["a"])) == ["D:1"]
    assert first_upstreams(await bench.sent(members["b"])) == ["source:1"]


def test_waiting_for_the_host_before_is_not_slowness() -> None:
    speeds = HopSpeeds()
    for _ in range(SLOW_VERSIONS):
        for agent in ("A", "B", "C"):
            speeds.note(measured(agent, 1.0))
        assert not speeds.note(measured("D", 10.0, waited_s=9.0))
    assert not speeds.is_slow("D")
    speeds.note(worker_pb2.HostTransfer(agent_id="D"))  # it had the version already
    assert not speeds.is_slow("D")
