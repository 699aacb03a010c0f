"""Pairs with a number that says which completion is better: in files, tables and mixtures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from paceline.data.examples import DecidedPairs, checked_rows
from paceline.errors import DataError
from paceline.spec import RunSpec


def row(prompt: str, preference: Any) -> dict[str, Any]:
    return {"prompt": prompt, "a": "one", "b": "two", "better": preference}


def spec_of(*paths: Path) -> RunSpec:
    keys = {"chosen_key": "a", "rejected_key": "b", "preference_key": "better"}
    data = {"train": [str(path) for path in paths], **keys}
    return RunSpec.model_validate({"algorithm": "dpo", "policy": {"model_name": "m"}, "data": data})


def jsonl(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


def test_each_data_set_has_its_own_rows_left_out(tmp_path: Path) -> None:
    table = tmp_path / "two.parquet"
    datasets.Dataset.from_list([row("c", 0.0), row("d", 0.5), row("e", -1.0)]).to_parquet(str(table))
    spec = spec_of(jsonl(tmp_path / "one.jsonl", row("a", -1), row("b", 0)), table)
    rows = checked_rows(spec)
    assert isinstance(rows, DecidedPairs)
    assert rows.sizes == (1, 2)
    assert [rows[index]["prompt"] for index in range(len(rows))] == ["a", "d", "e"]
    assert dict(rows.left_out) == {"neither completion is better": 2}


def test_a_data_set_without_any_decision_is_refused(tmp_path: Path) -> None:
    spec = spec_of(jsonl(tmp_path / "one.jsonl", row("a", -1)), jsonl(tmp_path / "two.jsonl", row("b", 0), row("c", 0)))
    with pytest.raises(DataError, match=r"data\.train: column 'better' is 0 in all 2 rows of a data set"):
        checked_rows(spec)


@pytest.mark.parametrize("value", [None, "much", True, float("nan")])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_value_that_says_nothing_is_named_with_its_row(tmp_path: Path, kind: str, value: Any) -> None:
    path = tmp_path / f"rows.{kind}"
    rows = [row("a", value)] if isinstance(value, str | bool) else [row("a", -1), row("b", value)]
    if kind == "jsonl":
        jsonl(path, *rows)
    else:
        datasets.Dataset.from_list(rows).to_parquet(str(path))
    with pytest.raises(DataError, match=r"rows\.\w+'?, (line|row) .*column 'better'"):
        checked_rows(spec_of(path))
