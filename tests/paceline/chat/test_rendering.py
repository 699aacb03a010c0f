"""Everything in a request is in the prompt, or the request is refused by name."""

from typing import Any

import chat_templates
import pytest

from paceline.chat.messages import Message, Unsupported
from paceline.chat.rendering import AnswerFormat, ChatTemplate
from paceline.errors import InvalidInput
from paceline.services.openai.requests import ChatAsk, read_ask
from paceline.services.rollout.openai.engine_requests import prepare_chat

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    },
}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
SECOND = {"id": "c2", "type": "function", "function": {"name": "add", "arguments": '{"x": 2}'}}
USER = {"role": "user", "content": "1+1?"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "2"}]}


def template(source: str) -> ChatTemplate:
    return ChatTemplate(chat_templates.character_tokenizer(source))


def rendered(*messages: Any) -> list[dict[str, Any]]:
    return [Message.model_validate(message).rendered() for message in messages]


def text(chat: ChatTemplate, *messages: Any, **options: Any) -> str:
    return str(chat.tokenizer.decode(chat.encode(rendered(*messages), **options)))


def by_transformers(chat: ChatTemplate, messages: list[Any], **options: Any) -> list[int]:
    ids = chat.tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=False, add_generation_prompt=True, **options
    )
    return list(ids)


@pytest.mark.parametrize("source", [chat_templates.HERMES, chat_templates.FUNCTIONS, chat_templates.JSON_CALLS])
def test_a_chat_with_tools_is_rendered_as_transformers_does(source: str) -> None:
    chat, answer = template(source), {"role": "assistant", "content": "It is 2."}
    wanted = [
        {"role": "system", "content": "Be brief."},
        USER,
        {
            **CALLED,
            "content": "",
            "tool_calls": [{**CALL, "function": {"name": "add", "arguments": {"x": 1}}}],
        },
        {**RESULT, "content": "2"},
        answer,
        USER,
    ]
    got = chat.encode(rendered({"role": "system", "content": "Be brief."}, USER, CALLED, RESULT, answer, USER), [TOOL])
    assert got.tolist() == by_transformers(chat, wanted, tools=[TOOL])
    prompt = chat.tokenizer.decode(got)
    assert all(word in prompt for word in ("Adds.", '"name": "add"' if source != chat_templates.FUNCTIONS else "=add>"))


@pytest.mark.parametrize(
    ("source", "message", "words"),
    [
        (chat_templates.PLAIN, CALLED, "'tool_calls'"),
        (chat_templates.PLAIN, {**CALLED, "content": "x"}, "'tool_calls'"),
        (chat_templates.PLAIN, RESULT, "'tool'"),
        (chat_templates.PLAIN, {**USER, "name": "Ann"}, "'name'"),
        # Templates that write functions' names have the word, and never a user's.
        (chat_templates.HERMES, {**USER, "name": "Ann"}, "'name'"),
        (
            chat_templates.HERMES,
            {"role": "critic", "content": "Bad."},
            "'critic' has the content, but",
        ),
        (chat_templates.JSON_CALLS, {**CALLED, "content": "So:"}, "the content beside tool_calls"),
        (
            chat_templates.JSON_CALLS,
            {"role": "assistant", "content": "2", "reasoning": "1+1"},
            "'reasoning_content'",
        ),
    ],
)
def test_a_field_that_the_template_would_leave_out_is_refused_by_name(source: str, message: Any, words: str) -> None:
    with pytest.raises(Unsupported, match=words) as refused:
        template(source).encode(rendered(USER, message))
    assert refused.value.field == "messages"


def test_reasoning_is_rendered_where_the_template_wants_it_and_its_absence_elsewhere_is_no_fault() -> None:
    chat = template(chat_templates.HERMES)
    old = {"role": "assistant", "content": "2", "reasoning_content": "one and one"}
    assert "one and one" in text(chat, USER, old, {"role": "tool", "content": "3"})
    assert "one and one" not in text(chat, USER, old, USER)


def test_a_developer_is_the_system_where_the_template_knows_no_developer() -> None:
    chat = template(chat_templates.HERMES)
    system = text(chat, {"role": "system", "content": "Be brief."}, USER)
    assert text(chat, {"role": "developer", "content": "Be brief."}, USER) == system
    assert "<developer>Be" in text(template(chat_templates.PLAIN), {"role": "developer", "content": "Be"}, USER)


def test_results_come_in_the_order_of_their_calls_where_ids_are_not_written() -> None:
    both = {**CALLED, "tool_calls": [CALL, SECOND]}
    first, second = RESULT, {**RESULT, "tool_call_id": "c2", "content": "3"}
    chat = template(chat_templates.HERMES)
    assert text(chat, USER, both, second, first) == text(chat, USER, both, first, second)
    for results in ([first], [first, first], [second, {**first, "tool_call_id": "c3"}]):
        with pytest.raises(Unsupported, match="one result for each call"):
            text(chat, USER, both, *results)
    written = text(template(chat_templates.WITH_IDS), USER, both, second, first)
    assert written.index("3(c2)") < written.index("2(c1)")
    without_ids = [{"role": "tool", "content": "5"}, {"role": "tool", "content": "6", "name": "add"}]
    assert text(chat, USER, both, *without_ids).index("5") < text(chat, USER, both, *without_ids).index("6")


def test_tools_are_refused_by_a_template_without_them_and_left_out_when_no_call_is_allowed() -> None:
    with pytest.raises(Unsupported, match="does not render") as refused:
        text(template(chat_templates.PLAIN), USER, tools=[TOOL])
    assert refused.value.field == "tools"
    chat = template(chat_templates.HERMES)
    body = {"model": "", "messages": [USER], "tools": [TOOL], "tool_choice": "none"}
    prompt_ids, _ = prepare_chat(read_ask(ChatAsk, body), chat)
    assert chat.tokenizer.decode(prompt_ids) == text(chat, USER)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (chat_templates.PLAIN, AnswerFormat("none", False)),
        (chat_templates.WITH_IDS, AnswerFormat("none", False)),
        (chat_templates.HERMES, AnswerFormat("hermes", True, '<tool_call>\n{"name": "', '", "arguments": ')),
        (chat_templates.FUNCTIONS, AnswerFormat("hermes", False, "<tool_call>\n<function=", ">\n")),
        (chat_templates.JSON_CALLS, AnswerFormat("json", False, '{"name": "', '", "parameters": ')),
    ],
)
def test_the_format_of_answers_is_derived_from_the_template(source: str, expected: AnswerFormat) -> None:
    assert template(source).answer_format == expected


def test_another_template_is_noticed() -> None:
    chat = template(chat_templates.WITH_IDS)
    assert text(chat, USER, CALLED, RESULT)
    chat.tokenizer.chat_template = chat_templates.PLAIN
    with pytest.raises(Unsupported, match="'tool_calls'"):
        text(chat, USER, CALLED, RESULT)


def test_reasoning_may_be_opened_by_the_prompt() -> None:
    opens = "{%- if enable_thinking is not defined %}{{ '<think>\\n' }}{% endif %}{%- endif %}"
    opened = chat_templates.HERMES.removesuffix("{%- endif %}") + opens
    chat = template(opened)
    assert chat.answer_format == AnswerFormat("hermes", True, '<tool_call>\n{"name": "', '", "arguments": ')
    assert chat.opens_reasoning(chat.encode(rendered(USER)))
    assert not chat.opens_reasoning(chat.encode(rendered(USER), template_kwargs={"enable_thinking": False}))


def test_an_effort_that_the_template_does_not_read_is_refused() -> None:
    assert template(chat_templates.EFFORT).effort_kwargs("low") == {"reasoning_effort": "low"}
    assert template(chat_templates.HERMES).effort_kwargs("none") == {"enable_thinking": False}
    assert template(chat_templates.HERMES).effort_kwargs(None) == {}
    for source, effort in ((chat_templates.HERMES, "low"), (chat_templates.PLAIN, "none")):
        with pytest.raises(Unsupported, match="reasoning_effort") as refused:
            template(source).effort_kwargs(effort)
        assert refused.value.field == "reasoning_effort"


def test_an_error_of_the_template_is_invalid_input() -> None:
    with pytest.raises(InvalidInput, match="roles must alternate"):
        text(template("{{ raise_exception('roles must alternate') }}"), USER)


def test_a_chat_that_the_assistant_ends_goes_on() -> None:
    chat = template(chat_templates.HERMES)
    begun = {"role": "assistant", "content": "<think>\nOne"}
    wanted = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n<think>\nOne"
    assert text(chat, USER, begun) == wanted  # huggingface/transformers#33198
    messages = rendered(USER, begun)
    assert chat.opens_reasoning(chat.encode(messages), messages)
    closed = rendered(USER, {**begun, "content": "<think>One</think>So"})
    assert not chat.opens_reasoning(chat.encode(closed), closed)
