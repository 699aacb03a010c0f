"""A rollout worker with leases that raise unforeseen errors: the group is returned, the worker continues."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from chat_templates import HERMES, PLAIN, character_tokenizer
from exchange_drivers import make_spec
from rollout_bench import PATIENCE_S, TWO_TURNS, Bench, Engine, lease

from paceline.calls.backoff import ExponentialBackoff
from paceline.errors import EngineDied, InvalidInput
from paceline.groups import Completion, VersionSpan
from paceline.rollout.engine import GenerationRequest, check_prompt_length, empty_completion
from paceline.services.demo.task import make_tokenizer
from paceline.services.rollout.group_sampler import GroupSampler
from paceline.services.rollout.run import (
    MAX_UNEXPECTED,
    RETURN_BYTES_PER_S,
    RETURN_S,
    _created,
    return_seconds,
)
from paceline.spec import RewardFunctionSection, RunSpec
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import encode_completions


async def test_an_engine_that_is_created_while_its_run_ends_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end, closed = threading.Event(), threading.Event(), asyncio.Event()

    async def close() -> None:
        closed.set()

    def create(spec: RunSpec, *, device: str) -> Any:
        begun.set()
        assert may_end.wait(PATIENCE_S)
        return SimpleNamespace(close=close)

    monkeypatch.setattr("paceline.services.rollout.run.create_engine", create)
    creating = asyncio.create_task(_created(make_spec(tmp_path), "cpu"))
    assert await asyncio.to_thread(begun.wait, PATIENCE_S)
    creating.cancel()
    await asyncio.sleep(0)
    assert not creating.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(creating, PATIENCE_S)
    assert closed.is_set()


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
    sampler = GroupSampler(engine, tokenizer, spec, "rollout-1", lambda group_id: None)
    _, completions = await sampler.sample(lease(0, '"1+1"'), None)
    assert len(completions) == 2
    for request in engine.asked:
        assert request.stop.strings == ("2",)
        assert request.params.min_p == 0.5
    ended = Completion(np.array(tokenizer("123")["input_ids"][:3], np.int32), np.zeros(3, np.float32), (), "stop")
    whole = Completion(ended.token_ids[:2], ended.logprobs[:2], (), "stop")
    assert sampler.text(whole) == "12"
    assert sampler.text(ended) == "123"  # the last token completes no stop string


@pytest.mark.parametrize(
    ("reward", "remedy"),
    [
        ({"function": "think_answer_format"}, "think_in_prompt: true"),
        ({"function": "format_regex", "kwargs": {"pattern": "<think>.*</think>.*"}}, "out of the pattern"),
        ({"function": "think_answer_format", "kwargs": {"think_in_prompt": True}}, None),
        ({"function": "format_regex", "kwargs": {"pattern": ".*</think>.*"}}, None),
    ],
)
async def test_rewards_that_look_for_an_opening_that_the_prompt_has_are_warned_of(
    tmp_path: Path, reward: dict[str, Any], remedy: str | None
) -> None:
    spec = make_spec(tmp_path).model_copy(update={"rewards": (RewardFunctionSection.model_validate(reward),)})
    told: list[str] = []

    async def warn(text: str) -> None:
        told.append(text)

    engine: Any = Engine()
    for opening, expected in (("<a>", 0), ("<a><think>\n", remedy is not None)):
        tokenizer = character_tokenizer(PLAIN.replace("<a>", opening))
        sampler = GroupSampler(engine, tokenizer, spec, "rollout-1", lambda group_id: None, warn)
        messages = json.dumps([{"role": "user", "content": "1+1?"}])
        for _ in range(2):
            await sampler.sample(lease(0, messages), None)
        assert len(told) == expected
    assert all(str(remedy) in text for text in told)


async def test_a_prompt_has_the_tools_of_its_lease(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    messages = [{"role": "user", "content": "1+1?"}]
    leased = lease(0, json.dumps(messages), tools_json=json.dumps(tools))
    engine: Any = Engine()
    tokenizer = character_tokenizer(HERMES)
    prompt_ids, _ = await GroupSampler(
        engine, tokenizer, make_spec(tmp_path), "rollout-1", lambda group_id: None
    ).sample(leased, None)
    rendered = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(prompt_ids) == rendered
    assert '"name": "add"' in rendered

    plain = GroupSampler(engine, character_tokenizer(PLAIN), make_spec(tmp_path), "rollout-1", lambda group_id: None)
    with pytest.raises(InvalidInput, match="has tools, which the chat template of the tokenizer does not read"):
        await plain.sample(leased, None)


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


class Joining(Engine):
    """Engine that adds one token to a prefix, with one span for all tokens."""

    async def generate(self, request: GenerationRequest) -> Completion:
        number = 1 + (len(request.prefix.token_ids) if request.prefix else 0)
        ids = np.full(number, 3, np.int32)
        return Completion(ids, np.zeros(number, np.float32), (VersionSpan(1, 0, 0, number),), "stop")


BEGUN = Completion(np.full(2, 3, np.int32), np.zeros(2, np.float32), (VersionSpan(1, 0, 0, 2, "rollout-0"),), "abort")
OWN, LATER = VersionSpan(1, 0, 0, 1, "rollout-1"), VersionSpan(1, 0, 2, 3, "rollout-1")


@pytest.mark.parametrize(
    ("begun", "spans"),
    [
        ((), ((OWN,), (OWN,))),
        ((BEGUN, replace(BEGUN, finish_reason="stop")), ((*BEGUN.spans, LATER), BEGUN.spans)),
        (
            (replace(BEGUN, spans=(VersionSpan(1, 0, 0, 2),)), empty_completion()),
            ((VersionSpan(1, 0, 0, 2), LATER), (OWN,)),
        ),
    ],
)
async def test_tokens_name_the_worker_that_sampled_them(
    tmp_path: Path, begun: tuple[Completion, ...], spans: tuple[tuple[VersionSpan, ...], ...]
) -> None:
    engine: Any = Joining()
    sampler = GroupSampler(engine, make_tokenizer(), make_spec(tmp_path), "rollout-1", lambda group_id: None)
    prefix = encode_completions(np.array([1], np.int32), begun) if begun else None
    leased = lease(0, '"1+1"', prefix_finish_reasons=[each.finish_reason for each in begun])
    _, completions = await sampler.sample(leased, prefix)
    assert tuple(completion.spans for completion in completions) == spans


@pytest.mark.parametrize("samples", [None, 1])
async def test_what_an_earlier_worker_left_and_nobody_can_read_is_made_anew(bench: Bench, samples: int | None) -> None:
    completion = Completion(np.array([5], np.int32), np.zeros(1, np.float32), (VersionSpan(1, 0, 0, 1),), "abort")
    frame = encode_completions(np.array([1], np.int32), [completion] * samples) if samples else b"nothing"
    reasons = ["abort"] * (samples or 2)
    bench.exchange.give(lease(0, prefix_frame=1, prefix_finish_reasons=reasons), frames=(frame,))
    result = await bench.exchange.next()
    assert isinstance(result, pb.GroupResult)
    assert all(request.prefix is None for request in bench.engine.asked)


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
