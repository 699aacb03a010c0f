"""Environment workers are sent every change of the serving rollout workers, and nothing else."""

from __future__ import annotations

from pathlib import Path

from control_plane import Plane, Worker, ack, learner, offer, rollout
from episode_drivers import ENVIRONMENT

from paceline.v1 import common_pb2, worker_pb2


async def hear_engines(worker: Worker, *expected: tuple[str, int]) -> worker_pb2.Engines:
    """Read until the list has exactly these members and versions."""
    while True:
        engines: worker_pb2.Engines = await worker.hear("engines")
        if [(engine.member_id, engine.version.step) for engine in engines.engines] == list(expected):
            return engines


async def test_the_list_follows_versions_drains_faults_and_leaves(tmp_path: Path) -> None:
    plane = await Plane.started(tmp_path)
    run = await plane.run_one(**ENVIRONMENT)
    environment = Worker(plane, common_pb2.ROLE_ENVIRONMENT, "environment-1")
    assert (await environment.hear("run")).run_id == run.run_id
    assert not (await environment.hear("engines")).engines
    trainer = learner(plane)
    session = (await trainer.hear("run")).session
    workers = {}
    for name in ("rollout-1", "rollout-2"):
        workers[name] = worker = rollout(plane, name, address=f"{name}:7")
        await worker.hear("run")
        worker.say(run_report=worker_pb2.RunReport(run_id=run.run_id))
        trainer.say(weight_offer=offer(run.run_id, session, 0, name))
        await worker.hear("weight_offer")
        worker.say(weight_ack=ack(run.run_id, session, 0, name))
    engines = await hear_engines(environment, ("rollout-1", 0), ("rollout-2", 0))
    assert engines.run_id == run.run_id
    assert [engine.address for engine in engines.engines] == ["rollout-1:7", "rollout-2:7"]
    workers["rollout-1"].say(heartbeat=worker_pb2.Heartbeat(draining=True))
    await hear_engines(environment, ("rollout-2", 0))
    workers["rollout-1"].say(leave=worker_pb2.Leave())
    workers["rollout-2"].say(run_report=worker_pb2.RunReport(run_id=run.run_id, error="no memory"))
    await hear_engines(environment)
    workers["rollout-2"].say(run_report=worker_pb2.RunReport(run_id=run.run_id))
    await hear_engines(environment, ("rollout-2", 0))
    later = Worker(plane, common_pb2.ROLE_ENVIRONMENT, "environment-2")
    await hear_engines(later, ("rollout-2", 0))
    workers["rollout-2"].hang_up()  # its stream breaks
    await hear_engines(environment)
    await hear_engines(later)
    await plane.stop()


async def test_an_environment_worker_is_idle_in_other_runs(tmp_path: Path) -> None:
    plane = await Plane.started(tmp_path)
    run = await plane.run_one()
    environment = Worker(plane, common_pb2.ROLE_ENVIRONMENT, "environment-1")
    await environment.hear("welcome")
    other = rollout(plane)
    assert (await other.hear("run")).run_id == run.run_id
    member = plane.coordinator.members.get("environment-1")
    assert member is not None
    assert len(member.stream.outbox) == 0
    await plane.stop()
