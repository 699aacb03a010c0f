"""A rollout worker with leases that raise unforeseen errors: the group is returned, the worker goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio
from exchange_drivers import make_spec

from paceline.backoff import ExponentialBackoff
from paceline.errors import EngineDied
from paceline.groups import Completion, Version, VersionSpan
from paceline.wire import encode_completions
from protos.paceline.v1 import exchange_pb2 as pb
from protos.paceline.v1 import rollout_pb2
from rollout.engine import GenerationRequest, check_prompt_length, empty_completion
from services.demo.model import make_tokenizer
from services.rollout.group_sampler import GroupSampler
from services.rollout.run import (
    MAX_UNEXPECTED,
    RETURN_BYTES_PER_S,
    RETURN_S,
    RolloutRun,
    return_seconds,
)
from services.rollout.worker import RolloutWorker

PATIENCE_S = 30.0
GEMMA = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
)
TWO_TURNS = '[{"role": "user", "content": "1"}, {"role": "user", "content": "2"}]'
ONE_TURN = '[{"role": "user", "content": "1+1"}]'


class Engine:
    """Engine that answers with one token; `fault` may raise for a request."""

    num_running, num_waiting, capacity, max_batch_size, version = 0, 0, 64, 64, None

    def __init__(self) -> None:
        self.fault: Callable[[GenerationRequest], None] = lambda request: None
        self.asked: list[GenerationRequest] = []
        self.began: asyncio.Queue[str] = asyncio.Queue()
        self.held: asyncio.Event | None = None

    async def generate(self, request: GenerationRequest) -> Completion:
        self.asked.append(request)
        self.began.put_nowait(request.request_id)
        self.fault(request)
        if request.request_id.startswith("probe/"):
            return empty_completion()
        if self.held is not None:
            await self.held.wait()
        span = VersionSpan(1, 0, 0, 1)
        return Completion(np.array([3], np.int32), np.zeros(1, np.float32), (span,), "stop")

    def abort(self, request_id: str) -> None:
        pass

    async def close(self) -> None:
        pass


class Exchange:
    """Exchange that gives the leases in `leases`, and records submissions and returns."""

    def __init__(self) -> None:
        self.leases: asyncio.Queue[tuple[list[pb.Lease], list[bytes]] | None] = asyncio.Queue()
        """None stands for a refusal."""
        self.returned: asyncio.Queue[pb.LeaseReturn | pb.GroupResult] = asyncio.Queue()
        self.known_reasons = {"", "bad_prompt", "prompt_too_long", "invalid_result"}

    async def request(self, request: pb.ExchangeRequest, payloads: Any = ()) -> Any:
        match request.WhichOneof("body"):
            case "lease":
                given = await self.leases.get()
                if given is None:
                    return pb.ExchangeReply(status=pb.REPLY_STATUS_INVALID, message="failed on it"), []
                leases, frames = given
                return pb.ExchangeReply(status=pb.REPLY_STATUS_OK, lease=pb.LeaseReply(leases=leases)), frames
            case "lease_return":
                self.returned.put_nowait(request.lease_return)
                if request.lease_return.data_error_reason not in self.known_reasons:
                    return pb.ExchangeReply(status=pb.REPLY_STATUS_INVALID), []
            case "group":
                self.returned.put_nowait(request.group)
        return pb.ExchangeReply(status=pb.REPLY_STATUS_COMMITTED), []

    def give(self, *leases: pb.Lease, frames: tuple[bytes, ...] = ()) -> None:
        self.leases.put_nowait((list(leases), list(frames)))

    async def next(self) -> Any:
        return await asyncio.wait_for(self.returned.get(), PATIENCE_S)


class Bench:
    """A run at work with a fake engine and exchange."""

    def __init__(self, directory: Path) -> None:
        self.engine, self.exchange = Engine(), Exchange()
        tokenizer = make_tokenizer()
        tokenizer.chat_template = GEMMA
        membership: Any = self.exchange
        engine: Any = self.engine
        spec = make_spec(directory)
        self.run = RolloutRun(
            spec, "run-1", "rollout-1", membership, engine, tokenizer, "127.0.0.1", "/runs/run-1"
        )
        self.working = asyncio.create_task(self.run.generate_forever())


def lease(group_id: int, prompt: str = ONE_TURN, attempt: int = 1, **fields: Any) -> pb.Lease:
    params = {"max_new_tokens": 4, "temperature": 1.0, "top_p": 1.0}
    return pb.Lease(
        group_id=group_id, attempt=attempt, prompt_json=prompt, num_generations=2, params=params, **fields
    )


@pytest_asyncio.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.working.cancel()
    await asyncio.wait((bench.working,))
    bench.run.weights.close()


async def test_a_prompt_that_the_chat_template_refuses_goes_back_and_nothing_else(bench: Bench) -> None:
    bench.exchange.give(lease(0, TWO_TURNS), lease(1))
    back = {result.group_id: result for result in [await bench.exchange.next(), await bench.exchange.next()]}
    assert back[0].data_error_reason == "bad_prompt"
    assert "Conversation roles must alternate" in back[0].data_error
    assert isinstance(back[1], pb.GroupResult)
    assert not bench.working.done()


async def test_a_prompt_that_is_too_long_goes_back_as_such(bench: Bench) -> None:
    bench.engine.fault = lambda request: check_prompt_length(3001, 512)
    bench.exchange.give(lease(0))
    back = await bench.exchange.next()
    assert (back.data_error_reason, back.data_error[:26]) == ("prompt_too_long", "the prompt has 3001 tokens")


async def test_an_older_coordinator_gets_a_reason_that_it_knows(bench: Bench) -> None:
    bench.engine.fault = lambda request: check_prompt_length(3001, 512)
    bench.exchange.known_reasons = {"bad_prompt"}
    bench.exchange.give(lease(0))
    reasons = [(await bench.exchange.next()).data_error_reason for _ in range(2)]
    assert reasons == ["prompt_too_long", "bad_prompt"]


async def test_prompts_are_tried_again_once_the_template_was_corrected(bench: Bench) -> None:
    class Corrected:
        reloads = calls = 0

        def reload(self, tokenizer: Any) -> None:
            self.calls += 1
            if self.calls == 2:  # the first group fails by the template that is still wrong
                tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
                self.reloads += 1

    template: Any = Corrected()
    bench.run._template = template
    bench.exchange.give(lease(0, TWO_TURNS))
    assert (await bench.exchange.next()).data_error_reason == "bad_prompt"
    bench.exchange.give(lease(1, TWO_TURNS), lease(2, TWO_TURNS), lease(3, TWO_TURNS))
    for _ in range(3):
        assert isinstance(await bench.exchange.next(), pb.GroupResult)


async def test_a_group_gets_the_runs_stop_strings_and_texts_that_end_with_them(tmp_path: Path) -> None:
    spec = make_spec(tmp_path)
    generation = spec.policy.generation.model_copy(update={"stop_strings": ("2",), "min_p": 0.5})
    spec = spec.model_copy(update={"policy": spec.policy.model_copy(update={"generation": generation})})
    engine: Any = Engine()
    tokenizer = make_tokenizer()
    sampler = GroupSampler(engine, tokenizer, spec, lambda group_id: None)
    _, completions = await sampler.sample(lease(0, '"1+1"'), None)
    assert len(completions) == 2
    for request in engine.asked:
        assert request.stop.strings == ("2",)
        assert request.params.min_p == 0.5
    ended = Completion(
        np.array(tokenizer("123")["input_ids"][:3], np.int32), np.zeros(3, np.float32), (), "stop"
    )
    whole = Completion(ended.token_ids[:2], ended.logprobs[:2], (), "stop")
    assert sampler.text(whole) == "12"
    assert sampler.text(ended) == "123"  # the last token completes no stop string


async def test_a_request_for_leases_that_is_refused_ends_nothing(bench: Bench) -> None:
    bench.run.refused_pause = ExponentialBackoff(0.0, 0.0)
    bench.engine.held = asyncio.Event()
    bench.exchange.give(lease(0))
    for _ in range(3):
        bench.exchange.leases.put_nowait(None)
    bench.exchange.give(lease(1))
    for _ in range(4):
        await asyncio.wait_for(bench.engine.began.get(), PATIENCE_S)
    bench.engine.held.set()
    results = [await bench.exchange.next(), await bench.exchange.next()]
    assert sorted(result.group_id for result in results) == [0, 1]
    assert not bench.working.done()


async def test_what_nobody_foresaw_about_one_group_goes_back_with_its_text(bench: Bench) -> None:
    def fault(request: GenerationRequest) -> None:
        if request.request_id.startswith("0/"):
            raise RuntimeError("index out of range in self")

    bench.engine.fault = fault
    bench.exchange.give(lease(0), lease(1))
    back = {result.group_id: result for result in [await bench.exchange.next(), await bench.exchange.next()]}
    assert back[0].data_error == "RuntimeError: index out of range in self"
    assert isinstance(back[1], pb.GroupResult)
    assert bench.run.num_leases == 0
    assert any(request.request_id.startswith("probe/") for request in bench.engine.asked)
    assert not bench.working.done()


async def test_an_engine_that_is_broken_ends_the_worker_and_burns_no_budget(bench: Bench) -> None:
    def fault(request: GenerationRequest) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    bench.engine.fault = fault
    bench.exchange.give(lease(0))
    await asyncio.wait((bench.working,), timeout=PATIENCE_S)
    with pytest.raises(ExceptionGroup) as died:
        bench.working.result()
    assert died.group_contains(RuntimeError, match="illegal memory access")
    assert bench.exchange.returned.empty()


async def test_one_group_after_the_other_with_a_fault_ends_the_worker(bench: Bench) -> None:
    def fault(request: GenerationRequest) -> None:
        if not request.request_id.startswith("probe/"):
            raise RuntimeError("no kernel for this shape")

    bench.engine.fault = fault
    for group_id in range(MAX_UNEXPECTED + 1):
        bench.exchange.give(lease(group_id))
    await asyncio.wait((bench.working,), timeout=PATIENCE_S)
    with pytest.raises(ExceptionGroup):
        bench.working.result()
    assert bench.exchange.returned.qsize() <= MAX_UNEXPECTED


async def test_an_engine_that_died_is_no_group_s_fault(bench: Bench) -> None:
    def fault(request: GenerationRequest) -> None:
        raise EngineDied("the engine died")

    bench.engine.fault = fault
    bench.exchange.give(lease(0))
    await asyncio.wait((bench.working,), timeout=PATIENCE_S)
    with pytest.raises(ExceptionGroup) as died:
        bench.working.result()
    assert died.group_contains(EngineDied)
    assert bench.exchange.returned.empty()


async def test_a_group_that_is_in_hand_already_is_not_begun_twice(bench: Bench) -> None:
    bench.engine.held = asyncio.Event()
    bench.exchange.give(lease(0))
    bench.exchange.give(lease(0, attempt=2))
    bench.exchange.give(lease(1))
    async with asyncio.timeout(PATIENCE_S):
        while not (await bench.engine.began.get()).startswith("1/"):
            pass
    bench.engine.held.set()
    back = sorted([await bench.exchange.next(), await bench.exchange.next()], key=lambda r: int(r.group_id))
    assert [(result.group_id, result.attempt) for result in back] == [(0, 1), (1, 1)]
    assert not bench.working.done()


@pytest.mark.parametrize("samples", [None, 1])
async def test_what_an_earlier_worker_left_and_nobody_can_read_is_made_anew(
    bench: Bench, samples: int | None
) -> None:
    completion = Completion(
        np.array([5], np.int32), np.zeros(1, np.float32), (VersionSpan(1, 0, 0, 1),), "abort"
    )
    frame = encode_completions(np.array([1], np.int32), [completion] * samples) if samples else b"nothing"
    reasons = ["abort"] * (samples or 2)
    bench.exchange.give(lease(0, prefix_frame=1, prefix_finish_reasons=reasons), frames=(frame,))
    result = await bench.exchange.next()
    assert isinstance(result, pb.GroupResult)
    assert all(request.prefix is None for request in bench.engine.asked)


# External requests


class Context:
    """The context of a call; `abort` ends it."""

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise Aborted(code, details)


class Aborted(Exception):
    def __init__(self, code: grpc.StatusCode, details: str):
        super().__init__(details)
        self.code = code


@pytest_asyncio.fixture
async def worker(bench: Bench) -> AsyncIterator[RolloutWorker]:
    """A worker that serves the bench's run."""
    worker = RolloutWorker("nowhere:1", "rollout-1", "cpu", 1.0, "127.0.0.1")
    worker.membership._context.term()
    bench.engine.version = Version(1, 0)  # type: ignore[assignment]
    worker._run = bench.run
    yield worker


async def generate(worker: RolloutWorker, **request: Any) -> rollout_pb2.GenerateResponse:
    context: Any = Context()
    return await worker.Generate(rollout_pb2.GenerateRequest(**request), context)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"prompt": "1", "n": 400_000}, "n is 400000, at most 128"),
        ({"prompt_ids": [1] * 100_000}, "number of prompt_ids is 100000"),
        ({"prompt": "1" * 1_000_000}, "length of prompt is 1000000"),
        ({"prompt": "1", "params": {"stop_token_ids": [1] * 1000}}, "stop_token_ids is 1000"),
        ({"prompt": "1", "params": {"min_new_tokens": 1 << 31}}, "min_new_tokens"),
        ({"prompt": "1", "params": {"max_new_tokens": 1 << 31}}, "max_new_tokens"),
    ],
)
async def test_a_caller_s_numbers_have_bounds(
    worker: RolloutWorker, bench: Bench, request_: dict[str, Any], words: str
) -> None:
    with pytest.raises(Aborted, match=words) as refused:
        await generate(worker, **request_)
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert bench.engine.asked == []


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
    ("max_tokens", "grace_s", "seconds"),
    [
        (0, 25.0, RETURN_S),
        (RETURN_BYTES_PER_S // 8, 25.0, RETURN_S + 1.0),
        (8 * 16 * 65_536, 60.0, RETURN_S + 8.0),
        (8 * 16 * 65_536, 25.0, 12.5),
        (0, 4.0, 2.0),
    ],
)
def test_a_drain_keeps_more_of_its_grace_where_more_may_go_back(
    max_tokens: int, grace_s: float, seconds: float
) -> None:
    assert return_seconds(max_tokens, grace_s) == seconds
