"""`rewards`, `environment` and `bundle`: the user's code in a run, and the files that travel with it."""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from paceline.spec.sections.base import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Usual,
    is_code_name,
)

TurnAdvantage = Literal["outcome", "discounted", "turn_level"]


def _is_finite(value: Any) -> bool:
    """Return whether a value of YAML has only finite numbers."""
    if isinstance(value, float):
        return math.isfinite(value)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return all(map(_is_finite, parts))


class RewardFunctionSection(Section):
    """One reward function."""

    PATH_ARGUMENTS: ClassVar[Mapping[str, str]] = {"process_reward_model": "path", "reward_model": "path"}
    """Maps a built-in function to the one of its keyword arguments that is a path relative to the spec's folder."""

    function: str
    """A built-in's name, or `path/to/file.py:function`."""
    name: str | None = None
    """Name in metrics and samples; default: the function's name."""
    weight: Annotated[float, Usual(-100, 100, "1 in TRL")] = 1.0
    """Factor in the sum of rewards."""
    weight_schedule: tuple[tuple[NonNegativeInt, float], ...] = ()
    """Factors by step instead of `weight`, as pairs of step and factor (`[[0, 1.0], [200, 0.1]]`): linear between them,
    constant before the first and after the last."""
    gate_min: float | None = None
    """Makes the function a gate: below this value, the rewards of all functions that are not gates count as 0."""
    kwargs: dict[str, Any] = {}
    """Fixed keyword arguments for the function."""
    timeout_s: Annotated[PositiveFloat, Usual(0.01, 86_400, "a day")] = 30.0
    """One call on one group may take at most this many seconds."""
    memory_mb: Annotated[PositiveInt, Usual(16, 4_194_304, "4 TiB")] = 2048
    """The function may allocate at most this many MiB of address space in its process."""

    @property
    def label(self) -> str:
        """The name in metrics."""
        return self.name or self.function.rsplit(":", 1)[-1]

    def weight_at(self, step: int) -> float:
        """Return the function's factor in the rewards of a step's batch."""
        points = self.weight_schedule
        if not points:
            return self.weight
        after = bisect.bisect_right(points, step, key=lambda point: point[0])
        if after in (0, len(points)):
            return points[max(0, after - 1)][1]
        (start, low), (end, high) = points[after - 1], points[after]
        return low + (high - low) * (step - start) / (end - start)

    @field_validator("function")
    @classmethod
    def _check_function(cls, text: str) -> str:
        if ":" in text and not is_code_name(text):
            raise ValueError(f"is {text[:200]!r}, but must be a built-in's name or path/to/file.py:function")
        return text

    @field_validator("kwargs")
    @classmethod
    def _check_kwargs(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        for name, value in kwargs.items():
            if not _is_finite(value):
                raise ValueError(f"{name} is {value!r:.100}, but every number must be finite")
        return kwargs

    @field_validator("weight_schedule")
    @classmethod
    def _check_schedule(cls, points: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
        for (before, _), (step, _) in itertools.pairwise(points):
            if step <= before:
                raise ValueError(f"step {step} comes after step {before}; write the steps in rising order")
        return points

    @model_validator(mode="after")
    def _check_weights(self) -> RewardFunctionSection:
        if self.weight_schedule and self.weight != 1.0:
            raise ValueError(
                f"weight {self.weight:g} with weight_schedule: the schedule replaces weight; remove one of them"
            )
        return self


class EnvironmentSection(Section):
    """The environment of each sample, and the limits of its episodes. `class` or `tools` (or both), `agent` or
    `command` names the user's code; the other keys stay empty."""

    model_config = ConfigDict(serialize_by_alias=True, validate_by_name=True, validate_by_alias=True)

    PATH_ARGUMENTS: ClassVar[tuple[str, ...]] = ("class", "tools", "agent", "train_call")
    """Keys that name a function or class in a file; the file's path is relative to the spec file's folder."""

    class_: Annotated[str | dict[str, str], Field(alias="class")] = ""
    """`path/to/file.py:Class`: public methods are tools, `reset(**columns)` begins an episode, `get_reward()` ends it;
    or a class with `step(text)`. In a mapping of names to classes, the data set's column `environment` chooses."""
    tools: tuple[str, ...] = ()
    """Functions that the model may call, with or without the tools of a class: `path/to/file.py:function` for each.
    Type hints and a docstring define their schemas."""
    agent: str = ""
    """`path/to/file.py:function`, `async def solve(row, base_url, api_key)`: a program that sends its requests to an
    OpenAI-compatible URL made for it, and returns its reward or None."""
    command: tuple[str, ...] = ()
    """Command line of an agent's program, in which `{column}` becomes the value of that column. The program gets
    OPENAI_BASE_URL and OPENAI_API_KEY, and may print its reward as the last line."""
    deterministic: bool = False
    """True if the environment answers equal calls equally, so that an episode whose process was lost is replayed from
    its record. A class may declare it with the attribute `deterministic = True`."""
    max_turns: Annotated[PositiveInt, Usual(1, 1000, "a turn is a call of the model")] = 16
    """An episode is truncated after this many turns of the model."""
    timeout_s: Annotated[PositiveFloat, Usual(0.01, 86_400, "a day")] = 600.0
    """Truncate an episode once its calls of the user's code took this many seconds; the model's time does not count."""
    call_timeout_s: PositiveFloat = 60.0
    """A call of the environment that takes more than this many seconds fails the sample's attempt."""
    memory_mb: Annotated[PositiveInt, Usual(16, 4_194_304, "4 TiB")] = 2048
    """The user's code may allocate at most this many MiB of address space in its process."""
    max_tool_tokens: PositiveInt = 4096
    """Largest number of tokens of an answer of a tool or of the environment; a longer answer is cut off and says so."""
    max_failures: PositiveInt = 3
    """A sample is given up after this many of its attempts have failed because of the environment. Attempts that a
    worker, the network or the coordinator ended do not count."""
    parallel_calls: PositiveInt = 32
    """Concurrent calls of the user's code in one process."""
    renderer: str = "auto"
    """How turns become tokens. The name of a family of the package `renderers`: this family's code. `template`: the
    chat template, if the rendering of more turns provably extends the rendering of fewer. `auto`: the family of a known
    model's name, else `template`."""
    tool_parser: Literal["auto", "hermes", "json", "none"] = "auto"
    """Format of tool calls in the model's text: `hermes` (`<tool_call>{...}</tool_call>`), `json` (the whole text is
    one call), `none`; auto: the renderer's format, else the chat template's."""
    train_call: str = ""
    """`path/to/file.py:function`, `train_call(messages, tools) -> bool`: selects the requests of an agent that train;
    other requests, such as a request for a title, are answered but do not train."""
    advantage: TurnAdvantage = "outcome"
    """Advantage of a turn's tokens: `outcome` the sample's advantage; `discounted` the discounted rewards from the turn
    on, relative to those of all turns of the group; `turn_level` the sample's advantage plus `turn_weight` times the
    turn's reward relative to the same turn in the group's other samples."""
    turn_discount: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """A reward is multiplied by this factor for each turn between the reward and the credited tokens (`discounted`)."""
    turn_weight: NonNegativeFloat = 1.0
    """Factor of the rewards of turns (`turn_level`)."""
    truncated: Literal["score", "leave_out"] = "score"
    """Treatment of a truncated sample: scored, or left out of training (but not of the group's baseline)."""
    processes: NonNegativeInt = 0
    """Processes for user code on each environment worker; 0: one for each core."""

    @property
    def classes(self) -> Mapping[str, str]:
        """Map names to classes. A single class has the empty name; without a class, the empty name maps to nothing."""
        return {"": self.class_} if isinstance(self.class_, str) else self.class_

    @property
    def has_class(self) -> bool:
        """Return whether episodes use a class or tools, not an agent's program."""
        return bool(self.class_ or self.tools)

    @property
    def is_used(self) -> bool:
        """Return whether the run has an environment."""
        return bool(self.has_class or self.agent or self.command)

    @model_validator(mode="after")
    def _check_one_kind(self) -> EnvironmentSection:
        named = [
            name
            for name, value in (
                ("class" if self.class_ else "tools", self.has_class),
                ("agent", self.agent),
                ("command", self.command),
            )
            if value
        ]
        if len(named) > 1:
            raise ValueError(f"{' and '.join(named)} are set, but an environment has only one of them; keep one")
        if self.train_call and self.has_class:
            raise ValueError(f"train_call decides on an agent's requests, and {named[0]} sends none; remove train_call")
        return self


MODULE_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


class BundleSection(Section):
    """Files that travel with the run: reward functions with the modules beside them that they import, data files, and
    the files listed here. The run keeps the content that they had when it was submitted."""

    include: tuple[str, ...] = ()
    """Other files for reward functions: paths, globs (`answers/*.json`) or folders, relative to the spec's folder."""
    max_mb: PositiveInt = 512
    """Largest sum of the files' sizes in MB; larger data belongs at a URL."""
    requirements: tuple[str, ...] = ()
    """Modules that the reward functions import beyond the standard library and Paceline's dependencies, as in `import
    NAME`. A reward worker that lacks a module reports it before the first group."""

    @field_validator("include")
    @classmethod
    def _check_include(cls, include: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in include:
            path = PurePosixPath(pattern)
            if not path.parts or path.is_absolute() or ".." in path.parts or "\\" in pattern or "\0" in pattern:
                raise ValueError(
                    f"{pattern!r} is not below the spec's folder; copy the file there and name it relative to the spec"
                )
        return include

    @field_validator("requirements")
    @classmethod
    def _check_requirements(cls, requirements: tuple[str, ...]) -> tuple[str, ...]:
        for name in requirements:
            if MODULE_NAME.fullmatch(name) is None:
                raise ValueError(f"{name!r} is not a module's name; write it as in `import NAME`, without a version")
        return requirements
