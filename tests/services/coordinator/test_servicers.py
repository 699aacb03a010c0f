"""Runs over real gRPC: submission, status, commands, and errors that explain themselves."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from control_plane import DEADLINE_S, Plane, Worker, refusal
from exchange_drivers import make_spec
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from paceline.encryption.storage_key import StorageKey
from paceline.errors import Conflict
from paceline.rate_limited_log import unforeseen
from paceline.spec.reading import spec_to_yaml
from paceline.v1 import common_pb2, run_pb2, worker_pb2


async def test_reflection_lists_the_services(plane: Plane) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(plane.channel)

    async def ask() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        yield reflection_pb2.ServerReflectionRequest(list_services="")

    async for response in stub.ServerReflectionInfo(ask()):
        names = {service.name for service in response.list_services_response.service}
        assert {"paceline.v1.RunService", "paceline.v1.WorkerService", "grpc.health.v1.Health"} <= names


@pytest.mark.parametrize("service", ["", "paceline.v1.RunService", "paceline.v1.WorkerService"])
async def test_health_says_serving(plane: Plane, service: str) -> None:
    stub = health_pb2_grpc.HealthStub(plane.channel)
    response = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    assert response.status == health_pb2.HealthCheckResponse.SERVING


# Runs


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"grpo": {"num_prompts_per_stepp": 2}}, "num_prompts_per_step"),
        ({"grpo": {"num_prompts_per_step": 0}}, "grpo.num_prompts_per_step"),
        ({"data": {"train": "/no/such/file.jsonl"}}, "data.train: no file '/no/such/file.jsonl'"),
        ({"weights": {"publish_interval": 5}}, "weights.publish_interval 5 exceeds"),
        (
            {"weights": {"backend": "gloo"}},
            "weights.backend: unknown key; 'weights.backend' is weights.channel",
        ),
        ({"name": "../../elsewhere"}, "'../../elsewhere'"),
        ({"policy": None}, "policy"),
    ],
)
async def test_submit_says_what_is_wrong(plane: Plane, change: dict[str, Any], text: str) -> None:
    tree = yaml.safe_load(spec_to_yaml(make_spec(plane.directory))) | change
    request = run_pb2.SubmitRequest(spec_yaml=yaml.safe_dump(tree))
    code, details = await refusal(plane.runs.Submit(request))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert text in details
    assert plane.ledger.runs() == []


@pytest.mark.parametrize("text", ["", "[", "- a\n- b", "just words", "a: \x07"])
async def test_submit_refuses_what_is_no_spec(plane: Plane, text: str) -> None:
    code, details = await refusal(plane.runs.Submit(run_pb2.SubmitRequest(spec_yaml=text)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details


async def test_submit_names_the_malformed_row(plane: Plane) -> None:
    spec = make_spec(plane.directory)
    (plane.directory / "train.jsonl").write_text('{"prompt": "a"}\n{"prompt": 7}\n')
    code, details = await refusal(plane.runs.Submit(run_pb2.SubmitRequest(spec_yaml=spec_to_yaml(spec))))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "train.jsonl, line 2" in details


async def test_runs_are_queued_listed_and_found(plane: Plane) -> None:
    first, second = await plane.submit(), await plane.submit(name="other")
    assert (first.run_id, second.run_id) == ("test-1", "other-2")
    assert first.state == run_pb2.RUN_STATE_QUEUED
    listed = (await plane.runs.List(run_pb2.ListRequest())).runs
    assert [run.run_id for run in listed] == ["test-1", "other-2"]
    got = (await plane.runs.Get(run_pb2.GetRequest(run_id="other-2"))).run
    assert (got.step, got.max_num_steps) == (0, 4)
    assert dict(got.tokens) == {"generated": 0, "trained": 0, "wasted": 0, "dropped": 0, "live": 0}
    assert (Path(got.directory) / "spec.yaml").read_text() == got.spec_yaml


async def test_with_a_storage_key_the_ledger_alone_has_the_spec(given_key: StorageKey, plane: Plane) -> None:
    run = await plane.submit()
    got = (await plane.runs.Get(run_pb2.GetRequest(run_id=run.run_id))).run
    assert "model_name: none" in got.spec_yaml
    assert "spec.yaml" not in os.listdir(got.directory)


@pytest.mark.parametrize("method", ["Get", "Cancel", "Pause", "Resume"])
async def test_an_unknown_run_is_not_found(plane: Plane, method: str) -> None:
    request = getattr(run_pb2, f"{method}Request")(run_id="none-1")
    code, details = await refusal(getattr(plane.runs, method)(request))
    assert code is grpc.StatusCode.NOT_FOUND
    assert "'none-1'" in details


async def test_watching_an_unknown_run_is_not_found(plane: Plane) -> None:
    call = plane.runs.Watch(run_pb2.WatchRequest(run_id="none-1"))
    code, _ = await refusal(call.read())
    assert code is grpc.StatusCode.NOT_FOUND


async def test_runs_start_one_after_the_other(plane: Plane) -> None:
    first, second = await plane.submit(), await plane.submit()
    plane.run_loops()
    assert await plane.watch_until(first.run_id, "state", state="running") == [(1, "state"), (2, "state")]
    response = await plane.runs.Cancel(run_pb2.CancelRequest(run_id=first.run_id))
    assert response.run.state == run_pb2.RUN_STATE_CANCELLED
    assert response.run.message == "cancelled by request"
    await plane.watch_until(second.run_id, "state", state="running")
    summary = json.loads((Path(first.directory) / "summary.json").read_text())
    assert (summary["state"], summary["steps"]) == ("cancelled", 0)


async def test_watch_goes_on_where_it_broke_and_ends_with_the_run(plane: Plane) -> None:
    run = await plane.submit()
    await plane.runs.Cancel(run_pb2.CancelRequest(run_id=run.run_id))
    async with asyncio.timeout(DEADLINE_S):
        call = plane.runs.Watch(run_pb2.WatchRequest(run_id=run.run_id, after=1))
        events = [(event.sequence, event.kind, json.loads(event.json)["state"]) async for event in call]
    assert events == [(2, "state", "cancelled")]


async def test_pause_resume_and_what_the_state_forbids(plane: Plane) -> None:
    run = await plane.submit()
    code, details = await refusal(plane.runs.Pause(run_pb2.PauseRequest(run_id=run.run_id)))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "is queued, not running" in details
    plane.run_loops()
    await plane.watch_until(run.run_id, "state", state="running")
    paused = (await plane.runs.Pause(run_pb2.PauseRequest(run_id=run.run_id))).run
    assert paused.state == run_pb2.RUN_STATE_PAUSED
    resumed = (await plane.runs.Resume(run_pb2.ResumeRequest(run_id=run.run_id))).run
    assert resumed.state == run_pb2.RUN_STATE_RUNNING
    await plane.runs.Cancel(run_pb2.CancelRequest(run_id=run.run_id))
    for call in (
        plane.runs.Cancel(run_pb2.CancelRequest(run_id=run.run_id)),
        plane.runs.Resume(run_pb2.ResumeRequest(run_id=run.run_id)),
    ):
        code, details = await refusal(call)
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "cancelled" in details


async def test_a_checkpoint_is_ordered_from_the_learner_that_has_the_run(plane: Plane) -> None:
    run = await plane.run_one()
    order = run_pb2.RunServiceCheckpointRequest(run_id=run.run_id)
    code, details = await refusal(plane.runs.Checkpoint(order))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "no learner that could write a checkpoint works on it" in details
    learner = Worker(plane, common_pb2.ROLE_LEARNER, "learner", world_size=1)
    await learner.hear("run")
    ordered = await plane.runs.Checkpoint(order)
    assert (await learner.hear("checkpoint")).run_id == run.run_id
    assert ordered.path == ""
    assert ordered.sequence == plane.ledger.last_sequence(run.run_id) > 0
    code, _ = await refusal(plane.runs.Checkpoint(run_pb2.RunServiceCheckpointRequest(run_id="none")))
    assert code is grpc.StatusCode.NOT_FOUND
    learner.hang_up()


async def test_a_worker_is_told_to_leave(plane: Plane) -> None:
    worker = Worker(plane, common_pb2.ROLE_REWARD, "reward")
    await worker.hear("welcome")
    order = worker_pb2.WorkerServiceDrainRequest(member_id="reward", grace_s=7.0)
    assert (await plane.workers.Drain(order)).held == 0
    assert (await worker.hear("drain")).grace_s == 7.0
    for wrong, said in ({"member_id": "other"}, "no member 'other'"), ({"grace_s": -1.0}, "grace_s is -1"):
        request = worker_pb2.WorkerServiceDrainRequest(**{"member_id": "reward", "grace_s": 1.0} | wrong)
        assert said in (await refusal(plane.workers.Drain(request)))[1]
    worker.hang_up()


async def test_a_run_that_ends_while_somebody_holds_it_stays_ended(plane: Plane) -> None:
    run = await plane.run_one()
    async with plane.coordinator.context.lock:
        cancel = asyncio.create_task(plane.coordinator.runs.commands.cancel(run.run_id))
        await asyncio.sleep(0)  # it queues for the lock before the pause does
        hold = asyncio.create_task(plane.coordinator.runs.commands.pause(run.run_id))
        await asyncio.sleep(0)
    await cancel
    with pytest.raises(Conflict):
        await hold
    assert plane.ledger.active_run() is None


async def test_a_submission_that_is_sent_again_queues_one_run(plane: Plane) -> None:
    text = spec_to_yaml(make_spec(plane.directory))
    again = run_pb2.SubmitRequest(spec_yaml=text, submission="one")
    first, second = [(await plane.runs.Submit(again)).run.run_id for _ in range(2)]
    other = (await plane.runs.Submit(run_pb2.SubmitRequest(spec_yaml=text, submission="two"))).run.run_id
    assert first == second != other
    assert len(plane.ledger.runs()) == 2


async def test_runs_come_in_pages_without_their_specs(plane: Plane) -> None:
    submitted = [(await plane.submit()).run_id for _ in range(5)]
    seen, token, sizes = [], "", []
    while True:
        page = await plane.runs.List(run_pb2.ListRequest(page_size=2, page_token=token))
        seen += [run.run_id for run in page.runs]
        sizes.append(len(page.runs))
        assert not any(run.spec_yaml for run in page.runs)
        if not (token := page.next_page_token):
            break
    assert (seen, sizes) == (submitted, [2, 2, 1])
    for wrong in ("x", "-1", "²", "9" * 100):
        request = run_pb2.ListRequest(page_token=wrong)
        if wrong.isascii() and wrong.isdigit():
            assert not (await plane.runs.List(request)).runs
        else:
            code, _ = await refusal(plane.runs.List(request))
            assert code is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_list_parses_no_yaml_and_survives_a_bad_row(plane: Plane) -> None:
    for _ in range(3):
        await plane.submit()
    plane.ledger.db.execute("UPDATE runs SET spec_yaml = '&a [*a]', state = 'odd' WHERE run_id = 'test-2'")
    plane.ledger.db.execute("UPDATE runs SET spec_yaml = '{' WHERE run_id = 'test-3'")
    first, bad, last = (await plane.runs.List(run_pb2.ListRequest())).runs
    assert (first.run_id, first.max_num_steps) == ("test-1", 4)
    assert (bad.run_id, bad.state) == ("test-2", run_pb2.RUN_STATE_UNSPECIFIED)
    assert "cannot be read" in bad.message
    assert (last.run_id, last.max_num_steps) == ("test-3", 4)


async def test_an_unforeseen_exception_is_answered_and_counted(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("paceline.services.coordinator.servicers.page", fail)
    monkeypatch.setattr(plane.coordinator.committed, "events", fail)
    before = unforeseen.total
    code, details = await refusal(plane.runs.List(run_pb2.ListRequest()))
    assert code is grpc.StatusCode.INTERNAL
    assert "unexpected ZeroDivisionError in List" in details
    run = await plane.submit()
    code, details = await refusal(plane.runs.Watch(run_pb2.WatchRequest(run_id=run.run_id)).read())
    assert code is grpc.StatusCode.INTERNAL
    assert "in Watch" in details
    assert unforeseen.total == before + 2


async def test_a_long_error_fits_into_its_trailer(plane: Plane) -> None:
    code, details = await refusal(plane.runs.Get(run_pb2.GetRequest(run_id="é\n" * 100_000)))
    assert code is grpc.StatusCode.NOT_FOUND
    assert details.endswith("[...]")


async def test_the_seconds_of_a_run_never_go_back_with_the_wall_clock(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await plane.run_one()
    monkeypatch.setattr("time.time", lambda: 0.0)  # decades ago
    await plane.runs.Cancel(run_pb2.CancelRequest(run_id=run.run_id))
    summary = json.loads((Path(run.directory) / "summary.json").read_text())
    assert 0.0 <= summary["seconds"] < 3600.0


async def test_the_seconds_of_a_run_add_up_over_lives(tmp_path: Path) -> None:
    plane = await Plane.started(tmp_path)
    run = await plane.run_one()
    plane.coordinator.context.run_log._counted_s -= 1000.0
    with plane.ledger.transaction():
        plane.coordinator.context.run_log._count_time()
    await plane.stop()
    again = await Plane.started(tmp_path)
    try:
        assert 1000.0 <= again.coordinator.context.run_log.summary(run.run_id)["seconds"] < 4000.0
    finally:
        await again.stop()
