"""Each change of the workers that receive weights makes a new roster, which is sent to the learner."""

from __future__ import annotations

import time

from exchange_drivers import World

from paceline.services.coordinator.members.registry import Introduction, Member, Members
from paceline.services.coordinator.pool.assignments import Roster, listed_names
from paceline.v1 import common_pb2, worker_pb2


def member(role: common_pb2.Role.ValueType, member_id: str, ready_run: str = "") -> Member:
    return Member(member_id, Introduction(role), time.monotonic(), ready_run=ready_run)


async def test_the_learner_hears_of_each_change_and_of_nothing_else(world: World) -> None:
    learner = member(common_pb2.ROLE_LEARNER, "learner-1")
    first, second = (member(common_pb2.ROLE_ROLLOUT, f"rollout-{i}", world.run_id) for i in (1, 2))
    members = Members(10.0)
    roster = Roster(members, world.exchange, lambda: learner)
    for newcomer in (first, second):
        members.add(newcomer)
        roster.update()
        roster.update()
    second.suspected = True
    roster.update()
    directive = await learner.stream.outbox.get()  # only the newest of directives that replace each other
    assert directive is not None
    assert (directive.epoch.number, list(directive.epoch.member_ids)) == (3, ["rollout-1"])
    assert (roster.number, roster.member_ids) == (3, ["rollout-1"])
    assert (first.weights.named_in, second.weights.named_in) == (1, 2)


async def test_a_cleared_roster_is_sent_again_under_a_new_number(world: World) -> None:
    learner = member(common_pb2.ROLE_LEARNER, "learner-1")
    members = Members(10.0)
    roster = Roster(members, world.exchange, lambda: learner)
    members.add(member(common_pb2.ROLE_ROLLOUT, "rollout-1", world.run_id))
    roster.update()
    roster.clear()
    roster.update()
    assert (roster.number, roster.member_ids) == (2, ["rollout-1"])


async def test_only_workers_that_are_ready_and_not_expelled_receive_weights(world: World) -> None:
    learner = member(common_pb2.ROLE_LEARNER, "learner-1")
    expelled = member(common_pb2.ROLE_ROLLOUT, "rollout-1", world.run_id)
    expelled.weights.expelled = True
    away = member(common_pb2.ROLE_ROLLOUT, "rollout-2", world.run_id)
    away.connected = False
    members = Members(10.0)
    for each in (expelled, away, member(common_pb2.ROLE_ROLLOUT, "rollout-3", "earlier-1")):
        members.add(each)
    roster = Roster(members, world.exchange, lambda: learner)
    roster.update()
    assert roster.member_ids == []


async def test_a_member_that_was_suspected_gets_its_host_s_plan_again(world: World) -> None:
    # The learner has cleared its state of the member, and waits for its answer.
    learner = member(common_pb2.ROLE_LEARNER, "learner-1")
    worker = member(common_pb2.ROLE_ROLLOUT, "rollout-1", world.run_id)
    worker.host = worker_pb2.HostAgent(agent_id="A", address="127.0.0.1:1")
    members = Members(10.0)
    roster = Roster(members, world.exchange, lambda: learner)
    members.add(worker)
    roster.update()
    announced = worker_pb2.HostVersion(
        run_id=world.run_id,
        version=common_pb2.PolicyVersion(session=1, step=1),
        sources=["127.0.0.1:2"],
        source_agent_ids=["L"],
    )
    roster.plans.take(announced, roster.number, roster.member_ids)
    worker.suspected = True
    roster.update()
    worker.suspected = False
    assert await plans_of(worker) == [1]
    roster.update()
    roster.update()
    assert await plans_of(worker) == [3]


async def plans_of(worker: Member) -> list[int]:
    """Return the epochs of the plans that are queued for a worker."""
    epochs = []
    while len(worker.stream.outbox):
        directive = await worker.stream.outbox.get()
        assert directive is not None
        epochs.append(directive.host_plan.epoch)
    return epochs


def test_a_line_of_the_log_names_some_of_thousands() -> None:
    assert listed_names([]) == "nobody"
    assert listed_names(["a", "b"]) == "a, b"
    line = listed_names([f"rollout-{number}" for number in range(1000)])
    assert line.startswith("rollout-0, rollout-1, ")
    assert line.endswith("rollout-15 and 984 more")
