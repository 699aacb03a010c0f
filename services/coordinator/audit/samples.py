"""Reads a run's samples from the ledger: those of a step, or all of them as a table. With or without a coordinator."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.errors import NotFound
from paceline.files.whole_file import written_whole
from paceline.wire import Buffer, decode_result, decode_rewards

if TYPE_CHECKING:
    from services.coordinator.ledger.ledger import Ledger


def samples_of_step(ledger: Ledger, run_id: str, step: int) -> list[dict[str, Any]]:
    """Return the groups of a step's batch, in the batch's order: prompt, columns, and for each completion its text,
    tokens, versions and rewards by function (null where a function returned None).

    Raises NotFound: a step without batch, samples that the run did not keep.
    """
    from paceline.spec.reading import spec_of_run

    rows = ledger.db.execute(
        "SELECT * FROM groups JOIN prompts USING (run_id, group_id) WHERE run_id = ? AND step = ? ORDER BY rank_order",
        (run_id, step),
    ).fetchall()
    if not rows:
        last = ledger.db.execute("SELECT MAX(step) FROM batches WHERE run_id = ?", (run_id,)).fetchone()[0]
        spec = ledger.db.execute("SELECT spec_yaml FROM runs WHERE run_id = ?", (run_id,)).fetchone()
        algorithm = (
            "" if spec is None or (parsed := spec_of_run(run_id, spec[0])[0]).samples else parsed.algorithm
        )
        if algorithm:
            raise NotFound(
                f"run {run_id} has no samples: with algorithm {algorithm} it trains on its data set's rows"
            )
        batches = "it has none yet" if last is None else f"its batches are of steps 0 to {last}"
        raise NotFound(f"step {step} of run {run_id} has no batch; {batches}")
    groups = []
    for row in rows:
        payload = ledger.payload(run_id, row["group_id"])
        if payload is None:
            raise NotFound(f"the samples of step {step} were not kept: the run has logger.keep_samples false")
        texts, arrays = payload.read()
        groups.append(_group(row, arrays, texts))
    return groups


def _group(row: sqlite3.Row, arrays: Buffer, texts: Buffer) -> dict[str, Any]:
    prompt_ids, completions = decode_result(arrays, texts)
    functions = json.loads(row["functions"])
    rewards_CF = decode_rewards(np.frombuffer(row["rewards"], "<f4").tolist(), len(completions))
    return {
        "group_id": row["group_id"],
        "step": row["step"],
        "state": row["state"],
        "attempt": row["attempt"],
        "prompt": json.loads(row["prompt_json"]),
        "columns": json.loads(row["columns_json"]),
        "prompt_ids": prompt_ids.tolist(),
        "reward": row["reward"],
        "completions": [
            {
                "text": completion.text,
                "token_ids": completion.token_ids.tolist(),
                "logprobs": completion.logprobs.tolist(),
                "finish_reason": completion.finish_reason,
                "spans": [[s.start, s.end, s.session, s.step] for s in completion.spans],
                "rewards": {
                    name: None if np.isnan(value) else float(value)
                    for name, value in zip(functions, rewards_F, strict=True)
                },
            }
            for completion, rewards_F in zip(completions, rewards_CF, strict=True)
        ],
    }


def export_samples(ledger: Ledger, run_id: str, weights: list[float], destination: Path) -> int:
    """Write every completion that the run has trained on as a row of the Parquet file `destination`; return the number
    of rows.

    Rows are in the order of training, a row group for each step, so memory holds one step. `weights` are those of the
    reward functions, for `final_reward`. The file appears whole under its name or not at all. Raises NotFound: nothing
    was trained, samples were not kept, no such folder.
    """
    import pyarrow.parquet

    if not destination.parent.is_dir():
        raise NotFound(f"no folder {destination.parent}; make it first")
    steps = ledger.db.execute(
        "SELECT step FROM batches WHERE run_id = ? AND trained = 1 ORDER BY step", (run_id,)
    ).fetchall()
    if not steps:
        raise NotFound(f"run {run_id} has trained no batch yet, so there is nothing to export")
    schema, rows = _schema(), 0
    with (
        written_whole(destination) as partial,
        pyarrow.parquet.ParquetWriter(partial, schema, compression="zstd") as writer,
    ):
        for step in steps:
            table = [
                row
                for group in samples_of_step(ledger, run_id, step["step"])
                for row in _completion_rows(group, weights)
            ]
            writer.write_table(pyarrow.Table.from_pylist(table, schema=schema))
            rows += len(table)
    return rows


def _schema() -> Any:
    import pyarrow as pa

    return pa.schema(
        [
            ("group_id", pa.int64()),
            ("completion_index", pa.int32()),
            ("step", pa.int64()),
            ("attempt", pa.int32()),
            ("prompt", pa.string()),
            ("columns", pa.string()),
            ("completion", pa.string()),
            ("finish_reason", pa.string()),
            ("prompt_ids", pa.list_(pa.int32())),
            ("token_ids", pa.list_(pa.int32())),
            ("logprobs", pa.list_(pa.float32())),
            ("sessions", pa.list_(pa.int32())),
            ("versions", pa.list_(pa.int32())),
            ("rewards", pa.map_(pa.string(), pa.float32())),
            ("final_reward", pa.float32()),
        ]
    )


def _completion_rows(group: dict[str, Any], weights: list[float]) -> list[dict[str, Any]]:
    """Return a row for each completion: sessions and versions by token, a chat and the columns as JSON."""
    rows = []
    for index, completion in enumerate(group["completions"]):
        lengths = [end - start for start, end, _, _ in completion["spans"]]
        values = completion["rewards"].values()
        weighted = [w * value for w, value in zip(weights, values, strict=True) if value is not None]
        rows.append(
            {
                "group_id": group["group_id"],
                "completion_index": index,
                "step": group["step"],
                "attempt": group["attempt"],
                "prompt": group["prompt"]
                if isinstance(group["prompt"], str)
                else json.dumps(group["prompt"]),
                "columns": json.dumps(group["columns"]),
                "completion": completion["text"],
                "finish_reason": completion["finish_reason"],
                "prompt_ids": group["prompt_ids"],
                "token_ids": completion["token_ids"],
                "logprobs": completion["logprobs"],
                "sessions": np.repeat([s for _, _, s, _ in completion["spans"]], lengths).tolist(),
                "versions": np.repeat([v for _, _, _, v in completion["spans"]], lengths).tolist(),
                "rewards": list(completion["rewards"].items()),
                "final_reward": sum(weighted) if weighted else None,
            }
        )
    return rows
