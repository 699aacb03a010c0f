"""Rows of supervised and preference data sets: their meaning, and the error for a row that has none.

Forms that are read, by algorithm:

    sft              prompt, completion; or whole conversations (data.messages_key)
    dpo, orpo, rm    prompt, chosen, rejected (one, or a list of several), and for rm an optional margin;
                     chosen and rejected as whole conversations, without a prompt: their common beginning is the prompt;
                     context, completions: [{rank, completion}, …], as NeMo RL has it: the lowest rank is chosen
    kto              prompt, completion, label
    offline_grpo     traces (`paceline.data.traces`), of which each prompt's are one example

A completion is text, or the messages that follow the prompt. Promise: whatever `read_*` accepts can be tokenised, short
of a chat template that refuses it; everything else is a DataError that says what to change.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from paceline.data.column_scan import (
    Mask,
    RowCheck,
    begin_alike,
    booleans,
    conversations,
    different,
    finite_or_absent,
    texts,
)
from paceline.data.messages import are_messages, plain
from paceline.data.rows import Rows, check_columns, check_prompt, check_text, open_source
from paceline.data.tokens import with_system_prompt
from paceline.data.traces import Trace, TraceGroups, TraceKeys, read_trace
from paceline.errors import DataError
from paceline.spec import DataSection, RunSpec


class Demonstration(NamedTuple):
    """A prompt and the completion that `sft` imitates."""

    prompt: Any
    """Text or messages; of a whole conversation all but the last message."""
    completion: Any
    """Text, or the messages that follow."""


class Preference(NamedTuple):
    """One prompt with a better completion and at least one worse."""

    prompt: Any
    chosen: Any
    rejected: tuple[Any, ...]
    margin: float
    """Margin of the chosen completion in units of the reward; 0 by default."""


class LabeledCompletion(NamedTuple):
    """One completion, good or bad."""

    prompt: Any
    completion: Any
    desirable: bool


def check_example(spec: RunSpec) -> RowCheck:
    """Return the check of rows for the spec's algorithm; it raises DataError."""
    data = spec.data
    match spec.examples and spec.examples.example_form:
        case "demonstration":
            return RowCheck(
                lambda row: read_demonstration(row, data),
                (data.messages_key,) if data.messages_key else (data.prompt_key, data.completion_key),
                lambda table: _passing_demonstrations(table, data),
            )
        case "preference":
            keys = (data.prompt_key, data.chosen_key, data.rejected_key, data.margin_key)
            return RowCheck(
                lambda row: read_preference(row, data),
                (*keys, "context", "completions"),
                lambda table: _passing_preferences(table, data),
            )
        case "labeled_completion":
            return RowCheck(
                lambda row: read_labeled_completion(row, data),
                (data.prompt_key, data.completion_key, data.label_key),
                lambda table: _passing_labeled_completions(table, data),
            )
        case "traces":
            of_trace = trace_keys(spec)
            return RowCheck(
                lambda row: read_trace(row, of_trace), (), lambda table: np.zeros(table.num_rows, bool)
            )
        case _:
            raise ValueError(f"algorithm {spec.algorithm!r} reads no examples")


def open_examples(spec: RunSpec, *, validation: bool = False) -> Rows:
    """Return the examples of the training (or validation) data: its rows, of traces their groups. Raises DataError,
    Unreadable as `open_source`."""
    source = spec.data.source(validation=validation)
    rows = open_source(source, check_example(spec))
    if not spec.trains_traces:
        return rows
    section = spec.offline_grpo
    try:
        return TraceGroups(
            rows,
            trace_keys(spec),
            least_reward=section.min_reward_threshold,
            max_size=section.max_traces_per_group,
        )
    except DataError as error:
        raise DataError(f"{source.field}: {error}") from None


def trace_keys(spec: RunSpec) -> TraceKeys:
    """Return the columns of the traces of a spec."""
    return TraceKeys(spec.data.prompt_key, spec.data.completion_key, spec.offline_grpo.reward_keys)


def read_traces(row: dict[str, Any], spec: RunSpec) -> list[Trace]:
    """Return the traces of one example, text ones with data.system_prompt. Raises DataError."""
    traces = [read_trace(trace, trace_keys(spec)) for trace in row["traces"]]
    return [
        trace
        if trace.tokens is not None
        else trace._replace(prompt=_prompt(trace.prompt, (trace.completion,), spec.data))
        for trace in traces
    ]


def _passing_demonstrations(table: Any, data: DataSection) -> Mask:
    if data.messages_key is not None:
        return conversations(table, data.messages_key, system=data.system_prompt is None)
    return texts(table, data.prompt_key) & texts(table, data.completion_key)


def _passing_preferences(table: Any, data: DataSection) -> Mask:
    chosen, rejected = data.chosen_key, data.rejected_key
    passing = texts(table, chosen) & texts(table, rejected) & finite_or_absent(table, data.margin_key)
    if not passing.any():
        return passing  # the columns may have forms that only the check of single rows knows
    if data.prompt_key in table.column_names:
        return passing & texts(table, data.prompt_key) & different(table, chosen, rejected)
    return passing & begin_alike(table, chosen, rejected)


def _passing_labeled_completions(table: Any, data: DataSection) -> Mask:
    text = texts(table, data.prompt_key) & texts(table, data.completion_key)
    return text & booleans(table, data.label_key)


def read_demonstration(row: dict[str, Any], data: DataSection) -> Demonstration:
    """Raises DataError."""
    if data.messages_key is not None:
        messages: Any = row.get(data.messages_key)
        if not are_messages(messages) or len(messages) < 2 or messages[-1]["role"] != "assistant":
            raise DataError(
                f"column {data.messages_key!r} has to be at least two chat messages, the last by the assistant, not "
                f"{messages!r:.80}"
            )
        check_text(messages, data.messages_key)
        if data.system_prompt is not None and messages[0]["role"] == "system":
            raise DataError(
                "data.system_prompt is set, but the conversation has a system message; keep one of them"
            )
        return Demonstration(with_system_prompt(messages[:-1], data), plain(messages[-1:]))
    check_prompt(row, data.prompt_key)
    check_columns(row, (data.completion_key,))
    completion = _completion(row[data.completion_key], data.completion_key)
    return Demonstration(_prompt(row[data.prompt_key], (completion,), data), completion)


def read_preference(row: dict[str, Any], data: DataSection) -> Preference:
    """Raises DataError."""
    if "completions" in row and data.chosen_key not in row:
        return _ranked(row, data)
    check_columns(row, (data.chosen_key, data.rejected_key))
    chosen, rejected = row[data.chosen_key], row[data.rejected_key]
    several = rejected if isinstance(rejected, list) and not are_messages(rejected) else [rejected]
    if not several:
        raise DataError(
            f"column {data.rejected_key!r} is an empty list; a pair needs at least one completion"
        )
    margin = row.get(data.margin_key, 0.0)
    margin = 0.0 if margin is None else margin
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise DataError(f"column {data.margin_key!r} has to be a finite number, not {margin!r:.80}")
    if data.prompt_key not in row:
        prompt, chosen, several = _split_conversations(chosen, several, data)
    else:
        check_prompt(row, data.prompt_key)
        prompt = row[data.prompt_key]
    return _preference(prompt, chosen, several, float(margin), data, (data.chosen_key, data.rejected_key))


def read_labeled_completion(row: dict[str, Any], data: DataSection) -> LabeledCompletion:
    """Raises DataError."""
    check_prompt(row, data.prompt_key)
    check_columns(row, (data.completion_key,))
    label = row.get(data.label_key)
    if not isinstance(label, bool) and label not in (0, 1):
        raise DataError(
            f"column {data.label_key!r} has to be true or false, not {label!r:.80}; name the column in data.label_key"
        )
    completion = _completion(row[data.completion_key], data.completion_key)
    return LabeledCompletion(_prompt(row[data.prompt_key], (completion,), data), completion, bool(label))


def _ranked(row: dict[str, Any], data: DataSection) -> Preference:
    """`context` and `completions` with ranks, 0 the best."""
    ranked = row["completions"]
    fits = isinstance(ranked, list) and all(
        isinstance(item, dict) and isinstance(item.get("rank"), int) and item.get("completion")
        for item in ranked
    )
    if not fits or len(ranked) < 2:
        raise DataError(
            f"column 'completions' has to be at least two objects with rank and completion, not {ranked!r:.80}"
        )
    ordered = sorted(ranked, key=lambda item: int(item["rank"]))
    best = [item for item in ordered if item["rank"] == ordered[0]["rank"]]
    if len(best) > 1:
        raise DataError(
            f"{len(best)} completions have the best rank {best[0]['rank']}; exactly one can be the chosen one"
        )
    key = "context" if "context" in row else data.prompt_key
    check_prompt(row, key)
    rejected = [item["completion"] for item in ordered[1:]]
    return _preference(row[key], best[0]["completion"], rejected, 0.0, data, ("completions", "completions"))


def _preference(
    prompt: Any, chosen: Any, rejected: list[Any], margin: float, data: DataSection, keys: tuple[str, str]
) -> Preference:
    chosen = _completion(chosen, keys[0])
    worse = tuple(_completion(completion, keys[1]) for completion in rejected)
    if chosen in worse:
        raise DataError(
            f"the chosen completion is also rejected ({chosen!r:.60}); a pair without a difference teaches nothing, "
            "remove it"
        )
    return Preference(_prompt(prompt, (chosen, *worse), data), chosen, worse, margin)


def _split_conversations(chosen: Any, rejected: list[Any], data: DataSection) -> tuple[Any, Any, list[Any]]:
    """Prompt and completions of whole conversations: their common beginning is the prompt."""
    whole = [chosen, *rejected]
    if not all(are_messages(conversation) for conversation in whole):
        raise DataError(
            f"there is no column {data.prompt_key!r}, so {data.chosen_key!r} and {data.rejected_key!r} have to be whole "
            "conversations (lists of messages); name the prompt in data.prompt_key"
        )
    for conversation, key in zip(whole, (data.chosen_key, *[data.rejected_key] * len(rejected)), strict=True):
        check_text(conversation, key)
    common = 0
    for turn in zip(*whole, strict=False):
        if any(message != turn[0] for message in turn):
            break
        common += 1
    if common == 0 or any(len(conversation) == common for conversation in whole):
        raise DataError(
            f"{data.chosen_key!r} and {data.rejected_key!r} have to begin with the same messages and then to differ"
        )
    return chosen[:common], chosen[common:], [conversation[common:] for conversation in rejected]


def _prompt(prompt: Any, completions: tuple[Any, ...], data: DataSection) -> Any:
    """Return the prompt with the system prompt; as messages where any completion is messages."""
    if isinstance(prompt, str) and any(not isinstance(completion, str) for completion in completions):
        prompt = [{"role": "user", "content": prompt}]
    return with_system_prompt(prompt, data)


def _completion(value: Any, key: str) -> Any:
    check_text(value, key)
    return plain(value)
