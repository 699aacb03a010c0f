"""CSV: values by column, and faults by their line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.data.rows import open_csv
from paceline.errors import DataError


def rows_of(path: Path, text: str | bytes, **options: Any) -> list[dict[str, Any]]:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    rows = open_csv(path, **options)
    return [rows[index] for index in range(len(rows))]


def test_a_column_has_numbers_only_where_every_cell_is_one(tmp_path: Path) -> None:
    text = '\ufeffprompt,answer,share,good,code\n"1, 1\n=",2,0.5,TRUE,007\n\nb,-3,1,false,12\nc,,,,\n'
    assert rows_of(tmp_path / "a.csv", text) == [
        {"prompt": "1, 1\n=", "answer": 2, "share": 0.5, "good": True, "code": "007"},
        {"prompt": "b", "answer": -3, "share": 1.0, "good": False, "code": "12"},
        {"prompt": "c", "answer": None, "share": None, "good": None, "code": ""},
    ]


def test_tabs_part_the_cells_of_tsv(tmp_path: Path) -> None:
    assert rows_of(tmp_path / "a.tsv", "prompt\tanswer\n1,5\tx\n") == [{"prompt": "1,5", "answer": "x"}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt,answer\na,1\nb\n", r"line 3: 1 cells, but the first line names 2 columns"),
        ('prompt\n"a"b\n', r"line 2: not valid CSV"),
        ("prompt,prompt\na,b\n", r"line 1: the column 'prompt' occurs 2 times"),
        ("prompt,\na,b\n", r"line 1: a column has no name"),
        (b"prompt\na\n\xff\n", r"not UTF-8"),
        ('prompt\n"a\nb"\nbad\n', r"line 4: it is bad"),
    ],
)
def test_a_fault_is_told_with_its_line(tmp_path: Path, text: str | bytes, message: str) -> None:
    def check(row: dict[str, Any]) -> None:
        if row["prompt"] == "bad":
            raise DataError("it is bad")

    with pytest.raises(DataError, match=message):
        rows_of(tmp_path / "a.csv", text, check=check)


def test_rows_stay_what_they_were_when_the_file_is_changed(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("prompt\na\nb\n")
    rows = open_csv(path)
    fingerprint = rows.fingerprint
    path.write_text("prompt\nx\ny\n")
    assert rows[1] == {"prompt": "b"}
    assert open_csv(path).fingerprint != fingerprint
