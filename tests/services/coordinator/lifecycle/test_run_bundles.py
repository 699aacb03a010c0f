"""Runs with bundles: they start without the submitter's files, and go on with corrected ones after `resume`."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import grpc
import pytest
from control_plane import Plane, refusal
from exchange_drivers import write_prompts
from paused_runs import put_on, reward, state_of

from paceline.bundle.collecting import Bundle, collect, collect_again
from paceline.calls.bundle_transfer import send
from paceline.data.preparation.prepared import prepared_data
from paceline.errors import Unreadable
from paceline.models.memory_plan import with_engine
from paceline.services.common.worker.assigned_run import BundledSpec
from paceline.services.coordinator.blobs import BlobStore
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.lifecycle.run_data import RunBundles
from paceline.spec import RunSpec
from paceline.spec.reading import parse_spec, spec_to_yaml
from paceline.v1 import run_pb2, worker_pb2


def spec_in(folder: Path, **sections: Any) -> RunSpec:
    folder.mkdir(exist_ok=True)
    write_prompts(folder / "train.jsonl")
    (folder / "reward.py").write_text("from helper import X\n\ndef f(completions, answer, **_):\n    return [X] * 2\n")
    (folder / "helper.py").write_text("X = 1.0\n")
    tree: dict[str, Any] = {
        "name": "test",
        "policy": {"model_name": "none", "shared_prompts": False, "generation": {"max_new_tokens": 4}},
        "data": {"train": "train.jsonl"},
        "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "max_num_steps": 4},
        "rewards": [{"function": "reward.py:f"}],
        "logger": {"tensorboard": False},
    }
    return parse_spec(tree | sections, base=folder)


async def sent(plane: Plane, bundle: Bundle) -> str:
    with grpc.insecure_channel(f"127.0.0.1:{plane.server.port}") as channel:
        await asyncio.to_thread(send, channel, bundle)
    return bundle.manifest.digest


async def submitted(plane: Plane, spec: RunSpec, bundle: str) -> run_pb2.Run:
    request = run_pb2.SubmitRequest(spec_yaml=spec_to_yaml(spec), bundle=bundle)
    return (await plane.runs.Submit(request)).run


@pytest.fixture
async def plane(tmp_path: Path) -> Any:
    plane = await Plane.started(tmp_path / "runs")
    yield plane
    await plane.stop()


@pytest.fixture(autouse=True)
def _runs(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()


def local_spec(plane: Plane, assignment: worker_pb2.RunAssignment, spec: RunSpec, *kinds: Any) -> BundledSpec:
    return BundledSpec(spec, f"127.0.0.1:{plane.server.port}", assignment.bundle, *kinds)


async def test_a_run_starts_without_the_submitters_files(plane: Plane, tmp_path: Path) -> None:
    spec, _ = with_engine(spec_in(tmp_path / "mine"))
    run = await submitted(plane, spec, await sent(plane, collect(spec)))
    assert (run.bundle, plane.ledger.bundles()) == (collect(spec).manifest.digest, [run.bundle])
    shutil.rmtree(tmp_path / "mine")
    plane.run_loops()
    await plane.watch_until(run.run_id, "state", state="running")
    active = plane.coordinator.exchange.active
    assert active is not None
    assert active.prompts is not None
    assert active.prompts.draw(0)[1].keys() == {"answer"}
    assert active.spec == spec

    assignment = worker_pb2.RunAssignment(bundle=run.bundle)
    bundled = await asyncio.to_thread(local_spec, plane, assignment, spec, "code", "include")
    file = Path(bundled.spec.rewards[0].function.rpartition(":")[0])
    assert sorted(os.listdir(file.parent)) == ["helper.py", "reward.py"]
    assert bundled.spec.data == spec.data  # data are not fetched for functions
    with pytest.raises(Unreadable, match=str(tmp_path / "mine" / "reward.py")), bundled.original_paths():
        raise Unreadable(f"{file} fails")
    bundled.close()


async def test_prepared_rows_are_what_a_run_reads(plane: Plane, tmp_path: Path) -> None:
    spec = spec_in(tmp_path / "mine", data={"train": "train.jsonl", "preparation": {"max_prompt_characters": 4}})
    with prepared_data(spec, lambda run: ()) as prepared:
        bundle = collect(spec, prepared=prepared.files)
        digest = await sent(plane, bundle)
        number = prepared.sets["data.train"].rows
        (line,) = prepared.lines
    run = await submitted(plane, spec, digest)
    plane.run_loops()
    queued = json.loads(plane.ledger.events(run.run_id, 0)[0]["json"])
    assert queued["message"].endswith(f"; {line}"), "the run's record says what was left out"
    await plane.watch_until(run.run_id, "state", state="running")
    active = plane.coordinator.exchange.active
    assert active is not None
    assert active.prompts is not None
    assert len(active.prompts) == number > 0
    assert active.spec.data.preparation == spec.data.preparation, "the record says how they were made"
    again = collect_again(spec, bundle.manifest)
    assert again is not None
    assert again.manifest == bundle.manifest, "a resume prepares nothing anew"

    refused = await refusal(plane.runs.Submit(run_pb2.SubmitRequest(spec_yaml=spec_to_yaml(spec))))
    assert "data.preparation is set, but the run was submitted without prepared rows" in refused[1]


async def test_a_corrected_function_replaces_the_bundle_at_resume(plane: Plane, tmp_path: Path) -> None:
    spec = spec_in(tmp_path / "mine")
    first = collect(spec)
    run = await submitted(plane, spec, await sent(plane, first))
    plane.run_loops()
    await plane.watch_until(run.run_id, "state", state="running")
    await plane.runs.Pause(run_pb2.PauseRequest(run_id=run.run_id))
    (tmp_path / "mine" / "helper.py").write_text("X = 2.0\n")
    again = collect_again(spec, first.manifest)
    assert again is not None
    resume = run_pb2.ResumeRequest(run_id=run.run_id, bundle=again.manifest.digest)
    assert "is missing" in (await refusal(plane.runs.Resume(resume)))[1]
    assert (await state_of(plane, run.run_id))[0] == "paused"
    resumed = (await plane.runs.Resume(run_pb2.ResumeRequest(run_id=run.run_id, bundle=await sent(plane, again)))).run
    assert (resumed.bundle, resumed.state) == (again.manifest.digest, run_pb2.RUN_STATE_RUNNING)
    events = [json.loads(row["json"]) for row in plane.ledger.events(run.run_id, 0) if row["kind"] == "warning"]
    assert f"{again.manifest.digest} instead of {run.bundle}: 1 of its files differ (folder/helper.py)" in str(events)
    assert sorted(plane.ledger.bundles()) == sorted([run.bundle, again.manifest.digest])
    assert (await put_on(reward(plane))).bundle == again.manifest.digest


async def test_corrected_data_are_read_at_resume(plane: Plane, tmp_path: Path) -> None:
    spec = spec_in(tmp_path / "mine")
    first = collect(spec)
    run = await submitted(plane, spec, await sent(plane, first))
    plane.run_loops()
    await plane.watch_until(run.run_id, "state", state="running")
    await plane.runs.Pause(run_pb2.PauseRequest(run_id=run.run_id))
    for text, refused in (
        ('{"prompt": null, "answer": "4"}\n', True),
        ('{"prompt": "new", "answer": "4"}\n', False),
    ):
        (tmp_path / "mine" / "train.jsonl").write_text(text)
        again = collect_again(spec, first.manifest)
        assert again is not None
        call = plane.runs.Resume(run_pb2.ResumeRequest(run_id=run.run_id, bundle=await sent(plane, again)))
        if refused:  # with the submitter's path
            assert f"{tmp_path / 'mine' / 'train.jsonl'}, line 1: column 'prompt' is null" in (await refusal(call))[1]
        else:
            await call
    active = plane.coordinator.exchange.active
    assert active is not None
    assert active.prompts is not None
    assert active.prompts.draw(0) == ("new", {"answer": "4"})


async def test_bundles_that_cannot_be_used_are_refused(plane: Plane, tmp_path: Path) -> None:
    spec = spec_in(tmp_path / "mine")
    bundle = collect(spec)
    text = spec_to_yaml(spec)
    for digest, reason in (
        ("ab" * 32, "is missing"),
        ("../x", "not a SHA-256"),
        (bundle.manifest.digest, "is missing"),
    ):
        request = run_pb2.SubmitRequest(spec_yaml=text, bundle=digest)
        code, said = await refusal(plane.runs.Submit(request))
        assert (code, reason in said) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    digest = await sent(plane, bundle)
    data = next(file for file in bundle.manifest.files if file.kind == "data")
    (plane.directory / "blobs" / data.sha256[:2] / data.sha256[2:]).unlink()
    code, said = await refusal(plane.runs.Submit(run_pb2.SubmitRequest(spec_yaml=text, bundle=digest)))
    assert "'data/folder/train.jsonl' of bundle" in said
    assert not (await plane.runs.List(run_pb2.ListRequest())).runs
    old = (await plane.runs.Submit(run_pb2.SubmitRequest(spec_yaml=text))).run
    code, said = await refusal(
        plane.runs.Resume(run_pb2.ResumeRequest(run_id=old.run_id, bundle=await sent(plane, bundle)))
    )
    assert "was submitted without a bundle" in said


def test_an_operators_folders_and_examples(tmp_path: Path) -> None:
    spec = spec_in(tmp_path / "mine")
    first = collect(spec)
    blobs = BlobStore(tmp_path / "blobs")
    for data in (*(path.read_bytes() for path in first.sources.values()), first.manifest.text):
        put(blobs, data)
    ledger = Ledger(tmp_path / "ledger.sqlite")
    RunBundles(ledger, blobs, [tmp_path / "mine"]).check(spec, first.manifest.digest)
    with pytest.raises(Exception, match=r"the functions are not allowed: .* is not below"):
        RunBundles(ledger, blobs, [tmp_path / "theirs"]).check(spec, first.manifest.digest)
    with pytest.raises(Exception, match="--functions-from"):
        RunBundles(ledger, blobs, [tmp_path / "theirs"]).check(spec, "")
    (tmp_path / "mine" / "train.jsonl").write_text("{}\n")
    second = collect(spec)
    put(blobs, second.manifest.text)
    bundles = RunBundles(ledger, blobs)
    assert bundles.changes(spec, first.manifest.digest, second.manifest.digest) == ["data/folder/train.jsonl"]
    sft = spec.model_copy(update={"algorithm": "sft"})
    with pytest.raises(Exception, match="trains on examples cannot change its data"):
        bundles.changes(sft, first.manifest.digest, second.manifest.digest)
    assert collect_again(sft, first.manifest).manifest == first.manifest  # type: ignore[union-attr]
    (tmp_path / "mine" / "reward.py").unlink()
    assert collect_again(spec, first.manifest) is None
    with pytest.raises(Unreadable, match="paceline resume"), bundles.opened(spec, "cd" * 32, "data"):
        pass
    ledger.close()


def put(blobs: BlobStore, data: bytes) -> None:
    import hashlib

    from paceline.services.coordinator.bundle_servicer import Upload

    Upload(blobs).take(hashlib.sha256(data).hexdigest(), len(data), 0, data)
