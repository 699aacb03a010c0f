"""The recovery of ended runs after a restart: damaged rows and folders keep no other run from going on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from control_plane import Plane
from paused_runs import put_on, reward, state_of

from paceline.rate_limited_log import unforeseen
from paceline.services.coordinator.reporting import run_log
from paceline.v1 import run_pb2


async def test_a_summary_that_cannot_be_written_keeps_no_run_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = await Plane.started(tmp_path)
    first, second = await plane.submit(), await plane.submit(name="other")
    await plane.coordinator.runs.starter.start_next()
    worker = reward(plane)
    await put_on(worker)

    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(run_log, "write_summary", refuse)
        await plane.runs.Cancel(run_pb2.CancelRequest(run_id=first.run_id))
        await worker.hear("idle")
        await plane.coordinator.runs.starter.start_next()
        assert (await put_on(worker)).run_id == second.run_id
        await plane.stop()
        again = Plane(tmp_path)
        await again.start()  # it tries to write what is missing
        assert (await state_of(again, second.run_id))[0] == "running"
        await again.stop()
    third = await Plane.started(tmp_path)
    assert json.loads((Path(first.directory) / "summary.json").read_text())["state"] == "cancelled"
    await third.stop()


@pytest.mark.parametrize("ended", [True, False])
async def test_the_damaged_result_of_an_evaluation_keeps_no_coordinator_from_starting(
    tmp_path: Path, ended: bool
) -> None:
    plane = await Plane.started(tmp_path)
    run = await plane.submit()
    if ended:
        await plane.runs.Cancel(run_pb2.CancelRequest(run_id=run.run_id))
    await plane.stop()
    plane = Plane(tmp_path)
    plane.ledger.db.execute(
        "INSERT INTO evaluations (run_id, step, done, result_json) VALUES (?, 0, 1, '{')", (run.run_id,)
    )
    (Path(run.directory) / "summary.json").unlink(missing_ok=True)
    before = unforeseen.total
    await plane.start()
    assert unforeseen.total == before + ended
    state, _ = await state_of(plane, run.run_id)
    await plane.stop()
    assert state == ("cancelled" if ended else "running")
