"""Agents at the endpoint: tools in the prompt, calls and reasoning in the answers. Each test runs once for every engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import chat_templates
import openai
import pytest
from chain_model import write_chain_model
from endpoint_run import RUN, EndpointRun
from openai import AsyncOpenAI

TEXT = (
    "<think>", "\nI ", "add.", "\n</thi", "nk>\n\n", "So", ":\n", "<tool_", 'call>\n{"name": "add", "argu', 'ments": {"x": 1}}',
    "\n</tool_", "call>", "\n<tool_call>\n", '{"name": "add", "arguments": {"x": 2}}\n', "</tool_call>",
)  # fmt: skip
FORCED = ('{"x": 3}', "}\n</tool_call>\n")
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"properties": {"x": {"type": "integer"}}},
    },
}
ASKED: Any = {"role": "user", "content": "1+1?"}
ASK: Any = {"model": RUN, "messages": [ASKED], "max_tokens": 60, "seed": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that always reasons, writes content and calls twice; after the beginning of a call it completes that one."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = chat_templates.character_tokenizer(chat_templates.HERMES)
    write_chain_model(folder, tokenizer, [("\n", *TEXT), (" ", *FORCED)])
    return folder


def arguments(calls: Any) -> list[Any]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls or []]


async def test_calls_and_reasoning_come_apart_from_content(client: AsyncOpenAI, run: EndpointRun) -> None:
    answer = await client.chat.completions.create(
        **ASK, tools=[TOOL], logprobs=True, extra_body={"return_token_ids": True}
    )
    choice: Any = answer.choices[0]
    assert run.tokenizer.decode(choice.token_ids, skip_special_tokens=True) == "".join(TEXT)
    assert choice.message.content == "So:"
    assert choice.message.reasoning_content == "I add."
    assert arguments(choice.message.tool_calls) == [("add", {"x": 1}), ("add", {"x": 2})]
    assert choice.finish_reason == "tool_calls"
    assert len({call.id for call in choice.message.tool_calls}) == 2
    assert len(choice.logprobs.content) == len(choice.token_ids) == answer.usage.completion_tokens  # type: ignore[union-attr]
    prompt = run.tokenizer.decode(choice.prompt_token_ids)
    assert '"description": "Adds."' in prompt


async def test_a_stream_of_calls_joins_to_the_whole_answer(client: AsyncOpenAI) -> None:
    whole: Any = (await client.chat.completions.create(**ASK, tools=[TOOL], n=2, logprobs=True)).choices
    stream = client.chat.completions.stream(**ASK, tools=[TOOL], n=2, logprobs=True)
    reasoning = {0: "", 1: ""}
    chunks = 0
    async with stream as events:
        async for event in events:
            if event.type == "chunk":
                chunks += 1
                for choice in event.chunk.choices:
                    reasoning[choice.index] += getattr(choice.delta, "reasoning_content", None) or ""
        final = await events.get_final_completion()
    assert chunks > 8
    for expected, got in zip(whole, final.choices, strict=True):
        assert got.message.content == expected.message.content
        assert reasoning[got.index] == expected.message.reasoning_content
        assert arguments(got.message.tool_calls) == arguments(expected.message.tool_calls)
        assert got.finish_reason == expected.finish_reason == "tool_calls"
        assert got.logprobs is not None
        assert [t.token for t in got.logprobs.content or []] == [t.token for t in expected.logprobs.content]


async def test_an_answer_goes_back_as_it_came(client: AsyncOpenAI, run: EndpointRun) -> None:
    ask = ASK | {"tools": [TOOL]}
    first = (await client.chat.completions.create(**ask, extra_body={"return_token_ids": True})).choices[0]
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": str(number)}
        for number, call in enumerate(first.message.tool_calls or [])
    ]
    history: Any = [ASKED, first.message, *reversed(results)]
    then: Any = (
        await client.chat.completions.create(**ask | {"messages": history}, extra_body={"return_token_ids": True})
    ).choices[0]
    before, after = (run.tokenizer.decode(c.prompt_token_ids) for c in (first, then))  # type: ignore[attr-defined]
    assert after.startswith(before)
    called, _, results_text = after[len(before) :].partition("<|im_end|>")
    assert called == "".join(TEXT)
    assert results_text.index("<tool_response>\n0") < results_text.index("<tool_response>\n1")


async def test_without_tools_the_same_text_is_content(client: AsyncOpenAI) -> None:
    for more in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        message: Any = (await client.chat.completions.create(**ASK, **more)).choices[0].message
        assert message.tool_calls is None
        assert message.content == "".join(TEXT[5:])
        assert message.reasoning_content == "I add."
    body = {"separate_reasoning": False}
    message = (await client.chat.completions.create(**ASK, extra_body=body)).choices[0].message
    assert message.content == "".join(TEXT)
    said = await client.completions.create(model=RUN, prompt="x\n", max_tokens=60)
    assert said.choices[0].text == "".join(TEXT)
    assert said.choices[0].finish_reason == "stop"


async def test_a_demanded_call_is_begun_in_the_prompt(client: AsyncOpenAI, run: EndpointRun) -> None:
    named: Any = {"type": "function", "function": {"name": "add"}}
    for choice in (named, "required"):
        answer: Any = await client.chat.completions.create(
            **ASK, tools=[TOOL], tool_choice=choice, extra_body={"return_token_ids": True}
        )
        prompt = run.tokenizer.decode(answer.choices[0].prompt_token_ids)
        assert prompt.endswith('<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": ')
        assert arguments(answer.choices[0].message.tool_calls) == [("add", {"x": 3})]
        assert answer.choices[0].message.content is None
    with pytest.raises(openai.BadRequestError, match="'sub', which is not in `tools`"):
        await client.chat.completions.create(
            **ASK, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "sub"}}
        )


async def test_one_call_at_a_time_is_one_call(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(**ASK, tools=[TOOL], parallel_tool_calls=False)
    assert arguments(answer.choices[0].message.tool_calls) == [("add", {"x": 1})]


async def test_a_call_that_is_cut_off_stays_text(client: AsyncOpenAI) -> None:
    answer: Any = await client.chat.completions.create(**ASK | {"max_tokens": 9}, tools=[TOOL])
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content == 'So:\n<tool_call>\n{"name": "add", "argu'
    assert answer.choices[0].finish_reason == "length"


async def test_reasoning_is_off_where_the_effort_is_none(client: AsyncOpenAI, run: EndpointRun) -> None:
    body = {"return_token_ids": True}
    for more in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
        answer: Any = await client.chat.completions.create(**ASK, extra_body=body | more)
        prompt = run.tokenizer.decode(answer.choices[0].prompt_token_ids)
        assert prompt.endswith("<think>\n\n</think>\n\n")


async def test_tools_whose_calls_could_not_be_read_are_refused(client: AsyncOpenAI, run: EndpointRun) -> None:
    run.tokenizer.chat_template = "{{ tools | tojson }}" + chat_templates.WITH_IDS + "{{ '\\n' }}"
    with pytest.raises(openai.BadRequestError, match=r"set environment\.tool_parser") as refused:
        await client.chat.completions.create(**ASK, tools=[TOOL])
    assert refused.value.param == "tools"
    for parser, calls in (("hermes", 2), ("none", 0)):
        environment = run.spec.environment.model_copy(update={"tool_parser": parser})
        run.spec = run.spec.model_copy(update={"environment": environment})
        answer = await client.chat.completions.create(**ASK, tools=[TOOL])
        assert len(answer.choices[0].message.tool_calls or []) == calls
    with pytest.raises(openai.BadRequestError, match="use 'auto'"):
        await client.chat.completions.create(**ASK, tools=[TOOL], tool_choice="required")


RESPONSE_TOOL: Any = {
    "type": "function",
    "name": "add",
    "parameters": TOOL["function"]["parameters"],
    "strict": False,
}


async def test_a_response_is_the_chat_that_its_items_mean(client: AsyncOpenAI, run: EndpointRun) -> None:
    ask: Any = {
        "model": RUN, "tools": [RESPONSE_TOOL], "max_output_tokens": 60, "instructions": "Be brief.", "extra_body": {"seed": 1}
    }  # fmt: skip
    first = await client.responses.create(**ask, input="1+1?")
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
    assert first.output_text == "So:"
    assert (first.status, first.model) == ("completed", f"{RUN}@1.4")
    assert first.output[0].content[0].text == "I add."  # type: ignore[union-attr, index]
    assert first.usage is not None
    assert first.usage.output_tokens == len(TEXT) + 1
    assert first.usage.output_tokens_details.reasoning_tokens == 5
    items: Any = [{"role": "user", "content": "1+1?"}, *(item.model_dump() for item in first.output)]
    for number, call in enumerate(first.output[2:]):
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": str(number)})  # type: ignore[union-attr]
    second = await client.responses.create(**ask, input=items)
    as_chat: Any = await client.chat.completions.create(
        model=RUN,
        tools=[TOOL],
        messages=[
            {"role": "system", "content": "Be brief."},
            ASKED,
            {"role": "assistant", "content": "So:", "reasoning_content": "I add.", "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}},
                {"id": "b", "type": "function", "function": {"name": "add", "arguments": '{"x": 2}'}},
            ]},
            {"role": "tool", "tool_call_id": "a", "content": "0"},
            {"role": "tool", "tool_call_id": "b", "content": "1"},
        ],
    )  # fmt: skip
    assert second.usage is not None
    # Only one of them has `strict` and the description in its definitions.
    difference = len('"description": "Adds.", ') - len(', "strict": false')
    assert as_chat.usage.prompt_tokens - second.usage.input_tokens == difference


def items_of(response: Any) -> list[Any]:
    """Return the content of its items, without ids and the client's additions."""
    known = ("type", "status", "name", "arguments", "text")
    items = []
    for item in response.output:
        fields = item.to_dict()
        content = fields.get("content") or []
        items.append([{key: each[key] for key in known if key in each} for each in (fields, *content)])
    return items


async def test_the_events_of_a_response_build_the_whole(client: AsyncOpenAI) -> None:
    ask: Any = {"model": RUN, "tools": [RESPONSE_TOOL], "input": "1+1?", "extra_body": {"seed": 1}}
    whole = await client.responses.create(**ask, max_output_tokens=60)
    kinds, numbers, deltas = [], [], {"reasoning_text": "", "output_text": "", "function_call_arguments": ""}
    async with client.responses.stream(**ask, max_output_tokens=60) as stream:
        async for event in stream:
            kinds.append(event.type)
            numbers.append(event.sequence_number)
            kind = event.type.removeprefix("response.").removesuffix(".delta")
            if event.type.endswith(".delta"):
                deltas[kind] += event.delta  # type: ignore[union-attr]
        final = await stream.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert numbers == sorted(set(numbers))
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 4
    assert deltas == {
        "reasoning_text": "I add.",
        "output_text": "So:",
        "function_call_arguments": '{"x": 1}{"x": 2}',
    }
    assert items_of(final) == items_of(whole)
    kinds = []
    async for event in await client.responses.create(**ask, max_output_tokens=7, stream=True):
        kinds.append(event.type)
        last = event
    assert kinds[-1] == "response.incomplete"
    assert last.response.incomplete_details.reason == "max_output_tokens"  # type: ignore[union-attr]
    assert last.response.output[-1].status == "incomplete"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not supported"),
        ({"background": True}, "background", "not supported"),
        ({"include": ["message.output_text.logprobs"]}, "include", "not supported"),
        ({"tools": [{"type": "web_search"}]}, "tools", "only functions"),
        ({"tools": [RESPONSE_TOOL | {"name": None}]}, "tools", "the invalid name None"),
        ({"text": {"format": {"type": "json_object"}}}, "text", "only plain text"),
        ({"reasoning": {"effort": "high"}}, "reasoning", "can only switch reasoning off"),
        ({"reasoning": {"depth": 3}}, "reasoning", "reasoning.depth is unknown"),
        ({"tempreature": 1}, "tempreature", "is unknown"),
        ({"max_output_tokens": 99999}, "max_output_tokens", "exceeds 4096"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
        ({"input": []}, "input", "input is empty"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "'item_reference', which is unknown"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "only text"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input", "encrypted"),
        ({"input": [{"type": "reasoning", "content": ["x"]}]}, "input", "in an unknown form"),
        ({"input": [{"role": "critic", "content": "x"}]}, "input", "the unsupported role 'critic'"),
    ],
)
async def test_what_a_response_cannot_be_is_refused_with_the_field(
    client: AsyncOpenAI, body: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as refused:
        await client.post("/responses", body={"model": RUN, "input": "1+1?"} | body, cast_to=object)
    assert refused.value.param == field


async def test_tokens_go_in_and_come_out(client: AsyncOpenAI, run: EndpointRun) -> None:
    url = str(client.base_url).removesuffix("/v1/") + "/inference/v1/generate"
    prompt_ids = run.tokenizer("1+1?\n")["input_ids"]
    sampling = {
        "max_tokens": 60,
        "logprobs": 1,
        "seed": 1,
        "skip_special_tokens": False,
        "routed_experts_prompt_start": 2,
        "stop_token_ids": [5],
    }
    body = {"model": RUN, "token_ids": prompt_ids, "sampling_params": sampling, "return_token_ids": True}
    answer: Any = await client.post(url, body=body, cast_to=object)
    (choice,) = answer["choices"]
    ids = choice["token_ids"]
    assert run.tokenizer.decode(ids) == "".join(TEXT) + "<|im_end|>"
    assert answer["prompt_token_ids"] == prompt_ids
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [f"token_id:{i}" for i in ids]
    assert all(entry["logprob"] > -1e-3 for entry in choice["logprobs"]["content"])
    assert (choice["finish_reason"], choice["versions"]) == ("stop", [[1, 4, 0, len(ids)]])
    assert answer["usage"]["completion_tokens"] == len(ids)
    streamed: list[int] = []
    stream: Any = await client.post(
        url, body=body | {"stream": True}, cast_to=object, stream=True, stream_cls=openai.AsyncStream[object]
    )
    async for chunk in stream:
        for part in chunk["choices"]:
            streamed += part["token_ids"]
    assert streamed == ids
    assert part["finish_reason"] == "stop"
    for more, field in (
        ({"sampling_params": {"presence_penalty": 1}}, "presence_penalty"),
        ({"sampling_params": {"logprobs": 5}}, "logprobs"),
        ({"sampling_params": 1}, "sampling_params"),
        ({"sampling_params": {"stream": True}, "stream": True}, "stream"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"features": {"x": 1}}, "features"),
        ({"output_mode": "text"}, "output_mode"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.post(url, body=body | more, cast_to=object)
        assert refused.value.param == field
