"""A reward worker that stops finishes its running task and returns tasks that wait for a process. A worker whose
requests are refused tries again."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from exchange_drivers import make_spec

from paceline.calls.backoff import ExponentialBackoff
from paceline.groups import Completion, VersionSpan
from paceline.services.common.worker.score_extras import with_trainer_state
from paceline.services.reward.worker import RewardWorker
from paceline.spec.reading import spec_to_yaml
from paceline.v1 import exchange_pb2 as pb
from paceline.v1 import worker_pb2
from paceline.wire import encode_result

SLOW_REWARD = """
import pathlib
here = pathlib.Path(__file__).parent
def slow(completions, trainer_state, log_metric, **_):
    log_metric("step", trainer_state.global_step)
    (here / "started").write_text("x")
    (here / "go").read_text()
    return [1.0] * len(completions)
"""
"""Both files are pipes, so each side waits for the other."""

COLUMNS = with_trainer_state("{}", {"global_step": 7})


class Exchange:
    """Exchange that gives three tasks to the first request, then none; it records the scores."""

    def __init__(self, payloads: list[bytes]):
        self.payloads = payloads
        self.scores: list[pb.ScoreResult] = []
        self.changed = asyncio.Condition()
        self.left = [1, 2, 3]
        self.refusals = 2
        """Number of first requests for tasks that are refused."""

    def join(self, coordinator: str, hello: object, on_directive: Any, gauges: Any) -> Any:
        """Stand in for the worker's membership."""
        self.direct, self.gauges = on_directive, gauges
        return self

    async def request(
        self, request: pb.ExchangeRequest, payloads: Sequence[bytes] = ()
    ) -> tuple[pb.ExchangeReply, list[bytes]]:
        reply = pb.ExchangeReply(status=pb.REPLY_STATUS_COMMITTED)
        if request.WhichOneof("body") == "score":
            async with self.changed:
                self.scores.append(request.score)
                self.changed.notify_all()
            return reply, []
        if self.refusals:
            self.refusals -= 1
            return pb.ExchangeReply(status=pb.REPLY_STATUS_INVALID, message="failed on it"), []
        if not self.left:
            await asyncio.Event().wait()
        given, self.left = self.left, []
        for group_id in given:
            reply.task.tasks.add(group_id=group_id, attempt=1, prompt_json='"p"', columns_json=COLUMNS, digest="d")
        return reply, self.payloads * len(given)

    async def report(self, report: worker_pb2.ConnectRequest) -> None:
        pass

    async def has(self, number: int) -> list[pb.ScoreResult]:
        async with asyncio.timeout(60), self.changed:
            await self.changed.wait_for(lambda: len(self.scores) >= number)
        return self.scores


async def drained(directory: Path) -> None:
    os.mkfifo(directory / "started")
    os.mkfifo(directory / "go")
    (directory / "slow.py").write_text(SLOW_REWARD)
    spec = make_spec(directory, rewards=[{"function": f"{directory}/slow.py:slow"}])
    ids = np.array([1, 2], np.int32)
    completion = Completion(ids, np.zeros(2, np.float32), (VersionSpan(1, 0, 0, 2),), "stop", "a")
    exchange = Exchange(encode_result(ids, [completion]))
    worker = RewardWorker("nowhere:1", "reward", 1, membership=exchange.join)
    worker.refused_pause = ExponentialBackoff(0.0, 0.0)
    assignment = worker_pb2.RunAssignment(run_id="run-1", spec_yaml=spec_to_yaml(spec))
    await exchange.direct(worker_pb2.ConnectResponse(run=assignment))
    async with asyncio.timeout(120):
        working = asyncio.create_task(worker.work())
        await asyncio.to_thread((directory / "started").read_text)
        worker.stop()
        returned = await exchange.has(2)
        assert [(score.group_id, score.handed_back, score.error) for score in returned] == [
            (2, True, ""),
            (3, True, ""),
        ]
        assert not working.done()
        await asyncio.to_thread((directory / "go").write_text, "x")
        await working
    gauges = exchange.gauges()
    assert gauges.pop("fn/seconds/slow") > 0
    assert gauges.pop("occupied") >= 0
    assert gauges == {
        "groups_since_report": 1.0,
        "logged_sum/step": 7.0,
        "logged_count/step": 1.0,
        "fn/calls/slow": 1.0,
    }
    last = exchange.scores[-1]
    assert (last.group_id, last.handed_back, list(last.rewards)) == (1, False, [1.0])
    assert len(exchange.scores) == 3


def test_what_waits_for_a_process_goes_back_and_what_runs_is_finished(tmp_path: Path) -> None:
    asyncio.run(drained(tmp_path))


async def test_a_task_whose_process_is_killed_goes_back_as_a_crash(tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text("import os\ndef f(completions, **_):\n    os.kill(os.getpid(), 9)\n")
    spec = make_spec(tmp_path, rewards=[{"function": f"{tmp_path}/dies.py:f"}])
    ids = np.array([1, 2], np.int32)
    completion = Completion(ids, np.zeros(2, np.float32), (VersionSpan(1, 0, 0, 2),), "stop", "a")
    exchange = Exchange(encode_result(ids, [completion]))
    worker = RewardWorker("nowhere:1", "reward", 1, membership=exchange.join)
    worker.refused_pause = ExponentialBackoff(0.0, 0.0)
    assignment = worker_pb2.RunAssignment(run_id="run-1", spec_yaml=spec_to_yaml(spec))
    await exchange.direct(worker_pb2.ConnectResponse(run=assignment))
    working = asyncio.create_task(worker.work())
    first = (await exchange.has(1))[0]
    worker.stop()
    async with asyncio.timeout(120):
        await working
    assert (first.handed_back, first.crashed, list(first.rewards)) == (True, True, [])
    assert "died with signal SIGKILL" in first.error


async def test_a_worker_without_gpus_refuses_a_run_that_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.services.reward.worker.usable_gpus", lambda: ())
    spec = make_spec(tmp_path, cluster={"reward_gpus": [0]})
    reports: list[worker_pb2.ConnectRequest] = []

    async def report(request: worker_pb2.ConnectRequest) -> None:
        reports.append(request)
        worker.stop()

    worker = RewardWorker("127.0.0.1:1", "reward-0", 1, membership=lambda *_: SimpleNamespace(report=report))
    worker.assigned.assign(worker_pb2.RunAssignment(run_id="test-1", spec_yaml=spec_to_yaml(spec)))
    async with asyncio.timeout(60.0):
        await worker.work()
    said = reports[0].run_report
    assert said.fault == worker_pb2.FAULT_PASSING
    assert "asks for GPU 0 (cluster.reward_gpus), but this host shows no GPU that torch can use" in said.error


async def test_functions_that_were_changed_are_loaded_anew_when_the_run_is_assigned_again(
    tmp_path: Path,
) -> None:
    code = tmp_path / "f.py"
    await asyncio.to_thread(code.write_text, "def f(completions, **_):\n    return [nothing]\n")
    spec = make_spec(tmp_path, rewards=[{"function": f"{code}:f"}])
    ids = np.array([1, 2], np.int32)
    completion = Completion(ids, np.zeros(2, np.float32), (VersionSpan(1, 0, 0, 2),), "stop", "a")
    exchange = Exchange(encode_result(ids, [completion]))
    exchange.refusals = 0
    worker = RewardWorker("nowhere:1", "reward", 1, membership=exchange.join)
    run = worker_pb2.RunAssignment(run_id="run-1", spec_yaml=spec_to_yaml(spec))
    await exchange.direct(worker_pb2.ConnectResponse(run=run))
    working = asyncio.create_task(worker.work())
    failed = list(await exchange.has(3))
    assert all("NameError: name 'nothing' is not defined (f.py:2 in f)" in score.error for score in failed)
    await exchange.direct(worker_pb2.ConnectResponse(run=run))
    assert not worker.assigned.changed.is_set(), "the same code is not loaded twice"
    await asyncio.to_thread(code.write_text, "def f(completions, **_):\n    return [0.5]\n")
    exchange.left = [4]
    await exchange.direct(worker_pb2.ConnectResponse(run=run))
    scored = (await exchange.has(4))[3]
    assert (scored.group_id, scored.error, list(scored.rewards)) == (4, "", [0.5])
    worker.stop()
    async with asyncio.timeout(120):
        await working
