"""Converts OpenTelemetry spans of model calls to traces, by the conventions for generative AI (1.37 and later).

Files are JSON lines: OTLP (`resourceSpans`, `resourceLogs`), as the collector's and the SDKs' file exporters write it,
or one span on each line, as the Python SDK prints it (`ReadableSpan.to_json`). These attributes of a span, or of its
event `gen_ai.client.inference.operation.details`, are read, structured or as JSON: `gen_ai.input.messages`,
`gen_ai.output.messages`, `gen_ai.system_instructions` and `gen_ai.tool.definitions`. Scores come from events
`gen_ai.evaluation.result`, by the span's id or the response's. Source: opentelemetry.io/docs/specs/semconv/gen-ai.

Promise: a message is read as a whole or not at all; anything that a text model cannot read is left out and counted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from paceline.errors import DataError

Json = dict[str, Any]
INPUT, OUTPUT = "gen_ai.input.messages", "gen_ai.output.messages"
SYSTEM, TOOLS = "gen_ai.system_instructions", "gen_ai.tool.definitions"
DETAILS = "gen_ai.client.inference.operation.details"
EVALUATION = "gen_ai.evaluation.result"
OPERATIONS = ("chat", "generate_content", "text_completion")
"""Operations whose span is one call of a model."""


class Event(NamedTuple):
    """An event of a span, or a log record that belongs to a span."""

    name: str
    span_id: str
    attributes: Json


class Span(NamedTuple):
    """A span, whatever its serialisation."""

    trace_id: str
    span_id: str
    attributes: Json
    events: tuple[Event, ...]


class Score(NamedTuple):
    """An evaluation of a model's response."""

    name: str
    value: float
    span_id: str
    response_id: str


class Unusable(Exception):
    """A span that cannot be a trace; the text is the reason."""


def is_telemetry(record: Mapping[str, Any]) -> bool:
    return bool({"resourceSpans", "resourceLogs"} & record.keys()) or (
        "context" in record and isinstance(record.get("attributes"), dict)
    )


def spans_of(record: Mapping[str, Any]) -> Iterator[Span]:
    """Yield the spans of a line. Raises DataError for malformed attributes."""
    if "context" in record:
        ids = record["context"]
        trace_id, span_id = (str(ids.get(key, "")).removeprefix("0x") for key in ("trace_id", "span_id"))
        events = tuple(
            Event(str(event.get("name")), span_id, dict(event.get("attributes") or {}))
            for event in record.get("events") or ()
        )
        yield Span(trace_id, span_id, dict(record["attributes"]), events)
        return
    for span in _nested(record, "resourceSpans", "scopeSpans", "spans"):
        span_id = str(span.get("spanId", ""))
        events = tuple(Event(str(event.get("name")), span_id, _attributes(event)) for event in span.get("events") or ())
        yield Span(str(span.get("traceId", "")), span_id, _attributes(span), events)


def events_of(record: Mapping[str, Any]) -> Iterator[Event]:
    """Yield the events of a line: those of its spans, and its log records."""
    for span in spans_of(record):
        yield from span.events
    for log in _nested(record, "resourceLogs", "scopeLogs", "logRecords"):
        attributes = _attributes(log)
        name = str(log.get("eventName") or attributes.get("event.name") or "")
        yield Event(name, str(log.get("spanId", "")), attributes)


def score_of(event: Event) -> Score | None:
    """Return the score of an evaluation; None for another event, or without a number."""
    value = event.attributes.get("gen_ai.evaluation.score.value")
    if event.name != EVALUATION or isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not math.isfinite(value):
        return None
    name = str(event.attributes.get("gen_ai.evaluation.name", ""))
    return Score(name, float(value), event.span_id, str(event.attributes.get("gen_ai.response.id", "")))


def rows_of_span(span: Span) -> list[Json]:
    """Return a row for each choice of a model call: prompt, completion and ids, without a reward. Raises Unusable."""
    attributes = dict(span.attributes)
    for event in span.events:
        if event.name == DETAILS:
            attributes |= event.attributes
    if attributes.get("gen_ai.operation.name") not in OPERATIONS:
        raise Unusable("not a call of a model")
    given, made = (_json_value(attributes.get(key), key) for key in (INPUT, OUTPUT))
    if not given or not made:
        raise Unusable("messages are not recorded (gen_ai.input.messages, gen_ai.output.messages)")
    prompt = [message for each in given for message in _messages(each)]
    if system := _json_value(attributes.get(SYSTEM), SYSTEM):
        prompt = [{"role": "system", "content": _text_of(system)}, *prompt]
    tools = _json_value(attributes.get(TOOLS), TOOLS)
    return [
        {
            "prompt": prompt,
            "completion": _completion(choice),
            "tools": [_tool(tool) for tool in tools] if tools else None,
            "finish_reason": choice.get("finish_reason"),
            "model": attributes.get("gen_ai.response.model") or attributes.get("gen_ai.request.model"),
            "response_id": attributes.get("gen_ai.response.id"),
            "trace_id": span.trace_id,
            "span_id": span.span_id,
        }
        for choice in made
    ]


def _completion(choice: Mapping[str, Any]) -> list[Json]:
    messages = _messages(choice)
    if len(messages) != 1 or messages[0]["role"] != "assistant":
        raise Unusable("an output that is not one message of the assistant")
    if not messages[0]["content"] and "tool_calls" not in messages[0]:
        raise Unusable("empty completion")
    return messages


def _messages(message: Any) -> list[Json]:
    """Return a message of the conventions as messages of a chat template: one, or one for each response of a tool."""
    if not isinstance(message, Mapping) or not isinstance(message.get("parts"), list):
        raise Unusable("a message without parts")
    texts, calls, responses, reasoning = [], [], [], []
    for part in message["parts"]:
        match part.get("type") if isinstance(part, Mapping) else None:
            case "text":
                texts.append(str(part.get("content", "")))
            case "reasoning":
                reasoning.append(str(part.get("content", "")))
            case "tool_call":
                function = {"name": part.get("name"), "arguments": part.get("arguments")}
                calls.append({"id": part.get("id"), "type": "function", "function": function})
            case "tool_call_response":
                result = part.get("response", part.get("result"))
                text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
                responses.append({"role": "tool", "content": text, "tool_call_id": part.get("id")})
            case kind:
                raise Unusable(f"a part of type {str(kind)[:40]!r}, which a text model cannot read")
    if responses:
        return responses
    found: Json = {"role": str(message.get("role", "")), "content": "".join(texts)}
    if reasoning:
        found["reasoning_content"] = "".join(reasoning)
    if calls:
        found["tool_calls"] = calls
    return [found]


def _text_of(parts: Any) -> str:
    if not all(isinstance(part, Mapping) and part.get("type") == "text" for part in parts):
        raise Unusable("system instructions that are not text")
    return "\n".join(str(part.get("content", "")) for part in parts)


def _tool(tool: Any) -> Json:
    if not isinstance(tool, Mapping) or "function" in tool:
        return dict(tool)
    function = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _json_value(value: Any, key: str) -> list[Any]:
    """Return the list in an attribute, which is structured or a JSON text; an empty list if the attribute is absent."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:  # such as a text that the instrumentation cut off
            raise Unusable(f"{key} is not valid JSON") from error
    if value is not None and not isinstance(value, list):
        raise Unusable(f"{key} is not a list")
    return value or []


def _nested(record: Mapping[str, Any], *keys: str) -> Iterator[Json]:
    if not keys:
        yield dict(record)
        return
    for item in record.get(keys[0]) or ():
        if isinstance(item, dict):
            yield from _nested(item, *keys[1:])


def _attributes(holder: Mapping[str, Any]) -> Json:
    try:
        return {item["key"]: _any_value(item["value"]) for item in holder.get("attributes") or ()}
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"'attributes' must be OTLP JSON, a list of objects with key and value ({error!r:.80}); export the "
            "telemetry again"
        ) from None


def _any_value(value: Mapping[str, Any]) -> Any:
    """Return a value of OTLP JSON, in which integers are strings."""
    if not value:
        return None
    ((kind, content),) = value.items()
    match kind:
        case "intValue":
            return int(content)
        case "arrayValue":
            return [_any_value(item) for item in content.get("values") or ()]
        case "kvlistValue":
            return {item["key"]: _any_value(item["value"]) for item in content.get("values") or ()}
        case _:
            return content
