"""A function's file outside of the allowed folders is refused at submission, and again in the worker that would run it; so are
functions that a worker's `--only` does not name."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
from click.testing import CliRunner
from control_plane import Plane, refusal
from exchange_drivers import make_spec

from paceline.calls.backoff import ExponentialBackoff
from paceline.services.reward.main import main
from paceline.services.reward.worker import RewardWorker
from paceline.spec.reading import spec_to_yaml
from paceline.v1 import run_pb2, worker_pb2

CODE = "def f(completions, **_):\n    return [1.0] * len(completions)\n"


def function_elsewhere(tmp_path: Path, **spec: Any) -> str:
    """A spec whose function's file is not in its own folder, as YAML."""
    for name in ("mine", "theirs"):
        (tmp_path / name).mkdir()
    (tmp_path / "theirs" / "f.py").write_text(CODE)
    rewards = [{"function": f"{tmp_path}/theirs/f.py:f"}]
    return spec_to_yaml(make_spec(tmp_path, rewards=rewards, folder=str(tmp_path / "mine"), **spec))


async def test_submit_refuses_a_function_from_elsewhere(tmp_path: Path) -> None:
    plane = await Plane.started(tmp_path)
    request = run_pb2.SubmitRequest(spec_yaml=function_elsewhere(tmp_path))
    code, said = await refusal(plane.runs.Submit(request))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert f"{tmp_path}/theirs/f.py is not below {tmp_path}/mine; move it there, or allow its folder" in said
    assert not (await plane.runs.List(run_pb2.ListRequest())).runs
    await plane.stop()


class Reports:
    """Reports of a worker, in place of its membership."""

    def __init__(self) -> None:
        self.first: asyncio.Future[worker_pb2.ConnectRequest] = asyncio.get_running_loop().create_future()

    def join(self, coordinator: str, hello: object, on_directive: Any, gauges: object) -> Any:
        self.direct = on_directive
        return self

    async def request(self, request: object) -> None:
        """Have no task."""
        await asyncio.Event().wait()

    async def report(self, report: worker_pb2.ConnectRequest) -> None:
        """Keep the first report."""
        if not self.first.done():
            self.first.set_result(report)


async def first_report(assignment: worker_pb2.RunAssignment, **options: Any) -> worker_pb2.RunReport:
    """Return the first report of a reward worker with these options on an assignment."""
    reports = Reports()
    worker = RewardWorker("nowhere:1", "reward-1", 1, ExponentialBackoff(1e6, 1e6), membership=reports.join, **options)
    await reports.direct(worker_pb2.ConnectResponse(run=assignment))
    working = asyncio.create_task(worker.work())
    try:
        async with asyncio.timeout(60.0):
            return (await reports.first).run_report
    finally:
        worker.stop()
        await working


async def test_a_worker_runs_only_what_its_own_folders_allow(tmp_path: Path) -> None:
    """Also if the coordinator accepted it. Another worker may allow it, so the run does not end."""
    assignment = worker_pb2.RunAssignment(run_id="run-1", spec_yaml=function_elsewhere(tmp_path))
    refused = await first_report(assignment, functions_from=[tmp_path / "mine"])
    assert "this worker does not run the functions: rewards.0.function" in refused.error
    assert refused.fault == worker_pb2.FAULT_PASSING
    assert "theirs/f.py is not below" in (await first_report(assignment)).error


async def test_a_worker_of_some_functions_takes_no_run_with_others(tmp_path: Path) -> None:
    """Another worker may take it, so the run does not end."""
    rewards = [{"function": "exact_match"}, {"function": "length", "kwargs": {"tolerance_tokens": 9}}]
    assignment = worker_pb2.RunAssignment(run_id="run-1", spec_yaml=spec_to_yaml(make_spec(tmp_path, rewards=rewards)))
    refused = await first_report(assignment, only=["code_tests", "length"])
    assert "scores only with code_tests, length (--only), but the run has exact_match" in refused.error
    assert refused.fault == worker_pb2.FAULT_PASSING
    assert (await first_report(assignment, only=["exact_match", "length"])).error == ""


def test_only_names_built_in_functions() -> None:
    refused = CliRunner().invoke(main, ["--only", "my_rewards.py:f"])
    assert refused.exit_code == 2
    assert "'my_rewards.py:f' is not a built-in reward function; built in are bbq_bias" in refused.output
