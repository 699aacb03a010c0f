"""Turns by rollout workers that drain, die, refuse and lie, over real connections to scripted workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio

from paceline.calls.token import make_token
from paceline.environment.protocols import TurnParams, TurnRequest
from paceline.errors import Conflict, InvalidInput
from paceline.groups import Version, VersionSpan
from paceline.services.common.access.rights import GENERATE, Caller, CallerRole
from paceline.services.common.access.sessions import issue
from paceline.services.common.access.token_guard import worker_guard
from paceline.services.common.serving.grpc_server import ACCEPTED, GrpcServer, with_status
from paceline.services.environment.sampling_workers import (
    MAX_BREAKS,
    LeasedTokens,
    Pauses,
    PinLost,
    RequiredWeights,
    SamplingWorkers,
    WorkersEnd,
)
from paceline.v1 import rollout_pb2, rollout_pb2_grpc, worker_pb2

PATIENCE_S = 60.0
RUN = "run-1"
ANY = RequiredWeights()
TURN = TurnRequest(np.array([1, 2, 3], np.int32), TurnParams(8), 7, "7/0")
CALLER = Caller("pool", frozenset({CallerRole.WORKER}))
Reply = Callable[[rollout_pb2.GenerateRequest, Any], Awaitable[rollout_pb2.GenerateResponse]]


def response(ids: list[int], reason: str = "stop", step: int = 4) -> rollout_pb2.GenerateResponse:
    answer = rollout_pb2.GenerateResponse()
    completion = answer.completions.add(
        text=" ".join(map(str, ids)), token_ids=ids, logprobs=[-1.0] * len(ids), finish_reason=reason
    )
    if ids:
        completion.spans.add(version={"session": 1, "step": step}, start=0, end=len(ids))
    return answer


class Worker(rollout_pb2_grpc.RolloutServiceServicer):
    """A rollout worker that answers as scripted; without a script it samples `11 12`."""

    def __init__(self, name: str) -> None:
        self.name, self.requests = name, list[rollout_pb2.GenerateRequest]()
        self.script: list[Reply] = []
        self.began = asyncio.Event()
        self.version = Version(1, 4)
        self.key = b"k" * 32
        self.server = GrpcServer("127.0.0.1", 0, worker_guard("", lambda: self.key))
        register = rollout_pb2_grpc.add_RolloutServiceServicer_to_server
        self.server.add(self, register, "paceline.v1.RolloutService")

    @property
    def listed(self) -> worker_pb2.EngineAddress:
        session, step = self.version
        address = f"127.0.0.1:{self.server.port}"
        return worker_pb2.EngineAddress(
            member_id=self.name,
            address=address,
            version={"session": session, "step": step},
            ticket=issue(self.key, self.name, GENERATE, CALLER),
        )

    @with_status
    async def Generate(self, request: Any, context: Any) -> rollout_pb2.GenerateResponse:
        self.requests.append(request)
        self.began.set()
        return await self.script.pop(0)(request, context) if self.script else response([11, 12])


class Rollout:
    """Two workers, `a` and `b`, and a client of both."""

    def __init__(self, pauses: Pauses) -> None:
        self.a, self.b = Worker("a"), Worker("b")
        self.workers = SamplingWorkers(RUN, pauses)

    def list(self, *workers: Worker, run_id: str = RUN) -> None:
        self.workers.update(worker_pb2.Engines(run_id=run_id, engines=[worker.listed for worker in workers]))

    async def sample(self, required: RequiredWeights = ANY, turn: TurnRequest = TURN) -> Any:
        async with asyncio.timeout(PATIENCE_S):
            return await LeasedTokens(self.workers, required).sample(turn)


@pytest.fixture
def pauses() -> Pauses:
    return Pauses(list_s=0.02, gone_s=0.05)


@pytest_asyncio.fixture
async def rollout(pauses: Pauses) -> AsyncIterator[Rollout]:
    rollout = Rollout(pauses)
    for worker in (rollout.a, rollout.b):
        await worker.server.start()
    rollout.list(rollout.a, rollout.b)
    yield rollout
    await rollout.workers.close()
    for worker in (rollout.a, rollout.b):
        await worker.server.stop(0)


brief = pytest.mark.parametrize("pauses", [Pauses(0.05, 0.05, 0.02, 0.05)])
"""For tests in which a worker that failed is asked again."""


async def until_cancelled(_: object, context: Any) -> rollout_pb2.GenerateResponse:
    await context.send_initial_metadata(ACCEPTED)
    return await until_over()


async def until_over() -> rollout_pb2.GenerateResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def breaks(_: object, context: Any) -> rollout_pb2.GenerateResponse:
    """Accept the request, and fail as a worker whose process dies."""
    await context.send_initial_metadata(ACCEPTED)
    await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
    raise AssertionError


def answers(ids: list[int], reason: str = "stop", step: int = 4) -> Reply:
    async def answer(_: object, context: Any) -> rollout_pb2.GenerateResponse:
        return response(ids, reason, step)

    return answer


def refuses(error: Exception) -> Reply:
    async def refuse(_: object, context: Any) -> rollout_pb2.GenerateResponse:
        raise error

    return refuse


async def test_a_request_says_what_the_lease_wants(rollout: Rollout) -> None:
    params = TurnParams(8, 2, 0.5, 0.9, 5, (3, 4))
    turn = await rollout.sample(RequiredWeights(oldest_step=3), TURN._replace(params=params))
    assert turn.token_ids.tolist() == [11, 12]
    assert turn.logprobs.tolist() == [-1.0, -1.0]
    assert turn[2:] == ((VersionSpan(1, 4, 0, 2, "a"),), "stop", "11 12")
    (request,) = rollout.a.requests
    assert list(request.prompt_ids) == [1, 2, 3]
    assert (request.run_id, request.session, request.seed) == (RUN, "7/0", 7)
    assert (request.min_version.session, request.min_version.step) == (0, 3)
    assert not request.HasField("pinned_version")
    sent = request.params
    assert (sent.max_new_tokens, sent.min_new_tokens, sent.top_k, list(sent.stop_token_ids)) == (
        8,
        2,
        5,
        [3, 4],
    )
    assert (sent.temperature, sent.top_p) == pytest.approx((0.5, 0.9))


@brief
async def test_the_turn_of_a_worker_that_drains_goes_on_at_another(rollout: Rollout) -> None:
    rollout.a.script = [answers([21, 22], "abort")]
    rollout.b.script = [answers([23], "abort", step=4), answers([], "abort")]
    turn = await rollout.sample()
    # `a` began, `b` went on and drained too, twice; then both are asked again.
    assert turn.token_ids.tolist() == [21, 22, 23, 11, 12]
    assert {span[:2] for span in turn.spans} == {(1, 4)}
    samplers_T = [span.sampler for span in turn.spans for _ in range(span.start, span.end)]
    assert samplers_T in (["a", "a", "b", "a", "a"], ["a", "a", "b", "b", "b"])
    assert turn.finish_reason == "stop"
    begun = [list(request.begun_ids) for request in (*rollout.a.requests, *rollout.b.requests)]
    assert begun.count([]) == 1
    assert [21, 22] in begun
    assert [21, 22, 23] in begun


async def test_tokens_of_two_versions_and_workers_keep_theirs(rollout: Rollout) -> None:
    rollout.a.script = [answers([21, 22], "abort", step=4)]
    rollout.b.script = [answers([23, 24], "length", step=5)]
    turn = await rollout.sample()
    assert turn.spans == (VersionSpan(1, 4, 0, 2, "a"), VersionSpan(1, 5, 2, 4, "b"))


async def test_a_worker_that_dies_costs_its_answer_and_the_next_goes_to_another(rollout: Rollout) -> None:
    accepted = asyncio.Event()

    async def accept(request: object, context: Any) -> rollout_pb2.GenerateResponse:
        await context.send_initial_metadata(ACCEPTED)
        accepted.set()  # `began` would be too early: the acceptance has to be on its way before the end
        return await until_over()

    rollout.a.script = [accept]
    sampling = asyncio.create_task(rollout.sample())
    await asyncio.wait_for(accepted.wait(), PATIENCE_S)
    await rollout.a.server.stop(0)
    turn = await sampling
    assert turn.token_ids.tolist() == [11, 12]
    assert [list(request.begun_ids) for request in rollout.b.requests] == [[]]
    assert rollout.b.requests[0].seed == rollout.a.requests[0].seed
    assert rollout.workers.num_broken == 1
    # The conversation stays with the worker that has its prefix now.
    await rollout.sample()
    assert len(rollout.b.requests) == 2


async def test_a_worker_that_cannot_be_reached_breaks_no_answer(rollout: Rollout) -> None:
    await rollout.a.server.stop(0)
    assert (await rollout.sample()).token_ids.tolist() == [11, 12]
    assert rollout.workers.num_broken == 0
    assert rollout.a.requests == []


@pytest.mark.parametrize("nonsense", ["none", "two", "logprobs", "spans", "gap"])
async def test_an_answer_that_is_no_turn_is_asked_for_elsewhere(rollout: Rollout, nonsense: str) -> None:
    wrong = response([21, 22])
    completion = wrong.completions[0]
    match nonsense:
        case "none":
            del wrong.completions[:]
        case "two":
            wrong.completions.add()
        case "logprobs":
            del completion.logprobs[1:]
        case "spans":
            completion.spans[0].end = 1
        case "gap":
            completion.spans[0].start = 1

    async def lie(_: object, context: Any) -> rollout_pb2.GenerateResponse:
        return wrong

    rollout.a.script = [lie]
    assert (await rollout.sample()).token_ids.tolist() == [11, 12]
    assert len(rollout.a.requests) == len(rollout.b.requests) == 1


async def test_what_every_engine_refuses_is_the_caller_s_fault(rollout: Rollout) -> None:
    rollout.a.script = [refuses(InvalidInput("the prompt has 9 tokens, but must have 1 to 8"))]
    with pytest.raises(InvalidInput, match="must have 1 to 8"):
        await rollout.sample()
    assert rollout.b.requests == []


async def test_a_worker_with_older_weights_than_listed_is_passed_over(rollout: Rollout) -> None:
    rollout.a.script = [refuses(Conflict("this worker holds version (1, 3), older than (0, 4)"))]
    assert (await rollout.sample(RequiredWeights(oldest_step=4))).token_ids.tolist() == [11, 12]
    assert len(rollout.a.requests) == len(rollout.b.requests) == 1
    assert rollout.workers.num_broken == 0


async def test_turns_wait_for_a_worker_with_new_weights(rollout: Rollout) -> None:
    sampling = asyncio.create_task(rollout.sample(RequiredWeights(oldest_step=5)))
    rollout.a.version = Version(1, 6)
    rollout.list(rollout.a, rollout.b, run_id="another")
    await asyncio.sleep(0)
    assert not sampling.done()
    rollout.list(rollout.a, rollout.b)
    assert (await sampling).token_ids.tolist() == [11, 12]
    assert rollout.b.requests == []


async def test_turns_wait_while_no_worker_is_there(rollout: Rollout) -> None:
    rollout.list()
    sampling = asyncio.create_task(rollout.sample())
    await asyncio.sleep(0)
    rollout.list(rollout.b)
    assert (await sampling).token_ids.tolist() == [11, 12]


async def test_an_evaluation_whose_worker_is_gone_goes_back(rollout: Rollout) -> None:
    pinned = RequiredWeights(pinned=Version(1, 4), pinned_member="a")
    assert (await rollout.sample(pinned)).token_ids.tolist() == [11, 12]
    (request,) = rollout.a.requests
    assert (request.pinned_version.session, request.pinned_version.step) == (1, 4)
    assert not request.HasField("min_version")
    rollout.list(rollout.b)
    with pytest.raises(PinLost, match="worker a does not serve"):
        await rollout.sample(pinned)
    assert rollout.b.requests == []


@brief
async def test_a_turn_that_ends_workers_is_the_cause_after_a_few_of_them(rollout: Rollout) -> None:
    rollout.a.script = [breaks] * MAX_BREAKS
    rollout.b.script = [breaks] * MAX_BREAKS
    with pytest.raises(WorkersEnd, match=f"{MAX_BREAKS} answers to one turn of 3 prompt tokens"):
        await rollout.sample()
    assert len(rollout.a.requests) + len(rollout.b.requests) == MAX_BREAKS


@brief
async def test_suspect_turns_are_asked_for_one_at_a_time(rollout: Rollout) -> None:
    """Turns that were there when workers died wait for each other, so only the cause meets every death."""
    rollout.list(rollout.a)
    rollout.a.script = [breaks, breaks, breaks, breaks, until_cancelled]
    turns = [TURN._replace(conversation=str(index)) for index in range(2)]
    sampling = [asyncio.create_task(rollout.sample(turn=turn)) for turn in turns]
    async with asyncio.timeout(PATIENCE_S):
        while len(rollout.a.requests) < 5:  # noqa: ASYNC110 - the count has no event
            await asyncio.sleep(0.005)
    for _ in range(20):
        await asyncio.sleep(0.005)
    assert len(rollout.a.requests) == 5, "the other suspect waits"
    for task in sampling:
        task.cancel()
    await asyncio.wait(sampling)


async def test_a_turn_that_is_cancelled_ends_at_the_worker(rollout: Rollout) -> None:
    ended = asyncio.Event()

    async def generate(request: object, context: Any) -> rollout_pb2.GenerateResponse:
        try:
            return await until_cancelled(request, context)
        finally:
            ended.set()

    rollout.a.script = [generate]
    sampling = asyncio.create_task(rollout.sample())
    await asyncio.wait_for(rollout.a.began.wait(), PATIENCE_S)
    sampling.cancel()
    await asyncio.wait((sampling,))
    assert sampling.cancelled()
    await asyncio.wait_for(ended.wait(), PATIENCE_S)


async def test_connections_to_workers_that_are_gone_are_closed(rollout: Rollout) -> None:
    await rollout.sample()
    await rollout.sample(turn=TURN._replace(conversation="8/0"))
    assert len(rollout.workers._channels) == 2
    rollout.list(rollout.b)
    assert len(rollout.workers._channels) == 1


@brief
async def test_a_worker_with_a_new_key_is_asked_again_with_the_ticket_of_the_next_list(rollout: Rollout) -> None:
    rollout.list(rollout.a)
    await rollout.sample()
    rollout.a.key = b"n" * 32  # its next Welcome
    turn = asyncio.create_task(rollout.sample())
    await asyncio.sleep(0)
    rollout.list(rollout.a)
    assert (await turn).token_ids.tolist() == [11, 12]
    assert len(rollout.a.requests) == 2
    assert rollout.workers.num_broken == 0


@brief
async def test_a_worker_that_gives_a_false_address_gets_neither_token_nor_turn(
    rollout: Rollout, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_token(tmp_path / "token")
    monkeypatch.setenv("PACELINE_TOKEN_FILE", str(tmp_path / "token"))
    received: list[tuple[str, dict[str, Any]]] = []

    class Lure(grpc.GenericRpcHandler):  # type: ignore[misc]  # its base is untyped
        def service(self, details: Any) -> Any:
            received.append((details.method, dict(details.invocation_metadata)))
            return None

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Lure(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    false = rollout.a.listed
    false.member_id, false.address = "0-eve", f"127.0.0.1:{port}"
    false.ticket.CopyFrom(issue(b"e" * 32, "0-eve", GENERATE, CALLER))
    rollout.workers.update(worker_pb2.Engines(run_id=RUN, engines=[false, rollout.a.listed]))
    await rollout.sample()
    assert [method for method, _ in received] == ["/paceline.v1.AccessService/Prove"]
    assert "authorization" not in received[0][1]
    await server.stop(0)


async def test_a_worker_and_its_successor_at_the_same_address_have_their_own_tickets(rollout: Rollout) -> None:
    await rollout.sample()
    (before,) = rollout.workers._channels
    old = rollout.a.listed if rollout.a.listed.member_id == before[0] else rollout.b.listed
    new = worker_pb2.EngineAddress()
    new.CopyFrom(old)
    new.member_id = "successor"
    rollout.workers.update(worker_pb2.Engines(run_id=RUN, engines=[old, new]))
    for worker in rollout.workers.list._workers.values():
        rollout.workers._connection(worker)
    assert set(rollout.workers._provers) == {before, ("successor", before[1])}
    rollout.workers.update(worker_pb2.Engines(run_id=RUN, engines=[new]))
    assert set(rollout.workers._tickets) == set(rollout.workers._channels) == {("successor", before[1])}
