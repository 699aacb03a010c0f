"""Energy by step."""

from __future__ import annotations

from typing import Any

from exchange_drivers import World

from paceline.services.coordinator.exchange.notices import Notice
from paceline.services.coordinator.members.registry import Introduction, Member, Members
from paceline.services.coordinator.reporting.run_log import Energy, RunLog
from paceline.v1 import common_pb2


def test_each_gpu_counts_once_from_its_second_reading_on() -> None:
    energy = Energy()
    assert energy.metrics([{"gpu_energy_j/a": 100.0, "gpu_use": 1.0}], 10) == {}
    members = [{"gpu_energy_j/a": 160.0}, {"gpu_energy_j/a": 150.0, "gpu_energy_j/b": 5000.0}]
    assert energy.metrics(members, 10) == {"gpu_energy_j": 60.0, "joules_per_trained_token": 6.0}
    members = [{"gpu_energy_j/a": 20.0}, {"gpu_energy_j/b": 5040.0}]  # a's driver was loaded anew
    assert energy.metrics(members, 0) == {"gpu_energy_j": 40.0}
    assert energy.metrics([{}], 10) == {}


def test_a_step_has_the_sums_of_a_pool_and_the_energy_of_all(make_world: Any) -> None:
    world: World = make_world()
    members = Members(60.0)
    for name, role in (
        ("learner", common_pb2.ROLE_LEARNER),
        ("one", common_pb2.ROLE_ROLLOUT),
        ("two", common_pb2.ROLE_ROLLOUT),
    ):
        members.add(Member(name, Introduction(role), 0.0))
    run_log = RunLog(world.ledger, world.exchange, members)
    for step, joules in enumerate((1000.0, 1300.0)):
        for number, member in enumerate(members.all()):
            member.measures.gauges = {"gpu_power_w": 100.0, "gpu_xid": 79.0, f"gpu_energy_j/{number % 2}": joules}
        with world.ledger.transaction():
            run_log.write_down([Notice("step", {"step": step, "metrics": {"trained_tokens": 60.0}})])
    metrics = world.ledger.metrics_of_step(world.run_id, 1)
    assert metrics is not None
    assert metrics["rollout/gpu_power_w"] == 200.0
    assert metrics["learner/gpu_power_w"] == 100.0
    assert metrics["gpu_energy_j"] == 600.0
    assert metrics["joules_per_trained_token"] == 10.0
    assert not [name for name in metrics if "gpu_xid" in name or "gpu_energy_j/" in name]
