"""A model behind a URL gives what it gives in this process; a broken, refusing or absent service is told apart from its answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from judge_server import JudgeServer, by_body, raw, says, status

from paceline.errors import InvalidInput, Unavailable
from paceline.spec import RunSpec
from reward.endpoints.settings import EndpointSettings
from services.cli.chat import spec_of_model
from services.cli.evaluating.evaluation_spec import evaluation_spec, spec_of_endpoint
from services.evaluation.engine_model import EngineModel
from services.evaluation.runner import evaluate
from services.evaluation.url_model import opened_url
from services.model_server.serving import endpoint_of, opened_model

SAMPLE = """
policy: {generation: {max_new_tokens: 6, temperature: 1.0e-4}}
data: {validation: questions.jsonl, prompt_key: question, apply_chat_template: always}
rewards: [{function: choice_accuracy, kwargs: {answer_column: right}}]
grpo: {val_samples_per_prompt: 2, max_val_samples: 3}
"""


def settings(url: str, **changes: Any) -> EndpointSettings:
    return EndpointSettings.model_validate(
        {"base_url": url, "model": "", "first_backoff_s": 0.0, "cache": False, **changes}
    )


def spec_of(folder: Path, text: str, model: RunSpec) -> RunSpec:
    (folder / "eval.yaml").write_text(text)
    return evaluation_spec(folder / "eval.yaml", (), model)


async def test_the_same_numbers_as_in_this_process(folder: Path) -> None:
    choose = (folder / "choose.yaml").read_text()
    model = spec_of_model(str(folder / "model"), folder)
    for text in (choose, SAMPLE):
        spec = spec_of(folder, text, model)
        async with opened_model(spec, "tiny") as served, endpoint_of(served, "127.0.0.1", 0) as url:
            here = await evaluate(EngineModel(served), spec, 0)
            async with opened_url(spec_of(folder, text, spec_of_endpoint(url)), settings(url)) as asked:
                there = await evaluate(asked, spec, 0)
        assert there.result["model"] == "tiny"
        for one, other in zip(here.samples, there.samples, strict=True):
            assert [one[key] for key in ("problem", "completion", "rewards")] == [
                other[key] for key in ("problem", "completion", "rewards")
            ]
            for score, remote in zip(one.get("choices", []), other.get("choices", []), strict=True):
                assert remote["logprob"] == pytest.approx(score["logprob"], abs=1e-4)
                assert remote["is_greedy"] == score["is_greedy"]


async def test_a_request_has_the_settings_and_the_key(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_API_KEY", "secret")
    text = SAMPLE.replace("temperature: 1.0e-4", "temperature: 0.5, top_p: 0.9, stop_strings: [END]")
    spec = spec_of(folder, text, spec_of_endpoint("http://unused"))
    async with JudgeServer(by_body(lambda body: str(body["seed"] % 2))) as server:
        chosen = settings(server.url, model="other", api_key_env="TEST_API_KEY")
        async with opened_url(spec, chosen) as asked:
            await evaluate(asked, spec, 7)
    body = next(body for body in server.bodies if body["messages"][0]["content"] == "Two and two?")
    assert body["route"] == "chat/completions"
    assert body["messages"] == [{"role": "user", "content": "Two and two?"}]
    sent = {key: body[key] for key in ("model", "max_tokens", "temperature", "top_p", "stop")}
    assert sent == {"model": "other", "max_tokens": 6, "temperature": 0.5, "top_p": 0.9, "stop": ["END"]}
    assert "top_k" not in body
    assert server.keys[0] == "Bearer secret"
    assert len({body["seed"] for body in server.bodies}) == 6


async def test_a_request_has_the_tools_of_the_row(folder: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    question = [{"role": "user", "content": "Two and two?"}]
    row = {"question": question, "right": "A", "tools": json.dumps(tools)}
    (folder / "questions.jsonl").write_text(json.dumps(row) + "\n")
    spec = spec_of(folder, SAMPLE, spec_of_endpoint("http://unused"))
    async with JudgeServer(says("A")) as server, opened_url(spec, settings(server.url, model="m")) as asked:
        await evaluate(asked, spec, 0)
    assert [body["tools"] for body in server.bodies] == [tools, tools]


async def test_what_a_service_refuses_is_a_failed_problem(folder: Path) -> None:
    spec = spec_of(folder, SAMPLE, spec_of_endpoint("http://unused"))
    async with JudgeServer(says("A")) as server:
        server.script.extend([status(503), status(400, "too long"), raw(b"{}")])
        async with opened_url(spec, settings(server.url, model="m", max_concurrency=1)) as asked:
            result, samples, _ = await evaluate(asked, spec, 0)
    assert (result["problems"], result["failed"]) == (2, 1)
    assert "too long" in result["failures"][0]
    assert {sample["completion"] for sample in samples} == {"A"}


async def test_a_service_that_is_away_ends_the_evaluation(folder: Path) -> None:
    spec = spec_of(folder, SAMPLE, spec_of_endpoint("http://unused"))
    async with JudgeServer(status(503)) as server:
        chosen = settings(server.url, model="m", attempts=2)
        async with opened_url(spec, chosen) as asked:
            with pytest.raises(Unavailable, match="attempt 2 of 2"):
                await evaluate(asked, spec, 0)
    with pytest.raises(Unavailable, match="cannot be reached"):
        async with opened_url(spec, settings(server.url, attempts=1)):
            pass


async def test_a_service_without_logprobs_of_prompts_is_named(folder: Path) -> None:
    spec = spec_of(folder, (folder / "choose.yaml").read_text(), spec_of_endpoint("http://unused"))
    async with JudgeServer(says("A")) as server:
        chosen = settings(server.url, model="m")
        async with opened_url(spec, chosen) as asked:
            result = (await evaluate(asked, spec, 0)).result
    assert result["problems"] == 0
    assert "does not give the log-probabilities of a prompt" in result["failures"][0]


async def test_a_function_that_counts_tokens_is_refused(folder: Path) -> None:
    text = SAMPLE.replace(
        "choice_accuracy, kwargs: {answer_column: right}", "length, kwargs: {tolerance_tokens: 9}"
    )
    with pytest.raises(InvalidInput, match="counts tokens"):
        async with opened_url(
            spec_of(folder, text, spec_of_endpoint("http://unused")), settings("http://127.0.0.1:1/v1")
        ):
            pass
