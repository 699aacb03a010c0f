"""Rewards from the reply of a reward model's process. Pure.

Promise: the reply is checked as that of a process that may be wrong: C results, each finite numbers or None.
"""

from __future__ import annotations

import math
from typing import Any

from paceline.errors import InvalidInput
from paceline.reward.models.settings import ModelSettings, ProcessModelSettings

MAX_LABEL = 40
"""Characters of a function's label in the names of columns."""


def rewards_of(reply: dict[str, Any], settings: ModelSettings, num_completions: int) -> list[float | None]:
    """Return [C] scale · (score - offset), of steps their reduced score; None for a text without a score. Raises InvalidInput."""
    scores = reply.get("scores")
    if not isinstance(scores, list) or len(scores) != num_completions:
        raise InvalidInput(f"its process has not sent a score for each of {num_completions} completions")
    return [_reward(values, settings) for values in scores]


def extra_of(
    reply: dict[str, Any], settings: ModelSettings, label: str, num_completions: int
) -> dict[str, list[Any]]:
    """Return the columns that are kept beside the rewards: the steps' scores, and the version of weights that may change."""
    columns: dict[str, list[Any]] = {}
    if isinstance(settings, ProcessModelSettings):
        columns[f"{label[:MAX_LABEL]}_steps"] = [
            None if values is None else " ".join(f"{value:.4g}" for value in values)
            for values in reply["scores"]
        ]
    if settings.refresh_s:
        columns[f"{label[:MAX_LABEL]}_model"] = [str(reply.get("version"))] * num_completions
    return columns


def reduced(values: list[float], how: str) -> float:
    """Return one number for the scores of the steps: their `min`, `product`, `mean` or the `last`."""
    if how == "min":
        return min(values)
    if how == "product":
        return math.prod(values)
    return sum(values) / len(values) if how == "mean" else values[-1]


def _reward(values: Any, settings: ModelSettings) -> float | None:
    if values is None:
        return None
    if not isinstance(values, list) or not values or not all(_is_finite(value) for value in values):
        raise InvalidInput("its process sent something else than finite scores")
    score = reduced(values, settings.reduce) if isinstance(settings, ProcessModelSettings) else values[0]
    return settings.scale * (score - settings.offset)


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
