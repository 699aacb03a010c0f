"""Opens and checks data sets of examples, and converts their rows to what the algorithm reads.
`paceline.data.example_rows` has the forms of rows. Traces (`offline_grpo`) are grouped by their prompts; pairs
become labeled completions for `kto`. Promise: what passes the check is read later without a fault, unless a chat
template refuses it. Rows that are left out are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import numpy as np

from paceline.data.example_rows import (
    as_prompt,
    preference_of,
    read_demonstration,
    read_labeled_completion,
    read_preference,
)
from paceline.data.formats import describe, explain_form
from paceline.data.messages import tools_of
from paceline.data.prompts import prompt_rows
from paceline.data.row_checks import (
    Mask,
    RowCheck,
    begin_alike,
    booleans,
    check_prepared,
    conversations,
    different,
    finite,
    finite_or_absent,
    texts,
    unanswered,
)
from paceline.data.row_prompts import conversation_key, has_text, prompt_of, with_keys_of_row
from paceline.data.rows import Rows, by_reason, left_out_of, open_source, sizes_of
from paceline.data.tokens import with_system_prompt
from paceline.data.traces import Trace, TraceGroups, TraceKeys, read_trace
from paceline.errors import DataError
from paceline.spec import DataSection, RunSpec


def check_example(spec: RunSpec) -> RowCheck:
    """Return the check of rows for the spec's algorithm. It raises DataError."""
    data = spec.data
    match spec.examples and spec.examples.example_form:
        case "demonstration":
            keys = (data.messages_key,) if data.messages_key else (data.prompt_key, data.completion_key)
            return RowCheck(
                _explained(spec, lambda row: _read_masked(row, spec)),
                (*keys, "messages", "text", "input", "output", "tools"),
                lambda table: _without_tools(table) & _passing_demonstrations(table, spec),
            )
        case "preference":
            return RowCheck(
                _explained(spec, lambda row: read_preference(row, data)),
                (*_pair_keys(data), "context", "completions", "tools"),
                lambda table: _without_tools(table) & _passing_preferences(table, data),
            )
        case "labeled_completion":
            return RowCheck(
                _explained(spec, lambda row: _read_labeled(row, data)),
                (*_pair_keys(data), data.completion_key, data.label_key, "tools"),
                lambda table: _without_tools(table) & _passing_labeled_completions(table, data),
            )
        case "traces":
            of_trace = trace_keys(spec)
            return RowCheck(
                _explained(spec, lambda row: read_trace(row, of_trace)),
                None,
                lambda table: np.zeros(table.num_rows, bool),
            )
        case _:
            raise ValueError(f"algorithm {spec.algorithm!r} reads no examples")


def _explained(spec: RunSpec, read: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], None]:
    """Return a check that `read` accepts a row and the row's tools. Another algorithm's format is refused by name."""

    def check(row: dict[str, Any]) -> None:
        try:
            read(row)
        except DataError as error:
            assert spec.examples is not None
            sentence = explain_form(row, spec.data, spec.examples.example_form, spec.algorithm)
            raise DataError(sentence or str(error)) from None
        tools_of(row)

    return check


def _pair_keys(data: DataSection) -> tuple[str, ...]:
    return (data.prompt_key, *data.pair_keys, data.margin_key)


def open_examples(spec: RunSpec, *, validation: bool = False) -> Rows:
    """Return the training (or validation) examples: rows, or groups of traces. Raises as `open_source` does."""
    source = spec.data.source(validation=validation)
    return as_examples(checked_rows(spec, validation=validation), spec, source.field)


def checked_rows(spec: RunSpec, *, validation: bool = False) -> Rows:
    """Return the rows of the training (or validation) data after checking that the algorithm can read each row. Pairs
    in which neither completion is better are left out. Raises DataError, Unreadable as `open_source` does."""
    data, source = spec.data, spec.data.source(validation=validation)
    if spec.examples is None:
        return prompt_rows(data, validation=validation, has_tools=spec.prompts_have_tools)
    check_prepared(data)
    rows = open_source(source, check_example(spec))
    has_pairs = spec.examples.example_form == "preference" or _are_pairs(rows, spec)
    return DecidedPairs(rows, data, source.field) if has_pairs and data.preference_key in rows.columns else rows


def as_examples(rows: Rows, spec: RunSpec, field: str) -> Rows:
    """Return checked rows as the algorithm's examples. Raises DataError with the name of the field."""
    if not spec.trains_traces:
        return UnpairedRows(rows, spec.data) if _are_pairs(rows, spec) else rows
    section = spec.offline_grpo
    try:
        return TraceGroups(
            rows, trace_keys(spec), least_reward=section.min_reward_threshold, max_size=section.max_traces_per_group
        )
    except DataError as error:
        raise DataError(f"{field}: {error}") from None


def report_of(rows: Rows, spec: RunSpec) -> str:
    """Return a description, for people, of the examples (or the groups of traces) and of the rows left out."""
    assert spec.examples is not None
    if isinstance(rows, TraceGroups):
        return f"{describe(rows[0]['traces'][0], spec.data, 'traces')}; {rows.report}"
    first = rows.first_pair if isinstance(rows, UnpairedRows) else rows[0]
    text = describe(first, spec.data, spec.examples.example_form)
    left_out = left_out_of(rows)
    return f"{text}; left out: {by_reason(left_out)}" if left_out else text


class UnpairedRows:
    """Rows of pairs as rows of labeled completions: row 2i has the chosen completion of pair i, row 2i + 1 the rejected one."""

    def __init__(self, rows: Rows, data: DataSection) -> None:
        self._rows, self._data, self.fingerprint = rows, data, rows.fingerprint
        tools = ("tools",) if "tools" in rows.columns else ()
        self.columns: tuple[str, ...] = (data.prompt_key, data.completion_key, data.label_key, *tools)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(2 * size for size in sizes_of(self._rows))

    @property
    def left_out(self) -> Counter[str]:
        """Return, for each reason, the number of pairs that were left out for it."""
        return left_out_of(self._rows)

    @property
    def first_pair(self) -> dict[str, Any]:
        """Return the first pair of completions, unchanged."""
        return self._rows[0]

    def __len__(self) -> int:
        return 2 * len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row, data = self._rows[index // 2], self._data
        pair = read_preference(row, data.model_copy(update={"system_prompt": None}))
        values = (pair.prompt, pair.rejected[0] if index % 2 else pair.chosen, index % 2 == 0, row.get("tools"))
        return dict(zip(self.columns, values, strict=False))


def _are_pairs(rows: Rows, spec: RunSpec) -> bool:
    """Return whether the rows for an algorithm that reads labeled completions are pairs."""
    assert spec.examples is not None
    data = spec.data
    return (
        spec.examples.example_form == "labeled_completion"
        and data.label_key not in rows.columns
        and {data.chosen_key, data.rejected_key} <= set(rows.columns)
    )


def _read_labeled(row: dict[str, Any], data: DataSection) -> None:
    """Check a labeled completion, or a pair that becomes two. Raises DataError."""
    if data.label_key in row or not {data.chosen_key, data.rejected_key} <= row.keys():
        read_labeled_completion(row, data)
    elif len(read_preference(row, data).rejected) > 1:
        raise DataError(
            f"column {data.rejected_key!r} has several completions; give each pair one rejected completion, or write a "
            f"row with the column {data.label_key!r} for each completion"
        )


def trace_keys(spec: RunSpec) -> TraceKeys:
    return TraceKeys(spec.data.prompt_key, spec.data.completion_key, spec.offline_grpo.reward_keys)


def read_traces(row: dict[str, Any], spec: RunSpec) -> list[Trace]:
    """Return the traces of one example; traces of text get data.system_prompt. Raises DataError."""
    traces = [read_trace(trace, trace_keys(spec)) for trace in row["traces"]]
    return [
        trace
        if trace.tokens is not None
        else trace._replace(prompt=as_prompt(trace.prompt, (trace.completion,), spec.data))
        for trace in traces
    ]


def _without_tools(table: Any) -> Mask:
    """Return [N] booleans, false for rows with tools: such rows are checked singly."""
    return np.full(table.num_rows, "tools" not in table.column_names)


def _read_masked(row: dict[str, Any], spec: RunSpec) -> None:
    """Check a demonstration. Raises DataError, also if `sft.loss_mask` is `assistant` and the row has no messages."""
    if spec.sft.loss_mask == "assistant" and conversation_key(row, spec.data) is None:
        raise DataError(
            "sft.loss_mask is 'assistant', but the row has no conversation; name its column with data.messages_key, or set "
            "sft.loss_mask to 'completion'"
        )
    read_demonstration(row, spec.data)


def _passing_demonstrations(table: Any, spec: RunSpec) -> Mask:
    names, data = dict.fromkeys(table.column_names), spec.data
    if (messages := conversation_key(names, data)) is not None:
        return conversations(table, messages, system=data.system_prompt is None)
    if spec.sft.loss_mask == "assistant":
        return np.zeros(table.num_rows, bool)
    if has_text(names, data):
        return texts(table, "text")
    data = with_keys_of_row(names, data)
    prompts = texts(table, data.prompt_key) & unanswered(table, data.prompt_key)
    return prompts & texts(table, data.completion_key)


def _passing_preferences(table: Any, data: DataSection) -> Mask:
    chosen, rejected = data.chosen_key, data.rejected_key
    passing = texts(table, chosen) & texts(table, rejected) & finite_or_absent(table, data.margin_key)
    if data.preference_key is not None:
        passing &= finite(table, data.preference_key)
    if not passing.any():
        return passing  # the columns may have forms that only the check of single rows supports
    if data.prompt_key in table.column_names:
        prompts = texts(table, data.prompt_key) & unanswered(table, data.prompt_key)
        return passing & prompts & different(table, chosen, rejected)
    return passing & begin_alike(table, chosen, rejected)


def _passing_labeled_completions(table: Any, data: DataSection) -> Mask:
    prompts = texts(table, data.prompt_key) & unanswered(table, data.prompt_key)
    return prompts & texts(table, data.completion_key) & booleans(table, data.label_key)


UNDECIDED = "neither completion is better"


class DecidedPairs:
    """Checked pairs, without undecided ones (`data.preference_key` is 0). Only the indices of pairs are in memory."""

    def __init__(self, rows: Rows, data: DataSection, field: str) -> None:
        """Raise DataError that names `field` if a data set has no pair with a better completion."""
        self._rows, self.columns, self.fingerprint = rows, rows.columns, rows.fingerprint
        self._kept = np.array([i for i in range(len(rows)) if preference_of(rows[i], data) != 0], np.int64)
        ends = np.searchsorted(self._kept, [0, *accumulate(sizes_of(rows))])
        self.sizes = tuple(np.diff(ends).tolist())
        if 0 in self.sizes:
            raise DataError(
                f"{field}: column {data.preference_key!r} is 0 in all {sizes_of(rows)[self.sizes.index(0)]:,} rows of a data "
                "set, so neither completion is ever better; correct data.preference_key, or remove the data set"
            )
        self.left_out = Counter({UNDECIDED: len(rows) - len(self)})

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._rows[int(self._kept[index])]


def exchange_of(row: dict[str, Any], spec: RunSpec) -> tuple[Any, Any, str]:
    """Return the prompt of a row, the completion that trains, and its kind (chosen, good, bad, or empty). The prompt is
    None if the whole text trains; the completion is None for an algorithm that samples."""
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
            reward = "no reward" if trace.reward is None else f"reward {trace.reward:g}"
            return as_prompt(trace.prompt, (trace.completion,), data), trace.completion, reward
        case _:
            prompt, _ = prompt_of(row, with_keys_of_row(row, data))
            return with_system_prompt(prompt, data), None, ""
