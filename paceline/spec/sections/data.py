"""`data` and `rewards`: the source of prompts and the functions that score completions."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, JsonValue, field_validator, model_validator

from paceline.spec.sections.base import NonNegativeInt, PositiveFloat, PositiveInt, Section

RESERVED_TEMPLATE_KWARGS = frozenset(
    {
        "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "max_length", "messages",
        "padding", "processor_kwargs", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize",
        "tokenizer_kwargs", "truncation",
    }
)  # fmt: skip
"""Arguments of `apply_chat_template` that are not the template's."""


class DataSource(NamedTuple):
    """The names that identify a data set."""

    field: str
    """Key of the spec that names it."""
    name: str | tuple[str, ...]
    split: str
    config: str | None = None


class DataSection(Section):
    """The source of prompts. Columns that are not named here go to the reward functions."""

    train: str | Annotated[tuple[str, ...], Field(min_length=1)]
    """A .jsonl, .parquet, .csv or .tsv file, a glob (`data/*.parquet`) or an fsspec URL (`s3://bucket/*.jsonl`) of such
    files, a list of these, a folder made by `datasets`, or a data set's name on the hub."""
    validation: str | Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """The same, for evaluation."""
    train_split: str = "train"
    """Split of a `datasets` folder or a hub data set."""
    validation_split: str = "test"
    """Split for evaluation."""
    train_config: str | None = None
    """Configuration of a data set on the hub that has several (`main` of `openai/gsm8k`), as the second argument of
    `datasets.load_dataset`."""
    validation_config: str | None = None
    """Configuration for evaluation; default `train_config` where `validation` names the same data set."""
    prompt_key: str = "prompt"
    """Column with the prompt: text, or chat messages (a list of role and content). Empty: the rows have none, and `reset` of
    `environment.class` returns it."""
    completion_key: str = "completion"
    """Column with the target (`sft`) or the judged completion (`kto`): text, or messages that follow the prompt."""
    messages_key: str | None = None
    """Column with whole conversations, instead of prompt and completion (`sft`)."""
    chosen_key: str = "chosen"
    """Column with the better completion: text, or messages (`dpo`, `orpo`, `rm`)."""
    rejected_key: str = "rejected"
    """Column with the worse completion, or a list of several."""
    label_key: str = "label"
    """Column that says whether the completion is good: true or false (`kto`)."""
    margin_key: str = "margin"
    """Column with the margin by which the chosen completion is better; rows without it have margin 0 (`rm`)."""
    system_prompt: str | None = None
    """Put before every prompt as a system message; makes a chat of a text prompt."""
    apply_chat_template: Literal["auto", "always", "never"] = "auto"
    """auto: messages always, text only when system_prompt is set."""
    chat_template_kwargs: dict[str, JsonValue] = {}
    """Arguments of the chat template, wherever it is applied (`{enable_thinking: false}` for Qwen3)."""
    shuffle: bool = True
    """Draw a new seeded order in every epoch; false keeps the file's order."""

    def source(self, *, validation: bool = False) -> DataSource:
        """Return the names that identify the data set for training, or the one for evaluation."""
        if not validation:
            return DataSource("data.train", self.train, self.train_split, self.train_config)
        assert self.validation is not None, "RunSpec refuses evaluation without data.validation"
        config = self.validation_config or (self.train_config if self.validation == self.train else None)
        return DataSource("data.validation", self.validation, self.validation_split, config)

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_template_kwargs(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(set(kwargs) & RESERVED_TEMPLATE_KWARGS):
            raise ValueError(f"{taken[0]!r} is not an argument of the template; remove it")
        return kwargs


class RewardFunctionSection(Section):
    """One reward function."""

    PATH_ARGUMENTS: ClassVar[Mapping[str, str]] = {"process_reward_model": "path", "reward_model": "path"}
    """Built-in functions with a keyword argument that is a path, relative to the spec's file, and that argument."""

    function: str
    """A built-in's name, or `path/to/file.py:function`."""
    name: str | None = None
    """Name in metrics and samples; default the function's own."""
    weight: float = 1.0
    """Factor in the sum of rewards."""
    weight_schedule: tuple[tuple[NonNegativeInt, float], ...] = ()
    """Factors by step in place of `weight`, as pairs of step and factor (`[[0, 1.0], [200, 0.1]]`): linear in between, constant
    before the first and after the last."""
    gate_min: float | None = None
    """Makes the function a gate: where it gives less than this, all functions that are no gates count as 0."""
    kwargs: dict[str, Any] = {}
    """Fixed keyword arguments for the function."""
    timeout_s: PositiveFloat = 30.0
    """Time limit of one call on one group."""
    memory_mb: PositiveInt = 2048
    """Address space that the function may add in its process."""

    @property
    def label(self) -> str:
        """The name that metrics use."""
        return self.name or self.function.rsplit(":", 1)[-1]

    def weight_at(self, step: int) -> float:
        """Return the factor of the function in the rewards of a step's batch."""
        points = self.weight_schedule
        if not points:
            return self.weight
        after = bisect.bisect_right(points, step, key=lambda point: point[0])
        if after in (0, len(points)):
            return points[max(0, after - 1)][1]
        (start, low), (end, high) = points[after - 1], points[after]
        return low + (high - low) * (step - start) / (end - start)

    @field_validator("weight_schedule")
    @classmethod
    def _check_schedule(cls, points: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
        for (before, _), (step, _) in itertools.pairwise(points):
            if step <= before:
                raise ValueError(f"step {step} comes after step {before}; write the steps in rising order")
        if any(not math.isfinite(factor) for _, factor in points):
            raise ValueError("a factor is not finite; write numbers")
        return points

    @model_validator(mode="after")
    def _check_weights(self) -> RewardFunctionSection:
        if self.weight_schedule and self.weight != 1.0:
            raise ValueError(
                f"weight {self.weight:g} with weight_schedule: the schedule takes the place of weight; remove one of them"
            )
        if self.gate_min is not None and not math.isfinite(self.gate_min):
            raise ValueError(
                f"gate_min {self.gate_min} is not finite; write the least reward that opens the gate"
            )
        return self
