"""Prompts of several data sets: weights, the names of sources, and what contradicts them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from paceline.data.prompts import open_prompts
from paceline.spec import DataSection, RunSpec


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    paths = [tmp_path / "math.jsonl", tmp_path / "code.jsonl"]
    for path, number in zip(paths, (3, 30), strict=True):
        rows = [{"prompt": f"{path.stem} {index}", "n": index} for index in range(number)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(path) for path in paths]


def test_weights_mix_and_the_source_is_a_column(files: list[str]) -> None:
    data = DataSection(train=tuple(files), train_weights=(3.0, 1.0), source_key="of")
    prompts = open_prompts(data, 4)
    drawn = [prompts.draw(cursor) for cursor in range(40)]
    assert Counter(columns["of"] for _, columns in drawn) == pytest.approx({"math": 30, "code": 10}, abs=2)
    assert all(prompt.split()[0] == columns["of"] for prompt, columns in drawn)
    assert prompts.columns == ("n", "of")
    resumed = open_prompts(data, 4)
    assert [resumed.draw(cursor) for cursor in range(39, -1, -1)] == drawn[::-1]


def test_a_list_without_weights_is_one_data_set_with_sources(files: list[str]) -> None:
    data = DataSection(train=tuple(files), validation=files[0], source_key="of")
    prompts = open_prompts(data, 4)
    assert Counter(prompts.draw(cursor)[1]["of"] for cursor in range(33)) == {"math": 3, "code": 30}
    assert open_prompts(data, 4, validation=True).draw(0) == ("math 0", {"n": 0})


def test_a_column_of_the_rows_stays(files: list[str]) -> None:
    prompts = open_prompts(DataSection(train=tuple(files), source_key="n"), 4)
    assert {prompts.draw(cursor)[1]["n"] for cursor in range(33)} == set(range(30))


def test_names_of_sources_are_distinct() -> None:
    data = DataSection(train=("a/x.jsonl", "b/x.jsonl", "math/*.jsonl", "org/name-1.5"))
    assert data.source_names() == ("x-0", "x-1", "math", "name-1.5")
    assert DataSection(train="a.jsonl").source_names() == ()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"train": "a.jsonl", "train_weights": [1.0, 2.0]},
            "train_weights has 2 weights, but train lists 1 data sets",
        ),
        ({"train": ["a", "b"], "train_weights": [1.0]}, "train_weights has 1 weights, but train lists 2 data sets"),
        ({"train": ["a", "b"], "train_weights": [1.0, 1e-5]}, "1e-05 of 1.00001 is a share below 1/10000"),
        ({"train": ["a", "b"], "train_weights": [1.0, 0.0]}, "greater than 0"),
    ],
)
def test_weights_that_cannot_be_drawn_are_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DataSection.model_validate(data)


def test_examples_have_no_sources() -> None:
    tree = {"algorithm": "sft", "policy": {"model_name": "m"}, "data": {"train": "a", "source_key": "of"}}
    with pytest.raises(
        ValidationError, match=r"data\.source_key 'of' with algorithm 'sft', but only an algorithm that samples"
    ):
        RunSpec.model_validate(tree)


def test_traces_have_no_weights() -> None:
    tree = {
        "algorithm": "offline_grpo",
        "policy": {"model_name": "m"},
        "data": {"train": ["a", "b"], "train_weights": [1, 2]},
    }
    with pytest.raises(ValidationError, match=r"data.train_weights \[1.0, 2.0\] with algorithm 'offline_grpo'"):
        RunSpec.model_validate(tree)
