"""Comparison of an evaluation's questions with the data that a model was trained on.

Promise: a set that cannot be compared is named with the reason, never passed over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.data.overlap import OVERLAP, OverlapIndex, prompt_texts
from paceline.data.rows import open_source
from paceline.errors import PacelineError
from paceline.spec.sections.data import DataSource

Json = dict[str, Any]


def compared(questions: Sequence[str], sets: Sequence[DataSource], prompt_key: str) -> list[Json]:
    """Return for each training set how many of the questions are in it and the indices of the first ones, or why it could not
    be compared."""
    index = OverlapIndex(questions)
    return [_compared(index, questions, source, prompt_key) for source in sets]


def _compared(index: OverlapIndex, questions: Sequence[str], source: DataSource, prompt_key: str) -> Json:
    name = source.name if isinstance(source.name, str) else ", ".join(source.name)
    try:
        rows = open_source(source)
    except PacelineError as error:
        return {"training": name, "not_compared": str(error)}
    texts = prompt_texts(rows, prompt_key)
    found = index.found_in(texts, questions)
    if not any(prompt_texts(rows, prompt_key)):
        return {"training": name, "not_compared": f"no column with prompts among {list(rows.columns)}"}
    return {"training": name, "rows": len(rows), "questions": len(found), "first": found[:5]}


def warnings_of(found: Sequence[Json], num_questions: int) -> list[str]:
    """Return a sentence for each training set that holds questions, and for each that could not be compared."""
    lines = []
    for each in found:
        if "not_compared" in each:
            lines.append(
                f"{each['training']} could not be compared with the questions: {each['not_compared']}"
            )
        elif each["questions"]:
            lines.append(
                f"{each['questions']:,} of {num_questions:,} questions have at least {OVERLAP:.0%} of their words in "
                f"{each['training']}, which the model was trained on (first: problem {each['first'][0]}); its result says "
                "little about new questions"
            )
    return lines
