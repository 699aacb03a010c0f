"""Base of the parts of a spec: strict sections and constrained numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

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

    @model_validator(mode="after")
    def _check_integers(self) -> Self:
        for name in type(self).model_fields:
            value = getattr(self, name)
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
