"""Base of the parts of a spec: strict sections and constrained numbers."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticKnownError

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]


@dataclass(frozen=True)
class Usual:
    """Range of a field's usual numbers, as metadata of its type. Other numbers are accepted, and noted once."""

    low: float
    high: float
    source: str
    """Publication or limit that the range comes from."""

    def note(self, path: str, value: Any) -> str:
        """Return a clause about a number outside of the range; empty for any other value."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or self.low <= value <= self.high:
            return ""
        return f"{path} {value:g} (usually {self.low:g} to {self.high:g}: {self.source})"


MAX_INT = (1 << 63) - 1
"""Largest integer that a message and the ledger hold."""
LARGEST = {"_s": 1e9, "_hours": 1e6, "_mb": 2.0**42}
"""Largest value of a unit, by the end of a key: waits and limits of the operating system overflow not far above."""


@functools.cache
def _kinds(annotation: Any) -> frozenset[Any]:
    """Return the types that make up an annotation."""
    parts = get_args(annotation)
    return frozenset().union(*map(_kinds, parts)) if parts else frozenset((annotation,))


def is_code_name(text: str) -> bool:
    """Return whether a text is `path/to/file.py:function`."""
    path, _, name = text.rpartition(":")
    return bool(path) and name.isidentifier()


class Section(BaseModel):
    """A frozen part of the spec, without unknown keys, infinite numbers or integers beyond 64 bits."""

    model_config = ConfigDict(
        frozen=True,
        allow_inf_nan=False,
        extra="forbid",
        use_attribute_docstrings=True,
        protected_namespaces=(),
        validate_default=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_truth_values(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false for a number; pydantic reads them as 1 and 0."""
        annotation: Any = cls.model_fields[info.field_name or ""].annotation
        kinds = _kinds(annotation)
        is_number = not kinds.isdisjoint((int, float)) and kinds.isdisjoint((bool, str, Any))
        if is_number and any(isinstance(each, bool) for each in (value if isinstance(value, list) else [value])):
            raise PydanticKnownError("float_type" if float in kinds else "int_type")
        return value

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        for name in type(self).model_fields:
            value = getattr(self, name)
            largest = next((LARGEST[end] for end in LARGEST if name.endswith(end)), math.inf)
            if isinstance(value, int | float) and value > largest:
                raise ValueError(f"{name} is {value:g}, but must be at most {largest:g}")
            for number in value if isinstance(value, tuple) else (value,):
                if isinstance(number, int) and abs(number) > MAX_INT:
                    raise ValueError(f"{name} is {number}, but must be from {-MAX_INT} to {MAX_INT}")
        return self

    def unusual(self, prefix: str = "") -> Iterator[str]:
        """Yield a clause for each number of this section, and of those below, that is outside of its usual range."""
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            yield from filter(
                None, (each.note(f"{prefix}{name}", value) for each in field.metadata if isinstance(each, Usual))
            )
            for index, part in enumerate(value if isinstance(value, tuple) else (value,)):
                if isinstance(part, Section):
                    place = f"{prefix}{name}.{index}." if isinstance(value, tuple) else f"{prefix}{name}."
                    yield from part.unusual(place)
