"""The examples of environments, run by a policy that follows a script: real user code, real conversations, no worker."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from episode_world import (
    MemoryTurnLog,
    ScriptedSource,
    ids_of,
    lease,
    merged_tokenizer,
    row_tokens,
    run_group,
)

from paceline.data.prompts import open_prompts
from paceline.environment.hosting.pool import UserCode
from paceline.environment.protocols import FinishedGroup, TurnRequest
from paceline.environment.setting import EpisodeSetting
from paceline.services.environment.conversation_server import ConversationServer
from paceline.spec import RunSpec
from paceline.spec.reading import load_spec

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "environments"
Say = Callable[[TurnRequest, int], str]


async def group_of(spec: RunSpec, say: Say, tokenizer: Any, prompt: Any, columns: dict[str, Any]) -> FinishedGroup:
    """Run a group of two samples with the example's code in its process, and real conversations."""

    def sampled(request: TurnRequest, number: int) -> tuple[list[int], str]:
        return ids_of(say(request, number), tokenizer), "stop"

    source = ScriptedSource(sampled, tokenizer)
    setting = EpisodeSetting.of(spec, tokenizer)
    async with (
        UserCode(spec.environment, num_processes=1) as code,
        ConversationServer("run", tokenizer) as conversations,
    ):
        leased = lease(prompt, 2, columns=columns)
        return await run_group(setting, source, code, leased, MemoryTurnLog(), conversations)


def drawn(spec: RunSpec) -> tuple[Any, dict[str, Any]]:
    """A row of the example's data."""
    prompt, columns = open_prompts(spec.data, spec.seed).draw(1)
    return prompt, dict(columns)


def messages_of(rows: FinishedGroup) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(rows.samples[0].messages_json)
    return found


def reward_function(path: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{path.parent.name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.yaml")), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_spec_loads(path: Path) -> None:
    spec = load_spec(path)
    assert spec.environment.is_used == (path.name == "grpo.yaml")


async def test_the_calculator_is_called_and_its_answer_repeated(tmp_path: Path) -> None:
    folder = tmp_path / "calculator"
    shutil.copytree(EXAMPLES / "calculator", folder, ignore=shutil.ignore_patterns("data", "model", "runs"))
    made = runpy.run_path(str(folder / "prepare.py"))
    made["write_data"](folder / "data", 0)
    tokenizer = made["make_tokenizer"]()
    spec = load_spec(folder / "grpo.yaml")
    prompt, columns = drawn(spec)

    def say(request: TurnRequest, number: int) -> str:
        if number == 0:
            return f"{made['BEGIN']}{prompt.removesuffix('=')}{made['END_OF_CALL']}"
        return str(tokenizer.decode(request.prompt_ids, skip_special_tokens=True)).rpartition("}}")[2]

    rows = await group_of(spec, say, tokenizer, prompt, columns)
    assert [m["role"] for m in messages_of(rows)] == ["assistant", "tool", "assistant"]
    assert len(rows.completions) == 2
    assert row_tokens(rows.completions[0]).tolist() == [
        *ids_of(prompt, tokenizer, end=False),
        *ids_of(say(TurnRequest(rows.prompt_ids, lease().params, 0, ""), 0), tokenizer),
        *ids_of(columns["answer"], tokenizer, end=False),
        *ids_of(columns["answer"], tokenizer),
    ]
    correct = reward_function(folder / "reward.py", "correct")
    assert correct([messages_of(rows)], [columns["answer"]]) == [1.0]
    assert correct([messages_of(rows)[-1:]], [columns["answer"]]) == [0.0]  # without the tool


async def test_the_search_finds_its_page_and_is_rewarded_twice() -> None:
    spec, tokenizer = example("search")
    prompt, columns = drawn(spec)
    question = prompt[0]["content"].partition("?")[0]
    script = [
        call("search", words=question),
        call("open_file", name="nothing.txt"),
        call("open_file", name=columns["page"]),
        f"It is {columns['answer']}.",
    ]
    rows = await group_of(spec, lambda _, number: script[min(number, 3)], tokenizer, prompt, columns)
    results = [m["content"] for m in messages_of(rows) if m["role"] == "tool"]
    assert columns["page"] in results[0].splitlines()
    assert "there is no file nothing.txt" in results[1]
    assert columns["answer"].lower() in results[2].lower()
    assert [text.reward for text in rows.samples] == [0.5, 0.5]
    answered = reward_function(EXAMPLES / "search" / "reward.py", "answered")
    assert answered([messages_of(rows)], [columns["answer"]]) == [1.0]


def call(name: str, /, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def test_the_agent_trains_by_its_session() -> None:
    spec, tokenizer = example("agent")
    prompt, columns = drawn(spec)
    script = [
        call("calculate", expression="3*(4+5)"),
        call("calculate", expression="import os"),
        f"So: {columns['answer']}.",
    ]
    rows = await group_of(spec, lambda _, number: script[min(number, 2)], tokenizer, prompt, columns)
    results = [m["content"] for m in messages_of(rows) if m["role"] == "tool"]
    assert results[0] == "27"
    assert results[1].startswith("SyntaxError")
    assert [(text.ending, text.reward) for text in rows.samples] == [("done", 1.0)] * 2
    assert len(rows.completions) == 2  # one row a sample: nothing was encoded again
    assert json.loads(rows.samples[0].tools_json)[0]["function"]["name"] == "calculate"


async def test_the_same_agent_answers_a_plain_server() -> None:
    asked: list[Any] = []

    async def chat(request: web.Request) -> web.Response:
        asked.append(await request.json())
        message: dict[str, Any] = {"role": "assistant", "content": "It is 27."}
        if len(asked) == 1:
            function = {"name": "calculate", "arguments": '{"expression": "3*(4+5)"}'}
            message = {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "type": "function", "function": function}],
            }
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response(
            {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        )

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        (address,) = runner.addresses
        variables = {"OPENAI_BASE_URL": f"http://127.0.0.1:{address[1]}/v1", "OPENAI_API_KEY": "none"}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(EXAMPLES / "agent" / "agent.py"), "What is 3*(4+5)?"),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **variables},
        )
        async with asyncio.timeout(120):
            output, _ = await process.communicate()
    finally:
        await runner.cleanup()
    assert output.decode().strip() == "It is 27."
    assert asked[1]["messages"][-1] == {"role": "tool", "tool_call_id": "c", "content": "27"}


async def test_only_the_moves_of_one_player_train() -> None:
    spec, tokenizer = example("game")

    def say(request: TurnRequest, number: int) -> str:
        return str([1, 4, 2, 5, 3][number])  # X takes the first row

    rows = await group_of(spec, say, tokenizer, "Play.", {"board": "." * 9})
    assert [(text.ending, text.reward) for text in rows.samples] == [("done", 1.0)] * 2
    assert (len(rows.completions), len(rows.rows.turns)) == (2, 6)
    text = tokenizer.decode(row_tokens(rows.completions[0]))
    assert "You play noughts and crosses as X" in text
    assert "as O" not in text
    said = [m["content"] for m in messages_of(rows) if m["role"] == "assistant"]
    assert said == ["1", "2", "3"]


def example(name: str) -> tuple[RunSpec, Any]:
    """The spec of an example for a made tokenizer, whose template takes no arguments."""
    spec = load_spec(EXAMPLES / name / "grpo.yaml")
    data = spec.data.model_copy(update={"chat_template_kwargs": {}})
    environment = spec.environment.model_copy(update={"renderer": "template"})
    return spec.model_copy(update={"data": data, "environment": environment}), merged_tokenizer()
