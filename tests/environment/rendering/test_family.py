"""Rendering by the package `renderers`: a Qwen 3 conversation whose bridge keeps every token, and what is refused."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from episode_world import HERMES, merged_tokenizer, run_spec, spelled, user

from paceline.environment.protocols import SampledTurn
from paceline.environment.rendering.family import FamilyRendering
from paceline.environment.rendering.protocol import Conversation
from paceline.environment.rendering.template import TemplateRendering
from paceline.environment.setting import choose_renderings
from paceline.errors import InvalidInput
from paceline.groups import VersionSpan

pytest.importorskip("renderers", reason="the extra 'environments' is not installed")

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        },
    }
]


def qwen_tokenizer() -> Any:
    tokenizer = merged_tokenizer(HERMES)
    tokenizer.add_tokens(["<think>", "</think>", "<tool_response>", "</tool_response>"])
    return tokenizer


TOKENIZER = qwen_tokenizer()


def sampled(text: str, end: bool = True) -> SampledTurn:
    ids = spelled(text, TOKENIZER, random.Random(3))
    if end:
        ids.append(TOKENIZER.eos_token_id)
    return SampledTurn(
        np.array(ids, np.int32),
        np.zeros(len(ids), np.float32),
        (VersionSpan(1, 0, 0, len(ids)),),
        "stop" if end else "length",
        text,
    )


def call(arguments: str = '{"a":15}') -> str:
    return f'<tool_call>\n{{"name":"add","arguments":{arguments}}}\n</tool_call>'


@pytest.fixture
def rendering() -> FamilyRendering:
    return FamilyRendering(TOKENIZER, "qwen3", {})


def test_a_turn_is_read_and_bridged_without_a_changed_token(rendering: FamilyRendering) -> None:
    before = Conversation(user("Add 15."), TOOLS)
    prompt_ids = rendering.prompt(before)
    turn = sampled(f"<think>\nhm\n</think>\n\nSo: {call()}")
    parsed = rendering.parse(before, prompt_ids, turn)
    assert (parsed.reasoning.strip(), parsed.content.strip()) == ("hm", "So:")
    assert [(each.name, each.arguments) for each in parsed.calls] == [("add", {"a": 15})]
    answer = parsed.message("call_0")
    new = [{"role": "tool", "content": "15", "name": "add", "tool_call_id": "call_0_0"}]
    bridge = rendering.bridge(before, prompt_ids, turn, answer, new)
    assert bridge is not None
    text = TOKENIZER.decode(bridge, skip_special_tokens=False)
    assert text.startswith("\n<|im_start|>user\n<tool_response>\n15\n</tool_response><|im_end|>")
    assert text.endswith("<|im_start|>assistant\n")
    rendered = rendering.prompt(before.extended([answer, *new]))
    read = np.concatenate([prompt_ids, turn.token_ids, bridge])
    assert not np.array_equal(rendered, read)  # what rendering anew would have changed


def test_a_broken_call_is_a_fault(rendering: FamilyRendering) -> None:
    before = Conversation(user("Add 15."), TOOLS)
    parsed = rendering.parse(before, rendering.prompt(before), sampled(call('{"a":15')))
    assert parsed.calls == ()
    (fault,) = parsed.faults
    assert fault.startswith("invalid json")


def test_unknown_families_and_arguments_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"environment.renderer 'no-such' cannot be used"):
        FamilyRendering(TOKENIZER, "no-such", {})
    with pytest.raises(InvalidInput, match=r"cannot be used with this tokenizer and data.chat_template_kwargs"):
        FamilyRendering(TOKENIZER, "qwen3", {"no_such_argument": 1})


def test_the_spec_chooses_the_rendering() -> None:
    def chat(model: str = "made", **environment: Any) -> Any:
        spec = run_spec(policy={"model_name": model}, environment=environment)
        return choose_renderings(spec, TOKENIZER).chat

    assert isinstance(chat("Qwen/Qwen3-0.6B"), FamilyRendering)
    assert isinstance(chat("Qwen/Qwen3-0.6B", renderer="template"), TemplateRendering)
    assert isinstance(chat("Qwen/Qwen3-0.6B", tool_parser="json"), TemplateRendering)
    assert isinstance(chat("my/fine-tune"), TemplateRendering)
    assert chat("my/fine-tune", renderer="qwen3").family == "qwen3"
    with pytest.raises(InvalidInput, match="set one of them to auto"):
        chat(renderer="qwen3", tool_parser="hermes")


def test_messages_are_as_json_as_they_were_made(rendering: FamilyRendering) -> None:
    parsed = rendering.parse(Conversation(user("?"), TOOLS), rendering.prompt(Conversation(user("?"))), sampled(call()))
    assert json.loads(json.dumps(parsed.message("c")))["tool_calls"][0]["id"] == "c_0"


def tokenizer_of_families() -> Any:
    tokenizer = qwen_tokenizer()
    marks = (
        "vision_start",
        "vision_end",
        "image_pad",
        "video_pad",
        "endoftext",
        "begin_of_text",
        "end_of_text",
    )
    headers = ("start_header_id", "end_header_id", "eot_id", "eom_id", "python_tag")
    tokenizer.add_tokens([f"<|{name}|>" for name in marks + headers], special_tokens=True)
    return tokenizer


FLAG: Any = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"properties": {"a": {"type": "boolean"}, "s": {"type": "string"}}},
    },
}
XML = "<tool_call>\n<function=f>\n<parameter=a>\nTrue\n</parameter>\n<parameter=s>\n  x \n</parameter>\n</function>\n</tool_call>"
CUT = "<tool_call>\n<function=f>\n<parameter=a>\nTrue\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("family", "text", "calls", "faults"),
    [
        ("qwen3.5", XML, [("f", {"a": True, "s": "  x "})], 0),  # PrimeIntellect-ai/renderers#47
        ("qwen3.5", CUT, [], 1),
        ("llama-3", '{"name": "Ada", "born": 1815}', [], 0),
        ("llama-3", '{"name": "f"}', [], 0),
        ("llama-3", '{"name": "f", "parameters": {"a": true}}', [("f", {"a": True})], 0),
    ],
)
def test_calls_of_a_family_are_read_as_those_of_a_template(
    family: str, text: str, calls: list[Any], faults: int
) -> None:
    rendering = FamilyRendering(tokenizer_of_families(), family, {})
    parsed = rendering.parse(Conversation(user("q"), [FLAG]), np.zeros(1, np.int32), sampled(text))
    assert [tuple(call) for call in parsed.calls] == calls
    assert len(parsed.faults) == faults
    if family == "llama-3" and not calls:
        assert parsed.content == text
