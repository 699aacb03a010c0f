"""Runs on streamed data, on prompts with tools and on prepared data, through real services."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_chat import TEMPLATE, make_chat_tokenizer

from paceline.client import Client, state_name
from paceline.services.local.cluster import LocalCluster
from paceline.spec import RunSpec

pytestmark = pytest.mark.slow

DEADLINE_S = 180.0
OWN = """
def size(completions, **columns):
    return [float(len(messages[0]["content"]) % 3) for messages in completions]


def pair(row):
    return {"prompt": row["prompt"][0]["content"], "completion": "7"}
"""
TOOLS = [{"type": "function", "function": {"name": "add"}}]


@pytest.fixture
def model(chat_model: Path) -> Path:
    """The chat model with a template that shows tools."""
    template = "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}" + TEMPLATE
    (chat_model / "chat_template.jinja").write_text(template)
    return chat_model


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_streamed_chats_with_tools_and_prepared_examples(
    client: Client, cluster: LocalCluster, make_spec: Callable[..., RunSpec], model: Path, tmp_path: Path
) -> None:
    chats = [{"prompt": [{"role": "user", "content": f"{n}+1?"}], "tools": TOOLS if n % 2 else None} for n in range(40)]
    write(tmp_path / "set" / "train.jsonl", chats)
    (tmp_path / "own.py").write_text(OWN)
    policy = {"model_name": str(model), "max_total_sequence_length": 256}
    spec = make_spec(
        policy=policy,
        data={
            "train": str(tmp_path / "set"),
            "streaming": True,
            "streaming_block_rows": 12,
            "validation": None,
        },
        grpo={"max_num_steps": 4},
        rewards=[{"function": f"{tmp_path / 'own.py'}:size"}],
    )
    run = client.wait(client.submit(spec).run_id, timeout_s=DEADLINE_S)
    cluster.check()
    assert state_name(run) == "succeeded", run.message
    tokenizer, seen = make_chat_tokenizer(), set()
    for group in client.records.groups(run.run_id):
        has_tools = group["columns"]["tools"] is not None
        seen.add(has_tools)
        text = tokenizer.decode(group["prompt_ids"])
        assert text.startswith('<|system|>[{"type": "function"' if has_tools else "<|user|>")
    assert seen == {True, False}
    warnings = [event.content["message"] for event in client.records.events(run.run_id, kinds=["warning"])]
    assert not [line for line in warnings if "not compared" in line], "the coordinator encodes the same prompts"
    assert client.records.verify(run.run_id).problems == []

    preparation = {
        "function": f"{tmp_path / 'own.py'}:pair",
        "max_prompt_characters": 4,
        "pass_rate": [0.0, 1.0],
        "pass_rate_of": [run.run_id],
    }
    examples = {
        "train": str(tmp_path / "set" / "train.jsonl"),
        "validation": None,
        "preparation": preparation,
    }
    sft = make_spec(
        algorithm="sft",
        policy=policy,
        data=examples,
        sft={"num_examples_per_step": 4, "max_num_epochs": 2, "max_num_steps": 100},
        rewards=[],
    )
    trained = client.wait(client.submit(sft).run_id, timeout_s=DEADLINE_S)
    cluster.check()
    assert state_name(trained) == "succeeded", trained.message
    assert trained.max_num_steps == 5, "two passes over the ten rows of four characters"
