"""Prepared data of a spec: files for each data set, by the user's function and the filters, with every reason counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.data.examples import checked_rows
from paceline.data.preparation.prepared import Prepared, prepared_data
from paceline.data.prompts import open_prompts
from paceline.data.rows import sizes_of
from paceline.errors import DataError
from paceline.spec import RunSpec
from paceline.spec.reading import parse_spec

CODE = """
def ask(row):
    if row["q"] == "none":
        return None
    return {"prompt": row["q"] + "?", "answer": row["a"]}
"""
LONG = "Ann has seven pens and buys two more at the shop, how many has she got in the end"


def write(path: Path, *questions: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"q": text, "a": text[:1]}) + "\n" for text in questions))


def spec_in(folder: Path, preparation: dict[str, Any], **data: Any) -> RunSpec:
    (folder / "own.py").write_text(CODE)
    tree = {
        "policy": {"model_name": "none"},
        "data": {"preparation": {"function": "own.py:ask", **preparation}, **data},
        "rewards": [{"function": "exact_match"}],
    }
    return parse_spec(tree, base=folder)


def no_attempts(run: str) -> Any:
    raise AssertionError(f"run {run} is not asked")


def texts(prepared: Prepared, spec: RunSpec, *, validation: bool = False) -> list[Any]:
    rows = checked_rows(prepared.spec(spec), validation=validation)
    return [rows[index]["prompt"] for index in range(len(rows))]


def refusal(spec: RunSpec) -> str:
    with pytest.raises(DataError) as refused, prepared_data(spec, no_attempts):
        pass
    return str(refused.value)


def test_each_data_set_of_a_mixture_is_a_file_with_its_name(tmp_path: Path) -> None:
    write(tmp_path / "one" / "train.jsonl", "a", "none", "b")
    write(tmp_path / "two.jsonl", "c", "dddddd")
    write(tmp_path / "held.jsonl", "none", "eeeeee")
    spec = spec_in(
        tmp_path,
        {"max_prompt_characters": 3},
        train=["./one/train.jsonl", "./two.jsonl"],
        train_weights=[1, 3],
        source_key="source",
        validation="./held.jsonl",
    )
    with prepared_data(spec, no_attempts) as prepared:
        assert texts(prepared, spec) == ["a?", "b?", "c?"]
        assert texts(prepared, spec, validation=True) == ["eeeeee?"], "filters are for training data"
        data = prepared.spec(spec).data
        assert data.source_names() == spec.data.source_names() == ("train", "two")
        assert sizes_of(checked_rows(prepared.spec(spec))) == (2, 1)
        assert {open_prompts(data, 0).draw(n)[1]["source"] for n in range(10)} == {"train", "two"}
        assert prepared.lines == [
            "data.validation: 1 row after data.preparation; left out: 1 (by the function)",
            "data.train: 3 rows after data.preparation; left out: 1 (by the function), 1 (prompt of more than 3 characters)",
        ]
        paths = [path for each in prepared.sets.values() for path in each.paths]
    assert not any(path.exists() for path in paths)


async def test_prompts_are_compared_with_validation_data_as_the_function_makes_them(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", LONG, "other")
    write(tmp_path / "held.jsonl", LONG.upper())
    spec = spec_in(tmp_path, {"max_overlap": 0.9}, train="./train.jsonl", validation="./held.jsonl")
    with prepared_data(spec, no_attempts) as prepared:  # below a running loop, as in a notebook
        assert texts(prepared, spec) == ["other?"]
        assert prepared.sets["data.train"].left_out["prompt that overlaps with data.validation"] == 1


def test_an_evaluation_set_without_prompts_is_named(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", LONG)
    write(tmp_path / "test.jsonl", LONG)
    spec = spec_in(tmp_path, {"max_overlap": 0.9}, train="./train.jsonl")
    assert "test.jsonl has no prompts in 'prompt' or a usual column, only q, a; rename" in refusal(spec)


def test_pass_rates_of_several_runs_count_together(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", "a", "b", "c")
    attempts = {"one-1": [("a?", [1.0, 1.0]), ("b?", [1.0, 0.0])], "two-1": [("a?", [1.0]), ("b?", [0.0])]}
    keys = {"pass_rate": [0.2, 0.8], "pass_rate_of": list(attempts)}
    spec = spec_in(tmp_path, keys, train="./train.jsonl")
    with prepared_data(spec, attempts.__getitem__) as prepared:
        assert texts(prepared, spec) == ["b?", "c?"]
        assert prepared.sets["data.train"].left_out["pass rate above 0.8"] == 1


def test_what_cannot_be_read_or_leaves_nothing_names_the_data_set(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", "a")
    write(tmp_path / "other.jsonl", "none")
    spec = spec_in(tmp_path, {}, train=["./train.jsonl", "./other.jsonl"])
    assert "other.jsonl': data.preparation leaves no row; left out: 1 (by the function)" in refusal(spec)
    (tmp_path / "own.py").write_text("def ask(row):\n    return {'prompt': ''}\n")
    assert "train.jsonl', row 0: column 'prompt' is empty" in refusal(spec)


def test_a_spec_without_preparation_keeps_its_data_and_one_with_it_is_not_read_without(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "answer": "1"}\n')
    tree = {
        "policy": {"model_name": "none"},
        "data": {"train": str(tmp_path / "train.jsonl")},
        "rewards": [{"function": "exact_match"}],
    }
    spec = RunSpec.model_validate(tree)
    with prepared_data(spec, no_attempts) as prepared:
        assert (prepared.sets, prepared.spec(spec)) == ({}, spec)
    tree["data"] = {**tree["data"], "preparation": {"max_prompt_characters": 5}}
    unprepared = RunSpec.model_validate(tree)
    for read in (lambda: checked_rows(unprepared), lambda: open_prompts(unprepared.data, 0)):
        with pytest.raises(
            DataError, match=r"data\.preparation is set, but the run was submitted without prepared rows"
        ):
            read()
