"""The public OpenAI client against the endpoint. Each test runs once for every engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
import torch
from endpoint_run import RUN, EndpointRun
from openai import AsyncOpenAI
from pydantic import ValidationError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from paceline.errors import InvalidInput
from paceline.groups import Version
from paceline.rate_limited_log import unforeseen
from paceline.rollout.engine import GenerationRequest, SamplingParams
from paceline.services.openai.requests import ChatAsk, CompletionAsk
from paceline.services.rollout.openai.server import Endpoint

SECOND = Version(1, 5)
ENDLESS = 3000
LONG = 1200
"""Tokens that an engine takes seconds for, of which a test waits for the last."""
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a token for each printable character, one for each byte of `€`, and a chat template."""
    folder = tmp_path_factory.mktemp("model")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    symbols = [*map(chr, range(33, 127)), *(byte_level.pre_tokenize_str(" €")[0][0])]
    vocabulary = {symbol: i for i, symbol in enumerate(["<end>", *dict.fromkeys(symbols)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = byte_level, decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast
    made = fast(tokenizer_object=tokenizer, eos_token="<end>", chat_template=TEMPLATE)
    made.save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=len(made), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, initializer_range=0.2,
        eos_token_id=0, bos_token_id=None, pad_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).eval().save_pretrained(folder)
    return folder


async def test_a_chat_is_the_template_the_engine_and_the_tokenizer(client: AsyncOpenAI, run: EndpointRun) -> None:
    said = await client.chat.completions.create(
        model=RUN, messages=MESSAGES, max_completion_tokens=9, seed=3, extra_body={"return_token_ids": True}
    )
    prompt_ids = run.tokenizer("<system>Be brief.<user>Why?<a>")["input_ids"]
    choice: Any = said.choices[0]
    assert choice.prompt_token_ids == prompt_ids
    assert choice.message.content == run.tokenizer.decode(choice.token_ids, skip_special_tokens=True)
    assert said.usage is not None
    assert (said.usage.prompt_tokens, said.usage.completion_tokens) == (
        len(prompt_ids),
        len(choice.token_ids),
    )
    assert (choice.finish_reason == "length") == (len(choice.token_ids) == 9)
    assert said.model == f"{RUN}@1.4"
    assert said.system_fingerprint == "1.4"
    assert choice.versions == [[1, 4, 0, len(choice.token_ids)]]


async def test_the_same_seed_gives_the_same_choices_and_each_choice_is_its_own(client: AsyncOpenAI) -> None:
    ask: Any = {"model": RUN, "prompt": "One two", "n": 4, "max_tokens": 20}
    first = await client.completions.create(**ask, seed=5)
    again = await client.completions.create(**ask, seed=5)
    other = await client.completions.create(**ask, seed=6)
    texts = [[choice.text for choice in answer.choices] for answer in (first, again, other)]
    assert texts[0] == texts[1]
    assert not set(texts[0]) & set(texts[2])
    assert len(set(texts[0])) == 4
    assert [choice.index for choice in first.choices] == [0, 1, 2, 3]
    unseeded = [(await client.completions.create(**ask)).choices[0].text for _ in range(2)]
    assert unseeded[0] != unseeded[1]


async def test_a_stream_joins_to_the_whole_answer(client: AsyncOpenAI) -> None:
    ask: Any = {"model": RUN, "messages": MESSAGES, "n": 3, "max_tokens": 40, "seed": 1, "logprobs": True}
    whole = await client.chat.completions.create(**ask)
    texts, logprobs, reasons = {0: "", 1: "", 2: ""}, {0: [], 1: [], 2: []}, {}
    chunks = 0
    usage: Any = None
    stream = await client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    async for chunk in stream:
        chunks += 1
        usage = chunk.usage or usage
        assert chunk.model == f"{RUN}@1.4"
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            content = choice.logprobs.content if choice.logprobs else None
            logprobs[choice.index] += [(token.token, token.logprob) for token in content or []]
            reasons[choice.index] = choice.finish_reason
    assert chunks > 10
    assert usage == whole.usage
    for choice in whole.choices:
        assert texts[choice.index] == choice.message.content
        assert reasons[choice.index] == choice.finish_reason
        assert choice.logprobs is not None
        expected = [(token.token, token.logprob) for token in choice.logprobs.content or []]
        assert [token for token, _ in logprobs[choice.index]] == [token for token, _ in expected]
        assert np.allclose([p for _, p in logprobs[choice.index]], [p for _, p in expected], atol=1e-4)


async def test_a_text_stream_has_offsets_and_ends_with_a_reason(client: AsyncOpenAI) -> None:
    text, tokens, offsets, last = "", [], [], None
    stream = await client.completions.create(model=RUN, prompt="abc", max_tokens=30, seed=8, logprobs=0, stream=True)
    async for chunk in stream:
        choice = chunk.choices[0]
        text += choice.text
        if choice.logprobs is not None:
            tokens += choice.logprobs.tokens or []
            offsets += choice.logprobs.text_offset or []
        last = choice.finish_reason
    assert last in ("stop", "length")
    for token, offset in zip(tokens, offsets, strict=True):
        assert "\ufffd" in token or text[offset : offset + len(token)] == token


async def test_a_stop_string_ends_the_choice_and_is_no_part_of_it(
    client: AsyncOpenAI, run: EndpointRun, until: Callable[..., Awaitable[None]]
) -> None:
    ask: Any = {"model": RUN, "prompt": "abc", "seed": 11, "extra_body": {"min_tokens": 60}}
    free = (await client.completions.create(**ask, max_tokens=60)).choices[0].text
    stop = free[20:23]
    before = free[: free.find(stop)]
    stopped = await client.completions.create(**ask, max_tokens=ENDLESS, stop=[stop, "no such text"], logprobs=0)
    assert stopped.choices[0].text == before
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.usage is not None
    assert stopped.usage.completion_tokens == len(stopped.choices[0].logprobs.tokens) < 60  # type: ignore[union-attr, arg-type]
    streamed = ""
    async for chunk in await client.completions.create(**ask, max_tokens=ENDLESS, stop=stop, stream=True):
        streamed += chunk.choices[0].text
    assert streamed == before
    await until(lambda: run.engine.num_running == 0)


async def test_the_runs_stop_strings_and_template_arguments_are_the_default(
    client: AsyncOpenAI, run: EndpointRun
) -> None:
    ask: Any = {"model": RUN, "prompt": "abc", "seed": 11, "max_tokens": 60}
    free = (await client.completions.create(**ask)).choices[0].text
    generation = run.spec.policy.generation.model_copy(update={"stop_strings": (free[5:8],)})
    policy = run.spec.policy.model_copy(update={"generation": generation})
    data = run.spec.data.model_copy(update={"chat_template_kwargs": {"mark": "!"}})
    run.spec = run.spec.model_copy(update={"policy": policy, "data": data})
    assert (await client.completions.create(**ask)).choices[0].text == free[: free.find(free[5:8])]
    assert (await client.completions.create(**ask, stop=[])).choices[0].text == free
    run.tokenizer.chat_template = TEMPLATE + "{{ mark }}"
    for kwargs, mark in (({}, "!"), ({"mark": "?"}, "?")):
        chat: Any = await client.chat.completions.create(
            model=RUN,
            messages=MESSAGES,
            max_tokens=1,
            extra_body={"return_token_ids": True, "chat_template_kwargs": kwargs},
        )
        assert run.tokenizer.decode(chat.choices[0].prompt_token_ids).endswith(f"<a>{mark}")


async def test_a_stop_token_ends_the_choice_and_has_no_text(client: AsyncOpenAI, run: EndpointRun) -> None:
    ask: Any = {"model": RUN, "prompt": "abc", "seed": 12, "max_tokens": 60}
    more: Any = {"return_token_ids": True}
    free: Any = (await client.completions.create(**ask, extra_body=more)).choices[0]
    token = free.token_ids[10]
    at = free.token_ids.index(token)
    stopped: Any = (await client.completions.create(**ask, extra_body=more | {"stop_token_ids": [token]})).choices[0]
    assert stopped.token_ids == free.token_ids[: at + 1]
    assert stopped.text == run.tokenizer.decode(free.token_ids[:at], skip_special_tokens=True)
    assert stopped.finish_reason == "stop"


async def test_logprobs_are_those_of_a_plain_forward_pass(client: AsyncOpenAI, run: EndpointRun, folder: Path) -> None:
    said = await client.chat.completions.create(
        model=RUN, messages=MESSAGES, max_tokens=30, temperature=0.7, logprobs=True, seed=2,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    choice: Any = said.choices[0]
    auto: Any = Qwen3ForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32)
    ids_1L = torch.tensor([choice.prompt_token_ids + choice.token_ids])
    with torch.no_grad():
        logprobs_LV = (model(ids_1L).logits[0, :-1] / 0.7).log_softmax(-1)
    expected = logprobs_LV.gather(1, ids_1L[0, 1:, None])[len(choice.prompt_token_ids) - 1 :, 0]
    assert choice.logprobs is not None
    got = [token.logprob for token in choice.logprobs.content]
    assert np.abs(np.array(got) - expected.numpy()).max() < 1e-4
    assert [token.token for token in choice.logprobs.content] == [
        run.tokenizer.decode([i], skip_special_tokens=True) for i in choice.token_ids
    ]


async def test_temperature_zero_is_greedy(client: AsyncOpenAI) -> None:
    texts = set()
    for seed in range(3):
        said = await client.completions.create(model=RUN, prompt="abc", max_tokens=20, temperature=0, seed=seed)
        texts.add(said.choices[0].text)
    assert len(texts) == 1


async def test_several_prompts_and_token_ids_have_choices_in_order(client: AsyncOpenAI, run: EndpointRun) -> None:
    ids = [run.tokenizer(text)["input_ids"] for text in ("ab", "c")]
    ask: Any = {"model": RUN, "n": 2, "seed": 4, "max_tokens": 8}
    by_text = await client.completions.create(**ask, prompt=["ab", "c"])
    by_ids = await client.completions.create(**ask, prompt=ids)
    assert [c.text for c in by_text.choices] == [c.text for c in by_ids.choices]
    assert [c.index for c in by_ids.choices] == [0, 1, 2, 3]
    one = await client.completions.create(**ask, prompt=ids[0])
    assert [c.text for c in one.choices] == [c.text for c in by_ids.choices][:2]
    assert by_ids.usage is not None
    assert by_ids.usage.prompt_tokens == 3


async def test_models_are_the_run_and_the_version_it_holds(client: AsyncOpenAI, run: EndpointRun, weights: Any) -> None:
    assert [model.id async for model in client.models.list()] == [RUN, f"{RUN}@1.4"]
    assert (await client.models.retrieve(f"{RUN}@1.4")).id == f"{RUN}@1.4"
    pinned = await client.completions.create(model=f"{RUN}@1.4", prompt="abc")
    assert pinned.model == f"{RUN}@1.4"
    await run.engine.update_weights(SECOND, weights(1.1))
    assert [model.id async for model in client.models.list()] == [RUN, f"{RUN}@1.5"]
    for model in (f"{RUN}@1.4", "other", "other@1.5", f"{RUN}@"):
        with pytest.raises(openai.NotFoundError, match=f"{RUN}@1.5") as refused:
            await client.completions.create(model=model, prompt="abc")
        assert refused.value.code == "model_not_found"
        assert refused.value.param == "model"
    assert (await client.completions.create(model=RUN, prompt="abc")).model == f"{RUN}@1.5"


async def test_a_completion_lives_through_an_update_unless_it_asked_for_one_version(
    client: AsyncOpenAI, run: EndpointRun, weights: Any
) -> None:
    def ask(model: str) -> Any:
        # The update comes after the first chunk and before this many tokens.
        return client.completions.create(
            model=model, prompt="abc", max_tokens=LONG, stream=True, extra_body={"min_tokens": LONG}
        )

    free, pinned = await ask(RUN), await ask(f"{RUN}@1.4")
    await anext(free)
    await anext(pinned)
    await run.engine.update_weights(SECOND, weights(1.1))
    with pytest.raises(openai.APIError, match="received new weights"):
        async for _ in pinned:
            pass
    async for chunk in free:
        last = chunk
    assert last.model == f"{RUN}@1.5"
    assert last.system_fingerprint == "1.4+1.5"
    first, second = last.choices[0].versions
    assert [first[:3], second[:2], second[3]] == [[1, 4, 0], [1, 5], LONG]
    assert first[3] == second[2] > 0


async def test_a_pinned_request_without_a_stream_is_told_so_too(
    client: AsyncOpenAI, run: EndpointRun, weights: Any, until: Callable[..., Awaitable[None]]
) -> None:
    asked = asyncio.create_task(
        client.completions.create(
            model=f"{RUN}@1.4", prompt="abc", max_tokens=ENDLESS, extra_body={"min_tokens": ENDLESS}
        )
    )
    await until(lambda: run.engine.num_running == 1)
    await run.engine.update_weights(SECOND, weights(1.1))
    with pytest.raises(openai.NotFoundError, match="received new weights"):
        await asked
    await until(lambda: run.engine.num_running == 0)


async def test_a_client_that_goes_away_ends_its_sequences(
    client: AsyncOpenAI, run: EndpointRun, until: Callable[..., Awaitable[None]]
) -> None:
    endless: Any = {
        "model": RUN, "prompt": "abc", "max_tokens": ENDLESS, "extra_body": {"min_tokens": ENDLESS}
    }  # fmt: skip
    asked = asyncio.create_task(client.completions.create(**endless))
    await until(lambda: run.engine.num_running == 1)
    asked.cancel()
    await until(lambda: run.engine.num_running == 0)
    stream = await client.completions.create(**endless, stream=True)
    await anext(aiter(stream))
    await stream.close()
    await until(lambda: run.engine.num_running == 0)


async def test_a_full_queue_says_so_and_training_keeps_its_places(
    client: AsyncOpenAI, run: EndpointRun, until: Callable[..., Awaitable[None]]
) -> None:
    places = max(1, run.engine.max_batch_size // 8)
    endless: Any = {
        "model": RUN, "prompt": "abc", "max_tokens": ENDLESS, "extra_body": {"min_tokens": ENDLESS}
    }  # fmt: skip
    taken = [asyncio.create_task(client.completions.create(**endless, n=16)) for _ in range(places)]
    await until(lambda: run.engine.num_running == places)
    with pytest.raises(openai.RateLimitError, match="Try again later") as refused:
        # Requests may arrive in any order; one of these meets a full queue.
        await asyncio.gather(*(client.completions.create(**endless) for _ in range(2)))
    assert refused.value.response.headers["retry-after"] == "1"
    assert run.engine.num_running + run.engine.num_waiting == places
    lease = GenerationRequest("lease", np.array([1, 2], np.int32), SamplingParams(5), 0)
    assert len((await run.engine.generate(lease)).token_ids) <= 5
    for task in taken:
        task.cancel()
    await until(lambda: run.engine.num_running == 0)
    await client.completions.create(model=RUN, prompt="abc", max_tokens=2)


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        ({"presence_penalty": 0.5}, "presence_penalty", "not supported"),
        ({"logit_bias": {"3": 1}}, "logit_bias", "not supported"),
        ({"echo": True, "stream": True}, "echo", "without stream"),
        ({"echo": True, "n": 2}, "echo", "n=1"),
        ({"echo": True, "logprobs": 1}, "logprobs", "temperature=0"),
        ({"echo": True, "logprobs": 2, "temperature": 0}, "logprobs", "logprobs=0"),
        ({"logprobs": 3}, "logprobs", "logprobs=0"),
        ({"best_of": 4, "n": 2}, "best_of", "best_of 4 must equal n 2"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": 99999}, "max_tokens", "exceeds 4096"),
        ({"n": 1000}, "n", "less than or equal to 128"),
        ({"stop": ["a", ""]}, "stop", "not empty"),
        ({"top_p": "high"}, "top_p", "valid number"),
        ({"tempreature": 1}, "tempreature", "is unknown"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only with stream=true"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": [5000]}, None, "token ids"),
        ({"prompt": [2**40]}, None, "token ids"),
        ({"prompt": [1] * 5000}, None, "at most 4096 ids"),
        ({"prompt": "a" * 300_000}, None, "300000 characters exceeds 4096 tokens"),
        ({"prompt": ["a"] * 2000}, "prompt", "prompt"),
        ({"stop": ["a"] * 17}, "stop", "1 to 16 strings"),
        ({"min_p": 1.5}, "min_p", "less than 1"),
        ({"chat_template_kwargs": {"mark": "?"}}, "chat_template_kwargs", "is unknown"),
        ({"stop_token_ids": [2**70]}, None, "stop_token_ids is .*at most 256 ids from 0 to 2147483647"),
        ({"stop_token_ids": list(range(1000))}, None, "stop_token_ids is .*at most 256 ids"),
        ({"top_k": 2**70}, None, "top_k is .*from 0 to 2147483647"),
    ],
)
async def test_what_cannot_be_done_is_refused_with_the_field(
    client: AsyncOpenAI, body: dict[str, Any], field: str | None, message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as refused:
        await client.post("/completions", body={"model": RUN, "prompt": "abc"} | body, cast_to=object)
    assert refused.value.param == field
    assert refused.value.type == "invalid_request_error"


async def test_what_chat_cannot_do_is_refused_with_the_field(client: AsyncOpenAI) -> None:
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    for body, message in (
        ({"messages": image}, "only text"),
        ({"messages": []}, "messages"),
        ({"tools": tools}, "the request has tools, but the chat template of this model does not render tools"),
        ({"tool_choice": "required"}, "the request has no tools"),
        ({"reasoning_effort": "low"}, "reasoning_effort is 'low', which the chat template"),
        (
            {"chat_template_kwargs": {"tokenize": False}},
            "'tokenize', which is not an argument of the template",
        ),
        (
            {"chat_template_kwargs": {"mark": "?"}},
            "'mark', which the chat template of the tokenizer does not read",
        ),
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format is not supported"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "differ"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            await client.post("/chat/completions", body={"model": RUN, "messages": MESSAGES} | body, cast_to=object)
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "Wh"}, {"type": "text", "text": "y?"}]}]
    plain: Any = [{"role": "user", "content": "Why?"}]
    answers = [
        await client.chat.completions.create(model=RUN, messages=messages, seed=1) for messages in (parts, plain)
    ]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionAsk, {"prompt": [1, "a"] * 1000}),
        (CompletionAsk, {"prompt": [["a"] * 1000] * 100}),
        (CompletionAsk, {"prompt": "a", "stop_token_ids": ["a"] * 1000}),
        (CompletionAsk, {"prompt": "a", "stop": [1] * 1000}),
        (ChatAsk, {"messages": [{}] * 1000}),
    ],
)
def test_a_list_of_faults_is_told_by_few_of_them(kind: Any, body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refused:
        kind.model_validate({"model": RUN} | body)
    assert refused.value.error_count() < 10


async def test_prompts_are_counted_before_they_are_tokenized(
    client: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.services.rollout.openai.engine_requests.encode_text", None)
    with pytest.raises(openai.BadRequestError, match="600 completions in one request, but at most 32 fit"):
        await client.completions.create(model=RUN, prompt=["a"] * 300, n=2)


async def test_what_is_nested_without_end_is_the_clients_fault(url: str) -> None:
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession() as session:
        for body in ("[" * 100_000, '{"a": ' * 100_000):
            async with session.post(f"{url}/completions", data=body, headers=headers) as answer:
                assert answer.status == 400
                assert "nested too deeply" in await answer.text()


async def test_connections_that_say_nothing_leave_files_for_the_worker(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.services.common.serving.http_listener.MAX_CONNECTIONS", 2)
    monkeypatch.setattr("paceline.services.common.serving.http_listener.SHARE_OF_ADDRESS", 1.0)
    host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
    silent = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
    reader, writer = await asyncio.open_connection(host, int(port))
    async with asyncio.timeout(60):
        assert b" 429 " in await reader.read(), "it is refused and closed at once"
    writer.close()
    silent[0][1].close()
    await silent[0][1].wait_closed()
    async with asyncio.timeout(60), aiohttp.ClientSession() as session:
        while True:  # until the server has noticed
            try:
                async with session.get(f"{url}/models") as answer:
                    if answer.status == 200:
                        break
            except aiohttp.ClientError:
                continue
    silent[1][1].close()


async def test_bodies_that_do_not_end_are_bounded_in_number_and_time(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.services.common.serving.http_listener.MAX_BODIES", 1)
    monkeypatch.setattr("paceline.services.common.serving.http_listener.BODY_S", 3600.0)
    host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
    begun = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
    _, slow = await asyncio.open_connection(host, int(port))
    slow.write(begun)
    async with asyncio.timeout(60), aiohttp.ClientSession() as session:
        status = 400
        while status == 400:  # until the slow one is being read
            async with session.post(f"{url}/completions", json={}) as answer:
                status = answer.status
        assert status == 429
        slow.close()
        while status == 429:  # until the server has noticed its end
            async with session.post(f"{url}/completions", json={}) as answer:
                status = answer.status
        assert status == 400
    monkeypatch.setattr("paceline.services.common.serving.http_listener.BODY_S", 0.05)
    reader, slow = await asyncio.open_connection(host, int(port))
    slow.write(begun)
    async with asyncio.timeout(60):
        assert b"the body did not come within 0.05 s" in await reader.readuntil(b"}}")
    slow.close()


async def test_what_nobody_foresaw_is_counted_and_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    endpoint, before = Endpoint(fail), unforeseen.total
    url = f"http://127.0.0.1:{await endpoint.start('127.0.0.1', 0)}/v1/models"
    try:
        async with aiohttp.ClientSession() as session:
            for _ in range(5):
                async with session.get(url) as answer:
                    assert answer.status == 500
    finally:
        await endpoint.close()
    assert unforeseen.total == before + 5
    assert len([record for record in caplog.records if "ZeroDivisionError" in record.getMessage()]) < 5


TOOL_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "[{{ c.function.name }}{{ c.function.arguments | tojson }}]{% endfor %}"
    "{% if m.role == 'tool' %}({{ m.tool_call_id }}){% endif %}{% endfor %}<a>"
)
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
CALLED = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "2"}]},
]


async def chat(client: AsyncOpenAI, messages: Any, **fields: Any) -> Any:
    body = {"model": RUN, "messages": messages, "max_tokens": 1, "return_token_ids": True} | fields
    return await client.post("/chat/completions", body=body, cast_to=object)


async def test_calls_and_results_of_tools_are_rendered_as_the_template_does(
    client: AsyncOpenAI, run: EndpointRun
) -> None:
    run.tokenizer.chat_template = TOOL_TEMPLATE
    answer = await chat(client, CALLED)
    prompt = run.tokenizer.decode(answer["choices"][0]["prompt_token_ids"])
    assert prompt == '<user>1+1?<assistant>[add{"x": 1}]<tool>2(c1)<a>'


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            "the role 'assistant' has 'tool_calls', but the chat template",
        ),
        (
            {"role": "assistant", "content": "x", "tool_calls": [CALL]},
            "the role 'assistant' has 'tool_calls', but the chat template",
        ),
        ({"role": "tool", "content": "2", "tool_call_id": "c1"}, "the role 'tool' has 'tool_call_id'"),
        ({"role": "user", "content": "x", "name": "Ann"}, "the role 'user' has 'name'"),
        ({"role": "user", "content": None}, "without content or tool_calls"),
        ({"role": "user"}, "without content or tool_calls"),
        ({"role": "user", "content": [{"type": "text"}]}, "part of type 'text'"),
        ({"role": "assistant", "tool_calls": [{"type": "custom"}]}, "another form than a function's"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{x"}}]},
            "arguments are no JSON",
        ),
    ],
)
async def test_what_the_template_would_leave_out_is_refused_by_name(
    client: AsyncOpenAI, message: dict[str, Any], words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as refused:
        await chat(client, [*MESSAGES, message])
    assert refused.value.param == "messages"


async def test_fields_that_say_nothing_change_nothing(client: AsyncOpenAI, run: EndpointRun) -> None:
    plain = await chat(client, [{"role": "user", "content": "Why?"}])
    echoed = {"role": "user", "content": "Why?", "refusal": None, "tool_calls": None, "name": None}
    same = await chat(client, [echoed])
    ids = [answer["choices"][0]["prompt_token_ids"] for answer in (plain, same)]
    assert ids[0] == ids[1]


async def test_a_chat_that_the_template_refuses_is_the_client_s_fault(client: AsyncOpenAI, run: EndpointRun) -> None:
    run.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(openai.BadRequestError, match="roles must alternate"):
        await chat(client, MESSAGES)


@pytest.fixture
def no_run() -> Callable[[], None]:
    return lambda: None


async def test_without_a_run_there_are_no_models_and_a_clear_word(no_run: Callable[[], None]) -> None:
    endpoint = Endpoint(no_run)
    port = await endpoint.start("127.0.0.1", 0)
    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
        assert [model async for model in client.models.list()] == []
        with pytest.raises(openai.InternalServerError, match="has no run") as refused:
            await client.completions.create(model=RUN, prompt="abc")
        assert refused.value.status_code == 503
    await endpoint.close()


async def test_an_unforeseen_error_is_answered_and_counted() -> None:
    def broken() -> None:
        raise KeyError("run")

    before, endpoint = unforeseen.total, Endpoint(broken)
    port = await endpoint.start("127.0.0.1", 0)
    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.InternalServerError, match="unexpected KeyError in an HTTP POST") as refused:
            await client.completions.create(model=RUN, prompt="abc")
        assert (refused.value.status_code, refused.value.type) == (500, "server_error")
    await endpoint.close()
    assert unforeseen.total == before + 1


async def test_errors_of_http_itself_have_the_same_shape(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        for method, path, options, status, message in (
            ("POST", "/nothing", {"json": {}}, 404, "Not Found"),
            ("GET", "/completions", {}, 405, "Method Not Allowed"),
            ("POST", "/completions", {"data": "{}"}, 400, "application/json"),
            ("POST", "/completions", {"json": [1]}, 400, "JSON object"),
            ("POST", "/completions", {"json": {}}, 400, "model"),
            (
                "POST",
                "/completions",
                {"data": b"{", "headers": {"Content-Type": "application/json"}},
                400,
                "not JSON",
            ),
        ):
            async with session.request(method, url + path, **options) as answer:  # type: ignore[arg-type]
                assert answer.status == status
                assert message in json.loads(await answer.read())["error"]["message"]


async def test_the_plain_route_answers_with_texts_alone_and_is_named_where_a_route_is_missing(
    url: str, client: AsyncOpenAI
) -> None:
    base = url.removesuffix("/v1")
    same: Any = {"seed": 4, "temperature": 0.7}
    raw = await client.completions.create(model=RUN, prompt="abc", n=2, max_tokens=9, **same)
    chat = await client.chat.completions.create(model=RUN, messages=MESSAGES, max_tokens=9, **same)
    async with aiohttp.ClientSession() as session:

        async def generate(**body: Any) -> tuple[int, Any]:
            async with session.post(f"{base}/generate", json=body) as answer:
                return answer.status, await answer.json()

        status, found = await generate(prompt="abc", n=2, max_new_tokens=9, **same)
        assert (status, found["texts"]) == (200, [choice.text for choice in raw.choices])
        assert (found["text"], found["model"]) == (found["texts"][0], raw.model)
        assert found["usage"]["completion_tokens"] == raw.usage.completion_tokens  # type: ignore[union-attr]
        _, found = await generate(messages=MESSAGES, max_new_tokens=9, **same)
        assert found["text"] == chat.choices[0].message.content
        for body, field in (({"stream": True}, "stream"), ({"logprobs": 0, "echo": True}, "echo"), ({"x": 1}, "x")):
            status, found = await generate(prompt="abc", **body)
            assert (status, found["error"]["param"]) == (400, field)
        async with session.post(f"{base}/predict", json={}) as answer:
            assert "POST /generate" in (await answer.json())["error"]["message"]


async def test_echo_gives_the_log_probabilities_of_given_texts_as_transformers_has_them(
    client: AsyncOpenAI, run: EndpointRun, folder: Path
) -> None:
    auto: Any = Qwen3ForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32)
    greedy_ids = (
        await client.completions.create(
            model=RUN, prompt="One", max_tokens=12, temperature=0, extra_body={"return_token_ids": True}
        )
    ).choices[0]
    likely = [*run.tokenizer("One")["input_ids"], *greedy_ids.token_ids[:-1]]  # type: ignore[attr-defined]
    prompts = [run.tokenizer("Two and three are five")["input_ids"], likely, [5]]
    answer = await client.completions.create(
        model=f"{RUN}@1.4", prompt=prompts, max_tokens=1, temperature=0, logprobs=1, echo=True
    )
    are_greedy = []
    for ids, choice in zip(prompts, answer.choices, strict=True):
        numbers: Any = choice.logprobs
        assert choice.text.startswith(run.tokenizer.decode(ids))
        assert len(numbers.tokens) == len(numbers.token_logprobs) == len(numbers.top_logprobs) == len(ids) + 1
        assert numbers.token_logprobs[0] is None
        assert numbers.top_logprobs[0] is None
        assert choice.prompt_version == [1, 4]  # type: ignore[attr-defined]
        ids_1T = torch.tensor([ids])
        with torch.no_grad():
            logprobs_TV = model(ids_1T).logits[0].log_softmax(-1)
        expected = logprobs_TV[:-1].gather(1, ids_1T[0, 1:, None])[:, 0].numpy()
        assert np.allclose(numbers.token_logprobs[1:-1], expected, atol=1e-4)
        best = [max(top.values()) for top in numbers.top_logprobs[1:]]
        assert np.allclose(best[:-1], logprobs_TV[:-1].max(-1).values.numpy(), atol=1e-4)
        greedy = [given == top for given, top in zip(numbers.token_logprobs[1:-1], best[:-1], strict=True)]
        assert greedy == (logprobs_TV[:-1].argmax(-1) == ids_1T[0, 1:]).tolist()
        are_greedy += greedy
    assert {True, False} == set(are_greedy)


async def test_echo_without_log_probabilities_is_the_text_alone(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(model=RUN, prompt="One", max_tokens=3, echo=True)
    assert answer.choices[0].text.startswith("One")
    assert answer.choices[0].logprobs is None


async def test_a_text_that_does_not_fit_is_refused_with_its_length(run: EndpointRun) -> None:
    with pytest.raises(InvalidInput, match="has 5000 tokens"):
        await run.engine.prompt_logprobs(np.full(5000, 3, np.int32))
    with pytest.raises(InvalidInput, match="the model has 0 to"):
        await run.engine.prompt_logprobs(np.array([3, 10**6], np.int32))
