"""The data sets of a run: opened when it is submitted, to check them, and again when it starts."""

from __future__ import annotations

from typing import Any, NamedTuple

from paceline.data.examples import exchange_of, open_examples, report_of
from paceline.data.prompts import PromptSource, open_prompts
from paceline.spec import RunSpec

NUM_FIRST = 8
"""Rows whose texts are looked at when a run is submitted."""


class RunData(NamedTuple):
    """The data sets of a run, opened."""

    num_rows: int
    """Rows of the training data."""
    prompts: PromptSource | None = None
    """Training prompts; None for examples, which the learner reads."""
    validation: PromptSource | None = None
    report: str = ""
    """Format of the training data, and what was used and left out, for people."""
    first: tuple[Any, ...] = ()
    """Prompts, and completions of examples, of the first rows: texts or messages."""


def open_data(spec: RunSpec) -> RunData:
    """Open training and validation prompts of a run. Data of examples are only checked, because the learner reads them.
    Raises DataError."""
    data = spec.data
    if spec.examples is not None:
        rows = open_examples(spec)
        if spec.examples.validates and data.validation is not None:
            open_examples(spec, validation=True)
        shown = [rows[index] for index in range(min(len(rows), NUM_FIRST))]
        shown = [row["traces"][0] for row in shown] if spec.trains_traces else shown
        parts = (part for row in shown for part in exchange_of(row, spec)[:2] if part is not None)
        return RunData(len(rows), report=report_of(rows, spec), first=tuple(parts))
    has_tools = spec.prompts_have_tools
    prompts = open_prompts(spec.data, spec.seed, has_tools=has_tools)
    validation = (
        open_prompts(spec.data, spec.seed, validation=True, has_tools=has_tools)
        if spec.data.validation
        else None
    )
    first = tuple(prompts.draw(cursor)[0] for cursor in range(min(len(prompts), NUM_FIRST)))
    return RunData(len(prompts), prompts, validation, prompts.format, first)


def changed_data_warnings(before: str, spec: RunSpec, prompts: PromptSource | None) -> list[str]:
    """Return a warning when the prompts are not those that the run began with. `before` is the fingerprint from then, empty
    where none was recorded."""
    if prompts is None or before in ("", prompts.fingerprint):
        return []
    return [
        f"the data set {spec.data.train!r} is not what it was when the run began ({before}; now {prompts.fingerprint}): "
        "further prompts are drawn from it as it is now"
    ]
