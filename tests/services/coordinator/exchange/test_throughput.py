"""Counts of completed groups by worker."""

from __future__ import annotations

from pathlib import Path

import pytest
from exchange_drivers import Reward, Rollout, World, fill, make_spec

from paceline.services.coordinator.exchange.workers import Throughput


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
    world.close()


def test_workers_that_are_gone_are_forgotten() -> None:
    throughput = Throughput()
    throughput.generated["a"] += 1.0
    throughput.generated["b"] += 0.5
    throughput.scored["c"] += 2.0
    throughput.keep(["b"])
    assert dict(throughput.generated) == {"b": pytest.approx(0.5)}
    assert dict(throughput.scored) == {}
