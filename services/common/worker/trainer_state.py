"""The state of the training that goes with a score task: TRL's `trainer_state` for reward functions.

It travels as a column with a name that no argument of a function can have, so a data set's columns cannot meet it.
"""

from __future__ import annotations

import json
from typing import Any

from paceline.reward.trainer_view import POOL_WORKERS
from paceline.spec import RunSpec

TRAINER_STATE = "paceline.trainer_state"


def trainer_state(
    spec: RunSpec, trained_steps: int, num_rows: int, reward_workers: int = 1
) -> dict[str, Any]:
    """Return the state after `trained_steps`: the steps, the run's steps, and the epochs that they are. The number of reward
    workers goes with it, by which they divide limits of services; user functions do not see it."""
    prompts = trained_steps * spec.grpo.num_prompts_per_step
    return {
        "global_step": trained_steps,
        "max_steps": spec.max_num_steps,
        "epoch": prompts / num_rows if num_rows else 0.0,
        POOL_WORKERS: max(1, reward_workers),
    }


def with_trainer_state(columns_json: str, state: dict[str, Any]) -> str:
    """Return the columns of a group, a JSON object, with the state beside them."""
    if not columns_json.startswith("{"):
        return columns_json  # a damaged record, which the worker answers for
    inside = columns_json.strip()[1:-1].strip()
    return f'{{{inside}{", " if inside else ""}"{TRAINER_STATE}": {json.dumps(state)}}}'
