"""A report counts only from its role and its session; any other report ends at most its sender's stream."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from control_plane import DEADLINE_S, Plane, Worker, ack, learner, offer, refusal, rollout

from paceline.rate_limited_log import unforeseen
from paceline.v1 import common_pb2, records_pb2, run_pb2, worker_pb2


async def started(plane: Plane) -> run_pb2.Run:
    run = await plane.run_one()
    return run


async def heard(plane: Plane, worker: Worker, member_id: str) -> None:
    """Wait until the coordinator has handled the worker's earlier reports, which it does in order; the worker then
    leaves."""
    worker.say(leave=worker_pb2.Leave())
    await worker.hear_the_end()
    assert plane.coordinator.members.get(member_id) is None


def reward(plane: Plane, member_id: str = "reward-1") -> Worker:
    return Worker(plane, common_pb2.ROLE_REWARD, member_id)


async def test_an_acknowledgement_counts_from_whom_it_was_offered_to(plane: Plane) -> None:
    run = await started(plane)
    trainer, worker, other, scorer = (
        learner(plane),
        rollout(plane),
        rollout(plane, "rollout-2"),
        reward(plane),
    )
    for one in (trainer, worker, other, scorer):
        await one.hear("run")
    trainer.say(weight_offer=offer(run.run_id, 1, 0))
    trainer.say(weight_offer=offer(run.run_id, 1, 7))  # the run has not published it
    for _ in range(2):
        await worker.hear("weight_offer")
    worker.say(weight_ack=ack(run.run_id, 1, 1_000_000))
    worker.say(weight_ack=ack(run.run_id, 1, 7))
    worker.say(weight_ack=ack(run.run_id, 1, 0, member_id="rollout-2"))
    other.say(weight_ack=ack(run.run_id, 1, 0))
    other.say(weight_ack=ack(run.run_id, 1, 0, member_id="rollout-2"))
    scorer.say(weight_ack=ack(run.run_id, 1, 0, member_id="reward-1"))
    for one, member_id in ((other, "rollout-2"), (scorer, "reward-1")):
        await heard(plane, one, member_id)
    assert plane.ledger.run(run.run_id)["published_step"] == -1
    worker.say(weight_ack=ack(run.run_id, 1, 0))
    told = (await trainer.hear("weight_acks")).acks
    assert [(said.member_id, said.version.step) for said in told] == [("rollout-1", 0)]
    assert plane.ledger.run(run.run_id)["published_step"] == 0
    assert plane.coordinator.exchange.workers.versions == {"rollout-1": (1, 0)}


async def test_an_acknowledgement_after_the_end_of_its_run_is_no_warning(
    plane: Plane, caplog: pytest.LogCaptureFixture
) -> None:
    run = await started(plane)
    worker = rollout(plane, "rollout-late")
    await worker.hear("run")
    await plane.runs.Cancel(run_pb2.CancelRequest(run_id=run.run_id))
    worker.say(weight_ack=ack(run.run_id, 1, 0, member_id="rollout-late"))
    worker.say(weight_ack=ack("nosuch-1", 1, 0, member_id="rollout-late"))
    await heard(plane, worker, "rollout-late")
    lines = [record.getMessage() for record in caplog.records if "ignored a weight_ack" in record.getMessage()]
    assert lines == ["ignored a weight_ack of rollout rollout-late: run 'nosuch-1' is not the current run"]


async def test_only_the_sessions_learner_speaks_for_the_run(plane: Plane) -> None:
    run = await started(plane)
    trainer, worker = learner(plane), rollout(plane)
    await trainer.hear("run")
    spare = learner(plane, "learner-2")
    await worker.hear("run")
    await spare.hear("welcome")
    path = str(plane.directory / "evil")
    checkpoint = worker_pb2.CheckpointReport(run_id=run.run_id, session=1, step=0, path=path, sha256="s")
    publish = worker_pb2.PublishReport(
        run_id=run.run_id, member_id="rollout-1", failure=worker_pb2.PUBLISH_FAILURE_LINK, epoch=99
    )
    publish.version.session = 1
    member = plane.coordinator.members.get("rollout-1")
    assert member is not None
    for liar, member_id in ((spare, "learner-2"), (worker, "rollout-1")):
        liar.say(checkpoint=checkpoint)
        liar.say(weight_offer=offer(run.run_id, 1, 0))
        liar.say(publish=publish)
        liar.say(run_report=worker_pb2.RunReport(run_id=run.run_id, session=1, vocab_size=7))
        liar.say(run_report=worker_pb2.RunReport(run_id=run.run_id, session=1, finished=True, export_path="/evil"))
        await heard(plane, liar, member_id)
    row = plane.ledger.run(run.run_id)
    assert (row["vocab_size"], row["export_path"]) == (0, "")
    assert plane.ledger.checkpoints.newest(run.run_id) is None
    assert not member.weights.expelled
    assert not member.weights.offered


async def test_what_an_old_session_publishes_expels_nobody(plane: Plane) -> None:
    run = await started(plane)
    first = learner(plane)
    await first.hear("run")
    worker = rollout(plane)
    await worker.hear("run")
    first.say(leave=worker_pb2.Leave())
    await first.hear_the_end()
    second = learner(plane, "learner-2")
    assert (await second.hear("run")).session == 2
    report = worker_pb2.PublishReport(
        run_id=run.run_id, member_id="rollout-1", failure=worker_pb2.PUBLISH_FAILURE_LINK, epoch=99
    )
    report.version.session = 1
    second.say(publish=report)
    await heard(plane, second, "learner-2")
    member = plane.coordinator.members.get("rollout-1")
    assert member is not None
    assert not member.weights.expelled


async def test_the_learner_says_how_large_the_vocabulary_is(plane: Plane) -> None:
    run = await started(plane)
    trainer = learner(plane)
    await trainer.hear("run")
    trainer.say(run_report=worker_pb2.RunReport(run_id=run.run_id, session=1, vocab_size=151_936))
    await heard(plane, trainer, "learner-1")
    assert plane.ledger.run(run.run_id)["vocab_size"] == 151_936


def wait_for_file(path: Path) -> None:
    """Wait for a file that another thread writes whole."""
    end_s = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < end_s
        time.sleep(0.01)


async def test_numbers_of_tokens_count_from_the_learner_alone(plane: Plane) -> None:
    run = await started(plane)
    trainer, worker = learner(plane), rollout(plane)
    for one in (trainer, worker):
        await one.hear("run")
    with plane.ledger.transaction():
        plane.ledger.update_run(run.run_id, next_batch=3)

    def report(step: int, session: int = 1, entropies: tuple[float, ...] = (0.5, 0.25)) -> worker_pb2.TokenStatistics:
        found = worker_pb2.TokenStatistics(run_id=run.run_id, session=session, step=step)
        for group_id, index in ((8, 0), (7, 1), (7, 0)):
            found.completions.add(group_id=group_id, index=index, logprobs=(-1.0, float("nan")), entropies=entropies)
        return found

    worker.say(token_statistics=report(0))
    await heard(plane, worker, "rollout-1")
    trainer.say(token_statistics=report(0, session=2))
    trainer.say(token_statistics=report(3))  # it has no batch
    trainer.say(token_statistics=report(0, entropies=(0.5,)))
    trainer.say(token_statistics=report(2))
    await heard(plane, trainer, "learner-1")
    folder = plane.directory / "token_stats" / run.run_id
    await asyncio.to_thread(wait_for_file, folder / "00000000000000000002.bin")
    assert len(list(folder.iterdir())) == 1
    asked = records_pb2.GetTokenStatisticsRequest(run_id=run.run_id, step=2)
    answer = await plane.records.GetTokenStatistics(asked)
    assert [(each.group_id, each.index) for each in answer.completions] == [(7, 0), (7, 1), (8, 0)]
    asked.group_id = 8
    (only,) = (await plane.records.GetTokenStatistics(asked)).completions
    assert only.logprobs[0] == -1.0
    assert math.isnan(only.logprobs[1])
    assert list(only.entropies) == [0.5, 0.25]
    asked.step = 0
    assert not (await plane.records.GetTokenStatistics(asked)).completions
    (folder / "00000000000000000000.bin").write_bytes(b"\xff" * 50)
    assert not (await plane.records.GetTokenStatistics(asked)).completions


async def test_a_member_does_not_fill_the_events_with_warnings(plane: Plane) -> None:
    run = await started(plane)
    worker = rollout(plane)
    await worker.hear("run")
    for number in range(100):
        worker.say(run_report=worker_pb2.RunReport(run_id=run.run_id, warning=f"{number} " + "w" * 10_000))
    await heard(plane, worker, "rollout-1")
    warnings = [event["json"] for event in plane.ledger.events(run.run_id, 0) if event["kind"] == "warning"]
    assert len(warnings) == 16
    assert all(len(warning) < 5000 for warning in warnings)


async def test_a_member_does_not_fill_events_and_log_with_what_keeps_it_from_working(
    plane: Plane, caplog: pytest.LogCaptureFixture
) -> None:
    run = await started(plane)
    worker, healthy = rollout(plane), rollout(plane, "rollout-2")
    await worker.hear("run")
    await healthy.hear("run")
    for number in range(100):
        error = f"{number}\n2026-01-01 ERROR forged " + "e" * 10_000
        worker.say(run_report=worker_pb2.RunReport(run_id=run.run_id, error=error))
    await heard(plane, worker, "rollout-1")
    events = [event["json"] for event in plane.ledger.events(run.run_id, 0)]
    assert sum("cannot work on the run" in event for event in events) == 16
    lines = [record.getMessage() for record in caplog.records]
    assert sum("cannot work on" in line for line in lines) == 2 * 16
    assert not [line for line in lines if "\n" in line or len(line) > 2000]


async def test_a_new_stream_brings_no_new_budget(plane: Plane) -> None:
    run = await started(plane)
    worker = rollout(plane)
    await worker.hear("run")
    for number in range(20):
        worker.say(run_report=worker_pb2.RunReport(run_id=run.run_id, warning=f"first {number}"))
    worker.hang_up()
    await worker.hear_the_end()
    again = rollout(plane, secret=worker.secret)
    await again.hear("run")
    again.say(run_report=worker_pb2.RunReport(run_id=run.run_id, warning="on the next"))
    await heard(plane, again, "rollout-1")
    warnings = [event["json"] for event in plane.ledger.events(run.run_id, 0) if event["kind"] == "warning"]
    assert len(warnings) == 16


async def test_a_further_rank_than_the_learner_has_ends_no_session(plane: Plane) -> None:
    run = await started(plane)
    trainer = learner(plane)
    await trainer.hear("run")
    liar = learner(plane, "learner-9", rank=1, world_size=2)
    await liar.hear("welcome")
    fault = worker_pb2.RunReport(run_id=run.run_id, session=1, error="E: of another", fault=worker_pb2.FAULT_STEP)
    liar.say(run_report=fault)
    liar.say(run_report=worker_pb2.RunReport(run_id=run.run_id, session=1, error="another reason"))
    await heard(plane, liar, "learner-9")
    member = plane.coordinator.members.get("learner-1")
    assert member is not None
    assert (member.session, plane.ledger.run(run.run_id)["session"]) == (1, 1)
    assert plane.ledger.run(run.run_id)["state"] == "running"
    assert plane.coordinator.exchange.active.state.ranks == 1


async def test_an_unforeseen_exception_ends_its_senders_stream_and_nothing_else(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    await started(plane)
    worker, other = rollout(plane), rollout(plane, "rollout-2")
    await worker.hear("run")
    await other.hear("run")
    before = unforeseen.total

    def fail(_: Any) -> dict[str, float]:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr("paceline.services.coordinator.pool.reports.finite_gauges", fail)
        worker.say(heartbeat=worker_pb2.Heartbeat())

        async def read_on() -> None:
            while await worker.call.read() is not grpc.aio.EOF:
                pass

        code, details = await refusal(read_on())
    assert code is grpc.StatusCode.INTERNAL
    assert "unexpected ZeroDivisionError in Connect" in details
    assert unforeseen.total == before + 1
    await heard(plane, other, "rollout-2")


async def test_a_member_whose_bookkeeping_fails_is_looked_at_again(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    await started(plane)
    coordinator = plane.coordinator
    members = []
    for member_id in ("rollout-1", "rollout-2"):
        await rollout(plane, member_id).hear("run")
        member = coordinator.members.get(member_id)
        assert member is not None
        members.append(member)

    def fail(*_: Any, **__: Any) -> int:
        raise KeyError(7)

    with monkeypatch.context() as patch:
        patch.setattr("paceline.services.coordinator.pool.pool.leases.revoke_from_member", fail)
        for member in members:
            member.last_report_s -= 100.0
        await coordinator.pool.expire_silent()
        assert len(coordinator.members) == 2
    await coordinator.pool.expire_silent()
    assert len(coordinator.members) == 0
