"""Formats: each is recognised, named as it is read, and refused in a sentence by an algorithm that does not read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from paceline.data.examples import open_examples, report_of
from paceline.data.formats import describe, format_of_row
from paceline.data.prompts import open_prompts
from paceline.errors import DataError
from paceline.spec import DataSection, RunSpec

DATA = DataSection(train="unused.jsonl")
USER = {"role": "user", "content": "2+2?"}
FOUR = {"role": "assistant", "content": "4"}
FIVE = {"role": "assistant", "content": "5"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
ROWS: dict[str, dict[str, Any]] = {
    "text": {"text": "2+2=4"},
    "messages": {"messages": [USER, FOUR]},
    "prompt": {"prompt": "2+2=", "answer": "4"},
    "prompt chat": {"prompt": [USER], "tools": TOOLS},
    "completion": {"prompt": "2+2=", "completion": "4"},
    "completion chat": {"prompt": [USER], "completion": [FOUR]},
    "pair": {"prompt": "2+2=", "chosen": "4", "rejected": "5"},
    "pair chat": {"chosen": [USER, FOUR], "rejected": [USER, FIVE], "tools": json.dumps(TOOLS)},
    "unpaired": {"prompt": "2+2=", "completion": "4", "label": True},
    "stepwise": {"prompt": "2+2=", "completions": ["2", "4"], "labels": [False, True]},
    "ranked": {
        "context": [USER],
        "completions": [{"rank": 0, "completion": [FOUR]}, {"rank": 1, "completion": [FIVE]}],
    },
    "nemo": {"input": "2+2=", "output": "4"},
    "trace": {"prompt": "2+2=", "completion": "4", "final_reward": 1.0},
}


def spec_of(path: Path, algorithm: str, **data: Any) -> RunSpec:
    tree = {"algorithm": algorithm, "policy": {"model_name": "m"}, "data": {"train": str(path), **data}}
    return RunSpec.model_validate(tree)


def write(path: Path, *rows: dict[str, Any]) -> Path:
    if path.suffix == ".parquet":
        datasets.Dataset.from_list(list(rows)).to_parquet(str(path))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ("text", "TRL's language modeling, standard (every token trains)"),
        ("messages", "TRL's language modeling, conversational"),
        ("prompt", "TRL's prompt-only, standard"),
        ("prompt chat", "TRL's prompt-only, conversational, with tools"),
        ("completion", "TRL's prompt-completion, standard"),
        ("completion chat", "TRL's prompt-completion, conversational"),
        ("pair", "TRL's preference, explicit prompt, standard"),
        (
            "pair chat",
            "TRL's preference, implicit prompt, conversational, with tools (the common beginning of both completions is "
            "the prompt)",
        ),
        ("unpaired", "TRL's unpaired preference, standard"),
        ("stepwise", "TRL's stepwise supervision"),
        ("ranked", "NeMo RL's ranked completions"),
        ("trace", "traces (text)"),
    ],
)
def test_a_row_names_its_format(row: str, named: str) -> None:
    assert str(format_of_row(ROWS[row], DATA)) == named


def test_a_format_that_is_not_known_lists_its_columns() -> None:
    assert format_of_row({"q": "a", "a": "b"}, DATA) is None
    assert describe({"q": "a", "a": "b"}, DATA, None) == "columns of no known format: a, q"


READ = {
    "sft": ["text", "messages", "completion", "completion chat", "nemo"],
    "dpo": ["pair", "pair chat", "ranked"],
    "kto": ["unpaired", "pair", "pair chat"],
    "offline_grpo": ["trace"],
}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize(("algorithm", "row"), [(a, row) for a, rows in READ.items() for row in rows])
def test_an_algorithm_says_the_format_that_it_reads(tmp_path: Path, algorithm: str, row: str, suffix: str) -> None:
    worse = {**ROWS[row], "completion": "5", "final_reward": 0.0}
    path = write(tmp_path / f"d{suffix}", ROWS[row], worse if row == "trace" else ROWS[row])
    spec = spec_of(path, algorithm)
    rows = open_examples(spec)
    assert len(rows) == {"trace": 1}.get(row, 4 if algorithm == "kto" and "pair" in row and row != "unpaired" else 2)
    said = report_of(rows, spec)
    if row == "nemo":
        assert said == "prompts with completions, in the format NeMo RL's prompt-response (input, output), standard"
    else:
        assert f", in the format {format_of_row(ROWS[row], DATA)}" in said


@pytest.mark.parametrize(
    ("algorithm", "row", "sentence"),
    [
        (
            "sft",
            "pair",
            "TRL's preference, explicit prompt, which sft does not read; dpo, orpo, rm and kto read this format",
        ),
        (
            "sft",
            "prompt",
            "TRL's prompt-only, which sft does not read; algorithms that sample, such as grpo, read this format",
        ),
        ("dpo", "completion", "TRL's prompt-completion, which dpo does not read; sft reads this format"),
        ("dpo", "unpaired", "TRL's unpaired preference, which dpo does not read; kto reads this format"),
        ("kto", "messages", "TRL's language modeling, which kto does not read; sft reads this format"),
        ("rm", "text", "TRL's language modeling, which rm does not read"),
        ("kto", "ranked", "NeMo RL's ranked completions, which kto does not read; dpo, orpo and rm read this format"),
        ("dpo", "trace", "traces, which dpo does not read; offline_grpo reads traces"),
        ("offline_grpo", "pair", "TRL's preference, explicit prompt, which offline_grpo does not read"),
        (
            "dpo",
            "stepwise",
            "TRL's stepwise supervision, which dpo does not read; no algorithm reads this format: write a row with",
        ),
        ("sft", "stepwise", "TRL's stepwise supervision, which sft does not read; no algorithm reads this format"),
        ("kto", "stepwise", "TRL's stepwise supervision, which kto does not read"),
    ],
)
def test_a_format_of_another_algorithm_is_refused_in_a_sentence(
    tmp_path: Path, algorithm: str, row: str, sentence: str
) -> None:
    path = write(tmp_path / "d.jsonl", ROWS[row])
    with pytest.raises(DataError) as refused:
        open_examples(spec_of(path, algorithm))
    assert str(refused.value).startswith(f"{path}, line 1: ")
    assert sentence in str(refused.value)


def test_pairs_become_labeled_completions(tmp_path: Path) -> None:
    rows = open_examples(spec_of(write(tmp_path / "d.jsonl", ROWS["pair chat"]), "kto"))
    tools = ROWS["pair chat"]["tools"]
    assert [rows[index] for index in range(2)] == [
        {"prompt": [USER], "completion": [FOUR], "label": True, "tools": tools},
        {"prompt": [USER], "completion": [FIVE], "label": False, "tools": tools},
    ]


def test_a_pair_of_several_rejected_is_no_labeled_completion(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", {**ROWS["pair"], "rejected": ["5", "6"]})
    with pytest.raises(DataError, match="'rejected' has several completions; give each pair one"):
        open_examples(spec_of(path, "kto"))


def test_prompts_of_nemo_rl_have_their_column(tmp_path: Path) -> None:
    prompts = open_prompts(DataSection(train=str(write(tmp_path / "d.jsonl", ROWS["nemo"]))), 1)
    assert prompts.draw(0) == ("2+2=", {"output": "4"})
    assert prompts.columns == ("output",)
    assert prompts.format.endswith("completions are sampled for 'input', and reward functions get the other columns")


def test_tools_are_a_list_of_schemas_or_json(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", {**ROWS["messages"], "tools": "get_time"})
    with pytest.raises(DataError, match=r"d.jsonl, line 1: column 'tools' must be .* not 'get_time'; correct it"):
        open_examples(spec_of(path, "sft"))
