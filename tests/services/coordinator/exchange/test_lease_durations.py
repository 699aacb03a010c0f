"""A worker that submits nothing while others do loses its leases; one that works, or waits like all others, does not."""

from __future__ import annotations

from pathlib import Path

from control_plane import Plane, rollout
from exchange_drivers import (
    COMMITTED,
    DUPLICATE,
    INVALID,
    STALE,
    MakeWorld,
    Reward,
    Rollout,
    World,
    group_result,
    make_completion,
)

from paceline.groups import Version
from paceline.services.coordinator.exchange import leases
from paceline.services.coordinator.exchange.workers import LIMIT_S, MIN_RESULTS, NO_MEDIAN_S, LeaseDurations
from paceline.services.coordinator.members.registry import Fault
from paceline.v1 import common_pb2
from paceline.v1 import exchange_pb2 as pb

Lease = tuple[str, int, int]


class Time:
    """Checks the current leases every second."""

    def __init__(self) -> None:
        self.ages, self.now_s, self.held = LeaseDurations(), 100.0, dict[Lease, None]()
        self.able: set[str] = set()
        """Workers that could take the leases of others."""
        self.found: list[str] = []

    def run(self, seconds: int, *busy: str, lease_s: int = 2) -> None:
        """Let `busy` workers submit a group every `lease_s` seconds, one lease each."""
        for _ in range(seconds):
            self.now_s += 1.0
            group = int(self.now_s)
            if group % lease_s == 0:
                for worker in busy:
                    for lease in [lease for lease in self.held if lease[0] == worker]:
                        del self.held[lease]
                        self.ages.note_submission(*lease)
                    self.held[worker, group, 1] = None
            self.found += [member_id for member_id, _ in self.ages.check(self.now_s, self.held, self.able)]


def test_who_hands_in_nothing_while_others_do_is_overdue() -> None:
    time = Time()
    time.held["idle", 1, 1] = None
    time.run(int(LIMIT_S), "busy", "other")
    assert time.found == []
    time.run(5, "busy", "other")
    assert set(time.found) == {"idle"}


def test_the_limit_grows_with_what_others_need() -> None:
    time = Time()
    time.held["long", 1, 1] = None
    time.run(180, "busy", "other", lease_s=20)  # ten times their 20 s are 200
    assert time.found == []
    time.run(60, "busy", "other", lease_s=20)
    assert "long" in time.found


def test_one_long_lease_beside_others_that_are_handed_in_is_no_fault() -> None:
    time = Time()
    time.held["worker", 1, 1] = None
    for _ in range(10):
        time.run(int(LIMIT_S / 2), "busy")
        time.ages.note_submission("worker", 2, 1)
    assert time.found == []


def test_a_pool_of_one_is_waited_for() -> None:
    time = Time()
    time.run(30, "worker")
    time.run(1000)
    assert time.found == []


def test_nobody_is_overdue_while_nobody_hands_in() -> None:
    time = Time()
    time.run(30, "busy")
    time.held["slow", 1, 1] = None
    time.run(1000)  # and the others are then
    assert time.found == []


def test_whoever_the_others_wait_for_is_overdue_though_they_have_nothing_to_do_meanwhile() -> None:
    time = Time()
    time.run(30, "busy")
    time.held["idle", 1, 1] = None
    time.run(3, "busy")
    time.run(int(LIMIT_S) + 3)
    assert "idle" in time.found


def test_whoever_took_everything_is_overdue_though_nobody_can_hand_in_anything() -> None:
    time = Time()
    time.run(30, "busy")
    time.held.clear()
    time.held["idle", 1, 1] = None
    time.run(1000)
    assert time.found == [], "nobody could take it"
    time.able = {"idle", "busy"}
    time.run(1)
    assert time.found == ["idle"]
    time.found, time.held["busy", 2, 1] = [], None
    time.run(10)
    assert time.found == [], "nobody has free hands"


def test_before_anybody_has_handed_in_anything_the_limit_is_long() -> None:
    time = Time()
    time.able = {"idle", "free"}
    time.held["idle", 1, 1] = None
    time.run(int(NO_MEDIAN_S))
    assert time.found == []
    time.run(5)
    assert set(time.found) == {"idle"}


def test_a_standstill_of_the_coordinator_is_nobodys_age() -> None:
    time = Time()
    time.held["idle", 1, 1] = None
    time.run(30, "busy", "other")
    time.now_s += 3600.0
    time.run(5, "busy", "other")
    assert time.found == []


def test_who_is_refused_again_and_again_is_overdue_at_once() -> None:
    time = Time()
    time.held["sick", 1, 1] = None
    time.run(MIN_RESULTS * 2 + 2, "busy")
    for _ in range(2):
        time.ages.note_refusal("sick")
    time.run(1, "busy")
    assert time.found == []
    time.ages.note_refusal("sick")
    time.run(1, "busy")
    assert time.found == ["sick"]


def test_what_is_kept_is_bounded() -> None:
    time = Time()
    for index in range(2000):
        time.ages.note_submission(f"worker-{index}", index, 1)
        time.ages.note_refusal(f"worker-{index}")
    time.run(1)
    assert max(len(vars(time.ages)[name]) for name in ("_since_s", "_results", "_submitted_s", "_refused")) <= 256


def take_overdue(world: World, *member_ids: str) -> None:
    """Revoke the leases of workers as overdue."""
    found = [(member_id, "it sleeps") for member_id in member_ids]
    with world.ledger.transaction():
        leases.revoke_overdue(world.exchange, world.run, found)
    world.notices += world.exchange.notices.take()


def test_its_leases_go_to_others_and_it_gets_none_before_it_submits_one(world: World) -> None:
    idle, busy = Rollout(world, "idle"), Rollout(world, "busy")
    first, second = idle.lease(4)
    take_overdue(world, "idle")
    assert "idle gets no lease" in world.kinds("warning")[-1]["message"]
    held = pb.LeaseRequest(room=4, held=pb.Held(group_ids=[first.group_id, second.group_id]))
    reply = world.send(pb.ExchangeRequest(member_id="idle", lease=held)).reply
    assert list(reply.lease.leases) == []
    assert [lease.group_id for lease in busy.lease(4)] == [first.group_id, second.group_id]
    assert idle.finish(first) == COMMITTED  # late, but the first
    assert "gets leases again" in world.kinds("warning")[-1]["message"]
    assert len(idle.lease(4)) > 0


def test_a_late_result_that_another_was_before_counts_as_one(world: World) -> None:
    idle, busy = Rollout(world, "idle"), Rollout(world, "busy")
    (lease,) = idle.lease()
    take_overdue(world, "idle")
    (again,) = busy.lease()
    assert busy.finish(again) == COMMITTED
    assert idle.finish(lease) == DUPLICATE
    assert len(idle.lease()) == 1


def test_an_evaluation_goes_to_another_worker(make_world: MakeWorld) -> None:
    world = make_world(grpo={"val_period": 1}, check=False)
    with world.ledger.transaction():
        world.ledger.update_run(world.run_id, published_step=0)
    world.begin_evaluation(0)
    idle, busy = Rollout(world, "idle"), Rollout(world, "busy")
    assert idle.lease(1)[0].HasField("pinned_version")
    assert not [lease for lease in busy.lease(1) if lease.HasField("pinned_version")]
    take_overdue(world, "idle")
    assert busy.lease(1)[0].HasField("pinned_version")


def test_refused_results_are_counted(world: World) -> None:
    idle, busy = Rollout(world, "sick"), Rollout(world, "busy")
    (lease,) = idle.lease()
    busy.lease()
    for _ in range(MIN_RESULTS):
        world.exchange.workers.lease_durations.note_submission("busy", 99, 1)
    bad = make_completion(Version(1, 0), 17, 0)
    request, frames = group_result(lease.group_id, 1, [bad, bad])
    request.member_id = "sick"
    for _ in range(3):
        assert leases.find_overdue(world.exchange, world.run, 1.0) == []
        assert world.send(request, frames).reply.status == INVALID
    ((member_id, why),) = leases.find_overdue(world.exchange, world.run, 1.0)
    assert member_id == "sick"
    assert "3 groups" in why


def test_an_evaluation_that_is_answered_with_another_version_goes_to_another_worker(
    make_world: MakeWorld,
) -> None:
    world = make_world(grpo={"val_period": 1}, check=False)
    with world.ledger.transaction():
        world.ledger.update_run(world.run_id, published_step=0)
    world.begin_evaluation(0)
    sick, other = Rollout(world, "sick"), Rollout(world, "other")
    wrong = make_completion(Version(1, 1), 4, 0)
    sick.completions = lambda lease, length=4: [wrong]  # type: ignore[method-assign]
    for _ in range(3):
        (lease,) = sick.lease(1)
        assert leases.find_overdue(world.exchange, world.run, 1.0) == []
        assert sick.finish(lease) == STALE
    (lease,) = sick.lease(1)
    found = leases.find_overdue(world.exchange, world.run, 2.0)
    assert [member_id for member_id, _ in found] == ["sick"]
    take_overdue(world, "sick")
    assert not [lease for lease in sick.lease(1) if lease.HasField("pinned_version")]
    (again,) = other.lease(1)
    assert (again.group_id, again.attempt) == (lease.group_id, lease.attempt + 1)
    assert other.finish(again) == COMMITTED


def test_another_worker_without_the_version_cannot_take_over_an_evaluation(make_world: MakeWorld) -> None:
    world = make_world(grpo={"val_period": 1}, check=False)
    world.begin_evaluation(2)
    pinned, _ = Rollout(world, "pinned", step=2), Rollout(world, "behind", step=1)
    assert pinned.lease(1)
    for now_s in range(0, 2 * int(NO_MEDIAN_S), 10):
        assert leases.find_overdue(world.exchange, world.run, float(now_s)) == []
    Rollout(world, "able", step=2)
    ((member_id, why),) = leases.find_overdue(world.exchange, world.run, 2 * NO_MEDIAN_S)
    assert member_id == "pinned"
    assert "other workers have nothing to do (the limit is 600 s)" in why


def test_tasks_of_a_reward_worker_that_says_nothing_go_to_another(world: World) -> None:
    rollout, idle = Rollout(world), Reward(world, "idle")
    for lease in rollout.lease(4):
        assert rollout.finish(lease) == COMMITTED
    first, second = idle.tasks()
    for now_s in range(0, 2 * int(NO_MEDIAN_S), 10):
        assert leases.find_overdue(world.exchange, world.run, float(now_s)) == []
    busy = Reward(world, "busy")
    found = leases.find_overdue(world.exchange, world.run, 2 * NO_MEDIAN_S)
    assert [member_id for member_id, _ in found] == ["idle"]
    take_overdue(world, "idle")
    assert (
        "idle gets no task before it submits scores, and other workers get the 2"
        in world.kinds("warning")[-1]["message"]
    )
    assert idle.tasks() == []
    again = busy.tasks()
    assert [(task.group_id, task.attempt) for task in again] == [(0, 2), (1, 2)]
    assert busy.score(again[0]) == COMMITTED
    assert idle.score(first) == DUPLICATE  # late, and not the first
    assert "idle has submitted scores and gets tasks again" in world.kinds("warning")[-1]["message"]
    assert idle.score(second) == COMMITTED  # late, but the first
    assert world.exchange.workers.overdue == set()


def test_a_reward_worker_that_cannot_work_has_no_free_hands(world: World) -> None:
    rollout, slow = Rollout(world), Reward(world, "slow")
    (lease,) = rollout.lease()
    rollout.finish(lease)
    slow.tasks()
    fault = Fault(world.run_id, "no such file")
    world.enter("without the file", common_pb2.ROLE_REWARD, fault=fault)
    for now_s in range(0, 2 * int(NO_MEDIAN_S), 10):
        assert leases.find_overdue(world.exchange, world.run, float(now_s)) == []


class Idle(LeaseDurations):
    """Always reports one overdue worker."""

    def check(self, now_s: float, held: object, able: object = ()) -> list[tuple[str, str]]:
        return [("idle", "the worker has submitted nothing for 99 s")]


async def test_the_pool_takes_them_and_says_so(tmp_path: Path) -> None:
    plane = await Plane.started(tmp_path)
    plane.coordinator.pool.overdue_check_s = 0.0
    plane.coordinator.exchange.workers.lease_durations = Idle()
    try:
        run = await plane.submit()
        plane.run_loops()
        idle = rollout(plane, "idle")
        await idle.hear("run")
        await plane.watch_until(
            run.run_id,
            "warning",
            message="idle gets no lease before it submits a group, and other workers get the 0 groups that it holds: "
            "the worker has submitted nothing for 99 s",
        )
        assert plane.coordinator.exchange.workers.overdue == {"idle"}
    finally:
        await plane.stop()
