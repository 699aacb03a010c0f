"""Reads a run's samples from the ledger: those of a step, or of an evaluation. With or without a coordinator."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.array_frames import Buffer
from paceline.errors import NotFound
from paceline.rewards import group_totals
from paceline.spec import RewardFunctionSection
from paceline.wire import decode_result, decode_rewards
from services.common.logged_extra import read_extra
from services.coordinator.audit.episode_samples import ended_lives, episodes

if TYPE_CHECKING:
    from services.coordinator.ledger.ledger import Ledger


def samples_of_step(ledger: Ledger, run_id: str, step: int) -> list[dict[str, Any]]:
    """Return the groups of a step's batch, in the batch's order: prompt, columns, and for each completion its text,
    tokens, versions, rewards by function (null where a function returned None), their weighted sum, and the columns that the
    functions logged (`extra`).

    Raises NotFound: a step without batch, samples that the run did not keep.
    """
    rows = ledger.db.execute(
        "SELECT * FROM groups JOIN prompts USING (run_id, group_id) WHERE run_id = ? AND step = ? ORDER BY rank_order",
        (run_id, step),
    ).fetchall()
    if not rows:
        last = ledger.db.execute("SELECT MAX(step) FROM batches WHERE run_id = ?", (run_id,)).fetchone()[0]
        _check_that_it_samples(ledger, run_id)
        batches = "it has none yet" if last is None else f"its batches are of steps 0 to {last}"
        raise NotFound(f"step {step} of run {run_id} has no batch; {batches}")
    return _groups(ledger, run_id, rows, f"the samples of step {step}")


def newest_step(ledger: Ledger, run_id: str) -> int:
    """Return the newest trained step. Raises NotFound without any."""
    step = ledger.db.execute(
        "SELECT MAX(step) FROM batches WHERE run_id = ? AND trained = 1", (run_id,)
    ).fetchone()[0]
    if step is None:
        _check_that_it_samples(ledger, run_id)
        raise NotFound(f"run {run_id} has trained no batch yet")
    return int(step)


def samples_of_evaluation(ledger: Ledger, run_id: str, version: int | None = None) -> list[dict[str, Any]]:
    """Return the scored groups of the newest evaluation, or of that of a version, in the order of the validation set.

    They are as those of a step; `step` is the version. Raises NotFound: no such evaluation, samples that were not kept.
    """
    known = ledger.db.execute(
        "SELECT step, pinned_step FROM evaluations WHERE run_id = ? AND done = 1 AND pinned_step IS NOT NULL"
        " ORDER BY step",
        (run_id,),
    ).fetchall()
    wanted = [row for row in known if version is None or row["pinned_step"] == version]
    if not wanted:
        versions = ", ".join(str(row["pinned_step"]) for row in known) or "none yet"
        _check_that_it_samples(ledger, run_id)
        raise NotFound(
            f"run {run_id} has no evaluation{'' if version is None else f' of version {version}'}; evaluated are {versions}"
        )
    chosen = wanted[-1]
    rows = ledger.db.execute(
        "SELECT groups.*, prompt_json, columns_json FROM groups JOIN prompts USING (run_id, group_id)"
        " WHERE run_id = ? AND class = ? AND state = 'scored' ORDER BY slot",
        (run_id, f"eval:{chosen['step']}"),
    ).fetchall()
    if not rows:
        kept = ", ".join(str(row["pinned_step"]) for row in known if _is_kept(ledger, run_id, row["step"]))
        raise NotFound(
            f"the samples of version {chosen['pinned_step']} were not kept (logger.keep_evaluations); kept are "
            f"those of {kept or 'none'}"
        )
    version = chosen["pinned_step"]
    groups = _groups(ledger, run_id, rows, f"the samples of version {version}", version)
    return [group | {"step": version} for group in groups]


def by_reward(groups: list[dict[str, Any]], *, best: bool) -> list[dict[str, Any]]:
    """Return a group for each completion that has a reward, best or worst first; equal ones in their order."""
    alone = [
        group | {"completions": [completion], "reward": completion["reward"]}
        for group in groups
        for completion in group["completions"]
        if completion["reward"] is not None
    ]
    return sorted(alone, key=lambda group: -group["reward"] if best else group["reward"])


def _check_that_it_samples(ledger: Ledger, run_id: str) -> None:
    """Raises NotFound for a run that trains on examples."""
    from paceline.spec.reading import spec_of_run

    row = ledger.db.execute("SELECT spec_yaml FROM runs WHERE run_id = ?", (run_id,)).fetchone()
    spec = None if row is None else spec_of_run(run_id, row[0])[0]
    if spec is not None and not spec.samples:
        raise NotFound(
            f"run {run_id} has no samples: with algorithm {spec.algorithm} it trains on its data set's rows"
        )


def _is_kept(ledger: Ledger, run_id: str, step: int) -> bool:
    row = ledger.db.execute(
        "SELECT 1 FROM groups WHERE run_id = ? AND class = ? AND state = 'scored' LIMIT 1",
        (run_id, f"eval:{step}"),
    ).fetchone()
    return row is not None


def _groups(
    ledger: Ledger, run_id: str, rows: list[sqlite3.Row], what: str, step: int | None = None
) -> list[dict[str, Any]]:
    """Return the groups of `rows`, with the totals of `step`, else of each row's step."""
    from paceline.spec.reading import spec_of_run

    spec = spec_of_run(run_id, ledger.run(run_id)["spec_yaml"])[0]
    extra = read_extra(ledger.run_directory(run_id), {row["digest"] for row in rows})
    groups = []
    for row in rows:
        payload = ledger.payload(run_id, row["group_id"])
        if payload is None:
            raise NotFound(f"{what} were not kept: the run has logger.keep_samples false")
        texts, arrays = payload.read()
        at = row["step"] if step is None else step
        group = group_content(row, arrays, texts, spec.rewards, at or 0, extra.get(row["digest"], {}))
        if spec.environment.is_used:
            group["restarts"] = ended_lives(ledger, run_id, row["group_id"])
        groups.append(group)
    return groups


def group_content(
    row: sqlite3.Row,
    arrays: Buffer,
    texts: Buffer,
    rewards: Sequence[RewardFunctionSection],
    step: int,
    extra: dict[str, list[Any]],
) -> dict[str, Any]:
    """Return a group as `samples_of_step` does, from its row with its prompt, its arrays and texts, and the rewards of its
    run with their weights at `step`. Raises WireError."""
    prompt_ids, completions = decode_result(arrays, texts)
    sampled = episodes(arrays, texts)
    if sampled is None:
        sampled = [
            {
                "text": completion.text,
                "token_ids": completion.token_ids.tolist(),
                "logprobs": completion.logprobs.tolist(),
                "finish_reason": completion.finish_reason,
                "spans": [[s.start, s.end, s.session, s.step] for s in completion.spans],
            }
            for completion in completions
        ]
    functions = json.loads(row["functions"])
    rewards_CF = decode_rewards(np.frombuffer(row["rewards"], "<f4").tolist(), len(sampled))
    totals_C = group_totals(rewards_CF, rewards, step)
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
            sample
            | {
                "rewards": {
                    name: None if np.isnan(value) else float(value)
                    for name, value in zip(functions, rewards_F, strict=True)
                },
                "reward": None if np.isnan(totals_C[index]) else float(totals_C[index]),
                "extra": {
                    name: values[index] for name, values in extra.items() if len(values) == len(sampled)
                },
            }
            for index, (sample, rewards_F) in enumerate(zip(sampled, rewards_CF, strict=True))
        ],
    }
