"""Rows of supervised and preference data sets: the forms that are read, and what is said of the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from paceline.data.example_rows import read_demonstration, read_labeled_completion, read_preference
from paceline.data.examples import check_example
from paceline.data.rows import open_rows
from paceline.errors import DataError
from paceline.spec import DataSection, RunSpec

DATA = DataSection(train="unused.jsonl")
USER = {"role": "user", "content": "2+2?"}
FOUR = {"role": "assistant", "content": "4"}
FIVE = {"role": "assistant", "content": "5"}


def test_a_pair_of_texts() -> None:
    pair = read_preference({"prompt": "2+2=", "chosen": "4", "rejected": "5", "margin": 2}, DATA)
    assert pair == ("2+2=", "4", ("5",), 2.0)


def test_several_rejected_and_a_system_prompt() -> None:
    data = DATA.model_copy(update={"system_prompt": "Short."})
    pair = read_preference({"prompt": "2+2=", "chosen": "4", "rejected": ["5", "6"]}, data)
    assert pair.rejected == ("5", "6")
    assert [message["role"] for message in pair.prompt] == ["system", "user"]


def test_whole_conversations_share_their_beginning() -> None:
    pair = read_preference({"chosen": [USER, FOUR], "rejected": [USER, FIVE]}, DATA)
    assert pair == ([USER], [FOUR], ([FIVE],), 0.0)


def test_a_list_of_conversations_is_several_rejected() -> None:
    pair = read_preference({"prompt": [USER], "chosen": [FOUR], "rejected": [[FIVE], [USER]]}, DATA)
    assert pair.rejected == ([FIVE], [USER])


def test_nemos_ranks() -> None:
    completions = [
        {"rank": 1, "completion": [FIVE]},
        {"rank": 0, "completion": [FOUR]},
        {"rank": 2, "completion": [USER]},
    ]
    pair = read_preference({"context": [USER], "completions": completions}, DATA)
    assert pair == ([USER], [FOUR], ([FIVE], [USER]), 0.0)


def test_a_verdict_and_a_demonstration() -> None:
    assert read_labeled_completion({"prompt": "a", "completion": "b", "label": False}, DATA) == (
        "a",
        "b",
        False,
    )
    assert read_demonstration({"prompt": "a", "completion": "b"}, DATA) == ("a", "b")
    data = DATA.model_copy(update={"messages_key": "messages"})
    assert read_demonstration({"messages": [USER, FOUR]}, data) == ([USER], [FOUR])


PAIR = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        ({**PAIR, "rejected": "4"}, ("also rejected", "'4'", "remove")),
        ({**PAIR, "rejected": []}, ("'rejected'", "empty list")),
        ({**PAIR, "chosen": 7}, ("'chosen'", "7")),
        ({**PAIR, "margin": "much"}, ("'margin'", "'much'")),
        ({"chosen": "4", "rejected": "5"}, ("'prompt'", "data.prompt_key")),
        ({"chosen": [USER, FOUR], "rejected": [FIVE]}, ("begin with the same messages",)),
        ({"context": [USER], "completions": [{"rank": 0, "completion": [FOUR]}]}, ("at least two",)),
        (
            {"prompt": "a", "completions": [{"rank": 0, "completion": c} for c in ("b", "c")]},
            ("best rank 0", "exactly one"),
        ),
        ({"prompt": "a", "chosen": "b"}, ("'rejected'", "data.*_key")),
    ],
)
def test_what_is_no_pair_is_said(row: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(DataError) as refused:
        read_preference(row, DATA)
    for part in parts:
        assert part in str(refused.value)


@pytest.mark.parametrize("label", ["yes", None, 2])
def test_a_label_is_true_or_false(label: Any) -> None:
    with pytest.raises(DataError, match="'label'"):
        read_labeled_completion({"prompt": "a", "completion": "b", "label": label}, DATA)


@pytest.mark.parametrize("messages", [[FOUR], [USER, USER], "hello", None])
def test_a_conversation_ends_with_the_assistant(messages: Any) -> None:
    with pytest.raises(DataError, match="last by the assistant"):
        read_demonstration({"messages": messages}, DATA.model_copy(update={"messages_key": "messages"}))


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(PAIR) + "\n\n" + json.dumps({**PAIR, "rejected": "4"}) + "\n")
    spec = RunSpec.model_validate(
        {"algorithm": "dpo", "policy": {"model_name": "m"}, "data": {"train": str(path)}}
    )
    with pytest.raises(DataError, match=r"pairs\.jsonl, line 3: .*also rejected"):
        open_rows(str(path), "train", check=check_example(spec))


@pytest.mark.parametrize(
    ("sections", "parts"),
    [
        ({"dpo": {"val_period": 5}}, ("dpo.val_period", "data.validation")),
        ({"dpo": {"label_smoothing": 0.1}}, ("0.1", "'sigmoid'", "conservative")),
        ({"data": {"train": "x", "messages_key": "m"}}, ("'m'", "'dpo'")),
        ({"policy": {"model_name": "m", "num_updates_per_step": 40}}, ("40", "num_examples_per_step 32")),
        ({"algorithm": "sft", "sft": {"loss_mask": "assistant"}}, ("'assistant'", "data.messages_key")),
        ({"algorithm": "kto", "kto": {"num_examples_per_step": 1}}, ("at least 2",)),
    ],
)
def test_contradictions_are_refused(sections: dict[str, Any], parts: tuple[str, ...]) -> None:
    tree = {"algorithm": "dpo", "policy": {"model_name": "m"}, "data": {"train": "x"}, **sections}
    with pytest.raises(ValidationError) as refused:
        RunSpec.model_validate(tree)
    for part in parts:
        assert part in str(refused.value)
