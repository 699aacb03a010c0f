"""A rollout worker between two runs."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest
from exchange_drivers import make_spec

from paceline.calls.backoff import ExponentialBackoff
from paceline.groups import Version
from paceline.services.rollout.run import RolloutRun
from paceline.services.rollout.worker import RolloutWorker
from paceline.spec.reading import spec_to_yaml
from paceline.v1 import worker_pb2

PATIENCE_S = 60.0


async def test_a_worker_ends_while_it_still_closes_a_run_that_is_over():
    closing, closed = asyncio.Event(), asyncio.Event()

    class SlowToClose(RolloutWorker):
        async def _work_on(self, assignment: worker_pb2.RunAssignment) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                closing.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    closed.set()

    worker = SlowToClose("127.0.0.1:1", "rollout-0", "cpu", 1.0, "127.0.0.1")
    belonging = asyncio.create_task(worker.membership.run())
    await worker.on_directive(worker_pb2.ConnectResponse(run=worker_pb2.RunAssignment(run_id="grpo-1")))
    working = asyncio.create_task(worker.work())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await worker.on_directive(worker_pb2.ConnectResponse(idle=worker_pb2.Idle()))
    await asyncio.wait_for(closing.wait(), PATIENCE_S)

    working.cancel()
    ended, _ = await asyncio.wait((working,), timeout=PATIENCE_S)
    belonging.cancel()
    await asyncio.wait((belonging,))

    assert ended, "the worker waits for a next run although it was told to end"
    assert working.cancelled()
    assert closed.is_set()


async def test_a_worker_on_cpus_refuses_a_run_that_names_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec(tmp_path, cluster={"rollout_gpus": [0, 1]})
    assignment = worker_pb2.RunAssignment(run_id="test-1", spec_yaml=spec_to_yaml(spec))
    reports: list[worker_pb2.ConnectRequest] = []
    refused, started = asyncio.Event(), asyncio.Event()

    async def report(request: worker_pb2.ConnectRequest) -> None:
        reports.append(request)
        refused.set()

    async def start(*_: object) -> None:
        started.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(RolloutRun, "start", start)
    worker = RolloutWorker("127.0.0.1:1", "rollout-0", "cpu", 1.0, "127.0.0.1", ExponentialBackoff(0.01, 0.01))
    monkeypatch.setattr(worker.membership, "report", report)
    setting_up = asyncio.create_task(worker._set_up(assignment))
    async with asyncio.timeout(60.0):
        await refused.wait()
        assert not started.is_set()
        worker.cpu_chosen = True
        await started.wait()
    setting_up.cancel()
    await asyncio.wait((setting_up,))
    worker.membership.exchange._context.term()
    assert reports[0].run_report.fault == worker_pb2.FAULT_PASSING
    assert "the run asks for GPU 0 to 1 (cluster.rollout_gpus), but torch finds no GPU" in reports[0].run_report.error


class EndedRun:
    """Run that works until it is cancelled, with or without weights."""

    draining = False

    def __init__(self, version: Version | None) -> None:
        self.run_id, self.began, self.closed = "test-1", asyncio.Event(), False
        self.engine = SimpleNamespace(version=version, watch=self._forever)
        self.weights = SimpleNamespace(report_progress=self._forever, close=lambda: None)

    async def _forever(self) -> None:
        await asyncio.Event().wait()

    async def generate_forever(self) -> None:
        self.began.set()

    async def close(self) -> None:
        self.closed = True


class EndedByItself(EndedRun):
    """Run that the exchange has ended before it is cancelled: it returns."""

    async def generate_forever(self) -> None:
        self.began.set()
        with contextlib.suppress(asyncio.CancelledError):
            await self._forever()


@pytest.mark.parametrize("kind", [EndedRun, EndedByItself])
@pytest.mark.parametrize("version", [Version(1, 8), None])
async def test_the_engine_of_a_run_that_is_over_serves_until_the_next_run(
    version: Version | None, kind: type[EndedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [kind(version), EndedRun(None)]
    worker = RolloutWorker("127.0.0.1:1", "rollout-0", "cpu", 1.0, "127.0.0.1")
    worker.membership.exchange._context.term()
    given = iter(runs)

    async def set_up(_: object) -> EndedRun:
        return next(given)

    async def report(_: object) -> None:
        return None

    monkeypatch.setattr(worker, "_set_up", set_up)
    monkeypatch.setattr(worker.membership, "report", report)
    working = asyncio.create_task(worker.work())
    async with asyncio.timeout(PATIENCE_S):
        for number, run in enumerate(runs):
            assignment = worker_pb2.RunAssignment(run_id=f"test-{number}")
            await worker.on_directive(worker_pb2.ConnectResponse(run=assignment))
            await run.began.wait()
            assert worker.served is run  # type: ignore[comparison-overlap]
            assert runs[0].closed == (number == 1)
            await worker.on_directive(worker_pb2.ConnectResponse(idle=worker_pb2.Idle()))
            while worker._run is not None:  # noqa: ASYNC110 - the end of a run has no event
                await asyncio.sleep(0)
            assert run.closed == (run.engine.version is None)
            assert (worker.served is None) == run.closed
    working.cancel()
    await asyncio.wait((working,))
    assert all(run.closed for run in runs)
