"""Membership over real gRPC: Welcome, sessions, rosters, and members that leave."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from control_plane import DEADLINE_S, Plane, Worker, ack, learner, offer, refusal, rollout

from paceline.services.common.worker.membership import Membership
from paceline.services.coordinator.exchange.state import ActiveRun
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.v1 import common_pb2, run_pb2, worker_pb2
from paceline.wire import PROTOCOL

# Workers


async def test_a_stream_begins_with_hello(plane: Plane) -> None:
    worker = rollout(plane)
    worker._reports.get_nowait()
    worker.say(heartbeat=worker_pb2.Heartbeat())
    code, details = await refusal(worker.call.read())
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "must be hello" in details
    assert len(plane.coordinator.members) == 0


async def test_a_stream_that_says_nothing_is_refused(plane: Plane) -> None:
    worker = rollout(plane)
    worker._reports.get_nowait()
    worker.hang_up()
    code, _ = await refusal(worker.call.read())
    assert code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("hello", "code", "text"),
    [
        (
            {"protocol": 99},
            grpc.StatusCode.FAILED_PRECONDITION,
            f"speaks protocol 99, but the coordinator speaks {PROTOCOL}",
        ),
        ({"protocol": 2}, grpc.StatusCode.FAILED_PRECONDITION, "update the worker"),
        ({"member_id": ""}, grpc.StatusCode.INVALID_ARGUMENT, "member_id '' must be 1 to 64"),
        ({"member_id": "a\nERROR b"}, grpc.StatusCode.INVALID_ARGUMENT, r"'a\nERROR b'"),
        ({"member_id": "m" * 65}, grpc.StatusCode.INVALID_ARGUMENT, "1 to 64"),
        ({"role": 0}, grpc.StatusCode.INVALID_ARGUMENT, "has the role 0"),
        (
            {"role": 7},
            grpc.StatusCode.INVALID_ARGUMENT,
            "has the role 7, but this coordinator supports 1 (ROLE_ROLLOUT)",
        ),
        ({"role": -1}, grpc.StatusCode.INVALID_ARGUMENT, "has the role -1"),
        ({"learner_id": "x" * 65}, grpc.StatusCode.INVALID_ARGUMENT, "learner_id of worker rollout-1 has 65"),
        ({"address": "h" * 300}, grpc.StatusCode.INVALID_ARGUMENT, "address of worker rollout-1"),
        ({"http_address": "h\n:1"}, grpc.StatusCode.INVALID_ARGUMENT, "http_address of worker rollout-1"),
        ({"rank": 2, "world_size": 2}, grpc.StatusCode.INVALID_ARGUMENT, "rank 2 of 2"),
    ],
)
async def test_a_worker_that_does_not_fit_is_told_why(
    plane: Plane, hello: dict[str, Any], code: grpc.StatusCode, text: str
) -> None:
    worker = Worker(plane, hello.pop("role", 1), hello.pop("member_id", "rollout-1"), **hello)
    status, details = await refusal(worker.call.read())
    assert status is code
    assert text in details
    assert len(plane.coordinator.members) == 0


async def test_a_worker_is_welcomed_and_put_on_the_run(plane: Plane, caplog: pytest.LogCaptureFixture) -> None:
    run = await plane.run_one()
    worker = rollout(plane)
    welcome = await worker.hear("welcome")
    assert (welcome.term, welcome.exchange_endpoint) == (1, "tcp://127.0.0.1:1")
    assert welcome.heartbeat_timeout_s == 60.0
    assignment = await worker.hear("run")
    assert assignment.run_id == run.run_id
    assert assignment.spec_yaml == run.spec_yaml
    members = (await plane.workers.ListMembers(worker_pb2.ListMembersRequest())).members
    assert [(member.member_id, member.role) for member in members] == [("rollout-1", common_pb2.ROLE_ROLLOUT)]
    worker.say(leave=worker_pb2.Leave())
    caplog.set_level("INFO")
    await worker.hear_the_end()
    assert len(plane.coordinator.members) == 0
    assert not plane.coordinator.exchange.senders.ids
    await plane.watch_until(run.run_id, "member", what="left: in good order")
    levels = [record.levelname for record in caplog.records if "left (in good order)" in record.getMessage()]
    assert levels == ["INFO"]


async def test_a_broken_stream_is_no_death_and_a_new_one_replaces_it(plane: Plane) -> None:
    first = rollout(plane)
    await first.hear("welcome")
    second = rollout(plane, secret=first.secret)
    await second.hear("welcome")
    await first.hear_the_end()
    member = plane.coordinator.members.get("rollout-1")
    assert member is not None
    assert member.connected
    second.hang_up()
    await second.hear_the_end()
    assert plane.coordinator.members.get("rollout-1") is member
    assert not member.connected


async def test_the_learner_gets_a_session_and_the_next_one_another(plane: Plane) -> None:
    await plane.run_one()
    first = learner(plane)
    assert (await first.hear("run")).session == 1
    spare = learner(plane, "learner-2")
    await spare.hear("welcome")
    first.say(leave=worker_pb2.Leave())
    assignment = await spare.hear("run")
    assert (assignment.session, assignment.start_step, assignment.checkpoint_path) == (2, 0, "")


async def test_no_session_begins_of_a_run_that_stopped_while_its_checkpoints_were_read(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await plane.run_one()
    assignments, exchange = plane.coordinator.pool.assignments, plane.coordinator.exchange

    async def stop(active: ActiveRun) -> None:
        with plane.ledger.transaction():
            exchange.stop_work(active.run_id)

    monkeypatch.setattr(assignments, "_check_checkpoints", stop)
    await learner(plane).hear("welcome")
    await assignments.assign_learner()
    assert exchange.active is None
    assert plane.ledger.run(run.run_id)["session"] == 0


async def test_a_learner_that_comes_back_keeps_its_session(plane: Plane) -> None:
    run = await plane.run_one()
    first = learner(plane)
    await first.hear("run")
    first.hang_up()
    await first.hear_the_end()
    again = learner(plane, session=1, run_id=run.run_id)
    await again.hear("epoch")
    assert plane.ledger.run(run.run_id)["session"] == 1


async def test_a_members_progress_reaches_rank_0_under_the_members_own_name(plane: Plane) -> None:
    run = await plane.run_one()
    rank_0 = learner(plane)
    await rank_0.hear("run")
    member = rollout(plane)
    await member.hear("run")
    foreign = worker_pb2.WeightProgress(run_id="another", received_bytes=1)
    other = worker_pb2.WeightProgress(run_id=run.run_id, member_id="somebody", received_bytes=2)
    own = worker_pb2.WeightProgress(run_id=run.run_id, member_id="rollout-1", received_bytes=3)
    own.phase = worker_pb2.WEIGHT_PHASE_LOADING
    for progress in (foreign, other, own):
        progress.version.session = 1
    rank_0.say(weight_offer=offer(run.run_id, 1, 0))
    await member.hear("weight_offer")
    for progress in (foreign, other, own):
        member.say(weight_progress=progress)
    heard = await rank_0.hear("weight_progress")
    assert (heard.member_id, heard.received_bytes) == ("rollout-1", 3)
    assert heard.phase == worker_pb2.WEIGHT_PHASE_LOADING


async def test_a_checkpoint_that_is_reported_again_is_no_news(plane: Plane) -> None:
    run = await plane.run_one()
    worker = learner(plane)
    await worker.hear("run")
    for step in (1, 1, 2):
        path = str(plane.directory / run.run_id / "checkpoints" / f"1-{step}")
        report = worker_pb2.CheckpointReport(
            run_id=run.run_id, session=1, step=step, path=path, sha256="0" * 64, seconds=float("nan")
        )
        worker.say(checkpoint=report)
    await plane.watch_until(run.run_id, "checkpoint", step=2)
    kinds = [event["kind"] for event in plane.ledger.events(run.run_id, 0)]
    assert kinds.count("checkpoint") == 2
    assert "NaN" not in str([event["json"] for event in plane.ledger.events(run.run_id, 0)])


async def test_a_session_of_another_run_is_none_of_this(plane: Plane) -> None:
    await plane.run_one()
    first = learner(plane)
    await first.hear("run")
    first.say(leave=worker_pb2.Leave())
    await first.hear_the_end()
    other = learner(plane, "learner-2", session=1, run_id="another-7")
    assert (await other.hear("run")).session == 2


async def test_an_epoch_names_who_is_ready(plane: Plane) -> None:
    run = await plane.run_one()
    trainer, worker = learner(plane), rollout(plane)
    await trainer.hear_epoch()
    await worker.hear("run")
    worker.say(run_report=worker_pb2.RunReport(run_id=run.run_id))
    await trainer.hear_epoch("rollout-1")
    trainer.say(weight_offer=offer(run.run_id, 1, 0))
    await worker.hear("weight_offer")
    worker.say(weight_ack=ack(run.run_id, 1, 0))
    assert [said.member_id for said in (await trainer.hear("weight_acks")).acks] == ["rollout-1"]
    assert plane.coordinator.exchange.workers.versions == {"rollout-1": (1, 0)}
    worker.say(leave=worker_pb2.Leave())
    await trainer.hear_epoch()
    assert plane.coordinator.exchange.workers.versions == {}


async def test_a_member_that_missed_a_deadline_is_expelled_told_so_and_named_again(plane: Plane) -> None:
    run = await plane.run_one()
    trainer, worker, other = learner(plane), rollout(plane), rollout(plane, "rollout-2")
    for one, names in ((worker, ["rollout-1"]), (other, ["rollout-1", "rollout-2"])):
        await one.hear("run")
        one.say(run_report=worker_pb2.RunReport(run_id=run.run_id))
        await trainer.hear_epoch(*names)
    named_in = plane.coordinator.pool.assignments.roster.number

    def failed(epoch: int, failure: worker_pb2.PublishFailure.ValueType) -> worker_pb2.PublishReport:
        report = worker_pb2.PublishReport(
            run_id=run.run_id, member_id="rollout-1", epoch=epoch, failure=failure, error="transfer: too slow"
        )
        report.version.session = 1
        return report

    for failure in (worker_pb2.PUBLISH_FAILURE_REFUSED, worker_pb2.PUBLISH_FAILURE_UNSPECIFIED):
        trainer.say(publish=failed(named_in, failure))  # no deadline was missed
    trainer.say(publish=failed(named_in, worker_pb2.PUBLISH_FAILURE_LINK))
    told = await worker.hear("expelled")
    assert (told.run_id, told.epoch, told.reason) == (run.run_id, named_in, "transfer: too slow")
    await trainer.hear_epoch("rollout-2")
    what = f"expelled from epoch {named_in}: transfer: too slow"
    await plane.watch_until(run.run_id, "member", member_id="rollout-1", what=what)

    worker.say(run_report=worker_pb2.RunReport(run_id=run.run_id))
    await trainer.hear_epoch("rollout-1", "rollout-2")
    assert plane.coordinator.pool.assignments.roster.number == named_in + 2
    trainer.say(publish=failed(named_in, worker_pb2.PUBLISH_FAILURE_LINK))  # of the earlier epoch, late
    worker.say(leave=worker_pb2.Leave())
    await trainer.hear_epoch("rollout-2")
    assert plane.coordinator.pool.assignments.roster.number == named_in + 3


async def test_a_member_whose_stream_broke_is_suspected_and_back_with_the_next(plane: Plane) -> None:
    run = await plane.run_one()
    trainer, worker = learner(plane), rollout(plane)
    await worker.hear("run")
    worker.say(run_report=worker_pb2.RunReport(run_id=run.run_id))
    await trainer.hear_epoch("rollout-1")
    worker.hang_up()
    await trainer.hear_epoch()
    await plane.watch_until(run.run_id, "member", what="suspected: its stream broke")
    assert plane.coordinator.exchange.workers.suspected == {"rollout-1"}  # no batch waits for its groups
    again = rollout(plane, secret=worker.secret)
    await again.hear("run")
    assert plane.coordinator.exchange.workers.suspected == set()
    again.say(run_report=worker_pb2.RunReport(run_id=run.run_id))
    await trainer.hear_epoch("rollout-1")


async def test_a_quiet_member_is_suspected_until_it_is_heard_of(plane: Plane) -> None:
    run = await plane.run_one()
    trainer, worker = learner(plane), rollout(plane)
    await worker.hear("run")
    worker.say(run_report=worker_pb2.RunReport(run_id=run.run_id))
    await trainer.hear_epoch("rollout-1")
    plane.be_silent("rollout-1", 0.6)  # from half the time-out on it is suspected
    coordinator = plane.coordinator
    async with asyncio.timeout(DEADLINE_S), coordinator.context.watchers.changed:
        await coordinator.context.watchers.changed.wait_for(
            lambda: "rollout-1" in coordinator.exchange.workers.suspected
        )
    assert plane.coordinator.pool.assignments.roster.member_ids == []
    assert plane.coordinator.exchange.workers.suspected == {"rollout-1"}
    worker.say(heartbeat=worker_pb2.Heartbeat())
    await plane.watch_until(run.run_id, "member", what="reports again")
    assert plane.coordinator.exchange.workers.suspected == set()
    assert plane.coordinator.pool.assignments.roster.member_ids == ["rollout-1"]


async def test_a_worker_that_cannot_reach_the_exchange_is_silent(tmp_path: Path) -> None:
    """Its stream is open, and its groups would wait without end."""

    async def on_directive(_: worker_pb2.ConnectResponse) -> None:
        return

    def hello() -> worker_pb2.Hello:
        return worker_pb2.Hello(role=common_pb2.ROLE_ROLLOUT, member_id="rollout-1", protocol=PROTOCOL)

    plane = await Plane.started(tmp_path, timeout_s=2.0)  # an exchange without a listener
    run = await plane.submit()
    plane.run_loops()
    coordinator = plane.coordinator
    membership = Membership(f"127.0.0.1:{plane.server.port}", hello, on_directive)
    belonging = asyncio.create_task(membership.run())
    try:
        await plane.watch_until(run.run_id, "member", member_id="rollout-1", what="joined")
        async with asyncio.timeout(DEADLINE_S), coordinator.context.watchers.changed:
            await coordinator.context.watchers.changed.wait_for(
                lambda: "rollout-1" in coordinator.exchange.workers.suspected
            )
    finally:
        belonging.cancel()
        await asyncio.wait((belonging,))
        await plane.stop()


async def test_leases_of_a_quiet_member_go_to_others_once_the_learner_waits(plane: Plane) -> None:
    run = await plane.run_one()
    worker = rollout(plane)
    await worker.hear("run")
    coordinator, ledger = plane.coordinator, plane.ledger

    def holder() -> str | None:
        row = ledger.db.execute("SELECT member_id FROM groups WHERE state = 'leased'").fetchone()
        return None if row is None else str(row["member_id"])

    async with coordinator.context.lock:
        with ledger.transaction():
            ledger.db.execute(
                "INSERT INTO groups (run_id, group_id, class, state, slot, member_id)"
                " VALUES (?, 0, 'train', 'leased', 0, 'rollout-1')",
                (run.run_id,),
            )
    coordinator.exchange.active.state.first_requested_s[0] = 0.0
    await coordinator.pool.revoke_from_silent()
    assert holder() == "rollout-1", "it is heard of"
    member = coordinator.members.get("rollout-1")
    assert member is not None
    member.suspected = True
    coordinator.exchange.active.state.first_requested_s.clear()
    await coordinator.pool.revoke_from_silent()
    assert holder() == "rollout-1", "nobody waits for it"
    coordinator.exchange.active.state.first_requested_s[0] = 0.0
    member.connected = False
    await coordinator.pool.revoke_from_silent()
    assert holder() == "rollout-1", "that may be a crash"
    member.connected = True
    await coordinator.pool.revoke_from_silent()
    assert holder() is None


async def test_a_silent_member_is_gone(plane: Plane) -> None:
    plane.run_loops()
    worker = rollout(plane)
    await worker.hear("welcome")
    plane.be_silent("rollout-1")
    await worker.hear_the_end()
    assert plane.coordinator.members.get("rollout-1") is None


async def test_a_restart_takes_the_run_up_before_anyone_connects(tmp_path: Path) -> None:
    plane = await Plane.started(tmp_path)
    run = await plane.run_one()
    await plane.stop()
    again = await Plane.started(tmp_path)
    try:
        assert again.coordinator.exchange.active is not None
        worker = rollout(again)
        assert (await worker.hear("welcome")).term == 2
        assert (await worker.hear("run")).run_id == run.run_id
    finally:
        await again.stop()


async def test_stopping_ends_streams_and_watchers_at_once(plane: Plane) -> None:
    run = await plane.submit()
    worker = rollout(plane)
    await worker.hear("welcome")
    call = plane.runs.Watch(run_pb2.WatchRequest(run_id=run.run_id))
    await call.read()
    await plane.coordinator.end_streams()
    await worker.hear_the_end()
    code, _ = await refusal(call.read())
    assert code is grpc.StatusCode.UNAVAILABLE


async def test_holders_have_the_whole_timeout_to_come_back_after_a_restart(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.db.execute(
        "INSERT INTO groups (run_id, group_id, class, state, slot, member_id)"
        " VALUES ('a-1', 0, 'train', 'leased', 0, 'rollout-1')"
    )
    ledger.close()
    plane = await Plane.started(tmp_path, timeout_s=60.0)
    try:
        members = plane.coordinator.members
        now_s = time.monotonic()
        assert members.silent(now_s + 55.0) == []
        (expected,) = members.silent(now_s + 61.0)
        assert expected.member_id == "rollout-1"
        assert not plane.coordinator.exchange.senders.ids  # it is given nothing before it has come
        await plane.coordinator.pool.leave(expected, "never came back")
        assert plane.ledger.db.execute("SELECT state FROM groups").fetchone()["state"] == "admitted"
    finally:
        await plane.stop()


async def test_a_rollout_worker_that_loads_the_model_is_shown(plane: Plane) -> None:
    model = plane.directory / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}" + bytes(2_499_990))
    (model / "tokenizer.json").write_text("{}")
    run = await plane.run_one(policy={"model_name": str(model), "generation": {"max_new_tokens": 16}})
    worker = rollout(plane)
    await worker.hear("run")
    await plane.watch_until(run.run_id, "member", member_id="rollout-1", what=f"loads {model} (2.5 MB)")
    for _ in range(2):  # it is ready again after it was expelled
        worker.say(run_report=worker_pb2.RunReport(run_id=run.run_id))
    await plane.watch_until(run.run_id, "member", member_id="rollout-1", what="has loaded the model")
    worker.say(leave=worker_pb2.Leave())
    await worker.hear_the_end()
    texts = [json.loads(event["json"]).get("what") for event in plane.ledger.events(run.run_id, 0)]
    assert texts.count("has loaded the model") == 1
