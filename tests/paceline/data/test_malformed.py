"""Malformed data of every kind of file and every format: the file, the line or row, the column, the value, and what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.ipc
import pytest

from paceline.data.examples import open_examples
from paceline.data.prompts import open_prompts
from paceline.errors import InvalidInput
from paceline.spec import RunSpec

GOOD: dict[str, dict[str, Any]] = {
    "grpo": {"prompt": "2+2=", "answer": "four"},
    "sft": {"prompt": "2+2=", "completion": "four"},
    "dpo": {"prompt": "2+2=", "chosen": "four", "rejected": "five"},
    "rm": {"prompt": "2+2=", "chosen": "four", "rejected": "five", "margin": 1.0},
    "kto": {"prompt": "2+2=", "completion": "four", "label": True},
    "offline_grpo": {"prompt": "2+2=", "completion": "four", "final_reward": 1.0},
}


def refusal(path: Path, algorithm: str, **data: Any) -> str:
    tree = {"algorithm": algorithm, "policy": {"model_name": "m"}, "data": {"train": str(path), **data}}
    if algorithm == "grpo":
        tree["rewards"] = [{"function": "exact_match"}]
    spec = RunSpec.model_validate(tree)
    with pytest.raises(InvalidInput) as refused:
        open_prompts(spec.data, 1) if algorithm == "grpo" else open_examples(spec)
    return str(refused.value)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    match path.suffix:
        case ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        case ".json":
            path.write_text(json.dumps(rows, indent=1))
        case ".parquet":
            datasets.Dataset.from_list(rows).to_parquet(str(path))
        case ".arrow":
            table = pa.Table.from_pylist(rows)
            with pyarrow.ipc.new_file(path, table.schema) as writer:
                writer.write_table(table)
        case ".csv":
            lines = [list(rows[0]), *(["" if v is None else str(v) for v in row.values()] for row in rows)]
            path.write_text("".join(",".join(f'"{cell}"' for cell in line) + "\n" for line in lines))
    return path


VALUES = [
    ("grpo", {"prompt": None}, "column 'prompt' is ", "give it text or chat messages, or remove the row"),
    ("sft", {"completion": ""}, "column 'completion' is empty", "fill it, or remove the row"),
    ("dpo", {"rejected": "four"}, "the chosen completion is also rejected ('four')", "remove it"),
    ("offline_grpo", {"completion": ""}, "column 'completion' is empty", "fill it, or remove the row"),
]
PLACES = {
    ".jsonl": "{path}, line 3: ",
    ".json": "{path}, line {line} (row 2): ",
    ".csv": "{path}, line 4: ",
    ".parquet": "data.train: '{path}', row 2: ",
    ".arrow": "data.train: '{path}', row 2: ",
}


@pytest.mark.parametrize("suffix", PLACES)
@pytest.mark.parametrize(("algorithm", "change", "named", "remedy"), VALUES)
def test_a_value_is_named_with_its_place_in_every_kind_of_file(
    tmp_path: Path, suffix: str, algorithm: str, change: dict[str, Any], named: str, remedy: str
) -> None:
    good = GOOD[algorithm]
    path = write(tmp_path / f"d{suffix}", [good, good, {**good, **change}])
    said = refusal(path, algorithm)
    line = 2 + 2 * (len(good) + 2)  # of an array with one line for each bracket and column
    assert said.startswith(PLACES[suffix].format(path=path, line=line)), said
    assert named in said
    assert remedy in said


@pytest.mark.parametrize(
    ("algorithm", "change", "message"),
    [
        ("grpo", {"prompt": 7}, "column 'prompt' must be text or chat messages, not 7"),
        ("grpo", {"prompt": [{"from": "human", "value": "a"}]}, "rename these keys to 'role' and 'content'"),
        (
            "grpo",
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
            "has a message 0 of the user whose content has a part of type 'image'; only text parts can be read",
        ),
        (
            "sft",
            {"completion": {"a": 1}},
            "column 'completion' must be text or chat messages, not {'a': 1}",
        ),
        ("sft", {"tools": [1]}, "column 'tools' must be a list of JSON schemas of functions"),
        ("dpo", {"chosen": ["a"]}, "column 'chosen' must be text or chat messages"),
        ("dpo", {"rejected": []}, "column 'rejected' is an empty list; give it at least one completion"),
        ("rm", {"margin": "much"}, "column 'margin' must be a finite number, not 'much'"),
        ("rm", {"margin": float("inf")}, "column 'margin' must be a finite number, not inf"),
        ("kto", {"label": "yes"}, "column 'label' must be true or false, not 'yes'; name the column in"),
        (
            "offline_grpo",
            {"final_reward": "good"},
            "column 'final_reward' must be a finite number, not 'good'",
        ),
        (
            "offline_grpo",
            {"completion": [{"role": "tool", "content": "a"}]},
            "column 'completion' has a message 0 of the tool, which the model did not write; give a row to each answer",
        ),
    ],
)
def test_a_value_of_a_wrong_type_is_named_with_its_column(
    tmp_path: Path, algorithm: str, change: dict[str, Any], message: str
) -> None:
    path = write(tmp_path / "d.jsonl", [GOOD[algorithm], {**GOOD[algorithm], **change}])
    assert refusal(path, algorithm).startswith(f"{path}, line 2: {message}") or (
        f"{path}, line 2: " in refusal(path, algorithm) and message in refusal(path, algorithm)
    )


PROMPT = '{"prompt": "a"}'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.jsonl", f'{PROMPT}\n{{"prompt": ', ", line 2, column 12: not valid JSON (Expecting value): "),
        (
            "d.jsonl",
            f"{PROMPT}\n[1]\n",
            ", line 2: list is not an object with columns; correct or remove it",
        ),
        (
            "d.jsonl",
            f'{PROMPT}\n{{"question": "b"}}\n',
            ", line 2: no column 'prompt', which earlier rows have; give every",
        ),
        (
            "d.jsonl",
            b'{"prompt": "\xff"}\n',
            ", line 1, column 13: not valid JSON ('utf-8' codec can't decode byte 0xff",
        ),
        (
            "d.json",
            f'[{PROMPT},\n {{"prompt" 1}}]',
            ", line 2, column 12: not valid JSON (Expecting ':' delimiter): ",
        ),
        ("d.json", f"[{PROMPT}\n {PROMPT}]", ", line 2, column 2: not valid JSON (Expecting ',' or ']'): "),
        (
            "d.json",
            f"[{PROMPT},\n 7]",
            ", line 2 (row 1): int is not an object with columns; correct it",
        ),
        (
            "d.json",
            f'[{PROMPT},\n {{"p": 1}}]',
            ", line 2 (row 1): no column 'prompt', which earlier rows have",
        ),
        (
            "d.json",
            b'[{"prompt": "a"},\n "\xff"]',
            ", line 2: not UTF-8 (invalid start byte); save the file as UTF-8",
        ),
        ("d.json", f"[{PROMPT}", ", line 1, column 17: not valid JSON (Expecting ',' or ']'): "),
        (
            "d.csv",
            "prompt,answer\na,b,c\n",
            ", line 2: 3 cells, but the first line names 2 columns; put cells",
        ),
        ("d.csv", "prompt,prompt\na,b\n", ", line 1: the column 'prompt' occurs 2 times; name it once"),
        (
            "d.csv",
            b"prompt\n\xff\n",
            ", after line 0: not UTF-8 (invalid start byte); save the file as UTF-8",
        ),
        ("d.tsv", 'prompt\tanswer\n"a" b\tc\n', ", line 2: not valid CSV ("),
    ],
)
def test_broken_files_are_named_with_the_place_of_the_fault(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert refusal(path, "grpo").startswith(f"{path}{message}"), refusal(path, "grpo")


@pytest.mark.parametrize("name", ["d.parquet", "d.arrow"])
def test_a_broken_table_says_what_to_do(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("no table")
    said = refusal(path, "grpo")
    assert said.startswith(f"data.train: '{path}' cannot be read as a table: ")
    assert said.endswith("; write the file again, or write it as JSONL")


@pytest.mark.parametrize("name", ["d.json", "d.jsonl", "d.csv"])
def test_a_file_without_rows_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("[]" if name == "d.json" else "prompt\n" if name == "d.csv" else "\n")
    assert refusal(path, "grpo") == f"data.train: '{path}' has no rows; at least one is needed"
