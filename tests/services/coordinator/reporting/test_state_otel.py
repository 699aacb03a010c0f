"""What a collector reads of the coordinator's state, with a real ledger and members."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from paceline.services.coordinator.exchange.state import Exchange
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.members.registry import Fault, Introduction, Member, Members
from paceline.services.coordinator.reporting.otel import OBSERVE_S, StateMeters
from paceline.v1 import common_pb2

Series = dict[tuple[str, str], float]


class World:
    def __init__(self, directory: Path):
        self.ledger = Ledger(directory / "ledger.sqlite")
        self.exchange, self.members = Exchange(self.ledger), Members(10.0)
        self.reader = InMemoryMetricReader()
        meter = MeterProvider([self.reader]).get_meter("test")
        self.meters = StateMeters(self.ledger, self.exchange, self.members, directory, meter)

    def read(self) -> Series:
        """Return the values by the metric's short name and the value of its attribute."""
        data = self.reader.get_metrics_data()
        return {
            (
                metric.name.removeprefix("paceline.coordinator."),
                "".join(map(str, (p.attributes or {}).values())),
            ): p.value  # type: ignore[union-attr]
            for resource in (data.resource_metrics if data else [])
            for scope in resource.scope_metrics
            for metric in scope.metrics
            for p in metric.data.data_points
        }


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def add_run(ledger: Ledger, directory: Path, run_id: str) -> None:
    with ledger.transaction():
        ledger.add_run(run_id, "name: x\n", str(directory / run_id), max_num_steps=5)


def test_nothing_is_told_before_the_first_snapshot(world: World) -> None:
    assert world.read() == {}


def test_pools_are_counted_by_role(world: World) -> None:
    reward = common_pb2.ROLE_REWARD
    for name in ("a", "b", "c"):
        world.members.add(Member(name, Introduction(reward, "host:1"), 0.0))
    for member, (field, value) in zip(
        world.members.all(),
        (("connected", False), ("suspected", True), ("fault", Fault("r", "m"))),
        strict=True,
    ):
        setattr(member, field, value)
    world.meters.observe(0.0)
    read = world.read()
    assert read["members", "reward"] == 2
    assert read["suspected", "reward"] == 1
    assert read["unable", "reward"] == 1
    assert read["members", "rollout"] == 0
    assert read["disk_free_bytes", ""] > 0


def needed(world: World, active: object, now_s: float) -> set[str]:
    world.exchange.active = active  # type: ignore[assignment]
    world.meters.observe(now_s)
    return {pool for (name, pool), value in world.read().items() if name == "needed" and value}


def test_pools_are_needed_by_what_the_run_does(world: World) -> None:
    def run(prompts: object, rewards: list[str], environment: object) -> object:
        return SimpleNamespace(prompts=prompts, spec=SimpleNamespace(rewards=rewards, environment=environment))

    assert needed(world, None, 1 * OBSERVE_S) == set()
    assert needed(world, run(None, [], None), 2 * OBSERVE_S) == {"learner"}
    assert needed(world, run("prompts", ["exact_match"], None), 3 * OBSERVE_S) == {"learner", "rollout", "reward"}
    assert needed(world, run("prompts", [], "environment"), 4 * OBSERVE_S) == {"learner", "rollout", "environment"}


def test_the_age_of_a_step_counts_from_its_change_and_goes_with_the_run(world: World, tmp_path: Path) -> None:
    add_run(world.ledger, tmp_path, "run-1")
    world.meters.observe(0.0)
    assert world.read()["runs", "queued"] == 1
    assert ("step_age_s", "run-1") not in world.read()

    def change(**columns: object) -> None:
        with world.ledger.transaction():
            world.ledger.update_run("run-1", **columns)

    change(state="running")
    world.meters.observe(10.0)
    world.meters.observe(40.0)
    assert world.read()["step_age_s", "run-1"] == 30.0
    change(next_step=1)
    world.meters.observe(50.0)
    assert world.read()["step_age_s", "run-1"] == 0.0
    change(state="paused")
    world.meters.observe(60.0)
    world.meters.observe(90.0)
    assert world.read()["paused_s", "run-1"] == 30.0
    assert ("step_age_s", "run-1") not in world.read()
    change(state="failed")
    world.meters.observe(100.0)
    assert ("paused_s", "run-1") not in world.read()
    assert world.read()["runs", "failed"] == 1


def test_a_snapshot_is_kept_for_a_while(world: World) -> None:
    world.meters.observe(0.0)
    world.exchange.admission_closed = "full"
    world.meters.observe(OBSERVE_S / 2)
    assert world.read()["admission_closed", ""] == 0
    world.meters.observe(OBSERVE_S)
    assert world.read()["admission_closed", ""] == 1
