"""The client of the package `renderers` on a conversation: it renders and reads turns itself, and its tokens train as they are."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from episode_world import (
    HERMES,
    MemoryTurnLog,
    ScriptedSource,
    ids_of,
    lease,
    merged_tokenizer,
    row_tokens,
    run_group,
    run_spec,
    user,
)

from paceline.environment.protocols import TurnRequest
from paceline.environment.setting import EpisodeSetting
from paceline.services.environment.conversation_server import ConversationServer

pytest.importorskip("renderers", reason="the extra 'environments' is not installed")

TOOL = {
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}


async def solve(tokenizer: Any, row: Any, base_url: str, api_key: str, deaths: object) -> float:
    """An agent with the package's client."""
    from openai import AsyncOpenAI
    from renderers import config_from_name, create_renderer
    from renderers.client import generate

    renderer = create_renderer(tokenizer, config_from_name("qwen3"))
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        asked = {"client": client, "renderer": renderer, "model": "policy", "tools": [TOOL]}
        first = await generate(messages=list(row["prompt"]), sampling_params={"max_tokens": 60}, **asked)
        (call,) = first["tool_calls"]
        assert first["finish_reason"] == "tool_calls", first
        said = [{"role": "tool", "content": str(sum(call.arguments.values())), "name": call.name}]
        bridged = renderer.bridge_to_next_turn(first["prompt_ids"], first["completion_ids"], said, tools=[TOOL])
        second = await generate(messages=[], prompt_ids=list(bridged.token_ids), **asked)
        assert len(second["completion_logprobs"]) == len(second["completion_ids"])
    return float(second["content"].strip())


CALL = '<think>\n\n</think>\n\n<tool_call>\n{"name":"add","arguments":{"a":15}}\n</tool_call>'


async def test_tokens_of_the_renderers_client_train_as_they_are() -> None:
    tokenizer: Any = merged_tokenizer(HERMES)
    tokenizer.add_tokens(["<think>", "</think>", "<tool_response>", "</tool_response>"])
    spec = run_spec(environment={"class": "", "agent": "agent.py:solve", "renderer": "template"})
    setting = EpisodeSetting.of(spec, tokenizer)

    def say(request: TurnRequest, number: int) -> tuple[list[int], str]:
        assert tokenizer.eos_token_id in request.params.stop_token_ids
        return ids_of(CALL if number == 0 else "15", tokenizer), "stop"

    source = ScriptedSource(say, tokenizer)
    code: Any = SimpleNamespace(solve=partial(solve, tokenizer))
    async with ConversationServer("r", tokenizer) as conversations:
        leased = lease(user("Add 15."), 2)
        rows = await run_group(setting, source, code, leased, MemoryTurnLog(), conversations)
    assert [(text.ending, text.reward) for text in rows.samples] == [("done", 15.0)] * 2
    assert len(rows.completions) == 2, "a bridge extends its row"
    for completion in rows.completions:
        assert completion.prompt_ids is not None
        second = max(
            (request.prompt_ids for request, _ in source.asked), key=lambda ids: len(ids)
        )  # what the agent sent, id by id
        assert np.array_equal(row_tokens(completion)[: len(second)], second)
