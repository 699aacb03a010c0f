"""`reward_model` and `process_reward_model`: trained classification models as reward functions.

In a run they are scored by `paceline.reward.models`, in a process for each model that all groups of a worker share. Called as functions
they load the model into the caller's process and score there, with the same code.
"""

from __future__ import annotations

import functools
import json
from typing import Any


def reward_model(
    prompts: list[Any],
    completions: list[Any],
    *,
    path: str,
    endpoint: dict[str, Any] | None = None,
    scale: float = 1.0,
    offset: float = 0.0,
    chat_template_kwargs: dict[str, Any] | None = None,
    device: str = "auto",
    precision: str = "auto",
    max_batch_tokens: int = 16384,
    refresh_s: float = 0.0,
    **columns: Any,
) -> list[float | None]:
    """Return [C] scale · (score - offset) of each prompt with its completion, by the sequence classification with one output
    in folder `path`; None for a text that is longer than the model reads.

    The text is tokenised as in the model's training, with the model's tokenizer and chat template. The settings are those of
    `paceline.reward.models.settings.ModelSettings`. Raises InvalidInput, Unreadable.
    """
    settings = {
        "path": path,
        "endpoint": endpoint,
        "scale": scale,
        "offset": offset,
        "chat_template_kwargs": chat_template_kwargs,
        "device": device,
        "precision": precision,
        "max_batch_tokens": max_batch_tokens,
        "refresh_s": refresh_s,
    }
    return _rewards("reward_model", settings, prompts, completions)


def process_reward_model(
    prompts: list[Any],
    completions: list[Any],
    *,
    path: str,
    endpoint: dict[str, Any] | None = None,
    scale: float = 1.0,
    offset: float = 0.0,
    chat_template_kwargs: dict[str, Any] | None = None,
    device: str = "auto",
    precision: str = "auto",
    max_batch_tokens: int = 16384,
    refresh_s: float = 0.0,
    step_separator: str = "\n\n",
    reduce: str = "min",
    positive_label: int = 1,
    **columns: Any,
) -> list[float | None]:
    """Return [C] scale · (score - offset) of completions whose steps a token classification scores, each at the last token of
    the separator behind it; the score of a completion is the `reduce` of its steps' probabilities.

    The settings are those of `paceline.reward.models.settings.ProcessModelSettings`. Raises InvalidInput, Unreadable.
    """
    settings = {
        "path": path,
        "endpoint": endpoint,
        "scale": scale,
        "offset": offset,
        "chat_template_kwargs": chat_template_kwargs,
        "device": device,
        "precision": precision,
        "max_batch_tokens": max_batch_tokens,
        "refresh_s": refresh_s,
        "step_separator": step_separator,
        "reduce": reduce,
        "positive_label": positive_label,
    }
    return _rewards("process_reward_model", settings, prompts, completions)


def _rewards(
    function: str, settings: dict[str, Any], prompts: list[Any], completions: list[Any]
) -> list[float | None]:
    from paceline.reward.models.settings import model_settings, rewards_of

    checked = model_settings(function, settings)
    scorer = _load(function, json.dumps(checked.shared(), sort_keys=True))
    texts = [scorer.encode(*pair) for pair in zip(prompts, completions, strict=True)]
    return rewards_of({"scores": scorer.scores(texts)}, checked, len(completions))


@functools.lru_cache(maxsize=2)
def _load(function: str, settings_json: str) -> Any:
    """Return the model of these settings, loaded once a process."""
    from paceline.reward.models.pooled import open_scorer
    from paceline.reward.models.settings import model_settings

    return open_scorer(model_settings(function, json.loads(settings_json)))
