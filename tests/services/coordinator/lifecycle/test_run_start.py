"""Runs whose data or spec cannot be read now: they wait, keep their groups, and let other runs go first."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from control_plane import DEADLINE_S, Plane, learner, refusal, rollout
from exchange_drivers import make_spec
from paused_runs import impatient, next_state, put_on, reward, state_of

from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.lifecycle import run_start
from paceline.spec.reading import spec_to_yaml
from paceline.v1 import run_pb2

UNREADABLE = "{policy: {model_name: m}, data: {train: d}, rewards: [{function: length}], grpo: {max_num_steps: lots}}"


async def test_a_run_whose_data_set_is_away_waits_for_it(tmp_path: Path) -> None:
    plane = impatient(Plane(tmp_path))
    await plane.start()
    try:
        run = await plane.submit()
        (tmp_path / "train.jsonl").rename(tmp_path / "moved.jsonl")
        plane.run_loops()
        paused = await next_state(plane, run.run_id, 0, "paused")
        state, message = await state_of(plane, run.run_id)
        assert state == "paused"
        assert "no file" in message
        assert "retried automatically" in message
        (tmp_path / "moved.jsonl").rename(tmp_path / "train.jsonl")
        await next_state(plane, run.run_id, paused, "running")
        assert (await state_of(plane, run.run_id)) == ("running", "")
    finally:
        await plane.stop()


async def test_a_data_set_that_does_not_open_delays_no_other_duty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_start, "WAIT_S", 0.01)
    plane, go = impatient(Plane(tmp_path)), threading.Event()
    await plane.start()
    try:
        starter, opened = plane.coordinator.runs.starter, plane.coordinator.runs.starter._bundles.open_data
        await plane.submit()
        monkeypatch.setattr(starter._bundles, "open_data", lambda *run: go.wait() and opened(*run))
        await starter.start_next()
        await starter.start_next()
        assert plane.coordinator.exchange.active is None
        go.set()
        monkeypatch.setattr(run_start, "WAIT_S", 60.0)
        await starter.start_next()
        assert plane.coordinator.exchange.active is not None
    finally:
        go.set()
        await plane.stop()


async def test_a_data_set_that_is_away_when_the_coordinator_comes_back_ends_nothing(tmp_path: Path) -> None:
    plane = await Plane.started(tmp_path)
    run = await plane.run_one()
    await plane.stop()
    (tmp_path / "train.jsonl").rename(tmp_path / "moved.jsonl")
    again = await Plane.started(tmp_path)
    await again.stop()
    (tmp_path / "moved.jsonl").rename(tmp_path / "train.jsonl")
    third = await Plane.started(tmp_path)
    try:
        assert third.coordinator.exchange.active is not None
        assert (await state_of(third, run.run_id)) == ("running", "")
    finally:
        await third.stop()


@pytest.mark.parametrize("changed", [True, False])
async def test_a_data_set_that_was_changed_between_two_lives_is_warned_of(tmp_path: Path, changed: bool) -> None:
    plane = await Plane.started(tmp_path)
    await plane.run_one()
    await plane.stop()
    train = tmp_path / "train.jsonl"
    train.write_text(train.read_text() + ('{"prompt": "another", "answer": 7}\n' if changed else ""))
    again = await Plane.started(tmp_path)
    rows = again.ledger.db.execute("SELECT json FROM events WHERE kind = 'warning'").fetchall()
    await again.stop()
    messages = [json.loads(row["json"])["message"] for row in rows]
    assert [f"the data set '{train}' has changed since the run began (7 rows, " in m for m in messages] == [
        True
    ] * changed


async def test_a_run_whose_folder_cannot_be_written_waits_for_it(tmp_path: Path) -> None:
    plane = await Plane.started(tmp_path)
    run = await plane.run_one()
    await plane.stop()
    metrics = Path(run.directory) / "metrics.jsonl"
    metrics.unlink()
    metrics.mkdir()
    again = impatient(Plane(tmp_path))
    await again.start()
    try:
        state, message = await state_of(again, run.run_id)
        assert state == "paused"
        assert f"Is a directory: '{metrics}'" in message
        metrics.rmdir()
        again.run_loops()
        await next_state(again, run.run_id, 2, "running")
        await put_on(reward(again))
    finally:
        await again.stop()


async def test_workers_keep_what_they_hold_until_the_run_can_be_taken_up(tmp_path: Path) -> None:
    plane = await Plane.started(tmp_path)
    run = await plane.run_one()
    session = (await put_on(learner(plane))).session
    await plane.stop()
    (tmp_path / "train.jsonl").rename(tmp_path / "moved.jsonl")
    again = impatient(Plane(tmp_path))
    await again.start()
    try:
        code, details = await refusal(learner(again, session=session, run_id=run.run_id).call.read())
        assert code is grpc.StatusCode.UNAVAILABLE, "it comes back, and is not told that its run is over"
        assert "no file" in details
        (tmp_path / "moved.jsonl").rename(tmp_path / "train.jsonl")
        again.run_loops()
        await next_state(again, run.run_id, 2, "running")
        back = learner(again, session=session, run_id=run.run_id)
        await back.hear("epoch")
        assert again.ledger.run(run.run_id)["session"] == session
    finally:
        await again.stop()


async def test_workers_keep_what_they_hold_while_the_data_sets_of_their_run_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = await Plane.started(tmp_path)
    run = await plane.run_one()
    session = (await put_on(learner(plane))).session
    await plane.stop()
    again, go = Plane(tmp_path), threading.Event()
    opened = again.coordinator.runs.starter._bundles.open_data
    monkeypatch.setattr(again.coordinator.runs.starter._bundles, "open_data", lambda *run: go.wait() and opened(*run))
    monkeypatch.setattr(run_start, "WAIT_S", 0.01)
    await again.start()
    try:
        code, details = await refusal(learner(again, session=session, run_id=run.run_id).call.read())
        assert code is grpc.StatusCode.UNAVAILABLE, "it comes back, and is not told that its run is over"
        assert details == f"run {run.run_id} opens its data sets"
        go.set()
        again.run_loops()
        await active(again, run.run_id)
        back = learner(again, session=session, run_id=run.run_id)
        await back.hear("epoch")
        assert again.ledger.run(run.run_id)["session"] == session
        assert await state_of(again, run.run_id) == ("running", "")
    finally:
        go.set()
        await again.stop()


async def active(plane: Plane, run_id: str) -> None:
    """Wait until a run is the active one."""
    async with asyncio.timeout(DEADLINE_S):
        while (run := plane.coordinator.exchange.active) is None or run.run_id != run_id:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("restarts", [True, False])
async def test_a_run_whose_data_set_is_away_lets_others_go_first_and_comes_back(tmp_path: Path, restarts: bool) -> None:
    away, moved = tmp_path / "away.jsonl", tmp_path / "moved.jsonl"
    plane = impatient(Plane(tmp_path))
    await plane.start()
    try:
        held = (await plane.run_one()).run_id
        away.write_text((tmp_path / "train.jsonl").read_text())
        await plane.runs.Pause(run_pb2.PauseRequest(run_id=held))
        other = (await plane.submit(data={"train": str(away)}, priority=-1)).run_id
        away.rename(moved)
        await next_state(plane, other, 0, "paused")
        if restarts:
            await plane.stop()
            plane = impatient(Plane(tmp_path))
            await plane.start()
            plane.run_loops()
        else:
            await plane.runs.Resume(run_pb2.ResumeRequest(run_id=held))
            await active(plane, held)
        state, message = await state_of(plane, other)
        assert state == "paused"
        assert "retried automatically" in message
        paused = plane.ledger.last_sequence(other)
        moved.rename(away)
        if not restarts:
            await next_state(plane, other, 0, "queued")
            async with asyncio.timeout(DEADLINE_S):
                while (await state_of(plane, other))[0] != "queued":  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await plane.runs.Pause(run_pb2.PauseRequest(run_id=held))
        await next_state(plane, other, paused, "running")
        assert (await state_of(plane, held))[0] == "paused"
    finally:
        await plane.stop()


async def test_a_data_set_that_does_not_open_lets_other_runs_go_first_and_is_opened_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_start, "WAIT_S", 0.01)
    monkeypatch.setattr(run_start, "PATIENCE_S", 0.0)
    plane, go, names = impatient(Plane(tmp_path)), threading.Event(), []
    await plane.start()
    opened = plane.coordinator.runs.starter._bundles.open_data

    def open_data(spec: Any, bundle: str) -> Any:
        names.append(spec.name)
        return opened(spec, bundle) if spec.name == "second" or go.wait() else None

    monkeypatch.setattr(plane.coordinator.runs.starter._bundles, "open_data", open_data)
    try:
        first, cancelled = (await plane.submit(name="first")).run_id, (await plane.submit(name="cancelled")).run_id
        second = (await plane.submit(name="second")).run_id
        plane.run_loops()
        await active(plane, second)
        assert "still being opened" in (await state_of(plane, first))[1]
        await plane.runs.Cancel(run_pb2.CancelRequest(run_id=cancelled))
        paused = plane.ledger.last_sequence(first)
        go.set()
        await next_state(plane, first, paused, "queued")
        async with asyncio.timeout(DEADLINE_S):
            while plane.coordinator.runs.starter._openings._threads:  # noqa: ASYNC110 - the cancelled run's outcome
                await asyncio.sleep(0.01)
        assert (names.count("first"), names.count("cancelled")) == (1, 1)
        assert plane.coordinator.exchange.active is not None
        assert plane.coordinator.exchange.active.run_id == second
    finally:
        go.set()
        await plane.stop()


async def test_a_person_s_pause_outlives_a_data_set_that_was_away(tmp_path: Path) -> None:
    plane = await Plane.started(tmp_path)
    run = await plane.run_one()
    await plane.runs.Pause(run_pb2.PauseRequest(run_id=run.run_id))
    await plane.stop()
    (tmp_path / "train.jsonl").rename(tmp_path / "moved.jsonl")
    again = impatient(Plane(tmp_path))
    await again.start()
    try:
        (tmp_path / "moved.jsonl").rename(tmp_path / "train.jsonl")
        await again.coordinator.runs.starter.start_next()
        assert again.coordinator.exchange.active is not None
        assert (await state_of(again, run.run_id)) == ("paused", "")
    finally:
        await again.stop()


async def test_a_row_that_no_waiting_repairs_fails_a_run_that_has_not_begun_and_resume_takes_it_up(
    plane: Plane,
) -> None:
    first, second = await plane.submit(), await plane.submit(name="other")
    train = plane.directory / "train.jsonl"
    rows = train.read_text()
    train.write_text('{"prompt": 7}\n')
    await plane.coordinator.runs.starter.start_next()
    assert (await state_of(plane, first.run_id))[0] == "failed"
    train.write_text(rows)
    await plane.coordinator.runs.starter.start_next()
    assert (await state_of(plane, second.run_id))[0] == "running"
    resumed = await plane.runs.Resume(run_pb2.ResumeRequest(run_id=first.run_id))
    assert resumed.run.state == run_pb2.RUN_STATE_QUEUED
    await plane.coordinator.runs.starter.start_next()
    assert (await state_of(plane, first.run_id))[0] == "queued", "the other one trains"
    await plane.runs.Cancel(run_pb2.CancelRequest(run_id=second.run_id))
    await plane.coordinator.runs.starter.start_next()
    assert (await state_of(plane, first.run_id)) == ("running", "")


# Specs of other versions


def spell(directory: Path, run_id: str, spec_yaml: str) -> str:
    """Replace the run's spec as another version would write it; return the earlier text."""
    ledger = Ledger(directory / "ledger.sqlite")
    before = str(ledger.run(run_id)["spec_yaml"])
    with ledger.transaction():
        ledger.update_run(run_id, spec_yaml=spec_yaml)
    ledger.close()
    return before


@contextlib.asynccontextmanager
async def life(directory: Path) -> AsyncIterator[Plane]:
    """Run a coordinator for one term."""
    plane = impatient(Plane(directory))
    await plane.start()
    plane.run_loops()
    try:
        yield plane
    finally:
        await plane.stop()


async def test_other_runs_go_first_and_it_goes_on_where_it_can_be_read(tmp_path: Path) -> None:
    async with life(tmp_path) as plane:
        first, second = (await plane.submit()).run_id, (await plane.submit()).run_id
        await plane.watch_until(first, "state", state="running")
    spec = spell(tmp_path, first, UNREADABLE)

    async with life(tmp_path) as plane:
        await plane.watch_until(second, "state", state="running")
        state, message = await state_of(plane, first)
        assert state == "paused"
        assert "cannot read the spec of run test-1: grpo.max_num_steps" in message
        assert message.endswith("end the run with `paceline cancel test-1`. Other runs go first")
        seen = await plane.watch_until(first, "state", state="paused")
        await plane.runs.Cancel(run_pb2.CancelRequest(run_id=second))
        third = (await plane.submit()).run_id  # the first run was alone for a moment, and does not delay the others
        await plane.watch_until(third, "state", state="running")
    spell(tmp_path, first, spec)

    async with life(tmp_path) as plane:
        assert (await state_of(plane, third))[0] == "running", "the active run stays it"
        await plane.runs.Cancel(run_pb2.CancelRequest(run_id=third))
        await next_state(plane, first, seen[-1][0], "running")
        assert await state_of(plane, first) == ("running", "")


async def test_it_may_be_resumed_and_cancelled_while_another_trains(tmp_path: Path) -> None:
    async with life(tmp_path) as plane:
        first, second = (await plane.submit()).run_id, (await plane.submit()).run_id
    spell(tmp_path, first, UNREADABLE)
    async with life(tmp_path) as plane:
        await plane.watch_until(second, "state", state="running")
        resumed = (await plane.runs.Resume(run_pb2.ResumeRequest(run_id=first))).run
        assert resumed.state == run_pb2.RUN_STATE_QUEUED, "one run trains at a time"
        cancelled = (await plane.runs.Cancel(run_pb2.CancelRequest(run_id=first))).run
        assert cancelled.state == run_pb2.RUN_STATE_CANCELLED
        assert (await state_of(plane, second))[0] == "running"


async def test_a_person_s_pause_outlives_another_version(tmp_path: Path) -> None:
    async with life(tmp_path) as plane:
        first = (await plane.submit()).run_id
        await plane.watch_until(first, "state", state="running")
        await plane.runs.Pause(run_pb2.PauseRequest(run_id=first))
        second = (await plane.submit()).run_id
    spec = spell(tmp_path, first, UNREADABLE)
    async with life(tmp_path) as plane:
        await plane.watch_until(second, "state", state="running")
        await plane.runs.Cancel(run_pb2.CancelRequest(run_id=second))
    spell(tmp_path, first, spec)
    async with life(tmp_path) as plane:
        assert (await state_of(plane, first))[0] == "paused"


def change_spec(plane: Plane, run_id: str, **sections: Any) -> None:
    tree = yaml.safe_load(spec_to_yaml(make_spec(plane.directory))) | sections
    plane.ledger.update_run(run_id, spec_yaml=yaml.safe_dump(tree))


async def test_keys_that_only_another_version_knows_are_kept_and_warned_of(plane: Plane) -> None:
    run = await plane.submit()
    data = {"train": str(plane.directory / "train.jsonl"), "lookahead": 3}
    change_spec(plane, run.run_id, data=data, telepathy={"on": True})
    plane.run_loops()
    await plane.watch_until(run.run_id, "warning")
    (event,) = [e for e in plane.ledger.events(run.run_id, 0) if e["kind"] == "warning"]
    assert "data.lookahead" in event["json"]
    assert "telepathy" in event["json"]
    assert "telepathy" in plane.ledger.run(run.run_id)["spec_yaml"]
    worker = rollout(plane)
    told = yaml.safe_load((await put_on(worker)).spec_yaml)
    assert "telepathy" not in told
    assert "lookahead" not in told["data"]


async def test_a_spec_that_cannot_be_understood_pauses_its_run_and_the_coordinator_starts(
    tmp_path: Path,
) -> None:
    plane = await Plane.started(tmp_path)
    run = await plane.run_one()
    good = plane.ledger.run(run.run_id)["spec_yaml"]
    change_spec(plane, run.run_id, grpo={"num_prompts_per_step": "many"})
    await plane.stop()
    again = impatient(Plane(tmp_path))
    await again.start()
    try:
        row = again.ledger.run(run.run_id)
        assert row["state"] == "paused"
        assert "grpo.num_prompts_per_step" in row["message"]
        again.ledger.update_run(run.run_id, spec_yaml=good)
        again.run_loops()
        await next_state(again, run.run_id, 0, "paused")
        async with again.coordinator.context.watchers.changed:
            await again.coordinator.context.watchers.changed.wait_for(
                lambda: again.ledger.run(run.run_id)["state"] == "running"
            )
    finally:
        await again.stop()
