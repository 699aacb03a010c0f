"""Settings of reward models (`kwargs` of `reward_model` and `process_reward_model`), and rewards from a reply.

Promise: the reply is checked, because the process may be faulty: C results, each with finite numbers or None.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, model_validator

from paceline.errors import InvalidInput
from paceline.reward.endpoints.settings import EndpointSettings, checked_settings
from paceline.spec.sections.base import NonNegativeFloat, PositiveInt, Section


class ModelSettings(Section):
    """`reward_model`: a sequence classification with one output."""

    path: Annotated[str, Field(min_length=1)]
    """Folder, fsspec URL, name on the hub, or a folder of exports, whose newest step is used. With `endpoint` only the
    tokenizer and config.json are read."""
    endpoint: EndpointSettings | None = None
    """vLLM's server for a model that is larger than a GPU. Its `base_url` ends before `/pooling`."""
    scale: float = 1.0
    """Factor by which the score is multiplied, after `offset` was subtracted from it."""
    offset: float = 0.0
    """Number that is subtracted from the score."""
    chat_template_kwargs: dict[str, JsonValue] | None = None
    """Arguments of the model's chat template."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda|cuda:\d{1,3})$")] = "auto"
    """Device of the model. `cuda:1` is the second GPU that the worker sees; `auto` is the first GPU, else the CPU."""
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights. `auto` is bfloat16 on GPUs, else float32."""
    max_batch_tokens: PositiveInt = 16384
    """Largest number of tokens in a forward pass, including padding. A longer text has its own pass."""
    refresh_s: NonNegativeFloat = 0.0
    """Seconds between two checks for other weights at `path`, which then replace the loaded ones; 0 for no checks."""

    @model_validator(mode="after")
    def _check_endpoint(self) -> ModelSettings:
        for name in ("device", "precision", "refresh_s"):
            value = getattr(self, name)
            if self.endpoint is not None and value != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} {value!r} is for a model that the worker loads, but endpoint names a server; "
                    f"set {name} on the server"
                )
        return self

    def shared(self) -> dict[str, Any]:
        """Return the settings that must be equal for functions that share a process."""
        return self.model_dump(mode="json", exclude={"scale", "offset"})


class ProcessModelSettings(ModelSettings):
    """`process_reward_model`: a token classification that scores each step of a completion."""

    step_separator: Annotated[str, Field(min_length=1)] = "\n\n"
    """Text between two steps. The model scores a step at the last token of the separator after it."""
    reduce: Literal["min", "product", "mean", "last"] = "min"
    """Combination of the steps' scores."""
    positive_label: Annotated[int, Field(ge=0)] = 1
    """Index of the output whose probability is the score of a step. A model with one output has its sigmoid instead."""


def model_settings(function: str, kwargs: object) -> ModelSettings:
    kind = ProcessModelSettings if function == "process_reward_model" else ModelSettings
    return checked_settings(kind, kwargs, function)


MAX_LABEL = 40
"""Largest number of characters of a function's label in the names of additional columns."""


def rewards_of(reply: dict[str, Any], settings: ModelSettings, num_completions: int) -> list[float | None]:
    """Return [C] scale · (score - offset), the scores of steps combined; None without a score. Raises InvalidInput."""
    scores = reply.get("scores")
    if not isinstance(scores, list) or len(scores) != num_completions:
        raise InvalidInput(f"did not get a score of the reward model for each of the {num_completions} completions")
    return [_reward(values, settings) for values in scores]


def extra_of(reply: dict[str, Any], settings: ModelSettings, label: str, num_completions: int) -> dict[str, list[Any]]:
    """Return the columns to store beside the rewards: the steps' scores, and the version if weights may change."""
    columns: dict[str, list[Any]] = {}
    if isinstance(settings, ProcessModelSettings):
        columns[f"{label[:MAX_LABEL]}_steps"] = [
            None if values is None else " ".join(f"{value:.4g}" for value in values) for values in reply["scores"]
        ]
    if settings.refresh_s:
        columns[f"{label[:MAX_LABEL]}_model"] = [str(reply.get("version"))] * num_completions
    return columns


def reduced(values: list[float], how: str) -> float:
    if how == "min":
        return min(values)
    if how == "product":
        return math.prod(values)
    return sum(values) / len(values) if how == "mean" else values[-1]


def _reward(values: Any, settings: ModelSettings) -> float | None:
    if values is None:
        return None
    if not isinstance(values, list) or not values or not all(_is_finite(value) for value in values):
        raise InvalidInput("got something other than a list of finite scores from the reward model")
    score = reduced(values, settings.reduce) if isinstance(settings, ProcessModelSettings) else values[0]
    return settings.scale * (score - settings.offset)


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
