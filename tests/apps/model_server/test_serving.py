"""A model folder served without a run: the whole engine for its clients, and the same numbers as transformers."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI
from tiny_chat import save_tiny_chat

from paceline.apps.model_server.serving import endpoint_of, model_label, opened_model, registered_name
from paceline.apps.model_server.trace_log import TraceLog
from paceline.apps.registry.statement import Lineage, make_statement
from paceline.services.cli.chat import spec_of_model


@pytest.mark.parametrize(
    ("model", "label"),
    [("run:grpo-2", "grpo-2"), ("/models/tiny/", "tiny"), ("s3://bucket/exports/step-4", "step-4")],
)
def test_a_model_is_named_after_its_run_or_folder(model: str, label: str) -> None:
    assert model_label(model) == label


async def test_a_folder_is_served_and_a_harness_gets_more_than_an_eighth(tmp_path: Path) -> None:
    save_tiny_chat(tmp_path)
    spec = spec_of_model(str(tmp_path), tmp_path)
    async with (
        opened_model(spec, "tiny") as served,
        endpoint_of(served, "127.0.0.1", 0) as url,
        AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client,
    ):
        assert [each.id for each in (await client.models.list()).data] == ["tiny", "tiny@0.0"]
        # A worker's gate for 16 sequences holds 32 at most.
        many = await client.completions.create(
            model="tiny", prompt=["one"] * 60, max_tokens=1, temperature=0, logprobs=1, echo=True
        )
        assert len(many.choices) == 60
        assert len({choice.logprobs.model_dump_json() for choice in many.choices if choice.logprobs}) == 1


async def test_feedback_reaches_the_traces_by_one_call(tmp_path: Path) -> None:
    save_tiny_chat(tmp_path / "model")
    spec = spec_of_model(str(tmp_path / "model"), tmp_path)
    messages: Any = [{"role": "user", "content": "1+1="}]
    with closing(TraceLog(tmp_path / "traces", "sums:1", 1 << 20)) as log:
        async with (
            opened_model(spec, "tiny") as served,
            endpoint_of(served, "127.0.0.1", 0, log) as url,
            AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client,
            aiohttp.ClientSession() as session,
        ):
            whole = await client.chat.completions.create(model="tiny", messages=messages, n=2, max_tokens=4)
            text = await client.completions.create(model="tiny", prompt=["one", "two"], max_tokens=3)
            stream = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=4, stream=True)
            streamed = {chunk.id async for chunk in stream}.pop()
            for content, status in (
                ({"completion_id": whole.id, "index": 1, "score": 1}, 200),
                ({"completion_id": text.id, "index": 1, "score": 0.5}, 200),
                ({"completion_id": streamed, "score": 0}, 200),
                ({"completion_id": streamed, "score": 0}, 200),
                ({"completion_id": streamed, "score": 1}, 409),
                ({"completion_id": "nosuch", "score": 1}, 404),
                ({"completion_id": whole.id, "score": "good"}, 400),
                ({"completion_id": whole.id, "rating": 1}, 400),
            ):
                async with session.post(f"{url}/feedback", json=content) as answer:
                    assert answer.status == status, await answer.text()
    paths = sorted((tmp_path / "traces").glob("*.jsonl"))
    requests, rated = ([json.loads(line) for line in path.read_text().splitlines()] for path in reversed(paths))
    assert [row["completion"] for row in requests[:2]] == [each.message.content for each in whole.choices]
    assert [row["prompt"] for row in requests] == [messages, messages, "one", "two", messages]
    texts = {(row["id"], row["choice"]): row["completion"] for row in requests}
    scores = {(whole.id, 1): 1, (text.id, 1): 0.5, (streamed, 0): 0}
    assert [((row["id"], row["choice"]), row["final_reward"]) for row in rated] == [
        (choice, score) for choice, score in scores.items() if texts[choice]
    ]


async def test_an_endpoint_without_traces_takes_no_feedback(tmp_path: Path) -> None:
    save_tiny_chat(tmp_path)
    async with (
        opened_model(spec_of_model(str(tmp_path), tmp_path), "tiny") as served,
        endpoint_of(served, "127.0.0.1", 0) as url,
        aiohttp.ClientSession() as session,
        session.post(f"{url}/feedback", json={"completion_id": "a", "score": 1}) as answer,
    ):
        assert answer.status == 400
        assert "--traces FOLDER" in await answer.text()


def test_a_registered_folder_names_its_version(tmp_path: Path) -> None:
    assert registered_name(str(tmp_path)) == ""
    statement = make_statement("sums", 3, Lineage(), "", {}, {})
    (tmp_path / "paceline.json").write_text(json.dumps(statement))
    assert registered_name(str(tmp_path)) == "sums:3"
    (tmp_path / "paceline.json").write_text("{}")
    assert registered_name(str(tmp_path)) == ""
