"""Tokens of examples: whole texts, and tools that reach the chat template."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_templates import HERMES, character_tokenizer

from paceline.data.tokens import render_chat
from paceline.errors import InvalidInput
from paceline.learner.batch.encoding import ExampleEncoder
from paceline.learner.objectives.dpo import Dpo
from paceline.learner.objectives.sft import Sft
from paceline.services.openai.requests import ChatAsk, read_ask
from paceline.spec import RunSpec

TEMPLATE = (
    "{% if tools %}T:{{ tools[0].function.name }}<|im_end|>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": None}}]
USER, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}


def spec_of(**sections: Any) -> RunSpec:
    tree = {"algorithm": "sft", "policy": {"model_name": "m"}, "data": {"train": "x"}, **sections}
    return RunSpec.model_validate(tree)


def test_a_whole_text_trains_after_its_first_token() -> None:
    tokenizer = character_tokenizer(None)
    (sample,) = Sft(spec_of()).samples({"text": "2+2=4"}, 0, ExampleEncoder(spec_of(), tokenizer), None)
    assert tokenizer.decode(sample.prompt_ids) == "2"
    assert tokenizer.decode(sample.completion_ids) == "+2=4<|im_end|>"


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
def test_tools_of_a_row_are_in_its_prompt(tools: Any) -> None:
    tokenizer, spec = character_tokenizer(TEMPLATE), spec_of()
    encoder = ExampleEncoder(spec, tokenizer)
    (sample,) = Sft(spec).samples({"messages": [USER, ANSWER], "tools": tools}, 0, encoder, None)
    assert tokenizer.decode(sample.prompt_ids) == "T:add<|im_end|>[user]2+2?<|im_end|>[assistant]"
    assert tokenizer.decode(sample.completion_ids) == "4<|im_end|>"
    (plain,) = Sft(spec).samples({"messages": [USER, ANSWER], "tools": None}, 0, encoder, None)
    assert tokenizer.decode(plain.prompt_ids) == "[user]2+2?<|im_end|>[assistant]", "another row has none"

    pair = {"chosen": [USER, ANSWER], "rejected": [USER, {**ANSWER, "content": "5"}], "tools": tools}
    samples = Dpo(spec_of(algorithm="dpo")).samples(pair, 0, encoder, None)
    assert [tokenizer.decode(s.prompt_ids)[:5] for s in samples] == ["T:add", "T:add"]


@pytest.mark.parametrize("arguments", ['{"city": "Rome"}', {"city": "Rome"}])
def test_calls_train_as_the_endpoint_writes_them(arguments: Any) -> None:
    """oumi-ai/oumi#2599: data sets have the API's form, with arguments as text."""
    tokenizer, spec = character_tokenizer(HERMES), spec_of()
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    (sample,) = Sft(spec).samples({"messages": [USER, answer]}, 0, ExampleEncoder(spec, tokenizer), None)
    asked = read_ask(ChatAsk, {"model": "m", "messages": [USER, answer]}).rendered()
    ids = [*sample.prompt_ids, *sample.completion_ids]
    assert tokenizer.decode(ids) == render_chat(tokenizer, asked).rstrip("\n")
    assert '"arguments": {"city": "Rome"}}' in tokenizer.decode(sample.completion_ids)


def test_masks_of_the_assistant_are_after_the_tools() -> None:
    tokenizer = character_tokenizer(TEMPLATE)
    spec = spec_of(sft={"loss_mask": "assistant"}, data={"train": "x", "messages_key": "messages"})
    row = {"messages": [USER, ANSWER, USER, ANSWER], "tools": TOOLS}
    (sample,) = Sft(spec).samples(row, 0, ExampleEncoder(spec, tokenizer), None)
    assert sample.trained_T is not None
    assert tokenizer.decode(sample.completion_ids[sample.trained_T]) == "4<|im_end|>4<|im_end|>"


def test_a_template_that_reads_no_tools_is_refused() -> None:
    tokenizer = character_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(InvalidInput, match=r"column 'tools' defines 1 tools, but the chat template .* reads none"):
        ExampleEncoder(spec_of(), tokenizer).of_row({"tools": TOOLS})


def test_a_completion_that_was_cut_off_is_not_taught_to_stop() -> None:
    """The rows of `samples export` say how a completion ended (huggingface/transformers#19742)."""
    tokenizer, spec = character_tokenizer(TEMPLATE), spec_of()
    for reason, end in (("length", ""), ("stop", "<|im_end|>"), (None, "<|im_end|>")):
        row = {"prompt": [USER], "completion": "4, be", "finish_reason": reason}
        (sample,) = Sft(spec).samples(row, 0, ExampleEncoder(spec, tokenizer), None)
        assert tokenizer.decode(sample.completion_ids) == f"4, be{end}"
