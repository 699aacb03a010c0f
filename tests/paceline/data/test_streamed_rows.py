"""Rows of a stream: an order that resumes at every draw, bounded memory, and what happens when rows or the source fail."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from stream_threads import DEADLINE_S, settle

from paceline.data.prompts import PromptSource, open_prompts
from paceline.data.row_checks import row_check
from paceline.data.table_rows import StreamedRows
from paceline.errors import DataError, Unreadable
from paceline.spec import DataSection, RunSpec

BLOCK = 8


def drawn(rows: StreamedRows, draw: int) -> dict[str, Any]:
    """The row of a draw, once its block has been read."""
    try:
        return rows[draw]
    except Unreadable:
        settle()
        return rows[draw]


class Stream:
    """A stream of 20 rows in tables of 3, which can fail."""

    def __init__(self, number: int = 20, bad: tuple[int, ...] = ()) -> None:
        self.rows = [{"prompt": "" if n in bad else f"p{n}", "n": n} for n in range(number)]
        self.begun, self.fault = 0, False

    def __call__(self) -> Iterator[pa.Table]:
        self.begun += 1
        for start in range(0, len(self.rows), 3):
            if self.fault:
                raise ConnectionError("the hub is away")
            yield pa.Table.from_pylist(self.rows[start : start + 3])


def opened(stream: Stream, seed: int = 1, *, shuffle: bool = True, retry_s: float = 5.0) -> StreamedRows:
    check = row_check(DataSection(train="org/rows"))
    return StreamedRows("org/rows", stream, check, seed, block_rows=BLOCK, shuffle=shuffle, retry_s=retry_s)


def test_every_draw_is_the_same_wherever_a_run_resumes() -> None:
    whole = opened(Stream())
    expected = [drawn(whole, draw)["n"] for draw in range(60)]
    for draw in range(60):
        assert drawn(opened(Stream()), draw)["n"] == expected[draw]
    assert sorted(expected[:BLOCK]) == list(range(BLOCK)), "a block has consecutive rows"
    assert expected[:BLOCK] != list(range(BLOCK)), "they are shuffled"
    assert sorted(expected[:40]) == sorted([*range(20), *range(20)]), "each pass has each row once"
    other = opened(Stream(), seed=2)
    assert [drawn(other, draw)["n"] for draw in range(60)] != expected
    plain = opened(Stream(), shuffle=False)
    assert [drawn(plain, draw)["n"] for draw in range(60)] == [*range(20)] * 3
    assert drawn(plain, 3)["n"] == 3, "an earlier draw begins the stream anew"


def test_a_draw_never_waits_and_two_blocks_are_kept() -> None:
    gate, stream = threading.Event(), Stream(1000)

    def held() -> Iterator[pa.Table]:
        for index, table in enumerate(stream()):
            if index >= 4:
                assert gate.wait(DEADLINE_S)
            yield table

    rows = StreamedRows("org/rows", held, lambda row: None, 1, block_rows=BLOCK, shuffle=False)
    assert rows[0]["n"] == 0
    with pytest.raises(Unreadable, match=r"rows 8 to 15 of the stream 'org/rows' are being read"):
        rows[8]
    gate.set()
    assert drawn(rows, 8)["n"] == 8
    for draw in range(16, 400, BLOCK):
        assert drawn(rows, draw)["n"] == draw
        assert len(rows._blocks) == 2
    settle()


def test_rows_that_cannot_be_used_are_left_out_and_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    rows = opened(Stream(bad=(9, 11)))
    found = [drawn(rows, draw)["n"] for draw in range(BLOCK, 2 * BLOCK)]
    assert set(found) == {8, 10, 12, 13, 14, 15}
    assert "2 of 8 rows of the stream 'org/rows' cannot be used" in caplog.text
    assert "the first fault: row 9: column 'prompt' is empty" in caplog.text
    with pytest.raises(DataError, match=r"the stream 'org/rows', row 0: column 'prompt' is empty"):
        opened(Stream(bad=(0,)))
    with pytest.raises(DataError, match="the stream has no rows"):
        opened(Stream(0))
    settle()


def test_a_source_that_fails_is_tried_again() -> None:
    stream = Stream()
    rows = opened(stream, shuffle=False, retry_s=0.0)
    stream.fault = True
    with pytest.raises(Unreadable):
        rows[30]
    settle()
    begun = stream.begun
    stream.fault = False
    assert drawn(rows, 30)["n"] == 10
    assert stream.begun > begun, "it begins the stream anew"
    settle()


def test_a_fault_is_told_until_the_next_attempt() -> None:
    stream = Stream()
    rows = opened(stream, retry_s=1e9)
    stream.fault = True
    with pytest.raises(Unreadable, match="ConnectionError: the hub is away"):
        drawn(rows, 30)


def write_folder(folder: Path, number: int = 30) -> Path:
    """A folder as the hub has it: two Parquet files of one split."""
    folder.mkdir()
    for part in range(2):
        rows = [{"prompt": f"p{n}", "n": n} for n in range(part, number, 2)]
        datasets.Dataset.from_list(rows).to_parquet(str(folder / f"train-{part:05d}.parquet"))
    return folder


def draws(source: PromptSource, number: int) -> list[int]:
    found = []
    for draw in range(number):
        try:
            found.append(source.draw(draw)[1]["n"])
        except Unreadable:
            settle()
            found.append(source.draw(draw)[1]["n"])
    return found


def test_prompts_come_from_a_folder_of_files_as_from_the_hub(tmp_path: Path) -> None:
    data = DataSection(train=str(write_folder(tmp_path / "set")), streaming=True, streaming_block_rows=BLOCK)
    first, second = open_prompts(data, 1), open_prompts(data, 1)
    found = draws(first, 45)
    assert sorted(found[:30]) != found[:30]
    assert sorted(found[:24]) == sorted([*range(0, 30, 2), *range(1, 18, 2)]), "in the order of the files"
    assert (len(first), first.columns) == (0, ("n",))
    try:
        second.draw(40)
    except Unreadable:
        settle()
    assert second.draw(40)[1]["n"] == found[40]
    settle()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": ["a", "b"]}, "train lists 2 data sets, which a stream cannot mix"),
        ({"preparation": {"max_prompt_characters": 1}}, "preparation is set, which reads all rows"),
    ],
)
def test_what_a_stream_cannot_do_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataSection.model_validate({"train": "org/rows", "streaming": True, **change})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"algorithm": "sft"}, "data.streaming true with algorithm 'sft', which reads examples by index"),
        (
            {"grpo": {"max_num_epochs": 2}},
            "max_num_epochs 2 with data.streaming true: the length of a stream",
        ),
    ],
)
def test_what_needs_a_length_is_refused(sections: dict[str, Any], message: str) -> None:
    tree = {
        "policy": {"model_name": "m"},
        "data": {"train": "org/rows", "streaming": True},
        "rewards": [{"function": "exact_match"}],
        **sections,
    }
    with pytest.raises(ValueError, match=message):
        RunSpec.model_validate(tree)


def test_files_and_saved_folders_are_not_streamed(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a"}) + "\n")
    datasets.Dataset.from_list([{"prompt": "a"}]).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(DataError, match=r"are read row by row anyway; remove data\.streaming"):
        open_prompts(DataSection(train=str(tmp_path / "rows.jsonl"), streaming=True), 1)
    with pytest.raises(DataError, match="a folder made by `save_to_disk`, which is mapped from the disk anyway"):
        open_prompts(DataSection(train=str(tmp_path / "saved"), streaming=True), 1)
    no_split = DataSection(train=str(write_folder(tmp_path / "set")), streaming=True, train_split="other")
    with pytest.raises(DataError, match=r"has the splits \['train'\], not 'other'"):
        open_prompts(no_split, 1)
