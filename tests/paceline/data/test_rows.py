"""Data sets: every fault is found when the set is opened and names file and line; the order repeats from a seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from paceline.data.examples import check_example
from paceline.data.prompts import PromptSource, open_prompts
from paceline.data.row_checks import check_columns
from paceline.data.rows import open_rows
from paceline.errors import DataError, InvalidInput, Unreadable
from paceline.spec import DataSection, RunSpec

ROWS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(5)]


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(line + "\n" for line in lines))
    return path


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    return write(tmp_path / "train.jsonl", *(json.dumps(row) for row in ROWS))


def source(path: Path, *, seed: int = 1, validation: bool = False, **fields: Any) -> PromptSource:
    return open_prompts(DataSection(train=str(path), validation=str(path), **fields), seed, validation=validation)


def refusal(path: Path, **fields: Any) -> str:
    with pytest.raises(InvalidInput) as caught:
        source(path, **fields)
    return str(caught.value)


def test_every_row_comes_once_in_an_epoch_in_an_order_of_its_own(jsonl: Path) -> None:
    prompts = source(jsonl)
    assert len(prompts) == 5
    epochs = [[prompts.draw(5 * epoch + i)[0] for i in range(5)] for epoch in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == [row["prompt"] for row in ROWS]
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_the_same_seed_and_cursor_give_the_same_prompt_also_after_a_restart(jsonl: Path) -> None:
    first, again = source(jsonl), source(jsonl)
    assert [again.draw(i) for i in (11, 3, 7)] == [first.draw(i) for i in (11, 3, 7)]
    assert [source(jsonl, seed=2).draw(i) for i in range(20)] != [first.draw(i) for i in range(20)]


def test_without_shuffling_and_for_validation_the_order_is_the_files(jsonl: Path) -> None:
    expected = [(row["prompt"], {"answer": row["answer"]}) for row in ROWS]
    unshuffled, validation = source(jsonl, shuffle=False), source(jsonl, validation=True)
    assert [unshuffled.draw(i) for i in range(6)] == [*expected, expected[0]]
    assert [validation.draw(i) for i in range(5)] == expected


@pytest.mark.parametrize("content", ["", "[]\n" * 60, '{"answer": "1"}\n' * 60, "\xff" * 400])
def test_a_file_that_is_changed_in_its_place_is_told_until_it_is_put_back(tmp_path: Path, content: str) -> None:
    row = {"prompt": "2+2=", "answer": "4"}
    jsonl = write(tmp_path / "train.jsonl", *(json.dumps(row) for _ in range(3)))
    prompts, before = source(jsonl), jsonl.read_bytes()
    jsonl.write_text(content, encoding="latin-1")
    for cursor in range(3):
        with pytest.raises(Unreadable, match=r"restore the (file|data set)"):
            prompts.draw(cursor)
    jsonl.write_bytes(before)
    assert prompts.draw(0) == ("2+2=", {"answer": "4"})


def test_a_system_prompt_makes_a_chat(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    path = write(tmp_path / "d.jsonl", '{"prompt": "1+1="}', json.dumps({"prompt": chat}))
    system = {"role": "system", "content": "be brief"}
    prompts = source(path, shuffle=False, system_prompt="be brief")
    assert prompts.draw(0)[0] == [system, {"role": "user", "content": "1+1="}]
    assert prompts.draw(1)[0] == [system, *chat]


def test_a_system_prompt_is_not_repeated(tmp_path: Path) -> None:
    """As in the exported samples of a run that had it."""
    system = {"role": "system", "content": "be brief"}
    chats = [
        [system, {"role": "user", "content": "hi"}],
        [system | {"content": "rhyme"}, {"role": "user", "content": "hi"}],
    ]
    path = write(tmp_path / "d.jsonl", *(json.dumps({"prompt": chat}) for chat in chats))
    prompts = source(path, shuffle=False, system_prompt="be brief")
    assert prompts.draw(0)[0] == chats[0]
    assert prompts.draw(1)[0] == [system, *chats[1]], "another one stays too"


def test_empty_lines_are_no_rows(tmp_path: Path) -> None:
    prompts = source(write(tmp_path / "d.jsonl", "", '{"prompt": "ä"}', "  ", '{"prompt": "b"}'), shuffle=False)
    assert [prompts.draw(i)[0] for i in range(2)] == ["ä", "b"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"prompt": "a"}', '{"prompt": '], "line 2, column 13: not valid JSON (Expecting value)"),
        (['{"prompt": "a"}', "", "[1]"], "line 3: list is not an object"),
        (['{"prompt": "a"}', '{"prompt": ' + "[" * 100_000], "line 2: nested too deeply"),
        (
            ['{"prompt": "a"}', '{"prompt": ""}'],
            "line 2: column 'prompt' is empty; give it text or chat messages, or remove the row",
        ),
        (
            ['{"prompt": "a"}', '{"prompt": 7}'],
            "line 2: column 'prompt' must be text or chat messages, not 7",
        ),
        (['{"prompt": [{"role": "user"}]}'], "line 1: column 'prompt' must be text or chat messages"),
        (
            ['{"prompt": "a", "answer": 1}', '{"prompt": "b"}'],
            "line 2: no column 'answer', which earlier rows have",
        ),
        (['{"question": "a"}'], "line 1: data.prompt_key is 'prompt', but the columns are ['question']"),
    ],
)
def test_a_malformed_row_is_found_at_opening_with_its_line(tmp_path: Path, lines: list[str], message: str) -> None:
    path = write(tmp_path / "d.jsonl", *lines)
    assert refusal(path).startswith(f"{path}, {message}")


def test_a_file_that_is_not_there_names_the_field(tmp_path: Path) -> None:
    assert refusal(tmp_path / "no.jsonl") == (
        f"data.train: no file '{tmp_path / 'no.jsonl'}'; check the path (relative paths start at the spec's folder)"
    )
    assert "no file" in refusal(tmp_path / "no.parquet")


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    assert refusal(write(tmp_path / "d.jsonl")) == (
        f"data.train: '{tmp_path / 'd.jsonl'}' has no rows; at least one is needed"
    )


def test_a_validation_set_is_named_as_such(tmp_path: Path) -> None:
    assert refusal(write(tmp_path / "d.jsonl"), validation=True).startswith("data.validation: ")


def test_parquet_reads_like_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    datasets.Dataset.from_list(ROWS).to_parquet(str(path))
    prompts = source(path, shuffle=False)
    assert [prompts.draw(i) for i in range(5)] == [(row["prompt"], {"answer": row["answer"]}) for row in ROWS]
    assert "data.prompt_key is 'question', but the columns are ['answer', 'prompt']" in refusal(
        path, prompt_key="question"
    )


def test_a_broken_parquet_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "train.parquet", "not parquet")
    assert refusal(path).startswith(f"data.train: '{path}' cannot be read as a table: ")


def test_a_data_set_saved_to_disk_has_splits(tmp_path: Path) -> None:
    single, several = tmp_path / "single", tmp_path / "several"
    datasets.Dataset.from_list(ROWS).save_to_disk(single)
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS[:2]), "test": datasets.Dataset.from_list(ROWS[2:])}
                         ).save_to_disk(several)  # fmt: skip
    assert len(source(single)) == 5
    assert len(source(several)) == 2
    assert len(source(several, train_split="test")) == 3
    assert refusal(several, train_split="dev") == (
        f"the data set '{several}' has the splits ['test', 'train'], not 'dev'"
    )


@pytest.mark.parametrize(
    ("split", "numbers"),
    [
        ("train[:80%]", [0, 1, 2, 3]),
        ("train[-1:]+test", [4, 9]),
        ("train[1:3]", [1, 2]),
        ("train+test[:0]", [0, 1, 2, 3, 4]),
    ],
)
def test_a_part_of_a_split_is_written_as_in_datasets(tmp_path: Path, split: str, numbers: list[int]) -> None:
    splits = {"train": range(5), "test": [9]}
    rows = {name: datasets.Dataset.from_dict({"prompt": [str(n) for n in part]}) for name, part in splits.items()}
    datasets.DatasetDict(rows).save_to_disk(str(tmp_path / "set"))  # type: ignore[arg-type]
    found = open_rows(str(tmp_path / "set"), split)
    assert [int(found[index]["prompt"]) for index in range(len(found))] == numbers


@pytest.mark.parametrize("split", ["train[:x]", "train[:500%]", "train[9:]", "dev[:10%]", "train[", "", "train[:1e9]"])
def test_a_part_that_is_none_is_refused_with_the_form(tmp_path: Path, split: str) -> None:
    rows = {"train": datasets.Dataset.from_dict({"prompt": ["a", "b"]})}
    datasets.DatasetDict(rows).save_to_disk(str(tmp_path / "set"))  # type: ignore[arg-type]
    with pytest.raises(DataError):
        open_rows(str(tmp_path / "set"), split)


def test_a_data_set_of_several_configurations_needs_one_by_name(tmp_path: Path) -> None:
    """A folder with the card of a data set on the hub."""
    files = "".join(f"  - {{config_name: {name}, data_files: {name}.jsonl}}\n" for name in ("main", "extra"))
    write(tmp_path / "README.md", f"---\nconfigs:\n{files}---")
    write(tmp_path / "main.jsonl", '{"prompt": "a"}')
    write(tmp_path / "extra.jsonl", '{"prompt": "b"}', '{"prompt": "c"}')
    assert len(source(tmp_path, train_config="main")) == 1
    assert len(source(tmp_path, train_config="extra")) == 2
    wanted = f"data.train '{tmp_path}': set data.train_config to one of its configurations ['main', 'extra']; "
    assert refusal(tmp_path) == f"{wanted}none is set"
    assert refusal(tmp_path, train_config="mian") == f"{wanted}'mian' is none of them"
    path = tmp_path / "main.jsonl"
    assert refusal(path, train_config="main") == (
        f"data.train_config is 'main', but '{path}' is a file, which has no configurations; remove it"
    )


def test_held_out_prompts_of_the_same_data_set_have_its_configuration() -> None:
    data = DataSection(train="org/name", validation="org/name", train_config="main")
    assert data.source(validation=True) == ("data.validation", "org/name", "test", "main")
    other = data.model_copy(update={"validation": "org/other"})
    assert other.source(validation=True).config is None


def test_a_folder_without_data_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path).startswith(f"cannot load the data set '{tmp_path}': ")


def test_rows_of_a_supervised_run_need_both_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", '{"prompt": "a", "completion": "b"}', '{"prompt": "a", "completion": ""}')
    with pytest.raises(DataError, match="line 2: column 'completion' is empty; fill it, or remove the row"):
        open_rows(str(path), "train", check=lambda row: check_columns(row, ("prompt", "completion")))


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    datasets.Dataset.from_list(rows).to_parquet(str(path))
    return path


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"prompt": None, "answer": "1"}, "column 'prompt' is null"),
        ({"prompt": "", "answer": "1"}, "column 'prompt' is empty"),
    ],
)
def test_a_bad_row_of_a_table_is_found_at_opening_with_its_row(
    tmp_path: Path, bad: dict[str, Any], message: str
) -> None:
    path = parquet(tmp_path / "train.parquet", [*ROWS, bad])
    assert refusal(path).startswith(f"data.train: '{path}', row 5: {message}")


def test_an_empty_completion_of_a_table_is_called_empty(tmp_path: Path) -> None:
    pair = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
    path = parquet(tmp_path / "pairs.parquet", [*[pair] * 150, {**pair, "rejected": ""}])
    tree = {"algorithm": "dpo", "policy": {"model_name": "m"}, "data": {"train": str(path)}}
    with pytest.raises(DataError, match="row 150: column 'rejected' is empty"):
        open_rows(str(path), "train", check=check_example(RunSpec.model_validate(tree)))


def test_text_parts_of_a_prompt_are_joined(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]
    rows = [{"prompt": [{"role": "user", "content": parts}]}]
    expected = [{"role": "user", "content": "2+2?"}]
    lines = write(tmp_path / "d.jsonl", *(json.dumps(row) for row in rows))
    for path in (lines, parquet(tmp_path / "d.parquet", rows)):
        assert source(path).draw(0)[0] == expected
    image = [{"type": "image", "text": "x.png"}]
    path = parquet(tmp_path / "e.parquet", [*rows, {"prompt": [{"role": "user", "content": image}]}])
    assert "row 1: column 'prompt' has a message 0 of the user whose content has a part of type 'image'" in (
        refusal(path)
    )
