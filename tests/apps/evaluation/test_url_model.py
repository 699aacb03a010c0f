"""A model behind a URL gives what it gives in this process; a broken, refusing or absent service is told apart from its answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import chat_templates
import numpy as np
import pytest
from judge_server import JudgeServer, by_body, raw, says, status
from transformers import AddedToken

from paceline.apps.evaluation.engine_model import EngineModel
from paceline.apps.evaluation.evaluate import evaluation_spec, spec_of_endpoint
from paceline.apps.evaluation.runner import evaluate
from paceline.apps.evaluation.url_model import opened_url
from paceline.apps.model_server.serving import ServedModel, endpoint_of, opened_model
from paceline.chat.messages import Unsupported
from paceline.errors import InvalidInput, Unavailable
from paceline.groups import Completion, Version, VersionSpan
from paceline.reward.endpoints.settings import EndpointSettings
from paceline.rollout.engine import GenerationRequest, SamplingParams
from paceline.rollout.stop_strings import cut
from paceline.services.cli.chat import spec_of_model
from paceline.services.coordinator.exchange.requests.lease import params_message
from paceline.services.openai.requests import ChatAsk, read_ask
from paceline.services.rollout.group_sampler import GroupSampler
from paceline.spec import RunSpec
from paceline.v1 import exchange_pb2 as pb

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


class Scripted:
    """An engine that samples one text, up to a stop string or a token that ends it."""

    version, max_batch_size = Version(0, 0), 8

    def __init__(self, tokenizer: Any, text: str) -> None:
        self._ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        self._end = tokenizer.eos_token_id

    async def generate(self, request: GenerationRequest) -> Completion:
        ids = np.array(self._ids, np.int32)
        stops = np.isin(ids, [self._end, *request.params.stop_token_ids]).nonzero()[0]
        ids = ids[: stops[0] + 1] if len(stops) else ids
        ended = Completion(ids, np.zeros(len(ids), np.float32), (VersionSpan(0, 0, 0, len(ids)),), "length")
        scanner = None if request.stop is None else request.stop.scanner()
        if scanner is not None and scanner.push(ids.tolist()):
            return cut(ended, scanner.num_tokens)
        if request.on_progress is not None:
            request.on_progress(replace(ended, finish_reason="abort"))
        return replace(ended, finish_reason="stop") if len(stops) else ended

    def abort(self, request_id: str) -> None:
        pass


END = "<|im_end|>"
RIGHT = "<think>\n6*7 is 42\n</think>\n\n<answer>42</answer>"
REASONING, ANSWER = "6*7 is 42", "<answer>42</answer>"
CALLED = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
OPENED = chat_templates.HERMES.replace(
    "{%- if enable_thinking is defined", "{{- '<think>\\n' }}{%- if enable_thinking is defined"
)
WAYS: list[tuple[str, str, list[str], str, list[dict[str, Any]]]] = [
    # template, what the model writes, stop strings, the text, choices of other services
    (
        "hermes", RIGHT + END, [], RIGHT,
        [
            {"message": {"content": RIGHT}, "finish_reason": "stop"},
            {"message": {"content": ANSWER, "reasoning_content": REASONING}, "finish_reason": "stop"},
            {"message": {"content": ANSWER, "reasoning": f"\n{REASONING}\n"}, "finish_reason": "stop", "stop_reason": None},
        ],
    ),
    (
        "hermes", RIGHT + "<answer>", ["</answer>"], RIGHT,
        [
            {"message": {"content": RIGHT[:-9]}, "finish_reason": "stop", "stop_reason": "</answer>"},
            {"message": {"content": ANSWER[:-9], "reasoning": REASONING}, "finish_reason": "stop", "stop_reason": "</answer>"},
            {"message": {"content": ANSWER[:-9], "reasoning_content": REASONING}, "matched_stop": "</answer>"},
            {"message": {"content": RIGHT}, "finish_reason": "stop", "stop_reason": None},
        ],
    ),
    (
        "hermes", "<think>\n6*7 is 4", [], "<think>\n6*7 is 4",
        [
            {"message": {"content": "<think>\n6*7 is 4"}, "finish_reason": "length"},
            {"message": {"content": None, "reasoning": "6*7 is 4"}, "finish_reason": "length"},
            {"message": {"content": "", "reasoning_content": "6*7 is 4"}, "finish_reason": "length"},
        ],
    ),
    (
        "hermes", f"<think>\nhm\n</think>\n\nSo:\n{CALLED}{END}", [], f"<think>\nhm\n</think>\n\nSo:\n{CALLED}",
        [{"message": {"content": "So:", "reasoning": "hm", "tool_calls": [CALL]}, "finish_reason": "tool_calls"}],
    ),
    (
        "hermes", CALLED + END, [], CALLED,
        [{"message": {"content": None, "tool_calls": [CALL]}, "finish_reason": "tool_calls"}],
    ),
    ("hermes", "42" + END, [], "42", [{"message": {"content": "42"}, "finish_reason": "stop"}]),
    ("hermes", "42\n<|im_start|>user", ["<|im_start|>user"], "42\n", []),
    ("hermes", END, [], "", [{"message": {"content": None}, "finish_reason": "stop"}]),
    (
        "hermes", "a<|im_start|>b", ["<|im_start|>"], "a",
        [{"message": {"content": "a"}, "finish_reason": "stop", "stop_reason": 7}],
    ),
    (
        "opened", RIGHT.removeprefix("<think>\n") + END, [], RIGHT.removeprefix("<think>\n"),
        [
            {"message": {"content": RIGHT.removeprefix("<think>\n")}, "finish_reason": "stop"},
            {"message": {"content": ANSWER, "reasoning": REASONING}, "finish_reason": "stop"},
        ],
    ),
    (
        "opened", "6*7 is 4", [], "<think>\n6*7 is 4",
        [{"message": {"content": None, "reasoning_content": "6*7 is 4"}, "finish_reason": "length"}],
    ),
    (
        "never", RIGHT + "<answer>", ["</answer>"], RIGHT,
        [{"text": RIGHT[:-9], "finish_reason": "stop", "stop_reason": "</answer>"}],
    ),
    ("never", "42" + END, [], "42", [{"text": "42", "finish_reason": "stop", "stop_reason": None}]),
]  # fmt: skip


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(("template", "written", "stops", "text", "others"), WAYS)
async def test_a_completion_has_one_text_by_every_way(
    template: str, written: str, stops: list[str], text: str, others: list[dict[str, Any]], special: bool
) -> None:
    tokenizer = chat_templates.character_tokenizer(OPENED if template == "opened" else chat_templates.HERMES)
    tags = ("<think>", "</think>", "<answer>", "</answer>", "<tool_call>", "</tool_call>")
    tokenizer.add_tokens([AddedToken(tag, special=special) for tag in tags])
    tokenizer.add_tokens([AddedToken("<|im_start|>", special=True)])
    spec = RunSpec.model_validate(
        {
            "policy": {
                "model_name": "m",
                "max_total_sequence_length": 4096,
                "generation": {"stop_strings": stops},
            },
            "data": {"train": "none", "apply_chat_template": "never" if template == "never" else "auto"},
            "rewards": [{"function": "think_answer_format", "kwargs": {"think_in_prompt": template == "opened"}}],
        }
    )
    prompt: Any = "6*7?" if template == "never" else [{"role": "user", "content": "6*7?"}]
    tools = TOOLS if "<tool_call>" in written else None
    engine: Any = Scripted(tokenizer, written)
    served = ServedModel("m", spec, engine, tokenizer, SamplingParams.from_spec(spec.policy.generation))
    lease = pb.Lease(
        prompt_json=json.dumps(prompt),
        num_generations=1,
        tools_json=json.dumps(tools) if tools else "",
        params=params_message(spec.policy.generation),
    )
    _, sampled = await GroupSampler(engine, tokenizer, spec, "rollout-1", lambda group_id: None).sample(lease, None)
    found = [*(await EngineModel(served).sample(prompt, 0, 0, tools)), *sampled]
    async with endpoint_of(served, "127.0.0.1", 0) as url, opened_url(spec, settings(url)) as asked:
        found += await asked.sample(prompt, 0, 0, tools)
    for choice in others:
        body = json.dumps({"choices": [choice]}).encode()
        async with (
            JudgeServer(raw(body)) as server,
            opened_url(spec, settings(server.url, model="m")) as asked,
        ):
            found += await asked.sample(prompt, 0, 0, tools)
    assert [each.text for each in found] == [text] * (len(found))


async def test_a_service_that_names_no_stop_string_is_warned_of(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = SAMPLE.replace("temperature: 1.0e-4", "stop_strings: [END]")
    spec = spec_of(folder, text, spec_of_endpoint("http://unused"))
    body = json.dumps({"choices": [{"message": {"content": "42"}, "finish_reason": "stop"}]}).encode()
    async with JudgeServer(raw(body)) as server, opened_url(spec, settings(server.url, model="m")) as asked:
        for index in range(2):
            await asked.sample([{"role": "user", "content": "?"}], index, 0)
    assert [record.message.partition(" string")[0] for record in caplog.records] == [
        "the service does not name the stop"
    ]


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


async def test_a_prompt_that_the_assistant_begins_is_continued_by_every_server(folder: Path) -> None:
    question = [{"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "It is"}]
    (folder / "questions.jsonl").write_text(json.dumps({"question": question, "right": "A"}) + "\n")
    spec = spec_of(folder, SAMPLE, spec_of_endpoint("http://unused"))
    async with JudgeServer(says("A")) as server, opened_url(spec, settings(server.url, model="m")) as asked:
        await evaluate(asked, spec, 0)
    for body in server.bodies:
        assert body["messages"] == question
        assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
        assert read_ask(ChatAsk, {key: body[key] for key in body if key != "route"}).messages[-1].content == "It is"
        for name, value in (("continue_final_message", False), ("add_generation_prompt", True)):
            with pytest.raises(
                Unsupported, match=f"{name} is {value}, but must be {not value} with a last message of the assistant"
            ):
                read_ask(ChatAsk, {"model": "m", "messages": question, name: value})


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
    assert "does not return the log-probabilities of a prompt" in result["failures"][0]


async def test_a_function_that_counts_tokens_is_refused(folder: Path) -> None:
    text = SAMPLE.replace("choice_accuracy, kwargs: {answer_column: right}", "length, kwargs: {tolerance_tokens: 9}")
    with pytest.raises(InvalidInput, match="counts tokens"):
        async with opened_url(
            spec_of(folder, text, spec_of_endpoint("http://unused")), settings("http://127.0.0.1:1/v1")
        ):
            pass
