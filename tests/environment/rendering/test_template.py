"""The bridge by the difference of two renderings: where it is provable, and where it says that it is not."""

from __future__ import annotations

from typing import Any

import chat_templates
import numpy as np
import pytest
from episode_world import FORGETFUL, HERMES, merged_tokenizer, user

from paceline.chat.call_formats import CallFormat
from paceline.environment.protocols import SampledTurn
from paceline.environment.rendering.protocol import Conversation
from paceline.environment.rendering.template import TemplateRendering
from paceline.errors import InvalidInput
from paceline.groups import VersionSpan

NEW = user("and now?")
THINKING = HERMES.replace(
    "{{ m.content }}\n{%- for call",
    "{% if m.reasoning_content and loop.index0 > 0 and not messages[loop.index0 + 1:] | selectattr('role', 'equalto', "
    "'user') | list %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}\n{%- for call",
)
"""Strips the reasoning of answers before the user's last message, as templates of reasoning models do."""
ENDLESS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
"""Writes no end behind an answer."""
PREFILLED = HERMES.replace(
    "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
)
"""Opens the turn with tokens that it does not write into the history."""


def turn_of(tokenizer: Any, text: str, end: str = "<|im_end|>", reason: str = "stop") -> SampledTurn:
    ids = tokenizer(text + end, add_special_tokens=False)["input_ids"]
    return SampledTurn(
        np.array(ids, np.int32),
        np.zeros(len(ids), np.float32),
        (VersionSpan(1, 0, 0, len(ids)),),
        reason,
        text,
    )


def bridged(
    template: str, text: str, new: list[Any] = NEW, end: str = "<|im_end|>", reason: str = "stop"
) -> str | None:
    """The text of the bridge behind an answer; None where there is none."""
    tokenizer = merged_tokenizer(template)
    rendering = TemplateRendering(tokenizer, {})
    before = Conversation(user("hello"))
    prompt_ids = rendering.prompt(before)
    turn = turn_of(tokenizer, text, end, reason)
    answer = rendering.parse(before, prompt_ids, turn).message("c")
    ids = rendering.bridge(before, prompt_ids, turn, answer, new)
    if ids is None:
        return None
    assert ids.dtype == np.int32
    return str(tokenizer.decode(ids, skip_special_tokens=False))


OPENED = "\n<|im_start|>user\nand now?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("text", ["hi", "", "  hi \n", "hi <|im_start|> there", "☃ 漢字"])
def test_a_bridge_is_what_the_template_writes_behind_the_answer(text: str) -> None:
    assert bridged(HERMES, text) == OPENED


def test_the_whole_is_the_rendering_where_the_answer_is_spelled_as_the_template_does() -> None:
    tokenizer = merged_tokenizer(HERMES)
    rendering = TemplateRendering(tokenizer, {})
    before = Conversation(user("hello"))
    prompt_ids, turn = rendering.prompt(before), turn_of(tokenizer, "I add.")
    answer = {"role": "assistant", "content": "I add."}
    bridge = rendering.bridge(before, prompt_ids, turn, answer, NEW)
    assert bridge is not None
    whole = np.concatenate([prompt_ids, turn.token_ids, bridge])
    assert np.array_equal(whole, rendering.prompt(before.extended([answer, *NEW])))


def test_an_answer_that_was_cut_off_is_closed_as_the_template_closes_it() -> None:
    assert bridged(HERMES, "hi", end="", reason="length") == f"<|im_end|>{OPENED}"


def test_forced_tokens_of_the_opening_are_context() -> None:
    assert bridged(PREFILLED, "hi") == OPENED + "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("template", "text", "end"),
    [
        (FORGETFUL, "hi", "<|im_end|>"),  # it writes the history in another way
        (ENDLESS, "hi", "<|im_end|>"),  # it does not write the end that was sampled
        (HERMES, "hi", "<|endoftext|>"),  # the turn ended with another token than the template's
        (
            THINKING,
            "<think>\nhm\n</think>\n\nhi",
            "<|im_end|>",
        ),  # the reasoning is stripped before a user's message
    ],
)
def test_what_cannot_be_proven_is_none(template: str, text: str, end: str) -> None:
    assert bridged(template, text, end=end) is None


def test_reasoning_stays_before_results_of_tools() -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    result = [{"role": "tool", "content": "3", "name": "add", "tool_call_id": "c_0"}]
    text = bridged(THINKING, f"<think>\nhm\n</think>\n\n{call}", result)
    assert text is not None
    assert "<tool_response>\n3\n</tool_response>" in text


def test_tools_that_the_template_does_not_show_are_refused_by_name() -> None:
    tokenizer = merged_tokenizer(ENDLESS)
    tools = [
        {
            "type": "function",
            "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
        }
    ]
    with pytest.raises(
        InvalidInput, match="the request has tools, but the chat template of this model does not render tools"
    ):
        TemplateRendering(tokenizer, {}).prompt(Conversation(user("hello"), tools))
    shown = TemplateRendering(tokenizer, {}, "hermes").prompt(Conversation(user("hello"), tools))
    assert tokenizer.decode(shown) == "<user>hello<assistant>"


ANY_ROLE = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Knows no tools, and writes any role by its name, as SmolLM2's does."""
TWO_ROLES = ANY_ROLE.replace("{{ m.role }}", "{{ 'user' if m.role == 'user' else 'assistant' }}")


@pytest.mark.parametrize(("template", "role"), [(ANY_ROLE, "tool"), (TWO_ROLES, "user")])
@pytest.mark.parametrize("calls", ["json", "hermes"])
def test_a_template_without_calls_reads_them_as_text(template: str, role: str, calls: CallFormat) -> None:
    tokenizer = merged_tokenizer(template)
    rendering = TemplateRendering(tokenizer, {}, calls)
    before = Conversation(user("3 plus 14?"), [ADD])
    prompt_ids = rendering.prompt(before)
    text = '{"name": "add", "arguments": {"numbers": [3, 14]}}'
    text = text if calls == "json" else f"please\n<tool_call>\n{text}\n</tool_call>"
    turn = turn_of(tokenizer, text)
    answer = rendering.parse(before, prompt_ids, turn).message("c")
    new = [{"role": "tool", "content": "17", "name": "add", "tool_call_id": "c_0"}]
    bridge = rendering.bridge(before, prompt_ids, turn, answer, new)
    assert bridge is not None
    assert tokenizer.decode(bridge) == f"\n<|im_start|>{role}\n17<|im_end|>\n<|im_start|>assistant\n"
    whole = np.concatenate([prompt_ids, turn.token_ids, bridge])
    assert np.array_equal(whole, rendering.prompt(before.extended([answer, *new])))


ADD: Any = {
    "type": "function",
    "function": {"name": "add", "parameters": {"properties": {"numbers": {"type": "array"}}}},
}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"properties": {"deep": {"type": "boolean"}}}},
}


@pytest.mark.parametrize(
    ("template", "text", "content", "calls", "num_faults"),
    [
        (chat_templates.JSON_CALLS, '{"name": "Ada Lovelace", "born": 1815}', None, [], 0),
        (chat_templates.JSON_CALLS, '{"name": "rain", "parameters": {}}', None, [], 0),
        (chat_templates.JSON_CALLS, '{"name": "weather"}', None, [], 0),
        (chat_templates.JSON_CALLS, '{"name": "weather", "parameters": []}', None, [], 1),
        (chat_templates.JSON_CALLS, '{"name": "weather", "parameters": {"deep": true}}', "", [("weather", {"deep": True})], 0),
        (chat_templates.HERMES, '<tool_call>{"name": "rain"}</tool_call>', "", [("rain", {})], 0),
        (chat_templates.PYTHON_VALUES, "<tool_call><function=weather><parameter=deep>\nTrue\n</parameter></function></tool_call>", "", [("weather", {"deep": True})], 0),
    ],
)  # fmt: skip
def test_a_turn_calls_what_was_offered(
    template: str, text: str, content: str | None, calls: list[Any], num_faults: int
) -> None:
    rendering = TemplateRendering(chat_templates.character_tokenizer(template), {})
    conversation = Conversation(user("hello"), [WEATHER])
    parsed = rendering.parse(conversation, np.zeros(1, np.int32), turn_of(rendering.tokenizer, text))
    assert [tuple(call) for call in parsed.calls] == calls
    assert parsed.content == (text if content is None else content)
    assert len(parsed.faults) == num_faults
