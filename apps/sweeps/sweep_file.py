"""Reads a sweep's file: which keys of a spec to vary, their bounds, and the metric.

Promise: before anything runs, a key that the spec does not have, a bound that the spec refuses, or a metric that no
trial would get is reported, with the value and the remedy.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from paceline.errors import SpecError
from paceline.host.regular_file import read_regular
from paceline.spec import RunSpec
from paceline.spec.bounded_yaml import load
from paceline.spec.reading import load_spec

Value = bool | int | float | str


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Range(_Part):
    """Numbers between two bounds; integers if both bounds are."""

    low: int | float
    high: int | float
    log: bool = False
    step: int | float | None = None

    @model_validator(mode="after")
    def _ordered(self) -> Range:
        if not self.low < self.high:
            raise ValueError(f"low {self.low} must be below high {self.high}")
        if self.log and self.low <= 0:
            raise ValueError(f"log needs a low above 0, not {self.low}")
        if self.log and self.step is not None:
            raise ValueError("log and step exclude each other; leave one out")
        return self

    @property
    def is_whole(self) -> bool:
        return all(isinstance(each, int) for each in (self.low, self.high, self.step or 1))

    def ends(self) -> tuple[Value, ...]:
        """Return the values between which all others lie."""
        return (self.low, self.high)


class Choices(_Part):
    choices: Annotated[tuple[Value, ...], Field(min_length=1)]

    def ends(self) -> tuple[Value, ...]:
        return self.choices


class Pruning(_Part):
    """Rule that ends a trial early if it is worse than others at the same step."""

    startup_trials: int = Field(4, ge=0)
    warmup_steps: int = Field(0, ge=0)


class Sweep(_Part):
    name: str = Field("", pattern=r"^[\w.-]*$", max_length=40)
    trials: int = Field(gt=0, le=10_000)
    search: dict[str, Range | Choices] = Field(min_length=1)
    start: tuple[dict[str, Value], ...] = ()
    metric: str = "reward"
    of: Literal["evaluation", "step"] = "evaluation"
    last_steps: int = Field(5, gt=0)
    direction: Literal["maximize", "minimize"] = "maximize"
    sampler: Literal["tpe", "random"] = "tpe"
    seed: int = 0
    pruning: Pruning | None = None

    @property
    def space(self) -> str:
        """Return, as JSON, the settings that a resumed study must have unchanged: all but the number of trials."""
        return json.dumps(self.model_dump(mode="json", exclude={"trials", "name"}), sort_keys=True)


def load_sweep(path: str | Path) -> Sweep:
    """Read a sweep's file. Raises SpecError with file, field and value."""
    path = Path(path)
    try:
        tree = load(read_regular(path).decode())
    except (OSError, UnicodeDecodeError, SpecError) as error:
        raise SpecError(f"{path} cannot be read as a sweep: {str(error).replace('the spec', 'it')}") from None
    if not isinstance(tree, dict):
        raise SpecError(f"{path} must be a mapping with `trials` and `search`")
    try:
        sweep = Sweep.model_validate(tree)
    except ValidationError as error:
        raise SpecError("\n".join(f"{path}: {_fault(each)}" for each in error.errors())) from None
    for number, values in enumerate(sweep.start):
        if unknown := values.keys() - sweep.search.keys():
            raise SpecError(f"{path}: start.{number} sets {', '.join(sorted(unknown))}, which `search` does not vary")
    return sweep if sweep.name else sweep.model_copy(update={"name": path.stem[:40]})


def _fault(error: Any) -> str:
    place = ".".join(str(part) for part in error["loc"] if part not in ("Range", "Choices"))
    value = error["input"]
    shown = "" if isinstance(value, dict) else f", not {value!r}"
    return f"{place}: {error['msg'].removeprefix('Value error, ')}{shown}"


def overrides_of(values: dict[str, Value]) -> tuple[str, ...]:
    """Return values by key as overrides of a spec, such as `policy.optimizer.lr=1.0e-05`."""
    return tuple(f"{key}={_as_yaml(value)}" for key, value in values.items())


def check_sweep(sweep: Sweep, spec: str, overrides: tuple[str, ...]) -> RunSpec:
    """Load the spec at the ends of each key and with each start; return the unchanged spec. Raises SpecError."""
    loaded = load_spec(spec, overrides)
    for key, part in sweep.search.items():
        for value in part.ends():
            try:
                load_spec(spec, (*overrides, *overrides_of({key: value})))
            except SpecError as error:
                raise SpecError(f"search.{key} at {value!r}: {error}") from None
    for values in sweep.start:
        load_spec(spec, (*overrides, *overrides_of(values)))
    if sweep.of == "evaluation" and not _evaluates(loaded):
        raise SpecError(
            f"{spec} has no evaluation that measures {sweep.metric!r}: set data.validation and val_at_end, or `of: step` in "
            "the sweep"
        )
    return loaded


def _evaluates(spec: RunSpec) -> bool:
    section = getattr(spec, spec.algorithm if hasattr(spec, spec.algorithm) else "grpo", spec.grpo)
    at_end, period = getattr(section, "val_at_end", False), getattr(section, "val_period", 0)
    return bool(spec.data.validation) and bool(at_end or period)


def _as_yaml(value: Value) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, width=1000)
    return "".join(itertools.takewhile(lambda letter: letter != "\n", text))
