"""Groups of traces: what belongs together, and what is left out by which reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from paceline.data.rows import Rows, open_rows
from paceline.data.traces import TraceGroups, TraceKeys, read_trace
from paceline.errors import DataError

KEYS = TraceKeys()
TOKENS = {"prompt_ids": [1, 2], "token_ids": [3], "logprobs": [-0.5]}


def text(prompt: Any, completion: str, reward: float | None) -> dict[str, Any]:
    return {"prompt": prompt, "completion": completion, "final_reward": reward}


def opened(folder: Path, *rows: dict[str, Any]) -> Rows:
    path = folder / "traces.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return open_rows(str(path), "train")


def test_trls_completions_have_the_sum_of_their_functions(tmp_path: Path) -> None:
    rows = [
        {"step": 3, "prompt": "a", "completion": "b", "exact": 1.0, "length": 0.25, "advantage": 0.7},
        {"step": 3, "prompt": "a", "completion": "c", "exact": 0.0, "length": 0.5, "advantage": -0.7},
    ]
    path = tmp_path / "completions_00003.parquet"
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    groups = TraceGroups(open_rows(str(path), "train"), KEYS)
    assert [read_trace(row, KEYS).reward for row in groups[0]["traces"]] == [1.25, 0.5]
    assert groups.formats == {"TRL completions": 2}
    assert read_trace(rows[0], TraceKeys(rewards=("exact",))).reward == 1.0


def test_groups_by_prompt_and_reasons_of_those_left_out(tmp_path: Path) -> None:
    groups = TraceGroups(
        opened(
            tmp_path,
            text("a", "1", 1.0),
            text("b", "1", 1.0),
            text("a", "2", 0.5),
            text("b", "2", 1.0),
            text("a", "3", -2.0),
            text("c", "1", 0.5),
            text("a", "4", None),
        ),
        KEYS,
        least_reward=0.0,
    )
    assert [[row["completion"] for row in group["traces"]] for group in (groups[0],)] == [["1", "2"]]
    assert len(groups) == 1
    assert groups.left_out == {
        "all traces of the prompt have the same reward": 2,
        "reward below min_reward_threshold": 1,
        "only trace of its prompt": 1,
        "no reward": 1,
    }
    assert "1 group of 2 traces" in groups.report
    assert "2 (text rows) take the starting policy as behaviour policy" in groups.report


def test_exported_groups_stay_apart_and_long_ones_are_split(tmp_path: Path) -> None:
    exported = [
        {**text("a", "x", float(reward)), **TOKENS, "group_id": group} for group in (4, 7) for reward in range(3)
    ]
    rows = opened(tmp_path, *exported)
    groups = TraceGroups(rows, KEYS)
    assert [len(groups[index]["traces"]) for index in range(len(groups))] == [3, 3]
    assert groups.formats == {"own export": 6}
    split = TraceGroups(rows, KEYS, max_size=2)
    assert [len(split[index]["traces"]) for index in range(len(split))] == [2, 2]
    assert split.left_out == {"only trace of its prompt": 2}


def test_traces_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no prompt with two different rewards .*only trace of its prompt"):
        TraceGroups(opened(tmp_path, text("a", "1", 1.0)), KEYS)
