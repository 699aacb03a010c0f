"""Uses trained classification models as reward functions.

In a run, a process for each model scores all groups of a worker (`paceline.reward.models`). A direct call loads the
model into the caller's process.
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
    """Return [C] scale · (score - offset) of each prompt with its completion. The model in folder `path`, a sequence
    classification with one output, computes the score; None for a text that is longer than the model reads.

    The text is tokenised as in the model's training, with the model's tokenizer and chat template. The settings are
    `paceline.reward.models.settings.ModelSettings`. Raises InvalidInput, Unreadable.
    """
    return _rewards("reward_model", locals())


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
    """Return [C] scale · (score - offset) of completions. A token classification scores each step at the last token of
    the separator after the step; `reduce` combines the steps' probabilities into the score of the completion.

    The settings are `paceline.reward.models.settings.ProcessModelSettings`. Raises InvalidInput, Unreadable.
    """
    return _rewards("process_reward_model", locals())


def _rewards(function: str, given: dict[str, Any]) -> list[float | None]:
    from paceline.reward.models.settings import model_settings, rewards_of

    prompts, completions = given["prompts"], given["completions"]
    settings = {name: given[name] for name in given if name not in ("prompts", "completions", "columns")}
    checked = model_settings(function, settings)
    scorer = _load(function, json.dumps(checked.shared(), sort_keys=True))
    texts = [scorer.encode(*pair) for pair in zip(prompts, completions, strict=True)]
    return rewards_of({"scores": scorer.scores(texts)}, checked, len(completions))


@functools.lru_cache(maxsize=2)
def _load(function: str, settings_json: str) -> Any:
    from paceline.reward.models.pooled import open_scorer
    from paceline.reward.models.settings import model_settings

    return open_scorer(model_settings(function, json.loads(settings_json)))
