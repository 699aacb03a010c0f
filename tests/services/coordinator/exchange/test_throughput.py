"""Counts of completed groups by worker, and the pace of sampling by step."""

from __future__ import annotations

from pathlib import Path

import pytest
from exchange_drivers import Reward, Rollout, World, fill, make_spec

from paceline.services.coordinator.exchange.notices import Notice
from paceline.services.coordinator.exchange.workers import Throughput
from paceline.services.coordinator.members.registry import Introduction, Member, Members
from paceline.services.coordinator.reporting.run_log import RunLog, SamplingPace
from paceline.v1 import common_pb2


def test_groups_count_where_they_are_committed_and_once(tmp_path: Path) -> None:
    world = World(tmp_path, make_spec(tmp_path))
    rollout, reward = Rollout(world, "a"), Reward(world, "r")
    fill(rollout, reward, 2)
    (lease,) = rollout.lease()
    rollout.finish(lease)
    rollout.finish(lease)  # sent again, because the reply was lost
    throughput = world.exchange.workers.throughput
    assert dict(throughput.generated) == {"a": 3.0}
    assert dict(throughput.scored) == {"r": 2.0}
    books = world.ledger.token_books(world.run_id)
    assert throughput.tokens == books["generated"] > 0
    world.close()


def test_workers_that_are_gone_are_forgotten() -> None:
    throughput = Throughput()
    throughput.generated["a"] += 1.0
    throughput.generated["b"] += 0.5
    throughput.scored["c"] += 2.0
    throughput.keep(["b"])
    assert dict(throughput.generated) == {"b": pytest.approx(0.5)}
    assert dict(throughput.scored) == {}


def test_the_pace_of_a_step_is_the_mean_since_the_step_before() -> None:
    now_s, throughput = 100.0, Throughput()
    throughput.tokens, throughput.turns = 5000, 7  # of a run before
    pace = SamplingPace(throughput, lambda: now_s)
    throughput.tokens += 800  # a burst at the step's begin; then the workers wait for rewards
    now_s = 120.0
    assert pace.take() == {"tokens_per_s": 40.0, "turns_per_s": 0.0}
    throughput.tokens, throughput.turns = throughput.tokens + 30, throughput.turns + 5
    now_s = 130.0
    assert pace.take() == {"tokens_per_s": 3.0, "turns_per_s": 0.5}


def test_a_step_has_a_pace_while_its_workers_wait(tmp_path: Path) -> None:
    world, members = World(tmp_path, make_spec(tmp_path)), Members(60.0)
    member = Member("a", Introduction(common_pb2.ROLE_ROLLOUT), 0.0)
    members.add(member)
    run_log = RunLog(world.ledger, world.exchange, members)
    fill(Rollout(world, "a"), Reward(world, "r"), 2)
    member.measures.gauges = {"tokens_per_s": 0.0}  # since it waited at its last heartbeat
    with world.ledger.transaction():
        run_log.write_down([Notice("step", {"step": 0, "metrics": {}})])
    metrics = world.ledger.metrics_of_step(world.run_id, 0)
    assert metrics is not None
    assert metrics["rollout/tokens_per_s"] > 0
    world.close()


@pytest.mark.parametrize("is_resumed", [True, False])
def test_the_pace_begins_anew_when_a_run_is_resumed(tmp_path: Path, is_resumed: bool) -> None:
    world, members = World(tmp_path, make_spec(tmp_path)), Members(60.0)
    member = Member("a", Introduction(common_pb2.ROLE_ROLLOUT), 0.0)
    members.add(member)
    member.measures.gauges = {"tokens_per_s": 0.0}
    run_log = RunLog(world.ledger, world.exchange, members)
    run_log.open(world.run_id, tmp_path / "run", tensorboard=False)
    fill(Rollout(world, "a"), Reward(world, "r"), 2)  # before the pause
    if is_resumed:
        run_log.resume(world.run_id)
    with world.ledger.transaction():
        run_log.write_down([Notice("step", {"step": 0, "metrics": {}})])
    metrics = world.ledger.metrics_of_step(world.run_id, 0)
    assert metrics is not None
    assert (metrics["rollout/tokens_per_s"] == 0) == is_resumed
    run_log.close()
    world.close()
