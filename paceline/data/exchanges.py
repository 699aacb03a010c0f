"""The prompt and the completion of a row, as the algorithm of a spec reads them. Pure."""

from __future__ import annotations

from typing import Any

from paceline.data.column_names import with_keys_of_row
from paceline.data.example_rows import (
    as_prompt,
    read_demonstration,
    read_labeled_completion,
    read_preference,
)
from paceline.data.examples import trace_keys
from paceline.data.row_prompts import prompt_of
from paceline.data.tokens import with_system_prompt
from paceline.data.traces.rows import read_trace
from paceline.spec import RunSpec


def exchange_of(row: dict[str, Any], spec: RunSpec) -> tuple[Any, Any, str]:
    """Return the prompt of a row, the completion that trains, and what it is (chosen, good, bad; empty). The prompt is None where
    the whole text trains; the completion is None for an algorithm that samples."""
    data = spec.data
    match spec.examples and spec.examples.example_form:
        case "demonstration":
            return *read_demonstration(row, data), ""
        case "labeled_completion" if data.label_key in row:
            prompt, completion, desirable = read_labeled_completion(row, data)
            return prompt, completion, "good" if desirable else "bad"
        case "preference" | "labeled_completion":
            pair = read_preference(row, data)
            return pair.prompt, pair.chosen, "chosen"
        case "traces":
            trace = read_trace(row, trace_keys(spec))
            return as_prompt(trace.prompt, (trace.completion,), data), trace.completion, _reward(trace.reward)
        case _:
            prompt, _ = prompt_of(row, with_keys_of_row(row, data))
            return with_system_prompt(prompt, data), None, ""


def _reward(reward: float | None) -> str:
    return "no reward" if reward is None else f"reward {reward:g}"
