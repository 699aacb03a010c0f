"""OpenTelemetry spans as traces: both serialisations, every part, scores, and the reasons for which a span is left out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.apps.traces.conversion import ConversionReport, convert
from paceline.apps.traces.spans import Unusable, rows_of_span, spans_of
from paceline.data.rows import open_rows
from paceline.data.traces import TraceGroups, TraceKeys, read_trace
from paceline.errors import DataError

QUESTION = [{"role": "user", "parts": [{"type": "text", "content": "2+2?"}]}]


def answer(text: str, **part: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "parts": [part or {"type": "text", "content": text}],
        "finish_reason": "stop",
    }


def any_value(value: Any) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case str():
            return {"stringValue": value}
        case list():
            return {"arrayValue": {"values": [any_value(item) for item in value]}}
        case _:
            return {"kvlistValue": {"values": pairs(value)}}


def pairs(attributes: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": any_value(value)} for key, value in attributes.items()]


def otlp(attributes: dict[str, Any], *events: tuple[str, dict[str, Any]], span_id: str = "ab") -> dict[str, Any]:
    span = {
        "traceId": "12",
        "spanId": span_id,
        "attributes": pairs(attributes),
        "events": [{"name": name, "attributes": pairs(values)} for name, values in events],
    }
    return {"resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {}, "spans": [span]}]}]}


def sdk(attributes: dict[str, Any], *events: tuple[str, dict[str, Any]], span_id: str = "ab") -> dict[str, Any]:
    """A span as the Python SDK prints it, whose attributes are no objects: messages are JSON."""
    plain = {key: json.dumps(v) if isinstance(v, list) else v for key, v in attributes.items()}
    return {
        "name": "chat m",
        "context": {"trace_id": "0x12", "span_id": f"0x{span_id}", "trace_state": "[]"},
        "attributes": plain,
        "events": [{"name": name, "attributes": values} for name, values in events],
    }


def call(*choices: dict[str, Any], **further: Any) -> dict[str, Any]:
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "gen_ai.response.id": "r1",
        "gen_ai.input.messages": QUESTION,
        "gen_ai.output.messages": list(choices),
        **further,
    }


def score(value: float, name: str = "feedback", **further: Any) -> tuple[str, dict[str, Any]]:
    attributes = {"gen_ai.evaluation.name": name, "gen_ai.evaluation.score.value": value, **further}
    return "gen_ai.evaluation.result", attributes


def converted(folder: Path, *records: dict[str, Any], scores: tuple[str, ...] = ()) -> tuple[list[Any], Any]:
    path, report = folder / "spans.jsonl", ConversionReport()
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return list(convert([path], scores, report)), report


@pytest.mark.parametrize("form", [otlp, sdk])
def test_a_call_is_a_trace_with_the_score_of_its_evaluation(
    tmp_path: Path, form: Callable[..., dict[str, Any]]
) -> None:
    system = [{"type": "text", "content": "Be brief."}]
    tool = {"type": "function", "name": "add", "description": "a sum", "parameters": {"type": "object"}}
    attributes = call(answer("4"), **{"gen_ai.system_instructions": system, "gen_ai.tool.definitions": [tool]})
    (row,), report = converted(tmp_path, form(attributes, score(0.5)))
    assert row["prompt"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    assert row["completion"] == [{"role": "assistant", "content": "4"}]
    assert (row["final_reward"], row["model"], row["trace_id"], row["span_id"]) == (0.5, "m", "12", "ab")
    trace = read_trace(row, TraceKeys())
    assert (trace.reward, trace.tokens) == (0.5, None)
    assert trace.tools == [
        {
            "type": "function",
            "function": {"name": "add", "description": "a sum", "parameters": {"type": "object"}},
        }
    ]
    assert report.facts() == {"rows": 1, "with_reward": 1, "left_out": {}}


def test_messages_may_be_in_an_event(tmp_path: Path) -> None:
    messages = call(answer("4"))
    event = ("gen_ai.client.inference.operation.details", messages)
    (row,), _ = converted(tmp_path, otlp({"gen_ai.operation.name": "chat"}, event))
    assert row["completion"] == [{"role": "assistant", "content": "4"}]
    assert row["final_reward"] is None


def test_a_log_record_scores_by_the_response(tmp_path: Path) -> None:
    _, attributes = score(1.0, **{"gen_ai.response.id": "r1"})
    log = {"eventName": "gen_ai.evaluation.result", "attributes": pairs(attributes)}
    logs = {"resourceLogs": [{"scopeLogs": [{"logRecords": [log]}]}]}
    rows, report = converted(tmp_path, logs, otlp(call(answer("4"))))
    assert [row["final_reward"] for row in rows] == [1.0]
    assert report.with_reward == 1


def test_calls_of_tools_and_their_responses_are_messages() -> None:
    turns = [
        *QUESTION,
        answer("", type="tool_call", id="c1", name="add", arguments={"a": 2}),
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "result": {"sum": 4}}]},
    ]
    attributes = call(answer("4")) | {"gen_ai.input.messages": turns}
    (span,) = spans_of(otlp(attributes))
    (row,) = rows_of_span(span)
    assert row["prompt"][1:] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}],
        },
        {"role": "tool", "content": '{"sum": 4}', "tool_call_id": "c1"},
    ]


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"gen_ai.operation.name": "execute_tool"}, "not a call of a model"),
        ({"http.method": "GET"}, "not a call of a model"),
        ({"gen_ai.operation.name": "chat"}, "messages are not recorded"),
        (call(answer("", type="blob", content="x")), "a part of type 'blob', which a text model cannot read"),
        (call(answer("", type="text", content="")), "empty completion"),
        (call(answer("4")) | {"gen_ai.output.messages": '[{"role": "assi'}, "is not valid JSON"),
        (call({"role": "assistant", "content": "4"}), "a message without parts"),
    ],
)
def test_a_span_that_is_no_trace_has_a_reason(attributes: dict[str, Any], reason: str) -> None:
    (span,) = spans_of(otlp(attributes))
    with pytest.raises(Unusable, match=reason):
        rows_of_span(span)


def test_a_score_of_several_choices_says_nothing_of_each(tmp_path: Path) -> None:
    choices = otlp(call(answer("4"), answer("5")), score(1.0))
    rows, report = converted(tmp_path, choices, otlp(call(answer("6"), answer("7")), span_id="cd"))
    assert [row["completion"][0]["content"] for row in rows] == ["6", "7"]
    assert report.left_out == {"one score for several choices": 2}


def test_evaluations_of_several_names_are_chosen(tmp_path: Path) -> None:
    record = otlp(call(answer("4")), score(1.0, "right"), score(0.25, "brief"), score(0.5, "brief"))
    with pytest.raises(DataError, match=r"several names \('brief', 'right'\); choose with --score"):
        converted(tmp_path, record)
    with pytest.raises(DataError, match="no evaluation 'kind'; there are: 'brief', 'right'"):
        converted(tmp_path, record, scores=("kind",))
    assert converted(tmp_path, record, scores=("brief",))[0][0]["final_reward"] == 0.5
    assert converted(tmp_path, record, scores=("brief", "right"))[0][0]["final_reward"] == 1.5


def test_converted_calls_are_groups_of_offline_grpo(tmp_path: Path) -> None:
    calls = [call(answer(text), **{"gen_ai.response.id": text}) for text in ("4", "5", "6")]
    records = [otlp(each, score(value), span_id=str(value)) for each, value in zip(calls, (1.0, 0.0, 0.5), strict=True)]
    rows, _ = converted(tmp_path, *records)
    path = tmp_path / "traces.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    groups = TraceGroups(open_rows(str(path), "train"), TraceKeys())
    assert [row["final_reward"] for row in groups[0]["traces"]] == [1.0, 0.0, 0.5]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"}', r"line 1: .* is neither OpenTelemetry JSON .* nor a rollout of verifiers"),
        ("[1]", "line 1: list is not an object"),
        ('{"resourceSpans": ', "line 1, column 20: not valid JSON"),
        (
            '{"resourceSpans": [{"scopeSpans": [{"spans": [{"attributes": [{"a": 1}]}]}]}]}',
            "line 1: 'attributes' must be OTLP JSON",
        ),
    ],
)
def test_a_line_that_is_no_record_is_refused(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "spans.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(DataError, match=message):
        list(convert([path], (), ConversionReport()))
