"""`POST /v1/responses`: a request is read as the chat that it means. The server keeps nothing between two of them.

A request carries the whole conversation as items (messages, calls, results, reasoning); neighbouring items of the assistant
are one message of the chat. What would need a memory of earlier answers is refused by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from paceline.chat.messages import MAX_MESSAGES, Json, Unsupported
from paceline.chat.requests import ChatAsk, read_ask
from paceline.errors import InvalidInput

ROLES = ("user", "system", "developer", "assistant")

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "max_tool_calls": (),
    "n": (1,),
    "previous_response_id": (),
    "prompt": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "include": ([], ["reasoning.encrypted_content"]),
}
"""Fields that are known and not supported, with the values that have no effect. Reasoning is in the answer as it is, so
nobody needs it encrypted."""


FIELDS = {"messages": "input", "max_tokens": "max_output_tokens", "reasoning_effort": "reasoning"}
"""Fields of a response by those of the chat that it means."""


class ResponsesAsk(BaseModel):
    """The request. Further fields are those of a chat."""

    model_config = ConfigDict(extra="allow")

    input: str | Annotated[list[Json], Field(max_length=MAX_MESSAGES, fail_fast=True)]
    instructions: str | None = None
    tools: list[Json] | None = None
    tool_choice: Any = None
    max_output_tokens: int | None = None
    reasoning: Json | None = None
    text: Json | None = None
    stream_options: Json | None = None

    def chat(self) -> ChatAsk:
        """Return the chat that the request means. Raises Unsupported, InvalidInput."""
        rest = dict(self.model_extra or {})
        for name, values in NEUTRAL.items():
            value = rest.pop(name, None)
            if value is not None and value not in values:
                raise Unsupported(f"{name} is not supported here; remove it (it is {value!r:.60})", name)
        body: Json = {
            **rest,
            "messages": [*self._instructed(), *self._messages()],
            "tools": [_chat_tool(tool) for tool in self.tools or ()],
            "tool_choice": self.tool_choice,
            "max_tokens": self.max_output_tokens,
            "reasoning_effort": _only(self.reasoning, "reasoning", "effort", ("summary", "generate_summary")),
        }
        form = _only(self.text, "text", "format", ("verbosity",))
        if form is not None and form != {"type": "text"}:
            raise Unsupported(f"text.format is {form!r:.60}; only plain text is possible here", "text")
        if not body["messages"]:
            raise Unsupported("input is empty; give a text or at least one item", "input")
        with fields_of_responses():
            return read_ask(ChatAsk, body)

    def _instructed(self) -> list[Json]:
        return [] if self.instructions is None else [{"role": "system", "content": self.instructions}]

    def _messages(self) -> list[Json]:
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        messages: list[Json] = []
        said: Json | None = None
        """The assistant's message that the next item may belong to."""
        for item in self.input:
            kind = item.get("type", "message")
            match kind:
                case "message" if item.get("role") != "assistant":
                    messages.append(_message(item))
                    said = None
                case "message":
                    if said is None or said["content"] or said["tool_calls"]:
                        messages.append(said := _said())
                    said["content"] = _message(item)["content"]
                case "reasoning":
                    if said is None or said["content"] or said["tool_calls"] or said["reasoning_content"]:
                        messages.append(said := _said())
                    said["reasoning_content"] = _reasoning(item)
                case "function_call":
                    if said is None:
                        messages.append(said := _said())
                    said["tool_calls"].append(_call(item))
                case "function_call_output":
                    messages.append(_result(item))
                    said = None
                case _:
                    raise Unsupported(
                        f"input has an item of type {kind!r:.60}, which is unknown here", "input"
                    )
        return [message for message in messages if message != _said()]


def read_responses_ask(body: Any) -> tuple[ResponsesAsk, ChatAsk]:
    """Return a request and its chat. Raises InvalidInput that names the field."""
    ask = read_ask(ResponsesAsk, body)
    try:
        return ask, ask.chat()
    except RecursionError:
        raise InvalidInput("the body is nested too deeply") from None


@contextlib.contextmanager
def fields_of_responses() -> Iterator[None]:
    """Name the field of the request in errors about the chat that it means."""
    try:
        yield
    except Unsupported as error:
        error.field = FIELDS.get(error.field, error.field)
        raise


def _said() -> Json:
    return {"role": "assistant", "content": None, "reasoning_content": None, "tool_calls": []}


def _message(item: Json) -> Json:
    if item.get("role") not in ROLES:
        raise Unsupported(f"input has a message with the role {item.get('role')!r:.60}", "input")
    return {"role": item["role"], "content": item.get("content")}


def _reasoning(item: Json) -> str | None:
    if item.get("encrypted_content"):
        raise Unsupported(
            "input has reasoning that is encrypted, which nobody here can read; remove it", "input"
        )
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise Unsupported(f"input has reasoning of another form: {item!r:.80}", "input")
    text = "".join(str(part.get("text") or "") for part in parts)
    return text or None


def _call(item: Json) -> Json:
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    return {"id": item.get("call_id"), "type": "function", "function": function}


def _result(item: Json) -> Json:
    return {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}


def _chat_tool(tool: Json) -> Json:
    if tool.get("type") != "function":
        raise Unsupported(
            f"tools has one of type {tool.get('type')!r:.60}; only functions are possible here", "tools"
        )
    function = {name: value for name, value in tool.items() if name != "type" and value is not None}
    return {"type": "function", "function": function}


def _only(section: Json | None, name: str, key: str, ignored: Sequence[str]) -> Any:
    """Return the one key of a section that has an effect. Raises Unsupported for another one."""
    for other, value in (section or {}).items():
        if other != key and other not in ignored and value is not None:
            raise Unsupported(f"{name}.{other} is unknown; remove it (it is {value!r:.60})", name)
    return (section or {}).get(key)
