"""The queue of runs: how many specs are read at once, and one opening of the data sets for each submission."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from typing import Any

import grpc
import pytest
from control_plane import DEADLINE_S, Plane, learner, refusal
from exchange_drivers import make_spec

from paceline.calls.backoff import from_error
from paceline.errors import Busy
from paceline.files.storage import Folder
from paceline.services.common.access.rights import Caller, CallerRole, set_caller
from paceline.services.coordinator.lifecycle import run_queue
from paceline.services.coordinator.lifecycle.run_data import RunData
from paceline.spec.reading import spec_from_yaml, spec_to_yaml
from paceline.v1 import run_pb2, worker_pb2

PATIENCE_S = 60.0


async def test_specs_beyond_those_that_are_being_read_are_turned_away(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_queue, "MAX_TO_READ", 1)
    async with plane.coordinator.runs.queue._reading:  # as while another spec is read
        first = asyncio.create_task(plane.submit())
        async with asyncio.timeout(DEADLINE_S):
            while not plane.coordinator.runs.queue._to_read:  # noqa: ASYNC110 - a request on its way has no event
                await asyncio.sleep(0.01)
        code, details = await refusal(plane.submit())
        assert code.name == "RESOURCE_EXHAUSTED"
        assert "1 specs are being read" in details
    assert (await first).run_id == "test-1"


async def test_a_full_queue_turns_runs_away_and_says_when_to_come_again(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_queue, "MAX_QUEUED", 2)
    request = run_pb2.SubmitRequest(spec_yaml=spec_to_yaml(make_spec(plane.directory)), submission="one")
    await plane.runs.Submit(request)
    await plane.submit()
    with pytest.raises(grpc.aio.AioRpcError, match="2 runs are in the queue") as full:
        await plane.submit()
    assert full.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert from_error(full.value) == run_queue.QUEUE_AGAIN_S
    assert (await plane.runs.Submit(request)).run.run_id == "test-1", "a repeated submission is no further run"
    await plane.runs.Cancel(run_pb2.CancelRequest(run_id="test-1"))
    assert (await plane.submit()).run_id == "test-3"


async def test_one_submitter_has_a_share_of_the_queue(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_queue, "MAX_QUEUED_OF_ONE", 2)
    text = spec_to_yaml(make_spec(plane.directory))

    async def submit(name: str, role: CallerRole) -> str:
        set_caller(Caller(name, frozenset({role})))
        return await plane.coordinator.runs.queue.submit(text)

    async def in_task(name: str, role: CallerRole = CallerRole.SUBMITTER) -> str:
        return await asyncio.create_task(submit(name, role))

    assert [await in_task("ann"), await in_task("ann")] == ["test-1", "test-2"]
    with pytest.raises(Busy, match="2 runs of ann are in the queue"):
        await in_task("ann")
    assert await in_task("ben") == "test-3"
    assert await in_task("ann", CallerRole.OPERATOR) == "test-4"


async def test_a_client_that_asks_again_joins_the_opening_that_is_under_way(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, go = threading.Semaphore(0), threading.Event()
    calls = 0

    def slowly(spec: Any) -> Any:
        nonlocal calls
        calls += 1
        opened.release()
        assert go.wait(PATIENCE_S)
        return RunData(1), []

    monkeypatch.setattr(run_queue, "checked_data", slowly)
    text = spec_to_yaml(make_spec(plane.directory))
    request = run_pb2.SubmitRequest(spec_yaml=text, submission="one")
    first = asyncio.ensure_future(plane.runs.Submit(request))
    assert await asyncio.to_thread(opened.acquire, True, PATIENCE_S)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    second = asyncio.ensure_future(plane.runs.Submit(request))
    await asyncio.sleep(0)
    go.set()
    run = (await asyncio.wait_for(second, PATIENCE_S)).run
    assert calls == 1
    again = (await plane.runs.Submit(request)).run
    assert again.run_id == run.run_id
    assert calls == 1, "a run that is queued is not opened again"


async def test_epochs_become_the_steps_of_the_data_set(plane: Plane) -> None:
    spec = make_spec(plane.directory)
    grpo = {"num_prompts_per_step": 3, "max_num_epochs": 1.5}
    tree = spec.model_dump(mode="json") | {"grpo": spec.grpo.model_dump(exclude={"max_num_steps"}) | grpo}
    rows = len((plane.directory / "train.jsonl").read_text().splitlines())
    run = (await plane.runs.Submit(run_pb2.SubmitRequest(spec_yaml=json.dumps(tree)))).run
    assert run.max_num_steps == math.ceil(1.5 * rows / 3)
    stored = spec_from_yaml((await plane.runs.Get(run_pb2.GetRequest(run_id=run.run_id))).run.spec_yaml)
    assert stored.max_num_steps == run.max_num_steps
    assert stored.max_num_epochs == 1.5
    (event,) = plane.coordinator.ledger.events(run.run_id, 0, 1)
    steps = f"{run.max_num_steps} steps, because max_num_epochs is 1.5 and the data has {rows} rows"
    expected = f"data.train: prompts, in the format TRL's prompt-only, standard; {steps}"
    assert json.loads(event["json"])["message"] == expected


async def test_a_store_that_refuses_is_an_error_at_the_submission(plane: Plane) -> None:
    (plane.directory / "file").write_text("")
    plane.ledger.store = str(plane.directory / "file" / "below")
    code, details = await refusal(plane.submit())
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "--store" in details
    assert "cannot be written: NotADirectoryError" in details
    plane.ledger.store = f"memory://{plane.directory.name}"
    assert (await plane.submit()).run_id == "test-1"


async def test_a_runs_large_files_are_in_the_store_and_its_records_beside_the_ledger(plane: Plane) -> None:
    plane.ledger.store = f"memory://{plane.directory.name}"
    run = await plane.submit(grpo={"max_num_steps": 4})
    plane.run_loops()
    worker = learner(plane)
    assignment = await worker.hear("run")
    assert assignment.directory == f"{plane.ledger.store}/{run.run_id}"
    assert run.directory == str(plane.directory / run.run_id)
    path = f"{assignment.directory}/checkpoints/1-3"
    report = {"run_id": run.run_id, "session": 1, "step": 3, "sha256": "0" * 64}
    worker.say(checkpoint=worker_pb2.CheckpointReport(**report, path=path))
    await plane.watch_until(run.run_id, "checkpoint", step=3)
    assert [each.path for each in plane.ledger.checkpoints.kept(run.run_id)] == [path]
    worker.say(run_report=worker_pb2.RunReport(run_id=run.run_id, session=1, finished=True))
    async with asyncio.timeout(DEADLINE_S):
        while not plane.ledger.export_path(run.run_id):  # noqa: ASYNC110 - the report has no event
            await asyncio.sleep(0.01)
    assert plane.ledger.export_path(run.run_id) == f"{assignment.directory}/export"


async def test_a_model_url_that_does_not_exist_is_an_error_at_the_submission(plane: Plane) -> None:
    url = f"memory://{plane.directory.name}/models/base"
    policy = {"model_name": url, "generation": {"max_new_tokens": 16}}
    code, details = await refusal(plane.submit(policy=policy))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert f"policy.model_name '{url}': there is no such folder with a config.json; correct the URL" in details
    Folder(url).write("config.json", b'{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}')
    assert (await plane.submit(policy=policy)).run_id == "test-1"
