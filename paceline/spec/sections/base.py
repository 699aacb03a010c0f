"""Base of the parts of a spec: strict sections and constrained numbers."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]


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
