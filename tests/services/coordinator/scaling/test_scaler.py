"""The scaler over a real ledger and exchange, with a clock of the test: what it measures, decides and says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from exchange_drivers import Learner, Reward, Rollout, World, fill, make_spec

from paceline.errors import NotFound, Unavailable
from paceline.services.coordinator.exchange.notices import Notice
from paceline.services.coordinator.members.registry import Introduction, Member, Members
from paceline.services.coordinator.scaling.policy import Bounds, PoolConfig
from paceline.services.coordinator.scaling.scaler import NO_RUN, RECONNECT_S, UNUSED_S, Scaler
from paceline.v1 import common_pb2

ROLLOUT, REWARD = common_pb2.ROLE_ROLLOUT, common_pb2.ROLE_REWARD


class Bench:
    """A scaler with members that a test adds; `pass_time` is half a second at a time, as the coordinator's loop."""

    def __init__(self, directory: Path, *pools: PoolConfig, term: int = 1):
        self.now_s = 100.0
        self.world = World(directory, make_spec(directory, grpo={"max_num_steps": 1000, "num_prompts_per_step": 8}))
        self.world.ledger.term = term
        self.members = Members(10.0)
        self.scaler = Scaler(self.world.ledger, self.world.exchange, self.members, 5.0, lambda: self.now_s, pools)

    def join(self, role: common_pb2.Role.ValueType, *names: str, ready: bool = True, occupied: float = 1.0) -> None:
        for name in names:
            member = Member(name, Introduction(role), self.now_s)
            member.measures.gauges["occupied"] = occupied
            member.ready_run = self.world.run_id if ready else ""
            self.members.add(member)

    async def pass_time(self, seconds: float) -> None:
        for _ in range(round(2 * seconds)):
            self.now_s += 0.5
            await self.scaler.check()

    def complete(self, name: str, groups: float) -> None:
        self.world.exchange.workers.throughput.generated[name] += groups

    def step(self, train_s: float, wait_s: float = 0.0) -> None:
        run_id = self.world.run_id
        self.scaler.note([Notice("metrics", {"metrics": {"step_s": train_s}}, run_id)])
        self.scaler.note([Notice("step", {"step": 0, "metrics": {"learner_wait_s": wait_s}}, run_id)])


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.world.close()


async def test_a_bottleneck_is_measured_named_and_sized(bench: Bench) -> None:
    bench.join(ROLLOUT, "rollout-0", "rollout-1")
    bench.join(REWARD, "reward-0", occupied=0.1)
    await bench.pass_time(0.5)
    assert bench.scaler.desired("rollout") == 2, "it begins with what is there"
    for _ in range(8):  # two full workers complete 2 groups/s; the learner could train 4
        bench.complete("rollout-0", 5.0)
        bench.complete("rollout-1", 5.0)
        bench.world.exchange.workers.throughput.scored["reward-0"] += 10.0
        await bench.pass_time(5.0)
        bench.step(train_s=2.0, wait_s=3.0)
    report = bench.scaler.report()
    assert report.pools["rollout"].state is not None
    assert report.pools["rollout"].state.rate == pytest.approx(1.0, rel=0.05)
    assert report.pools["rollout"].state.demand == pytest.approx(4.0, rel=0.05)
    assert bench.scaler.desired("rollout") == 4, "5 are needed, and it doubles at most"
    assert report.wait_fraction == pytest.approx(0.6)
    assert re.match(r"the rollout pool limits the run: its 2 workers complete (49|50)% of what", report.text)
    assert "With 5 workers" in report.text


async def test_dropped_groups_are_work_that_a_step_takes(bench: Bench) -> None:
    bench.join(ROLLOUT, "rollout-0")
    await bench.pass_time(0.5)
    bench.step(2.0)
    with bench.world.ledger.transaction():
        bench.world.ledger.count(bench.world.run_id, "groups:dropped:no_variance", 8)
        bench.world.ledger.count(bench.world.run_id, "groups:dropped:run_ended", 100)
    bench.now_s += 2.0
    bench.step(2.0)
    period = bench.scaler.meter.take(bench.now_s)
    assert (period.steps, period.step_s) == (2, pytest.approx(2.0))
    assert period.groups_per_step == pytest.approx((8 + 16) / 2)


async def test_the_time_between_steps_counts_also_where_the_learner_does_not_report_it(bench: Bench) -> None:
    """Publishing and checkpoints are between steps."""
    bench.join(ROLLOUT, "rollout-0")
    bench.step(2.0)
    bench.now_s += 10.0
    bench.step(2.0, wait_s=4.0)
    assert bench.scaler.meter.take(bench.now_s).step_s == pytest.approx((2.0 + 6.0) / 2)


async def test_workers_that_do_not_take_work_are_starting(bench: Bench) -> None:
    bench.join(ROLLOUT, "rollout-0")
    bench.join(ROLLOUT, "rollout-1", ready=False)
    bench.join(ROLLOUT, "rollout-2")
    draining = bench.members.get("rollout-2")
    assert draining is not None
    draining.draining = True
    await bench.pass_time(1.0)
    measured = bench.scaler.report().pools["rollout"].measured
    assert measured is not None
    assert (measured.ready, measured.starting) == (1, 1)


async def test_without_a_run_pools_go_to_their_least_size(tmp_path: Path) -> None:
    bench = Bench(tmp_path, PoolConfig("reward", "reward", bounds=Bounds(first=2, most=4, idle_s=10.0)))
    bench.join(REWARD, "reward-0", "reward-1")
    await bench.pass_time(0.5)
    assert bench.scaler.desired("reward") == 2
    with bench.world.ledger.transaction():
        bench.world.ledger.update_run(bench.world.run_id, state="paused")
    await bench.pass_time(5.0)
    assert bench.scaler.desired("reward") == 2
    await bench.pass_time(10.0)
    assert bench.scaler.desired("reward") == 0
    assert bench.scaler.report().text == NO_RUN
    with bench.world.ledger.transaction():
        bench.world.ledger.update_run(bench.world.run_id, state="running")
    await bench.pass_time(0.5)
    assert bench.scaler.desired("reward") == 2, "at once, not at the end of the period"
    bench.world.close()


async def test_a_pool_that_no_run_needs_stays_at_its_least_size(bench: Bench) -> None:
    await bench.pass_time(1.0)
    assert bench.scaler.desired("environment") == 0
    assert bench.scaler.desired("reward") == 1


async def test_after_a_restart_nothing_is_said_until_the_workers_are_back(tmp_path: Path) -> None:
    bench = Bench(tmp_path, term=2)
    await bench.pass_time(1.0)
    with pytest.raises(Unavailable, match="has just started"):
        bench.scaler.desired("rollout")
    assert bench.scaler.report().pools["rollout"].state is None
    bench.join(ROLLOUT, *(f"rollout-{i}" for i in range(7)))
    await bench.pass_time(RECONNECT_S)
    assert bench.scaler.desired("rollout") == 7
    bench.world.close()


async def test_pools_of_one_role_share_its_demand_by_cost(tmp_path: Path) -> None:
    bounds = Bounds(most=2, low_s=0.0)
    bench = Bench(
        tmp_path,
        PoolConfig("rollout", "spot", "spot-", bounds, 1.0),
        PoolConfig("rollout", "fixed", "fixed-", bounds, 4.0),
    )
    bench.join(ROLLOUT, "spot-0", "fixed-0")
    with pytest.raises(Unavailable):
        bench.scaler.desired("spot")
    for _ in range(10):
        bench.complete("spot-0", 5.0)
        bench.complete("fixed-0", 5.0)
        await bench.pass_time(5.0)
        bench.step(5.0)  # 1.6 groups/s are asked, and each worker completes one
    assert (bench.scaler.desired("spot"), bench.scaler.desired("fixed")) == (2, 0)
    assert set(bench.scaler.report().pools) == {"spot", "fixed", "reward", "environment"}
    with pytest.raises(NotFound, match="no pool 'rollout'; the pools are environment, fixed, reward, spot"):
        bench.scaler.desired("rollout")
    bench.world.close()


async def test_a_declared_pool_is_scaled_from_its_first_run_on(tmp_path: Path) -> None:
    bench = Bench(tmp_path, PoolConfig("rollout", "rollout", bounds=Bounds(first=3)))
    with bench.world.ledger.transaction():
        bench.world.ledger.update_run(bench.world.run_id, state="paused")
    await bench.pass_time(1.0)
    rollout, reward = (bench.scaler.report().pools[name] for name in ("rollout", "reward"))
    assert rollout.requested_s is None
    with bench.world.ledger.transaction():
        bench.world.ledger.update_run(bench.world.run_id, state="running")
    await bench.pass_time(0.5)
    assert rollout.requested_s is not None
    assert rollout.state is not None
    assert rollout.state.desired == 3
    assert reward.requested_s is None, "nobody scales it"
    bench.world.close()


async def test_a_pool_that_nobody_asks_for_any_more_is_a_persons_again(bench: Bench) -> None:
    await bench.pass_time(0.5)
    bench.scaler.desired("reward")
    sized = bench.scaler.report().pools["reward"]
    bench.now_s += UNUSED_S
    await bench.pass_time(5.0)
    assert sized.requested_s is None


async def test_a_size_that_nobody_scales_is_a_persons(bench: Bench) -> None:
    """What was wanted before is not held against workers that a person has started since."""
    bench.join(ROLLOUT, "rollout-0")
    await bench.pass_time(10.0)
    bench.join(ROLLOUT, *(f"rollout-{i}" for i in range(1, 6)))
    await bench.pass_time(5.0)
    assert bench.scaler.desired("rollout") == 6


async def test_a_real_step_of_the_exchange_is_counted(bench: Bench) -> None:
    rollout, reward, learner = (
        Rollout(bench.world, "rollout-0"),
        Reward(bench.world, "reward-0"),
        Learner(bench.world),
    )
    bench.join(ROLLOUT, "rollout-0")
    bench.join(REWARD, "reward-0")
    await bench.pass_time(0.5)
    fill(rollout, reward, 8)
    assert learner.train(0) is not None
    (trained,) = [notice for notice in bench.world.notices if notice.kind == "step"]
    bench.scaler.note([Notice("metrics", {"metrics": {"step_s": 1.0}}, bench.world.run_id), trained])
    period = bench.scaler.meter.take(bench.now_s + 1.0)
    assert period.steps == 1
    assert period.workers["rollout-0"].completed == 8.0
    assert period.workers["reward-0"].completed == 8.0
