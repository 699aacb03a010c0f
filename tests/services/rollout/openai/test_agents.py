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
    """A model that always reasons, says something and calls twice; behind the beginning of a call it completes that one."""
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
        await client.chat.completions.create(
            **ask | {"messages": history}, extra_body={"return_token_ids": True}
        )
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
    with pytest.raises(openai.BadRequestError, match="'sub', which tools does not have"):
        await client.chat.completions.create(
            **ASK, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "sub"}}
        )


async def test_one_call_at_a_time_is_one_call(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(**ASK, tools=[TOOL], parallel_tool_calls=False)
    assert arguments(answer.choices[0].message.tool_calls) == [("add", {"x": 1})]


async def test_a_call_that_is_cut_off_stays_text(client: AsyncOpenAI) -> None:
    answer: Any = await client.chat.completions.create(**ASK | {"max_tokens": 9}, tools=[TOOL])
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content == 'So:<tool_call>\n{"name": "add", "argu'
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
    with pytest.raises(openai.BadRequestError, match="take 'auto'"):
        await client.chat.completions.create(**ASK, tools=[TOOL], tool_choice="required")
