"""Workers that cannot set up a run report the reason, retry automatically, and report when they succeed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from exchange_drivers import make_spec
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.calls.backoff import ExponentialBackoff
from paceline.data.tokens import load_tokenizer
from paceline.errors import InvalidInput, SpecError, Unavailable, Unreadable
from paceline.reward.runner import RewardRunner
from paceline.services.common.serving.grpc_server import GrpcServer
from paceline.services.common.worker.assigned_run import fault_of, spec_of
from paceline.services.reward.worker import RewardWorker
from paceline.services.rollout.run import RolloutRun
from paceline.services.rollout.worker import RolloutWorker
from paceline.spec.reading import spec_to_yaml
from paceline.v1 import exchange_pb2 as pb
from paceline.v1 import worker_pb2

PATIENCE_S = 60.0


class Membership:
    """Membership that records reports, and lets every request wait forever."""

    def __init__(self) -> None:
        self.reports: asyncio.Queue[worker_pb2.RunReport] = asyncio.Queue()
        self.readiness: list[bool] = []

    async def report(self, report: worker_pb2.ConnectRequest) -> None:
        self.reports.put_nowait(report.run_report)

    async def request(self, request: pb.ExchangeRequest, payloads: Any = ()) -> Any:
        await asyncio.Event().wait()

    async def on_readiness(self, ready: bool) -> None:
        self.readiness.append(ready)

    async def next(self) -> worker_pb2.RunReport:
        return await asyncio.wait_for(self.reports.get(), PATIENCE_S)


def join(worker: Any) -> Membership:
    worker.membership.exchange._context.term()
    worker.membership = membership = Membership()
    worker.assigned.on_readiness = membership.on_readiness
    return membership


def assigned(directory: Path, **sections: Any) -> worker_pb2.ConnectResponse:
    text = spec_to_yaml(make_spec(directory, **sections))
    return worker_pb2.ConnectResponse(run=worker_pb2.RunAssignment(run_id="run-1", spec_yaml=text))


async def ended(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_a_reward_worker_waits_for_the_user_s_file(tmp_path: Path) -> None:
    worker = RewardWorker("nowhere:1", "reward-1", 1, ExponentialBackoff(0.01, 0.01))
    membership = join(worker)
    file = tmp_path / "late.py"
    await worker._on_directive(assigned(tmp_path, rewards=[{"function": f"{file}:f"}]))
    working = asyncio.create_task(worker.work())
    for _ in range(2):
        report = await membership.next()
        assert (report.run_id, report.fault) == ("run-1", worker_pb2.FAULT_PASSING)
        assert f"there is no file '{file}'" in report.error
        assert membership.readiness[-1] is False
    file.write_text("def f(completions, **_):\n    return [1.0] * len(completions)\n")
    while (report := await membership.next()).error:
        pass
    assert report.run_id == "run-1"
    assert membership.readiness[-1] is True
    await ended(working)


async def test_a_reward_worker_that_is_assigned_again_tries_at_once_and_comes_back_with_its_failure(
    tmp_path: Path,
) -> None:
    worker = RewardWorker("nowhere:1", "reward-1", 1, ExponentialBackoff(1e6, 1e6))
    membership = join(worker)
    assignment = assigned(tmp_path, rewards=[{"function": "no_such_function"}])
    await worker._on_directive(assignment)
    working = asyncio.create_task(worker.work())
    first = await membership.next()
    assert first.fault == worker_pb2.FAULT_SPEC
    assert "'no_such_function' is not built in" in first.error
    await worker._on_directive(worker_pb2.ConnectResponse(welcome=worker_pb2.Welcome()))
    assert await membership.next() == first, "the coordinator may have forgotten"
    await worker._on_directive(assignment)
    assert await membership.next() == first
    await ended(working)


async def test_a_rollout_worker_waits_for_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = RolloutRun.start
    folder, begun = tmp_path / "model", asyncio.Event()

    async def forever() -> None:
        begun.set()
        await asyncio.Event().wait()

    async def close() -> None:
        pass

    async def start(spec: Any, *rest: Any) -> Any:
        if not folder.exists():
            return await started(spec, *rest)
        engine = SimpleNamespace(watch=forever, version=None)
        weights = SimpleNamespace(report_progress=forever)
        return SimpleNamespace(run_id="run-1", engine=engine, weights=weights, generate_forever=forever, close=close)

    monkeypatch.setattr(RolloutRun, "start", start)
    worker = RolloutWorker("nowhere:1", "rollout-1", "cpu", 1.0, "127.0.0.1", ExponentialBackoff(0.01, 0.01))
    membership = join(worker)
    policy = {"model_name": str(folder), "generation": {"max_new_tokens": 4}}
    await worker.on_directive(assigned(tmp_path, policy=policy))
    working = asyncio.create_task(worker.work())
    for _ in range(2):
        report = await membership.next()
        assert (report.run_id, report.fault) == ("run-1", worker_pb2.FAULT_PASSING)
        assert f"no folder '{folder}'" in report.error
        assert membership.readiness[-1] is False
    folder.mkdir()
    while (report := await membership.next()).error:
        pass
    await asyncio.wait_for(begun.wait(), PATIENCE_S)
    assert membership.readiness[-1] is True
    await ended(working)


async def test_health_says_of_one_service_that_it_cannot_work() -> None:
    async with GrpcServer("127.0.0.1", 0) as server:
        await server.set_serving("paceline.v1.RewardService", False)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            request = health_pb2.HealthCheckRequest(service="paceline.v1.RewardService")
            serving = health_pb2.HealthCheckResponse.SERVING
            assert (await check(request)).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert (await check(health_pb2.HealthCheckRequest())).status == serving, "the process lives"
            await server.set_serving("paceline.v1.RewardService", True)
            assert (await check(request)).status == serving


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (InvalidInput("x"), worker_pb2.FAULT_SPEC),
        (Unreadable("x"), worker_pb2.FAULT_PASSING),
        (Unavailable("x"), worker_pb2.FAULT_PASSING),
        (OSError("x"), worker_pb2.FAULT_PASSING),
        (RuntimeError("out of memory"), worker_pb2.FAULT_PASSING),
    ],
)
def test_what_another_spec_alone_would_change(error: Exception, fault: Any) -> None:
    assert fault_of(error) == fault


def test_a_spec_of_another_version_is_no_fault_of_the_spec() -> None:
    with pytest.raises(Unavailable, match=r"(?s)policy: missing.*one version"):
        spec_of(worker_pb2.RunAssignment(run_id="run-1", spec_yaml="telepathy: 1"))


def test_a_key_of_another_version_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    text = "policy: {model_name: m}\ndata: {train: d}\nrewards: [{function: length}]\ntelepathy: 1\n"
    assert spec_of(worker_pb2.RunAssignment(run_id="run-1", spec_yaml=text)).policy.model_name == "m"
    assert "does not know telepathy" in caplog.text


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (OSError("429 Client Error: Too Many Requests"), Unreadable),
        (OSError("503 Server Error"), Unreadable),
        (ValueError("Unrecognized model"), InvalidInput),
        (OSError(""), Unreadable),
    ],
)
def test_a_hub_that_refuses_for_now_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: Exception, kind: type[Exception]
) -> None:
    from transformers import AutoTokenizer

    def refuse(*_: Any, **__: Any) -> None:
        raise raised

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", refuse)
    with pytest.raises(InvalidInput) as caught:
        load_tokenizer(make_spec(tmp_path).policy)
    assert type(caught.value) is kind


LOADS: list[tuple[str, type[Exception]]] = [
    ("import no_such_package_here\ndef f(completions, **_): ...\n", Unreadable),
    ("open('/no/such/file')\ndef f(completions, **_): ...\n", Unreadable),
    ("def f(completions, **_)\n", InvalidInput),
    ("def g(completions, **_): ...\n", InvalidInput),
    ("import os\nos.kill(os.getpid(), 9)\n", Unavailable),
]


@pytest.mark.parametrize(("source", "kind"), LOADS)
async def test_a_reward_file_that_does_not_load(tmp_path: Path, source: str, kind: type[Exception]) -> None:
    (tmp_path / "mine.py").write_text(source)
    spec = make_spec(tmp_path, rewards=[{"function": f"{tmp_path}/mine.py:f"}])
    with pytest.raises((InvalidInput, Unavailable)) as caught:
        await RewardRunner(spec.rewards).start()
    assert type(caught.value) is kind


def test_a_spec_error_stays_an_input_s() -> None:
    assert fault_of(SpecError("x")) == worker_pb2.FAULT_SPEC
