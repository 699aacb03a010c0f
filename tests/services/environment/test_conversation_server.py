"""The public OpenAI client against the conversation server of agents."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from tiny_chat import make_chat_tokenizer

from paceline.environment.protocols import AgentAnswer, AgentRequest, ConversationAddress, LeaseLost, SampledTurn
from paceline.errors import Conflict, InvalidInput
from paceline.groups import VersionSpan
from paceline.services.environment.conversation_server import ConversationServer

PATIENCE_S = 60.0
MESSAGES: Any = [{"role": "user", "content": "1+1"}]
TOOL: Any = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
SPANS = (VersionSpan(1, 4, 0, 1, "rollout-1"), VersionSpan(1, 5, 1, 2, "rollout-2"))


def answered(message: dict[str, Any] | None = None, reason: str = "stop") -> AgentAnswer:
    ids = np.array([50, 51], np.int32)
    turn = SampledTurn(ids, np.array([-0.5, -1.5], np.float32), SPANS, reason, "OP")
    return AgentAnswer(np.array([1, 2, 3], np.int32), turn, message or {"role": "assistant", "content": "OP"})


class ScriptedConversation:
    """A conversation that answers as scripted and keeps its requests."""

    def __init__(self) -> None:
        self.requests: list[AgentRequest] = []
        self.script: list[Callable[[], Awaitable[AgentAnswer]]] = []
        self.began = asyncio.Event()

    async def answer(self, request: AgentRequest) -> AgentAnswer:
        self.requests.append(request)
        self.began.set()
        return await self.script.pop(0)() if self.script else answered()

    def raises(self, error: Exception) -> None:
        async def fail() -> AgentAnswer:
            raise error

        self.script.append(fail)

    def says(self, answer: AgentAnswer) -> None:
        async def say() -> AgentAnswer:
            return answer

        self.script.append(say)


@pytest_asyncio.fixture
async def server() -> AsyncIterator[ConversationServer]:
    async with ConversationServer("demo-1", make_chat_tokenizer()) as server:
        yield server


@pytest_asyncio.fixture
async def opened(server: ConversationServer) -> AsyncIterator[tuple[ScriptedConversation, ConversationAddress]]:
    conversation = ScriptedConversation()
    async with server.open(conversation) as address:
        yield conversation, address


@pytest_asyncio.fixture
async def client(opened: tuple[ScriptedConversation, ConversationAddress]) -> AsyncIterator[AsyncOpenAI]:
    base_url, api_key = opened[1]
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=PATIENCE_S) as client:
        yield client


async def test_a_chat_is_a_turn_of_its_session(
    client: AsyncOpenAI, opened: tuple[ScriptedConversation, ConversationAddress]
) -> None:
    conversation, address = opened
    answer = await client.chat.completions.create(
        model="any", messages=MESSAGES, tools=[TOOL], max_completion_tokens=7, temperature=0.2, logprobs=True,
        extra_body={"return_token_ids": True, "chat_template_kwargs": {"brief": True}},
    )  # fmt: skip
    choice: Any = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "OP", "stop")
    assert (answer.model, answer.system_fingerprint) == ("demo-1@1.5", "1.4+1.5")
    assert choice.token_ids == [50, 51]
    assert choice.prompt_token_ids == [1, 2, 3]
    assert choice.versions == [[1, 4, 0, 1], [1, 5, 1, 2]]
    assert [entry.logprob for entry in choice.logprobs.content] == [-0.5, -1.5]
    usage = answer.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 2, 5)
    (request,) = conversation.requests
    assert list(request.messages) == MESSAGES
    assert list(request.tools) == [TOOL]
    assert request.template_kwargs == {"brief": True}
    assert (request.max_new_tokens, request.prompt_ids, request.retry_count) == (7, None, 0)
    assert address.base_url.endswith("/v1")


async def test_calls_of_tools_come_whole_and_in_a_stream(
    client: AsyncOpenAI, opened: tuple[ScriptedConversation, ConversationAddress]
) -> None:
    conversation, _ = opened
    message = {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"}
    for _ in range(2):
        conversation.says(answered(message))
    whole: Any = (await client.chat.completions.create(model="m", messages=MESSAGES, tools=[TOOL])).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content is None
    assert whole.message.reasoning_content == "hm"
    assert whole.message.tool_calls[0].model_dump() == CALL
    stream = await client.chat.completions.create(
        model="m", messages=MESSAGES, tools=[TOOL], stream=True, stream_options={"include_usage": True}
    )
    chunks: list[Any] = [chunk async for chunk in stream]
    (call,) = [call for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or ()]
    assert (call.index, call.id, call.function.name, call.function.arguments) == (
        0,
        "call_1",
        "add",
        '{"a": 1}',
    )
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "tool_calls"
    assert chunks[-1].usage.total_tokens == 5
    assert len({chunk.id for chunk in chunks}) == 1


async def test_a_stream_has_the_text_and_the_versions(
    client: AsyncOpenAI, opened: tuple[ScriptedConversation, ConversationAddress]
) -> None:
    stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
    chunks: list[Any] = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "OP"
    assert chunks[-1].choices[0].versions == [[1, 4, 0, 1], [1, 5, 1, 2]]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n": 2}, "n is 2"),
        ({"stop": ["x"]}, "stop is set"),
        ({"extra_body": {"stop_token_ids": [1 << 40]}}, "stop_token_ids has 1099511627776"),
        ({"extra_body": {"stop_token_ids": list(range(17))}}, "more than 16"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice is 'required'"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
    ],
)
async def test_what_an_episode_cannot_do_is_refused_by_name(
    client: AsyncOpenAI, opened: tuple[ScriptedConversation, ConversationAddress], fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        await client.chat.completions.create(**{"model": "m", "messages": MESSAGES, **fields})
    assert opened[0].requests == []


async def test_no_tools_are_shown_where_none_are_wanted(
    client: AsyncOpenAI, opened: tuple[ScriptedConversation, ConversationAddress]
) -> None:
    await client.chat.completions.create(model="m", messages=MESSAGES, tools=[TOOL], tool_choice="none")
    assert list(opened[0].requests[0].tools) == []


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidInput("the prompt leaves no room"), 400),
        (Conflict("max_turns"), 409),
        (LeaseLost("gone"), 409),
    ],
)
async def test_errors_of_the_session_are_answered(
    client: AsyncOpenAI, opened: tuple[ScriptedConversation, ConversationAddress], error: Exception, status: int
) -> None:
    opened[0].raises(error)
    with pytest.raises(openai.APIStatusError) as refused:
        await client.chat.completions.create(model="m", messages=MESSAGES)
    assert refused.value.status_code == status


async def test_an_unforeseen_error_ends_one_request(
    client: AsyncOpenAI, opened: tuple[ScriptedConversation, ConversationAddress]
) -> None:
    opened[0].raises(ZeroDivisionError("division by zero"))
    with pytest.raises(openai.InternalServerError):
        await client.chat.completions.create(model="m", messages=MESSAGES)
    assert (await client.chat.completions.create(model="m", messages=MESSAGES)).choices


async def test_a_retry_says_so_and_has_the_same_body(
    server: ConversationServer, opened: tuple[ScriptedConversation, ConversationAddress]
) -> None:
    conversation, (base_url, api_key) = opened
    conversation.raises(InvalidInput("first"))
    body = json.dumps({"model": "m", "messages": MESSAGES})
    async with aiohttp.ClientSession() as http:
        for retry in ("0", "1", "nonsense"):
            headers = {"x-stainless-retry-count": retry, "content-type": "application/json"}
            async with http.post(f"{base_url}/chat/completions", data=body, headers=headers) as response:
                await response.read()
    assert [request.retry_count for request in conversation.requests] == [0, 1, 0]
    assert len({request.body_digest for request in conversation.requests}) == 1
    assert api_key in base_url


async def test_the_end_of_a_session_ends_its_requests(server: ConversationServer) -> None:
    conversation = ScriptedConversation()

    async def forever() -> AgentAnswer:
        await asyncio.Event().wait()
        raise AssertionError

    conversation.script = [forever]
    async with server.open(conversation) as (base_url, api_key):
        client = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=PATIENCE_S)
        asking = asyncio.create_task(client.chat.completions.create(model="m", messages=MESSAGES))
        await asyncio.wait_for(conversation.began.wait(), PATIENCE_S)
    with pytest.raises(openai.ConflictError, match="this episode is over"):
        await asking
    with pytest.raises(openai.NotFoundError, match="no running episode has this URL"):
        await client.chat.completions.create(model="m", messages=MESSAGES)
    await client.close()


async def test_a_turn_goes_on_when_its_caller_is_gone(
    server: ConversationServer, opened: tuple[ScriptedConversation, ConversationAddress]
) -> None:
    """The program repeats its request, and the conversation has the turn by then."""
    conversation, (base_url, _) = opened
    may_end, ended = asyncio.Event(), asyncio.Event()

    async def slow() -> AgentAnswer:
        await may_end.wait()
        ended.set()
        return answered()

    conversation.script = [slow]
    async with aiohttp.ClientSession() as http:
        body = {"model": "m", "messages": MESSAGES}
        asking = asyncio.create_task(http.post(f"{base_url}/chat/completions", json=body))
        await asyncio.wait_for(conversation.began.wait(), PATIENCE_S)
        asking.cancel()
        await asyncio.wait((asking,))
    may_end.set()
    await asyncio.wait_for(ended.wait(), PATIENCE_S)


async def test_sessions_are_apart(server: ConversationServer) -> None:
    one, other = ScriptedConversation(), ScriptedConversation()
    async with server.open(one) as first, server.open(other) as second:
        assert first.base_url != second.base_url
        async with AsyncOpenAI(base_url=second.base_url, api_key="whatever", max_retries=0) as client:
            await client.chat.completions.create(model="m", messages=MESSAGES)
            assert [model.id async for model in client.models.list()] == ["demo-1"]
    assert (len(one.requests), len(other.requests)) == (0, 1)


@pytest.mark.parametrize("path", ["inference/v1/generate", "v1/inference/v1/generate"])
async def test_token_ids_are_taken_as_they_are(
    server: ConversationServer, opened: tuple[ScriptedConversation, ConversationAddress], path: str
) -> None:
    conversation, (base_url, _) = opened
    root = base_url.removesuffix("/v1")
    body = {
        "model": "m",
        "token_ids": [4, 5, 6],
        "sampling_params": {"max_tokens": 9, "logprobs": 1, "stop_token_ids": [7]},
    }
    async with aiohttp.ClientSession() as http:
        async with http.post(f"{root}/{path}", json=body) as response:
            answer = await response.json()
            assert response.status == 200
        for field, value in (("n", 2), ("token_ids", [1 << 40]), ("token_ids", [])):
            async with http.post(f"{root}/{path}", json=body | {field: value}) as response:
                assert response.status == 400
                assert field in await response.text()
    (request,) = conversation.requests
    assert request.prompt_ids is not None
    assert request.prompt_ids.tolist() == [4, 5, 6]
    assert (request.max_new_tokens, request.stop_token_ids) == (9, (7,))
    (choice,) = answer["choices"]
    assert choice["token_ids"] == [50, 51]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["token_id:50", "token_id:51"]
    assert choice["finish_reason"] == "stop"


async def test_a_response_is_a_turn_of_its_session(
    client: AsyncOpenAI, opened: tuple[ScriptedConversation, ConversationAddress]
) -> None:
    conversation, _ = opened
    message = {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"}
    conversation.says(answered(message))
    tool: Any = {"type": "function", **TOOL["function"]}
    first = await client.responses.create(model="m", input="1+1", instructions="be brief", tools=[tool])
    assert [item.type for item in first.output] == ["reasoning", "function_call"]
    call: Any = first.output[1]
    assert (call.call_id, call.name, call.arguments) == ("call_1", "add", '{"a": 1}')
    assert first.usage is not None
    assert (first.usage.input_tokens, first.usage.output_tokens) == (3, 2)

    items: Any = [
        {"role": "user", "content": "1+1"},
        *(item.model_dump() for item in first.output),
        {"type": "function_call_output", "call_id": "call_1", "output": "2"},
    ]
    events = [
        event
        async for event in await client.responses.create(
            model="m", input=items, instructions="be brief", tools=[tool], stream=True
        )
    ]
    assert [event.type for event in events][-1] == "response.completed"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "OP"
    one, two = conversation.requests
    assert [each["role"] for each in one.messages] == ["system", "user"]
    assert list(one.tools) == list(two.tools) == [TOOL]
    said = two.messages[2]
    assert (said["role"], said["reasoning_content"], said["tool_calls"][0]["id"]) == (
        "assistant",
        "hm",
        "call_1",
    )
    assert (two.messages[3]["role"], two.messages[3]["content"]) == ("tool", "2")
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        await client.responses.create(model="m", input="1+1", previous_response_id=first.id)
