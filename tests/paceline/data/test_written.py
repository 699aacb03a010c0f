"""Values of columns keep the form that their file has, from the file to the reward."""

from __future__ import annotations

import datetime
import decimal
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from paceline.data.prompts import open_prompts
from paceline.data.written import number_of, says
from paceline.reward.builtin.formats import exact_match
from paceline.spec import DataSection
from paceline.user_code.frames import decode, encode

NAN = float("nan")
DAY = datetime.date(2026, 11, 26)
HOUR = datetime.datetime(2026, 11, 26, 7, 5)
COLUMN = {
    # cells of a CSV column, a completion for the first row, its score
    "csv 007": (["007", "12"], "007", 1.0),
    "csv 7 is not 007": (["007", "12"], "7", 0.0),
    "csv 1 beside 2.5": (["1", "2.5"], "1", 1.0),
    "csv 1.0": (["1.0", "2.0"], "1.0", 1.0),
    "csv 1 is not 1.50": (["1.50", "2"], "1", 0.0),
    "csv 0.50": (["0.50", "0.25"], "0.50", 1.0),
    "csv 1e5": (["1e5", "2e5"], "1e5", 1.0),
    "csv 1E5 beside 3": (["3", "1E5"], "3", 1.0),
    "csv -0": (["-0", "1"], "-0", 1.0),
    "csv beyond 2^53": (["9007199254740993", "1"], "9007199254740993", 1.0),
    "csv of 30 digits": (["123456789012345678901234567890", "1"], "123456789012345678901234567890", 1.0),
    "csv of 20 decimals": (["0.12345678901234567890", "1"], "0.12345678901234567890", 1.0),
    "csv true": (["true", "false"], "true", 1.0),
    "csv True": (["True", "False"], "True", 1.0),
    "csv TRUE": (["TRUE", "FALSE"], "TRUE", 1.0),
    "csv true is not false": (["true", "false"], "false", 0.0),
    "csv date": (["2026-11-26", "2026-01-01"], "2026-11-26", 1.0),
    "csv 1,234": (['"1,234"', "5"], "1,234", 1.0),
    "csv NA": (["NA", "1"], "NA", 1.0),
    "csv None": (["None", "1"], "None", 1.0),
    "csv null": (["null", "x"], "null", 1.0),
    "csv nan": (["nan", "1"], "nan", 1.0),
    "csv spaces": (['" 7 "', "8"], "7", 1.0),
    "csv an empty cell among numbers": (["", "8"], "8", None),
    "csv an empty cell among 0.50": (["", "0.50"], "8", None),
    "csv 50%": (["50%", "1"], "50%", 1.0),
}  # fmt: skip
VALUES: dict[str, tuple[Any, str, float | None]] = {
    "json 1.50": (b'{"prompt": "p", "answer": 1.50}\n', "1.50", 1.0),
    "json 1.50 is 1.5": (b'{"prompt": "p", "answer": 1.50}\n', "1.5", 1.0),
    "json 1e5": (b'{"prompt": "p", "answer": 1e5}\n', "1e5", 1.0),
    "json true": (b'{"prompt": "p", "answer": true}\n', "true", 1.0),
    "json false": (b'{"prompt": "p", "answer": false}\n', "True", 0.0),
    "json a big integer": (b'{"prompt": "p", "answer": 9007199254740993}\n', "9007199254740993", 1.0),
    "json its neighbour": (b'{"prompt": "p", "answer": 9007199254740993}\n', "9007199254740992", 0.0),
    "json text 007": (b'{"prompt": "p", "answer": "007"}\n', "7", 0.0),
    "json an integer is no 7.0": (b'{"prompt": "p", "answer": 7}\n', "7.0", 0.0),
    "json null": (b'{"prompt": "p", "answer": null}\n', "null", None),
    "json NaN": (b'{"prompt": "p", "answer": NaN}\n', "nan", None),
    "json Infinity": (b'{"prompt": "p", "answer": Infinity}\n', "inf", 1.0),
    "json NaN in a list": (b'{"prompt": "p", "answer": [NaN, 1.5]}\n', "1.5", 1.0),
    "json several answers": (b'{"prompt": "p", "answer": ["Ada", "Ada Lovelace"]}\n', "Ada Lovelace", 1.0),
    "json no answers": (b'{"prompt": "p", "answer": []}\n', "x", None),
    "parquet 72.0": (pa.array([72.0, None]), "72", 1.0),
    "parquet float32": (pa.array([0.1], pa.float32()), "0.1", 1.0),
    "parquet float16": (pa.array([0.1], pa.float16()), "0.1", 1.0),
    "parquet list of float32": (pa.array([[0.1, 0.2]], pa.list_(pa.float32())), "0.2", 1.0),
    "parquet NaN": (pa.array([NAN, 1.0]), "nan", None),
    "parquet decimal": (pa.array([decimal.Decimal("1.50")]), "1.50", 1.0),
    "parquet date": (pa.array([DAY]), "2026-11-26", 1.0),
    "parquet timestamp": (pa.array([HOUR]), "2026-11-26 07:05:00", 1.0),
    "parquet boolean": (pa.array([True]), "true", 1.0),
    "parquet uint64": (pa.array([2**63 + 5], pa.uint64()), str(2**63 + 5), 1.0),
    "parquet list": (pa.array([["a", "b"]]), "b", 1.0),
}  # fmt: skip


def scored(path: Path, text: str) -> float | None:
    """Return the score of a completion of the first row, whose columns go through the frames of a reward process."""
    data = DataSection(train=str(path), apply_chat_template="never", shuffle=False)
    columns = open_prompts(data, 0).draw(0)[1]
    frame = encode({"columns": columns})
    assert json.dumps(columns, default=str, allow_nan=False)  # what a ledger keeps, and SQLite has to read
    (score,) = exact_match(["p"], [text], **{name: [value] for name, value in decode(frame[4:])["columns"].items()})
    return score


@pytest.mark.parametrize("name", COLUMN)
def test_cells_of_csv(tmp_path: Path, name: str) -> None:
    cells, text, expected = COLUMN[name]
    (tmp_path / "a.csv").write_text("prompt,answer\n" + "".join(f"p,{cell}\n" for cell in cells))
    assert scored(tmp_path / "a.csv", text) == expected


@pytest.mark.parametrize("name", VALUES)
def test_values_of_json_and_parquet(tmp_path: Path, name: str) -> None:
    value, text, expected = VALUES[name]
    if isinstance(value, bytes):
        (tmp_path / "a.jsonl").write_bytes(value)
        assert scored(tmp_path / "a.jsonl", text) == expected
        return
    parquet.write_table(pa.table({"prompt": ["p"] * len(value), "answer": value}), tmp_path / "a.parquet")
    assert scored(tmp_path / "a.parquet", text) == expected


def test_numbers_by_their_texts() -> None:
    assert [number_of(text) for text in ("7", "-0", "0.50", "1e5", "007", "1_0", "nan", "", "٣")] == [
        7, 0, 0.5, 100000.0, None, None, None, None, None,
    ]  # fmt: skip
    assert says("1e-7", 0.0000001)
    assert not says("1", True)
