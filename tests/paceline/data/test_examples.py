"""Rows of supervised and preference data sets: the forms that are read, and what is said of the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
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


@pytest.mark.parametrize("prompt", [USER["content"], [USER]])
def test_whole_conversations_beside_their_prompt_repeat_it(prompt: Any) -> None:
    pair = read_preference({"prompt": prompt, "chosen": [USER, FOUR], "rejected": [USER, FIVE]}, DATA)
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
            ("best rank 0", "only one of them"),
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


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_the_assistants_messages_train_in_conversations_alone(tmp_path: Path, name: str) -> None:
    tree = {
        "algorithm": "sft",
        "sft": {"loss_mask": "assistant"},
        "policy": {"model_name": "m"},
        "data": {"train": "x"},
    }
    check = check_example(RunSpec.model_validate(tree))
    for row in ({"messages": [USER, FOUR]}, {"prompt": "2+2=", "completion": "4"}):
        path = tmp_path / name
        if path.suffix == ".parquet":
            parquet.write_table(pa.Table.from_pylist([row]), path)
        else:
            path.write_text(json.dumps(row) + "\n")
        if "messages" in row:
            assert len(open_rows(str(path), "train", check=check)) == 1
        else:
            with pytest.raises(DataError, match=r"sft\.loss_mask is 'assistant', but the row has no conversation"):
                open_rows(str(path), "train", check=check)


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(PAIR) + "\n\n" + json.dumps({**PAIR, "rejected": "4"}) + "\n")
    spec = RunSpec.model_validate({"algorithm": "dpo", "policy": {"model_name": "m"}, "data": {"train": str(path)}})
    with pytest.raises(DataError, match=r"pairs\.jsonl, line 3: .*also rejected"):
        open_rows(str(path), "train", check=check_example(spec))


@pytest.mark.parametrize(
    ("sections", "parts"),
    [
        ({"dpo": {"val_period": 5}}, ("dpo.val_period", "data.validation")),
        ({"dpo": {"label_smoothing": 0.1}}, ("0.1", "'sigmoid'", "conservative")),
        ({"data": {"train": "x", "messages_key": "m"}}, ("'m'", "'dpo'")),
        ({"policy": {"model_name": "m", "num_updates_per_step": 40}}, ("40", "num_examples_per_step 32")),
        ({"algorithm": "kto", "kto": {"num_examples_per_step": 1}}, ("at least 2",)),
    ],
)
def test_contradictions_are_refused(sections: dict[str, Any], parts: tuple[str, ...]) -> None:
    tree = {"algorithm": "dpo", "policy": {"model_name": "m"}, "data": {"train": "x"}, **sections}
    with pytest.raises(ValidationError) as refused:
        RunSpec.model_validate(tree)
    for part in parts:
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("first", "second", "prompt"),
    [
        ("Q: 7+8? The answer is 15", "Q: 7+8? The answer is 12", "Q: 7+8? The answer is"),
        ("<|user|>hi<|bot|>yes", "<|user|>hi<|tool|>no", "<|user|>hi"),  # unslothai/unsloth-zoo#1110
        ("<|user|>hi<|bot|>yes", "<|user|>hi<|bot|>yet", "<|user|>hi<|bot|>"),
        ("2+2=4", "2+2=5", "2+2="),
        ("x = 15", "x = 12", "x ="),
        ("f(15)", "f(12)", "f("),
        ("User: hi\nAssistant: yes", "User: hi\nAssistant: no", "User: hi\nAssistant:"),
        ("User: hi\n\nBot: yes", "User: hi\n\nBob: no", "User: hi\n\n"),
        ("Is it so?\nyes", "Is it so?\nno", "Is it so?\n"),
        ("a\nb", "a\n\nb", "a"),
        ("a  b", "a  c", "a "),
        ("a\tb", "a\tc", "a\t"),
        ("The answer is 15", "The answer is 15.", "The answer is"),
        ("The answer is 15", "The answer is 15 because", "The answer is"),
        ("It is unhappy", "It is undone", "It is"),
        ("Say don't", "Say don'x", "Say"),
        ("[INST] hi [/INST] yes", "[INST] hi [/INST] yellow", "[INST] hi [/INST]"),
        ("[INST]hi[/INST]yes", "[INST]hi[/INST]no", "[INST]hi[/INST]"),
        ("[INST]hi[/INST]yes", "[INST]hi[/INST]yet", "[INST]hi[/INST]"),
        ("<s>hi</s>yes", "<s>hi</s>yet", "<s>hi</s>"),
        ("<start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\nyes", "<start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>mode\nno", "<start_of_turn>user\nhi<end_of_turn>\n"),
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes", "<|im_start|>user\nhi<|im_end|>\n<|im_start|>tool\nno", "<|im_start|>user\nhi<|im_end|>\n"),
        ("<|im_start|>assistant\nyes", "<|im_start|>assistant\nyet", "<|im_start|>assistant\n"),
        ("<｜User｜>hi<｜Assistant｜>yes", "<｜User｜>hi<｜Assistent｜>yes", "<｜User｜>hi"),
        ("<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>yes", "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>yet", "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"),
        ("Human: 1 < 2\n\nAssistant: yes", "Human: 1 < 2\n\nAssistant: yet", "Human: 1 < 2\n\nAssistant:"),
        ("问题：1+1？答案：2", "问题：1+1？答案：3", "问题：1+1？答案："),
        ("Say cafe\u0301 now", "Say cafe\u0300 now", "Say"),
        ("Say 👍🏽", "Say 👍🏿", "Say"),
        ("a **b", "a **c", "a"),
        ("Ja. <b>x</b>", "Ja. <b>y</b>", "Ja. <b>"),
        ("one two\n", "one two\n\n", "one two"),
    ],
)  # fmt: skip
def test_a_pair_of_texts_is_cut_at_marks_and_words(first: str, second: str, prompt: str) -> None:
    for chosen, rejected in ((first, second), (second, first)):
        pair = read_preference({"chosen": chosen, "rejected": rejected}, DATA)
        assert pair.prompt == prompt
        assert (pair.prompt + pair.chosen, pair.prompt + pair.rejected[0]) == (chosen, rejected)


BEGUN = [USER, {"role": "assistant", "content": "The sum is "}]


def test_a_completion_goes_on_with_the_message_that_its_prompt_begins() -> None:
    pair = {"prompt": BEGUN, "chosen": [FOUR], "rejected": [FIVE]}
    assert read_preference(pair, DATA) == (BEGUN, "4", ("5",), 0.0)
    assert read_demonstration({"prompt": BEGUN, "completion": [FOUR]}, DATA) == (BEGUN, "4")
    assert read_demonstration({"prompt": BEGUN, "completion": "4"}, DATA) == (BEGUN, "4")
    assert read_labeled_completion({"prompt": BEGUN, "completion": [FOUR], "label": True}, DATA)[1] == "4"
    ranks = [{"rank": 0, "completion": [FOUR]}, {"rank": 1, "completion": [FIVE]}]
    assert read_preference({"context": BEGUN, "completions": ranks}, DATA).chosen == "4"
    with pytest.raises(DataError, match="continues, so the completion must be text or one message with text alone"):
        read_demonstration({"prompt": BEGUN, "completion": [FOUR, USER, FIVE]}, DATA)


def test_a_turn_behind_a_turn_of_the_assistant_is_a_turn() -> None:
    """The messages of a whole conversation are turns, whoever wrote the one before."""
    messages = DATA.model_copy(update={"messages_key": "messages"})
    assert read_demonstration({"messages": [*BEGUN, FOUR]}, messages) == (BEGUN, [FOUR])
    pair = read_preference({"chosen": [*BEGUN, FOUR], "rejected": [*BEGUN, FIVE]}, DATA)
    assert pair == (BEGUN, [FOUR], ([FIVE],), 0.0)
