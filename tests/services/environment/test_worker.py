"""An environment worker with real user code, a scripted rollout worker and a scripted exchange."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest_asyncio
from exchange_drivers import make_spec
from tiny_chat import save_tiny_chat

from paceline.calls.backoff import ExponentialBackoff
from paceline.data.tokens import load_tokenizer
from paceline.services.common.serving.grpc_server import GrpcServer
from paceline.services.environment.worker import EnvironmentWorker
from paceline.spec.reading import spec_to_yaml
from paceline.v1 import exchange_pb2 as pb
from paceline.v1 import rollout_pb2, rollout_pb2_grpc, worker_pb2
from paceline.wire import parse_message

PATIENCE_S = 60.0
RUN = "run-1"
GAME = """
class Game:
    def reset(self, answer, **_):
        self.turns, self.answer = 0, answer

    def step(self, text):
        self.turns += 1
        return f"turn {self.turns} of {text!r}", 0.5, self.turns == 3

    def get_reward(self):
        return float(self.answer)
"""
AGENT = """
from openai import AsyncOpenAI

async def solve(row, base_url, api_key):
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages = list(row["prompt"])
        for _ in range(2):
            answer = await client.chat.completions.create(model="policy", messages=messages)
            messages.append(answer.choices[0].message.model_dump(include={"role", "content"}))
            messages.append({"role": "user", "content": "go on"})
    return len(messages) / 10
"""
IDLE = """
import asyncio

async def solve(row, base_url, api_key):
    await asyncio.sleep(3600)
"""
"""An agent whose process starts at once, because it imports nothing."""


class Rollout(rollout_pb2_grpc.RolloutServiceServicer):
    """A rollout worker that samples `A` and the end of the turn."""

    def __init__(self) -> None:
        self.requests: list[rollout_pb2.GenerateRequest] = []
        self.server = GrpcServer("127.0.0.1", 0)
        register = rollout_pb2_grpc.add_RolloutServiceServicer_to_server
        self.server.add(self, register, "paceline.v1.RolloutService")
        self.token_ids: list[int] = []

    async def Generate(self, request: Any, context: Any) -> rollout_pb2.GenerateResponse:
        self.requests.append(request)
        response = rollout_pb2.GenerateResponse()
        number = len(self.token_ids)
        completion = response.completions.add(
            text="A", token_ids=self.token_ids, logprobs=[-1.0] * number, finish_reason="stop"
        )
        completion.spans.add(version={"session": 1, "step": 0}, start=0, end=number)
        return response


class Exchange:
    """Exchange that gives one lease and keeps what comes of it."""

    def __init__(self) -> None:
        self.leases: asyncio.Queue[pb.Lease] = asyncio.Queue()
        self.turns: list[pb.EpisodeTurn] = []
        self.group: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.returned: asyncio.Queue[pb.LeaseReturn] = asyncio.Queue()
        self.reports: asyncio.Queue[worker_pb2.RunReport] = asyncio.Queue()

    def join(self, coordinator: str, hello: object, on_directive: Any, gauges: Any) -> Any:
        """Stand in for the worker's membership."""
        self.direct, self.gauges = on_directive, gauges
        return self

    async def request(self, request: pb.ExchangeRequest, payloads: Any = ()) -> Any:
        reply = pb.ExchangeReply(status=pb.REPLY_STATUS_COMMITTED)
        match request.WhichOneof("body"):
            case "lease":
                return pb.ExchangeReply(
                    status=pb.REPLY_STATUS_OK, lease=pb.LeaseReply(leases=[await self.leases.get()])
                ), []
            case "turn":
                self.turns.append(request.turn)
            case "group":
                self.group.set_result((request.group, list(payloads)))
            case "lease_return":
                self.returned.put_nowait(request.lease_return)
        return reply, []

    async def report(self, report: worker_pb2.ConnectRequest) -> None:
        self.reports.put_nowait(report.run_report)


class Bench:
    """A worker at work."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.rollout, self.exchange = Rollout(), Exchange()
        pause = ExponentialBackoff(0.05, 0.05)
        self.worker = EnvironmentWorker("nowhere:1", "environment-0", 1, pause, membership=self.exchange.join)

    async def start(self, environment: dict[str, Any]) -> None:
        (self.directory / "game.py").write_text(GAME)
        (self.directory / "agent.py").write_text(AGENT)
        (self.directory / "idle.py").write_text(IDLE)
        model = save_tiny_chat(self.directory / "model")
        spec = make_spec(
            self.directory,
            policy={"model_name": str(model), "max_total_sequence_length": 512,
                    "generation": {"max_new_tokens": 16}},
            environment=environment,
        )  # fmt: skip
        self.rollout.token_ids = load_tokenizer(spec.policy)("A<|end|>")["input_ids"]
        await self.rollout.server.start()
        await self.direct(run=worker_pb2.RunAssignment(run_id=RUN, spec_yaml=spec_to_yaml(spec)))
        self.working = asyncio.create_task(self.worker.work())

    async def direct(self, **directive: Any) -> None:
        await self.exchange.direct(worker_pb2.ConnectResponse(**directive))

    async def list_workers(self) -> None:
        address = f"127.0.0.1:{self.rollout.server.port}"
        engine = worker_pb2.EngineAddress(member_id="r", address=address, version={"session": 1, "step": 0})
        await self.direct(engines=worker_pb2.Engines(run_id=RUN, engines=[engine]))

    def lease(self) -> None:
        params = {"max_new_tokens": 16, "temperature": 1.0, "top_p": 1.0}
        prompt = json.dumps([{"role": "user", "content": "play"}])
        self.exchange.leases.put_nowait(
            pb.Lease(group_id=7, attempt=1, prompt_json=prompt, columns_json='{"answer": 2}', seed=3,
                     num_generations=2, params=params, step=0)
        )  # fmt: skip


@pytest_asyncio.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.working.cancel()
    await asyncio.wait((bench.working,))
    # A run that was ending goes on with that: its processes are killed by now, and have to be waited for.
    ending = [task for task in asyncio.all_tasks() if "_work_on" in repr(task.get_coro())]
    await asyncio.gather(*ending, return_exceptions=True)
    await bench.rollout.server.stop(0)


async def test_a_class_plays_its_episodes_to_a_group(bench: Bench) -> None:
    await bench.list_workers()  # the list may come before the run is set up
    await bench.start({"class": f"{bench.directory}/game.py:Game"})
    bench.lease()
    async with asyncio.timeout(PATIENCE_S):
        report = await bench.exchange.reports.get()
        assert (report.run_id, report.error) == (RUN, "")
        result, payloads = await bench.exchange.group
    assert (result.group_id, result.attempt) == (7, 1)
    texts = parse_message(pb.Texts, payloads[1])
    assert [(each.ending, each.reward, each.turn_rewards) for each in texts.samples] == [("done", 2.0, 1.5)] * 2
    assert sorted((turn.sample, turn.index, turn.last) for turn in bench.exchange.turns) == [
        (sample, index, index == 2) for sample in range(2) for index in range(3)
    ]
    assert len(bench.rollout.requests) == 6
    assert {request.session for request in bench.rollout.requests} == {"7/0", "7/1"}
    gauges = bench.exchange.gauges()
    assert gauges["turns_per_s"] > 0
    assert (gauges["engines"], gauges["bridge_breaks"]) == (1.0, 0.0)


async def test_an_agent_sends_its_requests_to_its_session(bench: Bench) -> None:
    await bench.start({"agent": f"{bench.directory}/agent.py:solve"})
    bench.lease()
    async with asyncio.timeout(PATIENCE_S):
        await bench.exchange.reports.get()
        await bench.list_workers()
        _, payloads = await bench.exchange.group
    texts = parse_message(pb.Texts, payloads[1])
    assert [(each.ending, each.reward) for each in texts.samples] == [("done", 0.5)] * 2
    assert len(bench.exchange.turns) == 4


async def test_code_that_cannot_be_loaded_is_reported_and_tried_again(bench: Bench) -> None:
    await bench.start({"agent": f"{bench.directory}/later.py:solve"})
    async with asyncio.timeout(PATIENCE_S):
        for _ in range(2):
            report = await bench.exchange.reports.get()
            assert "later.py" in report.error
        (bench.directory / "later.py").write_text(AGENT)
        while (await bench.exchange.reports.get()).error:
            pass
    await bench.list_workers()
    bench.lease()
    async with asyncio.timeout(PATIENCE_S):
        result, _ = await bench.exchange.group
    assert result.group_id == 7


async def test_a_worker_that_drains_returns_its_leases(bench: Bench) -> None:
    await bench.start({"agent": f"{bench.directory}/idle.py:solve"})
    bench.lease()
    async with asyncio.timeout(PATIENCE_S):
        await bench.exchange.reports.get()
        while not bench.exchange.gauges().get("leases"):  # noqa: ASYNC110 - a taken lease has no event
            await asyncio.sleep(0.01)
        assert await bench.worker.drain(0.2) == 1
        back = await bench.exchange.returned.get()
    assert (back.group_id, back.data_error) == (7, "")
    assert bench.worker.drained.is_set()


async def test_a_run_that_is_over_ends_its_code(bench: Bench) -> None:
    await bench.start({"agent": f"{bench.directory}/idle.py:solve"})
    async with asyncio.timeout(PATIENCE_S):
        await bench.exchange.reports.get()
        await bench.direct(idle=worker_pb2.Idle(reason="the run has ended"))
        while bench.exchange.gauges():  # noqa: ASYNC110 - the end of a run has no event
            await asyncio.sleep(0.01)
    assert not bench.working.done()
