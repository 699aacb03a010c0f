"""`evaluation`: how `paceline eval` asks a model, and the groups of problems that it reports. Runs do not read it."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator

from paceline.spec.sections.base import Section
from paceline.templates import placeholders

CONTINUATION_NAMES = frozenset({"letter", "choice"})


class EvaluationSection(Section):
    """Form of an evaluation outside of runs. `paceline eval` alone reads it."""

    method: Literal["sample", "choose", "prefer"] = "sample"
    """`sample`: the model writes completions, which the reward functions score. `choose`: the answer is the one of
    `data.choices` whose continuation has the highest log-probability, and a second one counts that per character; the reward
    functions read its letter. `prefer`: the reward functions score `data.chosen_key` and `data.rejected_key`, and the metric
    is how often the chosen one is above; --model is the reward model."""
    continuation: str = " {choice}"
    """Text after the prompt of which `choose` takes the log-probability: `{choice}` is the answer's text, `{letter}` its letter."""
    group_by: tuple[str, ...] = ()
    """Columns whose values divide the problems: each metric is also reported for each value, with the gap between the best and
    the worst one, which `paceline gate --max` can bound."""

    @field_validator("continuation")
    @classmethod
    def _check_continuation(cls, text: str) -> str:
        names = placeholders(text)
        if not names or not names <= CONTINUATION_NAMES:
            raise ValueError(
                f"continuation {text!r} has to hold {{choice}} or {{letter}}, and no other name in braces"
            )
        return text
