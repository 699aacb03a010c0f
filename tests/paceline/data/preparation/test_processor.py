"""A user's function on rows: what it may return, and what a fault names."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from paceline.data.preparation.prepared import BATCH_ROWS, Processor
from paceline.data.rows import open_rows
from paceline.errors import DataError, InvalidInput, Unreadable


def write(folder: Path, code: str, number: int = 3) -> tuple[str, Any]:
    file, rows = folder / "own.py", folder / "rows.jsonl"
    file.write_text(textwrap.dedent(code))
    rows.write_text("".join(json.dumps({"n": index}) + "\n" for index in range(number)))
    return f"{file}:f", open_rows(str(rows), "train")


async def processed(function: str, rows: Any, timeout_s: float = 60.0) -> list[tuple[int, list[Any]]]:
    async with Processor(function, timeout_s) as processor:
        return [each async for each in processor.process(rows)]


async def test_a_row_becomes_a_row_several_or_none(tmp_path: Path) -> None:
    function, rows = write(
        tmp_path,
        """
        def f(row):
            print("to the log")
            return [row | {"copy": k} for k in range(row["n"])] if row["n"] != 1 else {"one": 1}
        """,
    )
    assert await processed(function, rows) == [
        (0, []),
        (1, [{"one": 1}]),
        (2, [{"n": 2, "copy": 0}, {"n": 2, "copy": 1}]),
    ]


async def test_batches_keep_the_order(tmp_path: Path) -> None:
    function, rows = write(tmp_path, "def f(row): return None if row['n'] % 2 else row", BATCH_ROWS + 3)
    found = await processed(function, rows)
    assert [index for index, _ in found] == list(range(BATCH_ROWS + 3))
    assert [len(made) for _, made in found] == [1 - index % 2 for index in range(BATCH_ROWS + 3)]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def f(row): return {'v': 1 // (2 - row['n'])}", r"raised ZeroDivisionError.*, for row 2$"),
        (
            "def f(row): return 'text'",
            r"a processor must return a row \(a dict\), .*; it returned 'text'.*, for row 0$",
        ),
        (
            "import os\ndef f(row): os._exit(3)",
            r"in rows 0 to 2; correct it, or raise data.preparation.timeout_s",
        ),
        ("def f(row): raise SystemExit(1)", r"raised SystemExit.*, for row 0$"),
        ("def f(row): return {'v': {1, 2}}", r"for row 2$"),
    ],
)
async def test_a_fault_names_the_row(tmp_path: Path, code: str, message: str) -> None:
    function, rows = write(tmp_path, code)
    with pytest.raises(DataError, match=message):
        await processed(function, rows)


async def test_a_function_that_hangs_ends_with_its_limit(tmp_path: Path) -> None:
    function, rows = write(tmp_path, "import time\ndef f(row): time.sleep(3600)")
    with pytest.raises(
        DataError,
        match=r"timed out after 0.5 s.* in rows 0 to 2; correct it, or raise data.preparation.timeout_s",
    ):
        await processed(function, rows, timeout_s=0.5)


async def test_a_function_that_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    function, rows = write(tmp_path, "def g(row): return row")
    with pytest.raises(InvalidInput, match="has no processor 'f'"):
        await processed(function, rows)
    with pytest.raises(Unreadable, match="there is no file"):
        await processed(str(tmp_path / "no.py") + ":f", rows)
