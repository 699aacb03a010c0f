"""The scan of columns: it passes the usual rows of each algorithm, and no row that the check of single rows refuses."""

from __future__ import annotations

import random
from typing import Any

import datasets
import pyarrow as pa
import pytest

from paceline.data import row_checks as column_scan
from paceline.data.examples import check_example
from paceline.data.row_checks import RowCheck, doubtful_rows, row_check
from paceline.errors import DataError
from paceline.spec import DataSection, RunSpec

DATA = DataSection(train="x")
TEXTS = ["a", "b", "", None]
CONTENTS = ["a", "b", "", None]
ROLES = ["user", "assistant", "system", "", None]


def check_for(algorithm: str, **data: Any) -> RowCheck:
    tree = {"algorithm": algorithm, "policy": {"model_name": "m"}, "data": {"train": "x", **data}}
    return check_example(RunSpec.model_validate(tree))


def conversation(draw: random.Random) -> list[dict[str, Any]] | None:
    if draw.random() < 0.05:
        return None
    first = {"role": "user", "content": draw.choice("ab")}
    others = [
        {"role": draw.choice(ROLES[:3] if draw.random() < 0.8 else ROLES), "content": draw.choice(CONTENTS)}
        for _ in range(draw.randrange(3))
    ]
    return [first, *others] if draw.random() < 0.9 else others


def rows_of(draw: random.Random, columns: dict[str, str]) -> dict[str, list[Any]]:
    makers = {
        "text": lambda: draw.choice(TEXTS),
        "chat": lambda: conversation(draw),
        "bool": lambda: draw.choice([True, False, None]),
        "int": lambda: draw.choice([0, 1, 2, None]),
        "float": lambda: draw.choice([0.0, 1.0, 0.5, float("nan"), None]),
    }
    return {name: [makers[kind]() for _ in range(400)] for name, kind in columns.items()}


@pytest.mark.parametrize(
    ("check", "columns"),
    [
        (row_check(DATA), {"prompt": "text"}),
        (row_check(DATA), {"prompt": "chat"}),
        (check_for("sft"), {"prompt": "text", "completion": "text"}),
        (check_for("sft"), {"prompt": "chat", "completion": "text"}),
        (check_for("sft", messages_key="m"), {"m": "chat"}),
        (check_for("sft", messages_key="m", system_prompt="s"), {"m": "chat"}),
        (check_for("dpo"), {"prompt": "text", "chosen": "text", "rejected": "text", "margin": "float"}),
        (check_for("dpo"), {"prompt": "chat", "chosen": "chat", "rejected": "chat"}),
        (check_for("rm"), {"chosen": "chat", "rejected": "chat"}),
        (check_for("dpo"), {"prompt": "text", "chosen": "chat", "rejected": "text"}),
        (check_for("kto"), {"prompt": "text", "completion": "text", "label": "bool"}),
        (check_for("kto"), {"prompt": "text", "completion": "text", "label": "int"}),
        (check_for("kto"), {"prompt": "chat", "completion": "text", "label": "float"}),
    ],
)
def test_no_row_passes_the_scan_that_the_check_refuses(check: RowCheck, columns: dict[str, str]) -> None:
    table = pa.table(rows_of(random.Random(7), columns))
    passing = check.passing(table)
    assert passing.any()
    assert not passing.all()
    for row, passes in zip(table.to_pylist(), passing, strict=True):
        if passes:
            check(row)


def test_a_column_of_an_unknown_form_is_checked_row_by_row() -> None:
    table = pa.table({"prompt": [["a", "b"]], "chosen": [1], "rejected": [2]})
    assert not row_check(DATA).passing(table).any()
    assert not check_for("dpo").passing(table).any()
    assert not row_check(DataSection(train="x", prompt_key="question")).passing(table).any()


def test_doubtful_rows_have_the_index_of_their_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(column_scan, "BATCH_ROWS", 4)
    prompts = [None if index in (3, 6) else "a" for index in range(9)]
    rows = datasets.Dataset.from_dict({"prompt": prompts, "other": list(range(9))})
    check = row_check(DATA)
    assert list(doubtful_rows(rows, check)) == [(3, {"prompt": None}), (6, {"prompt": None})]
    assert list(doubtful_rows(rows.select([6, 0, 3]), check)) == [
        (0, {"prompt": None}),
        (2, {"prompt": None}),
    ]
    with pytest.raises(DataError, match="is null"):
        check({"prompt": None})
