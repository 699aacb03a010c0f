"""`data.preparation`: changes to the rows of data sets before a run, made where the spec is submitted."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from paceline.spec.sections.base import PositiveFloat, PositiveInt, Section

Share = Annotated[float, Field(ge=0, le=1)]


class PreparationSection(Section):
    """Changes to the rows before a run: a function of yours, then filters. The machine that submits makes them, and the run
    gets the prepared rows with its other files; no service runs the function."""

    function: str | None = None
    """Function of a row (`path/to/file.py:name`) that returns a row, a list of rows, or None to leave the row out. It gets the rows
    of `data.train` and of `data.validation`; the filters leave out rows of `data.train` alone."""
    timeout_s: PositiveFloat = 60.0
    """Time limit of the function for 256 rows."""
    max_prompt_characters: PositiveInt | None = None
    """Leave out rows with a longer prompt."""
    max_prompt_tokens: PositiveInt | None = None
    """The same in tokens, by the policy's tokenizer and chat template, which have to be on the machine that submits."""
    max_overlap: Annotated[float, Field(gt=0, le=1)] | None = None
    """Leave out rows whose prompt shares at least this share of its n-grams of 13 words with an evaluation set:
    `data.validation`, and files beside the training data whose stem is test, eval, validation, valid or dev."""
    pass_rate: tuple[Share, Share] | None = None
    """Leave out rows whose prompt has a pass rate outside these bounds in the runs of `pass_rate_of`: the share of its completions
    with a reward of at least `passed_at`. Prompts that no run tried stay."""
    pass_rate_of: tuple[str, ...] = ()
    """Ids of earlier runs of the coordinator that gets the run."""
    passed_at: float = 1.0
    """Least total reward of a completion that passes."""

    @property
    def is_used(self) -> bool:
        """Return whether the data are changed at all."""
        return self.function is not None or self.filters

    @property
    def filters(self) -> bool:
        """Return whether rows are left out by a filter."""
        limits = (self.max_prompt_characters, self.max_prompt_tokens, self.max_overlap, self.pass_rate)
        return any(limit is not None for limit in limits)

    @model_validator(mode="after")
    def _check(self) -> PreparationSection:
        if self.function is not None and ".py:" not in self.function:
            raise ValueError(f"function {self.function!r} is no function; write it as path/to/file.py:name")
        if (self.pass_rate is None) != (not self.pass_rate_of):
            given = "pass_rate" if self.pass_rate is not None else "pass_rate_of"
            raise ValueError(f"{given} is set alone; pass_rate and pass_rate_of go together, set both")
        if self.pass_rate is not None and self.pass_rate[0] > self.pass_rate[1]:
            raise ValueError(
                f"pass_rate {list(self.pass_rate)} has its larger bound first, so no prompt would stay; swap them"
            )
        return self
