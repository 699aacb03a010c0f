"""`data.preparation`: keys that belong together, and the file of the function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from paceline.spec import DataSection
from paceline.spec.reading import parse_spec
from paceline.spec.sections.data import PreparationSection


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"pass_rate": [0.1, 0.9]}, "only pass_rate is set"),
        ({"pass_rate_of": ["run-1"]}, "only pass_rate_of is set"),
        ({"pass_rate": [0.9, 0.1], "pass_rate_of": ["run-1"]}, "has its larger bound first"),
        ({"function": "clean"}, r"write it as path/to/file\.py:name"),
        ({"max_overlap": 0}, "max_overlap"),
    ],
)
def test_contradictions_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        PreparationSection.model_validate(keys)


def test_the_function_is_relative_to_the_specs_folder(tmp_path: Path) -> None:
    tree: dict[str, Any] = {
        "policy": {"model_name": "none"},
        "data": {"train": "org/rows", "preparation": {"function": "./own.py:clean"}},
        "rewards": [{"function": "exact_match"}],
    }
    spec = parse_spec(tree, base=tmp_path)
    assert spec.data.preparation.function == f"{tmp_path.resolve()}/own.py:clean"


def test_prepared_files_take_the_place_of_data_sets() -> None:
    hub = DataSection(train="org/rows", train_config="main", validation="org/rows")
    alone = hub.with_prepared(["/p/train.jsonl"])
    assert (alone.train, alone.train_config) == ("/p/train.jsonl", None)
    assert alone.source(validation=True) == hub.source(validation=True), "its configuration is that of before"
    both = hub.with_prepared(["/p/train.jsonl"], ["/p/held.jsonl"])
    assert (both.validation, both.validation_config) == ("/p/held.jsonl", None)
    listed = DataSection(train=("one.jsonl", "two.jsonl")).with_prepared(["/p/one.jsonl", "/p/two.jsonl"])
    assert listed.train == ("/p/one.jsonl", "/p/two.jsonl")
