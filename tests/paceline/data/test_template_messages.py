"""Messages get the shape that a template takes, or are refused where it would leave something out."""

from __future__ import annotations

from typing import Any

import chat_templates
import pytest

from paceline.data.messages import in_order_of_calls, read_message
from paceline.data.tokens import render_chat
from paceline.errors import InvalidInput

GENERIC = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
USER: dict[str, Any] = {"role": "user", "content": "q"}
CALL: dict[str, Any] = {"id": "c1", "function": {"name": "f", "arguments": '{"x": 1}'}}
CALLED: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [CALL]}
SECOND = {"id": "c2", "function": {"name": "g", "arguments": "{}"}}


def result(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "content": text, **fields}


def written(template: str, *messages: Any) -> str:
    tokenizer = chat_templates.character_tokenizer(template)
    return render_chat(tokenizer, [read_message(message) for message in messages])


@pytest.mark.parametrize(
    ("template", "messages", "text"),
    [
        (GENERIC, [{"role": "developer", "content": "d"}, USER], "<developer>d<user>q"),
        (chat_templates.IN_MESSAGE, [USER, {"role": "function", "content": "r", "name": "f"}], "<user>q<tool>r"),
        (GENERIC, [USER, {"role": "function", "content": "r"}], "<user>q<function>r"),
        (GENERIC, [USER, {"role": "ipython", "content": "r"}], "<user>q<ipython>r"),
        (chat_templates.IN_MESSAGE, [{**USER, "tool_calls": None}, CALLED], '<user>q[f {"x": 1}]'),
        (chat_templates.THINKS, [USER, {"role": "assistant", "content": "a", "reasoning_content": "r"}], "<user>q<assistant>(r)a"),
        (chat_templates.THINKS, [USER, {"role": "assistant", "content": "a", "thinking": "r"}], "<user>q<assistant>(r)a"),
        (chat_templates.THINKS.replace("thinking", "reasoning"), [USER, {"role": "assistant", "content": "a", "thinking": "r"}], "<user>q<assistant>(r)a"),
    ],
)  # fmt: skip
def test_messages_get_the_shape_of_the_template(template: str, messages: list[Any], text: str) -> None:
    assert written(template, *messages) == text


def test_a_developer_is_the_system_where_the_template_leaves_developers_out() -> None:
    assert "Be brief." in written(chat_templates.HERMES, {"role": "developer", "content": "Be brief."}, USER)


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [
        (chat_templates.IN_MESSAGE, [USER, {"role": "critic", "content": "r"}], "messages of the critic have 'content'"),
        (GENERIC, [USER, CALLED], "messages of the assistant have 'tool_calls', which the chat template"),
        (chat_templates.NONE_CALLS, [USER, CALLED], "messages of the assistant have 'tool_calls', which the chat template"),
        (GENERIC, [USER, {"role": "assistant", "content": "a", "reasoning": "r"}], "have 'reasoning_content'"),
        (chat_templates.IN_MESSAGE, [USER, {**CALLED, "tool_calls": [CALL, SECOND]}, result("1", tool_call_id="c1")], "one result for each call"),
        (chat_templates.IN_MESSAGE, [USER, CALLED, result("1", tool_call_id="other")], "one result for each call"),
    ],
)  # fmt: skip
def test_what_the_template_would_leave_out_is_refused(template: str, messages: list[Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        written(template, *messages)


def test_results_are_in_the_order_of_their_calls() -> None:
    both = {**CALLED, "tool_calls": [CALL, SECOND]}
    first, second = result("1", tool_call_id="c1"), result("2", tool_call_id="c2")
    assert in_order_of_calls([both, second, first]) == [both, first, second]
    assert in_order_of_calls([both, result("b"), result("a")]) == [both, result("b"), result("a")]
    assert in_order_of_calls([USER, second, first]) == [USER, second, first], "calls are in the text"
    assert written(chat_templates.IN_MESSAGE, both, second, first).endswith("<tool>1<tool>2")
    assert "(c2)<tool>" in written(chat_templates.WITH_IDS, both, second, first), "the template writes ids"
