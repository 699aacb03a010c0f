"""Calls of `Generate`: bounds, the gate, and the turns of conversations, which continue on another worker after a
drain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio
from exchange_drivers import make_spec
from rollout_bench import PATIENCE_S, Bench
from tiny_models import tiny_qwen3

from paceline.groups import Version
from paceline.rollout.engines import create_engine
from paceline.services.common.serving.grpc_server import GrpcServer
from paceline.services.demo.task import make_tokenizer
from paceline.services.rollout.run import RolloutRun
from paceline.services.rollout.servicer import RolloutServicer
from paceline.services.rollout.worker import RolloutWorker
from paceline.spec import RunSpec
from paceline.v1 import common_pb2, rollout_pb2, rollout_pb2_grpc

RUN = "run-1"
PROMPT = [1, 2, 3]
LONG = 250


class Context:
    """The context of a call; `abort` ends it."""

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: Any = ()) -> None:
        raise Aborted(code, details)

    def trailing_metadata(self) -> tuple[()]:
        return ()

    async def send_initial_metadata(self, _: object) -> None:
        """A turn's request was accepted."""


class Aborted(Exception):
    def __init__(self, code: grpc.StatusCode, details: str):
        super().__init__(details)
        self.code = code


@pytest_asyncio.fixture
async def worker(bench: Bench) -> AsyncIterator[RolloutWorker]:
    """A worker that serves the bench's run."""
    worker = RolloutWorker("nowhere:1", "rollout-1", "cpu", 1.0, "127.0.0.1")
    worker.membership.exchange._context.term()
    bench.engine.version = Version(1, 0)  # type: ignore[assignment]
    worker._run = bench.run
    yield worker


async def generate(worker: RolloutWorker, **request: Any) -> rollout_pb2.GenerateResponse:
    context: Any = Context()
    return await RolloutServicer(worker).Generate(rollout_pb2.GenerateRequest(**request), context)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"prompt": "1", "n": 400_000}, "n is 400000; at most 128"),
        ({"prompt_ids": [1] * 100_000}, "number of prompt_ids is 100000"),
        ({"prompt": "1" * 1_000_000}, "length of prompt is 1000000"),
        ({"prompt": "1", "params": {"stop_token_ids": [1] * 1000}}, "stop_token_ids is 1000"),
        ({"prompt": "1", "params": {"min_new_tokens": 1 << 31}}, "min_new_tokens"),
        ({"prompt": "1", "params": {"max_new_tokens": 1 << 31}}, "max_new_tokens"),
        ({"prompt": "1", "params": {"temperature": float("inf")}}, "temperature is inf, but must be finite"),
        ({"prompt": "1", "params": {"temperature": float("nan")}}, "temperature is nan, but must be finite"),
        ({"prompt": "1", "params": {"top_p": float("nan")}}, "top_p is nan"),
    ],
)
async def test_a_caller_s_numbers_have_bounds(
    worker: RolloutWorker, bench: Bench, request_: dict[str, Any], words: str
) -> None:
    with pytest.raises(Aborted, match=words) as refused:
        await generate(worker, **request_)
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert bench.engine.asked == []


@pytest.mark.parametrize("grace_s", [float("nan"), float("inf"), -1.0, 1e300])
async def test_a_drain_without_an_end_is_refused(worker: RolloutWorker, grace_s: float) -> None:
    context: Any = Context()
    with pytest.raises(Aborted, match="must be from 0 to 86400 seconds"):
        await RolloutServicer(worker).Drain(rollout_pb2.DrainRequest(grace_s=grace_s), context)
    assert not worker.drained.is_set()


async def test_callers_share_the_gate_and_end_with_their_call(worker: RolloutWorker, bench: Bench) -> None:
    gate = worker.endpoint.gate_of(bench.run)
    bench.engine.held = asyncio.Event()
    call = asyncio.create_task(generate(worker, prompt="1", n=gate.capacity))
    async with asyncio.timeout(PATIENCE_S):
        for _ in range(gate.places):
            await bench.engine.began.get()
    assert bench.engine.began.empty(), "the others wait for a place"
    with pytest.raises(Aborted) as refused:
        await generate(worker, prompt="1")
    assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    call.cancel()
    await asyncio.wait((call,))
    bench.engine.held.set()
    assert len((await generate(worker, prompt="1", n=2)).completions) == 2
    assert len(bench.engine.asked) == gate.places + 2


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"run_id": "run-2"}, "works on run run-1, not on run-2"),
        ({"min_version": common_pb2.PolicyVersion(session=1, step=1)}, "older than"),
        ({"pinned_version": common_pb2.PolicyVersion(session=2, step=0)}, "not"),
    ],
)
async def test_a_session_gets_the_weights_that_it_wants_or_none(
    worker: RolloutWorker, bench: Bench, request_: dict[str, Any], words: str
) -> None:
    with pytest.raises(Aborted, match=words) as refused:
        await generate(worker, prompt_ids=PROMPT, session="s", **request_)
    assert refused.value.code is grpc.StatusCode.FAILED_PRECONDITION
    assert bench.engine.asked == []


async def test_the_step_decides_which_version_is_older(worker: RolloutWorker, bench: Bench) -> None:
    bench.engine.version = Version(2, 5)  # type: ignore[assignment]
    for oldest in ({"session": 0, "step": 5}, {"session": 7, "step": 4}):
        await generate(worker, prompt_ids=PROMPT, session="s", min_version=oldest)
    with pytest.raises(Aborted, match="older than"):
        await generate(worker, prompt_ids=PROMPT, session="s", min_version={"session": 1, "step": 6})


async def test_tokens_of_another_version_than_the_pinned_one_are_refused(worker: RolloutWorker, bench: Bench) -> None:
    bench.engine.version = Version(1, 7)  # type: ignore[assignment]  # the bench's tokens are of (1, 0)
    with pytest.raises(Aborted, match="received version") as refused:
        await generate(worker, prompt_ids=PROMPT, session="s", pinned_version={"session": 1, "step": 7})
    assert refused.value.code is grpc.StatusCode.FAILED_PRECONDITION


async def test_sessions_do_not_wait_behind_external_clients(worker: RolloutWorker, bench: Bench) -> None:
    gate = worker.endpoint.gate_of(bench.run)
    bench.engine.held = asyncio.Event()
    clients = asyncio.create_task(generate(worker, prompt="1", n=gate.capacity))
    turns = [asyncio.create_task(generate(worker, prompt_ids=PROMPT, session=f"s{index}")) for index in range(4)]
    async with asyncio.timeout(PATIENCE_S):
        for _ in range(gate.places + len(turns)):
            await bench.engine.began.get()
    bench.engine.held.set()
    assert [len((await turn).completions) for turn in turns] == [1] * 4
    assert len((await clients).completions) == gate.capacity


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"begun_ids": [1], "n": 2}, "n is 2 with begun_ids"),
        ({"begun_ids": [-1]}, "begun_ids holds -1"),
        ({"begun_ids": [1] * 100_000}, "number of begun_ids is 100000"),
        ({"session": "s" * 1000}, "length of session is 1000"),
    ],
)
async def test_begun_tokens_and_sessions_have_bounds(
    worker: RolloutWorker, bench: Bench, request_: dict[str, Any], words: str
) -> None:
    with pytest.raises(Aborted, match=words) as refused:
        await generate(worker, prompt_ids=PROMPT, **request_)
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert bench.engine.asked == []


class Served:
    """A worker with the native engine behind a gRPC server. It works on a run with an environment, without leases."""

    def __init__(self, spec: RunSpec) -> None:
        self.worker = RolloutWorker("nowhere:1", "rollout-1", "cpu", 1.0, "127.0.0.1")
        self.worker.membership.exchange._context.term()
        membership: Any = None  # nothing is requested of the exchange
        engine = create_engine(spec)
        self.run = RolloutRun(spec, RUN, "rollout-1", membership, engine, make_tokenizer(), "/runs/run-1")
        self.worker._run = self.run
        self.server = GrpcServer("127.0.0.1", 0)
        self.server.add(
            RolloutServicer(self.worker),
            rollout_pb2_grpc.add_RolloutServiceServicer_to_server,
            "paceline.v1.RolloutService",
        )

    async def start(self) -> None:
        await self.run.engine.update_weights(Version(1, 4), tiny_qwen3().state_dict())
        await self.server.start()
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.server.port}")
        self.stub = rollout_pb2_grpc.RolloutServiceStub(self.channel)
        self.working = asyncio.create_task(self.run.generate_forever())

    async def stop(self) -> None:
        self.working.cancel()
        await asyncio.wait((self.working,))
        await self.channel.close()
        await self.server.stop(0)
        await self.run.close()

    def turn(self, **request: Any) -> Any:
        params = {"max_new_tokens": LONG, "temperature": 1.0, "top_p": 1.0}
        asked = rollout_pb2.GenerateRequest(
            prompt_ids=PROMPT, session="s", run_id=RUN, seed=5, params=params, **request
        )
        return self.stub.Generate(asked)

    async def running(self, number: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.run.engine.num_running != number:  # noqa: ASYNC110 - the counter has no event
                await asyncio.sleep(0.005)


@pytest_asyncio.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[Served, Served]]:
    """Two workers with the same weights."""
    tiny_qwen3().config.save_pretrained(tmp_path / "model")
    spec = make_spec(
        tmp_path,
        environment={"class": "env.py:Env"},
        policy={
            "model_name": str(tmp_path / "model"),
            "max_total_sequence_length": 512,
            "generation": {"max_new_tokens": LONG},
        },
    )
    pair = Served(spec), Served(spec)
    for each in pair:
        await each.start()
    yield pair
    for each in pair:
        await each.stop()


async def test_a_turn_of_a_worker_that_drains_goes_on_elsewhere_without_a_lost_token(
    served: tuple[Served, Served],
) -> None:
    leaving, staying = served
    whole = (await staying.turn()).completions[0]
    assert len(whole.token_ids) == LONG
    call = leaving.turn()
    await leaving.running(1)
    assert await leaving.worker.drain(0.0) == 0  # no leases, and its turns end as they are
    begun = (await call).completions[0]
    assert begun.finish_reason == "abort"
    assert 0 < len(begun.token_ids) < LONG
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await leaving.turn()
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE

    rest = (await staying.turn(begun_ids=begun.token_ids)).completions[0]
    assert [*begun.token_ids, *rest.token_ids] == list(whole.token_ids)  # `native` continues with the same numbers
    assert rest.finish_reason == "length"
    assert rest.text == whole.text
    np.testing.assert_allclose([*begun.logprobs, *rest.logprobs], whole.logprobs, atol=2e-5)
    spans = [(span.version.session, span.version.step, span.start, span.end) for span in rest.spans]
    assert spans == [(1, 4, 0, len(rest.token_ids))]
    assert staying.run.generated_tokens == LONG + len(rest.token_ids)
    assert leaving.working.done(), "it has nothing else to do"


async def test_a_caller_that_goes_away_ends_its_turn(served: tuple[Served, Served]) -> None:
    worker, _ = served
    call = worker.turn()
    await worker.running(1)
    call.cancel()
    await worker.running(0)
    assert worker.run.generated_tokens == 0
