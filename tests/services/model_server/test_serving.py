"""A model folder served without a run: the whole engine for its clients, and the same numbers as transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from openai import AsyncOpenAI
from tiny_chat import save_tiny_chat

from services.cli.chat import spec_of_model
from services.model_server.serving import endpoint_of, model_label, opened_model


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
