"""Reward that the environment of an episode gave by itself."""

from __future__ import annotations

from typing import Any

from paceline.reward.builtin.inputs import MissingColumn

REWARD_COLUMN = "environment_reward"
"""Column of a run with an environment: what `get_reward`, `step` or the agent gave for each episode, or None."""


def environment(
    prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], **columns: Any
) -> list[float | None]:
    """Return [C] the reward of the environment, None for an episode that it gave none. Raises MissingColumn without one."""
    if REWARD_COLUMN not in columns:
        raise MissingColumn(
            "the run has no environment, so nothing gave a reward; remove the function 'environment'"
        )
    return list(columns[REWARD_COLUMN])
