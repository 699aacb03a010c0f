"""A run that dropped groups have paused goes on with the data and the functions that are there at `resume`."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import pytest
from control_plane import Plane
from paused_runs import state_of

from paceline.services.coordinator.exchange.notices import Notice
from paceline.services.coordinator.lifecycle.commands import changed_function_warnings, function_digests
from paceline.spec import RewardFunctionSection
from paceline.v1 import run_pb2


async def pause(plane: Plane, run_id: str, reason: str = "bad_prompt") -> None:
    """Pause the run as its exchange does after too many drops."""
    coordinator = plane.coordinator
    async with coordinator.context.lock:
        with plane.ledger.transaction():
            run = coordinator.exchange.active
            assert run is not None
            plane.ledger.update_run(run_id, dropped_in_a_row=7)
            plane.ledger.count(run_id, f"failures:{reason}", 4)
            coordinator.exchange.pause(run, "4 groups in a row were dropped", reason)
        notices = coordinator.exchange.notices.take()
    await coordinator.runs.act_on(notices)


async def test_the_reason_of_a_pause_is_in_the_summary_until_the_run_goes_on(
    running: tuple[Plane, str],
) -> None:
    plane, run_id = running
    await plane.coordinator.runs.act_on([Notice("paused", {"message": "of another run"}, "earlier-7")])
    summary = plane.ledger.run_directory(run_id) / "summary.json"
    assert not summary.exists()
    await pause(plane, run_id)
    assert await state_of(plane, run_id) == ("paused", "4 groups in a row were dropped")
    found = json.loads(summary.read_text())
    assert (found["state"], found["message"]) == ("paused", "4 groups in a row were dropped")
    assert found["failures"] == {"bad_prompt": 4}
    await plane.runs.Resume(run_pb2.ResumeRequest(run_id=run_id))
    assert await state_of(plane, run_id) == ("running", "")
    assert plane.ledger.run(run_id)["dropped_in_a_row"] == 0
    assert not summary.exists()


def write(path: Path, text: str) -> None:
    path.write_text(text)


async def test_the_data_set_is_read_anew_and_one_that_is_still_wrong_is_refused(
    running: tuple[Plane, str],
) -> None:
    plane, run_id = running
    exchange = plane.coordinator.exchange
    assert exchange.active is not None
    path = Path(exchange.active.spec.data.train)
    await pause(plane, run_id)
    write(path, '{"prompt": null, "answer": "4"}\n')
    with pytest.raises(grpc.aio.AioRpcError, match="line 1: column 'prompt' is null"):
        await plane.runs.Resume(run_pb2.ResumeRequest(run_id=run_id))
    assert (await state_of(plane, run_id))[0] == "paused"
    write(path, '{"prompt": "the new one", "answer": "4"}\n')
    await plane.runs.Resume(run_pb2.ResumeRequest(run_id=run_id))
    assert exchange.active.prompts is not None
    assert exchange.active.prompts.draw(0) == ("the new one", {"answer": "4"})
    warnings = [json.loads(row["json"]) for row in plane.ledger.events(run_id, 0) if row["kind"] == "warning"]
    assert any("has changed" in warning["message"] for warning in warnings)


async def test_groups_that_were_admitted_before_do_not_pause_the_run_again(
    running: tuple[Plane, str],
) -> None:
    plane, run_id = running
    await pause(plane, run_id)
    with plane.ledger.transaction():
        plane.ledger.count(run_id, "groups:ever_admitted", 5)
    await plane.runs.Resume(run_pb2.ResumeRequest(run_id=run_id))
    drops = plane.coordinator.exchange.active.state.drops_in_a_row
    for group_id in range(20):
        drops.add(group_id % 5, "bad_prompt", "the old prompts")
    assert drops.number == 0
    drops.add(5, "bad_prompt", "a new prompt")
    assert drops.number == 1


async def test_a_function_that_was_changed_is_recorded(
    running: tuple[Plane, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane, run_id = running
    exchange = plane.coordinator.exchange
    code = tmp_path / "r.py"
    write(code, "def f(completions): ...")
    assert exchange.active is not None
    rewards = (RewardFunctionSection(function=f"{code}:f"), RewardFunctionSection(function="length"))
    spec = exchange.active.spec.model_copy(update={"rewards": rewards})
    monkeypatch.setattr(
        "paceline.services.coordinator.lifecycle.commands.function_digests",
        lambda _: function_digests(spec),
    )
    for content in ("def f(completions): ...", "import re\n\n\ndef f(completions): ..."):
        write(code, content)
        await pause(plane, run_id, "reward_failed")
        await plane.runs.Resume(run_pb2.ResumeRequest(run_id=run_id))
    warnings = [json.loads(row["json"]) for row in plane.ledger.events(run_id, 0) if row["kind"] == "warning"]
    assert [str(code) in warning["message"] for warning in warnings] == [True]


def test_only_files_that_are_known_to_have_changed_are_named() -> None:
    assert changed_function_warnings("", '{"a.py": "1"}') == []
    assert changed_function_warnings('{"a.py": "1"}', '{"a.py": "1", "b.py": "2"}') == []
    (warning,) = changed_function_warnings('{"a.py": "1"}', '{"a.py": "2"}')
    assert "'a.py'" in warning
    assert "(XXH3 1; now 2)" in warning
