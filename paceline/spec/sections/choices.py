"""`data.choices`: rows with a question and several answers, one of which is right."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from paceline.spec.sections.base import Section


class ChoicesSection(Section):
    """Rows with several answers to choose from. Each row gets the columns `answer_choices` (the texts) and `answer_letter` (the
    letter of the right one), and `{choices}` in `data.prompt_template` is the lettered list."""

    keys: Annotated[tuple[str, ...], Field(min_length=1)]
    """One column with the list of answers (or, as in ARC, an object with `text` and `label`), or the columns with one answer
    each."""
    answer_key: str | None = None
    """Column that names the right answer: its label, its letter, or its index from 0. Null: the first one is right."""
    shuffle: bool = False
    """Put the answers into an order that depends on their texts alone, so that it is the same in every evaluation."""

    @model_validator(mode="after")
    def _check_first(self) -> ChoicesSection:
        if self.answer_key is None and not self.shuffle:
            raise ValueError(
                "answer_key is null, so the first answer is always right, and shuffle is false; set one of them"
            )
        return self
