"""`POST /v1/responses`: converts a request to the equivalent chat. The server keeps nothing between requests. A request
has the whole conversation as items (messages, calls, results, reasoning); neighbouring items of the assistant are
one message of the chat. Features that would require earlier answers are refused by name. Every part of an answer is
an item: reasoning, a message with one text, or a call. A stream's events have running numbers; an item's events come in
the order `added`, deltas, `done`. The last event has the whole answer."""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from paceline.chat.answer_reader import AnswerPart, TextPart
from paceline.chat.call_formats import ToolCall
from paceline.chat.completion_texts import END_THINK
from paceline.chat.messages import MAX_MESSAGES, Json, Unsupported
from paceline.errors import InvalidInput, PacelineError
from paceline.groups import Version
from paceline.services.common.serving.json_http import error_answer
from paceline.services.openai.answers import call_id
from paceline.services.openai.frames import Choice, Delta, Event, Frame, model_name, ranges, usage, version_name
from paceline.services.openai.requests import ChatAsk, read_ask

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
"""Unsupported fields, each with the values that have no effect. The answer's reasoning is never encrypted."""


FIELDS = {"messages": "input", "max_tokens": "max_output_tokens", "reasoning_effort": "reasoning"}
"""Maps a field of a chat to the equivalent field of a response."""


class ResponsesAsk(BaseModel):
    """Request of `POST /v1/responses`. Further fields are those of a chat."""

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
        """Return the equivalent chat. Raises Unsupported, InvalidInput."""
        rest = dict(self.model_extra or {})
        for name, values in NEUTRAL.items():
            value = rest.pop(name, None)
            if value is not None and value not in values:
                raise Unsupported(f"{name} is not supported; remove it (it is {value!r:.60})", name)
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        body: Json = {
            **rest,
            "messages": [*system, *self._messages()],
            "tools": [_chat_tool(tool) for tool in self.tools or ()],
            "tool_choice": self.tool_choice,
            "max_tokens": self.max_output_tokens,
            "reasoning_effort": _only(self.reasoning, "reasoning", "effort", ("summary", "generate_summary")),
        }
        form = _only(self.text, "text", "format", ("verbosity",))
        if form is not None and form != {"type": "text"}:
            raise Unsupported(f"text.format is {form!r:.60}; only plain text is supported", "text")
        if not body["messages"]:
            raise Unsupported("input is empty; give a text or at least one item", "input")
        with fields_of_responses():
            return read_ask(ChatAsk, body)

    def _messages(self) -> list[Json]:
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        messages: list[Json] = []
        assistant: Json | None = None
        for item in self.input:
            kind = item.get("type", "message")
            match kind:
                case "message" if item.get("role") != "assistant":
                    messages.append(_message(item))
                    assistant = None
                case "message":
                    if assistant is None or assistant["content"] or assistant["tool_calls"]:
                        messages.append(assistant := _assistant_message())
                    assistant["content"] = _message(item)["content"]
                case "reasoning":
                    if (
                        assistant is None
                        or assistant["content"]
                        or assistant["tool_calls"]
                        or assistant["reasoning_content"]
                    ):
                        messages.append(assistant := _assistant_message())
                    assistant["reasoning_content"] = _reasoning(item)
                case "function_call":
                    if assistant is None:
                        messages.append(assistant := _assistant_message())
                    assistant["tool_calls"].append(_call(item))
                case "function_call_output":
                    answered = {"tool_call_id": item.get("call_id"), "content": item.get("output")}
                    messages.append({"role": "tool", **answered})
                    assistant = None
                case _:
                    raise Unsupported(f"`input` has an item of type {kind!r:.60}, which is unknown", "input")
        return [message for message in messages if message != _assistant_message()]


def read_responses_ask(body: Any) -> tuple[ResponsesAsk, ChatAsk]:
    """Return a request and the equivalent chat. Raises InvalidInput that names the field."""
    ask = read_ask(ResponsesAsk, body)
    try:
        return ask, ask.chat()
    except RecursionError:
        raise InvalidInput("the body is nested too deeply") from None


@contextlib.contextmanager
def fields_of_responses() -> Iterator[None]:
    """Name the field of the request in errors about the equivalent chat."""
    try:
        yield
    except Unsupported as error:
        error.field = FIELDS.get(error.field, error.field)
        raise


def _assistant_message() -> Json:
    return {"role": "assistant", "content": None, "reasoning_content": None, "tool_calls": []}


def _message(item: Json) -> Json:
    if item.get("role") not in ROLES:
        raise Unsupported(f"`input` has a message with the unsupported role {item.get('role')!r:.60}", "input")
    return {"role": item["role"], "content": item.get("content")}


def _reasoning(item: Json) -> str | None:
    if item.get("encrypted_content"):
        raise Unsupported("`input` has encrypted reasoning, which this server cannot read; remove it", "input")
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise Unsupported(f"`input` has reasoning in an unknown form: {item!r:.80}", "input")
    text = "".join(str(part.get("text") or "") for part in parts)
    return text or None


def _call(item: Json) -> Json:
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    return {"id": item.get("call_id"), "type": "function", "function": function}


def _chat_tool(tool: Json) -> Json:
    if tool.get("type") != "function":
        raise Unsupported(
            f"`tools` has an entry of type {tool.get('type')!r:.60}; only functions are supported", "tools"
        )
    function = {name: value for name, value in tool.items() if name != "type" and value is not None}
    return {"type": "function", "function": function}


def _only(section: Json | None, name: str, key: str, ignored: Sequence[str]) -> Any:
    """Return the value of `key`, the only effective key of `section`. Raises Unsupported for an unknown key."""
    for other, value in (section or {}).items():
        if other != key and other not in ignored and value is not None:
            raise Unsupported(f"{name}.{other} is unknown; remove it (it is {value!r:.60})", name)
    return (section or {}).get(key)


class ResponseAnswer(Frame):
    """The answer of `/v1/responses`. `decode` turns token ids into text."""

    ends_with_mark = False

    def __init__(
        self, answer_id: str, ask: ResponsesAsk, run_id: str, at_first: Version, decode: Callable[[list[int]], str]
    ) -> None:
        super().__init__(answer_id, run_id, at_first)
        self._ask, self._decode = ask, decode
        self._sequence = 0
        self._items: list[Json] = []
        self._open: Json | None = None

    def whole(self, choices: Sequence[Choice]) -> Json:
        (choice,) = choices
        status = "completed" if choice.finish_reason == "stop" else "incomplete"
        items: list[Json] = []
        for part in choice.parts:
            items.append(self._item(part, items))
        if items and status == "incomplete":
            items[-1]["status"] = status
        counts = usage(choices)
        return self._response(status, choice) | {
            "output": items,
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens(choice)},
                "total_tokens": counts["total_tokens"],
            },
        }

    def begin(self, num_choices: int) -> list[Event]:
        response = self._response("in_progress", None)
        return [self._event(f"response.{name}", response=response) for name in ("created", "in_progress")]

    def add(self, delta: Delta) -> list[Event]:
        events: list[Event] = []
        for part in delta.parts:
            if isinstance(part, ToolCall):
                events += self._close()
                events += self._whole_call(part)
            else:
                kind = "reasoning" if part.reasoning else "message"
                if self._open is None or self._open["type"] != kind:
                    events += self._close()
                    events += self._begin_text(part)
                events += self._grow(part.text)
        return events

    def end(self, choice: Choice) -> list[Event]:
        return self._close("completed" if choice.finish_reason == "stop" else "incomplete")

    def finish(self, choices: Sequence[Choice]) -> list[Event]:
        response = self.whole(choices)
        return [self._event(f"response.{response['status']}", response=response)]

    def fail(self, error: PacelineError) -> list[Event]:
        fields = error_answer(error)[1]["error"]
        return [self._event("error", message=fields["message"], code=fields["code"], param=fields["param"])]

    def _begin_text(self, part: TextPart) -> list[Event]:
        item = self._item(TextPart("", part.reasoning), self._items)
        (content,) = item["content"]
        self._items.append(item)
        self._open = item
        return [
            self._event("response.output_item.added", **self._at(), item=item | _begun(content=[])),
            self._event("response.content_part.added", **self._of_text(), part=dict(content)),
        ]

    def _grow(self, text: str) -> list[Event]:
        assert self._open is not None
        (content,) = self._open["content"]
        content["text"] += text
        more: Json = {} if content["type"] == "reasoning_text" else {"logprobs": []}
        return [self._event(f"response.{content['type']}.delta", **self._of_text(), delta=text, **more)]

    def _close(self, status: str = "completed") -> list[Event]:
        item = self._open
        if item is None:
            return []
        item["status"] = status
        (content,) = item["content"]
        more: Json = {} if content["type"] == "reasoning_text" else {"logprobs": []}
        events = [
            self._event(f"response.{content['type']}.done", **self._of_text(), text=content["text"], **more),
            self._event("response.content_part.done", **self._of_text(), part=dict(content)),
            self._event("response.output_item.done", **self._at(), item=item),
        ]
        self._open = None
        return events

    def _whole_call(self, call: ToolCall) -> list[Event]:
        item = self._item(call, self._items)
        self._items.append(item)
        of_item = {**self._at(), "item_id": item["id"]}
        added = item | _begun(arguments="")
        return [
            self._event("response.output_item.added", **self._at(), item=added),
            self._event("response.function_call_arguments.delta", **of_item, delta=call.arguments),
            self._event("response.function_call_arguments.done", **of_item, arguments=call.arguments, name=call.name),
            self._event("response.output_item.done", **self._at(), item=item),
        ]

    def _item(self, part: AnswerPart, before: Sequence[Json]) -> Json:
        item_id = f"{self._id.partition('_')[2]}_{len(before)}"
        if isinstance(part, ToolCall):
            num_calls = sum(item["type"] == "function_call" for item in before)
            return {
                "type": "function_call",
                "id": f"fc_{item_id}",
                "call_id": call_id(part, self._id, 0, num_calls),
                "name": part.name,
                "arguments": part.arguments,
                "status": "completed",
            }
        if part.reasoning:
            text = {"type": "reasoning_text", "text": part.text}
            return {
                "type": "reasoning", "id": f"rs_{item_id}", "summary": [], "content": [text], "status": "completed"
            }  # fmt: skip
        text_part: Json = {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}
        return {
            "type": "message", "id": f"msg_{item_id}", "role": "assistant", "content": [text_part], "status": "completed"
        }  # fmt: skip

    def _at(self) -> Json:
        return {"output_index": len(self._items) - 1}

    def _of_text(self) -> Json:
        assert self._open is not None
        return {**self._at(), "item_id": self._open["id"], "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> Event:
        event = Event({"type": kind, "sequence_number": self._sequence, **fields}, kind)
        self._sequence += 1
        return event

    def _reasoning_tokens(self, choice: Choice) -> int:
        if not choice.reasoning:
            return 0
        ids = list(choice.token_ids)
        counts = range(len(ids) + 1)
        return min(bisect_left(counts, True, key=lambda count: END_THINK in self._decode(ids[:count])), len(ids))

    def _response(self, status: str, choice: Choice | None) -> Json:
        ask, extra = self._ask, self._ask.model_extra or {}
        spans = choice.spans if choice is not None else ()
        versions: list[tuple[int, ...]] = sorted({(span.session, span.step) for span in spans}) or [self._at_first]
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_s,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": ask.instructions,
            "max_output_tokens": ask.max_output_tokens,
            "model": model_name(self._run_id, versions[-1]),
            "output": [],
            "parallel_tool_calls": extra.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "reasoning": {"effort": (ask.reasoning or {}).get("effort"), "summary": None},
            "store": False,
            "temperature": extra.get("temperature"),
            "text": {"format": {"type": "text"}},
            "tool_choice": ask.tool_choice or "auto",
            "tools": ask.tools or [],
            "top_p": extra.get("top_p"),
            "truncation": "disabled",
            "usage": None,
            "metadata": extra.get("metadata") or {},
            "system_fingerprint": "+".join(version_name(version) for version in versions),
            "versions": ranges(spans),
        }


def _begun(**empty: Any) -> Json:
    return {"status": "in_progress", **empty}
