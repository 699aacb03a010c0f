"""`logger.rules` and `logger.webhooks`: what warns of a run, and who hears of it."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, model_validator

from paceline.spec.sections.base import Section

FORM = "[change of] METRIC <|<=|>|>= NUMBER [for N steps]"
_PATTERN = re.compile(
    r"(?P<change>change of )?(?P<metric>\S{1,200}) (?P<op><=|>=|<|>) (?P<value>\S{1,40})(?: for (?P<steps>\d{1,6}) steps?)?"
)
Op = Literal["<", "<=", ">", ">="]


class Rule(NamedTuple):
    """A condition on a metric that has to hold for some steps in a row."""

    metric: str
    """Name; `*` stands for any characters."""
    op: Op
    value: float
    steps: int = 1
    of_change: bool = False
    """Of the difference to the step before, for metrics that count from the run's start."""

    def __str__(self) -> str:
        steps = f" for {self.steps} steps" if self.steps > 1 else ""
        return f"{'change of ' if self.of_change else ''}{self.metric} {self.op} {self.value:g}{steps}"


def parsed_rule(text: str) -> Rule:
    """Return the rule that a text of a spec means. Raises ValueError."""
    found = _PATTERN.fullmatch(" ".join(text.split()))
    try:
        if found is None:
            raise ValueError
        value, steps = float(found["value"]), int(found["steps"] or 1)
        if not math.isfinite(value) or not steps:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"{text[:80]!r} is no rule; write {FORM}, as 'truncated_fraction > 0.5 for 5 steps'"
        ) from None
    op: Op = found["op"]  # type: ignore[assignment]
    return Rule(found["metric"], op, value, steps, bool(found["change"]))


DEFAULT_RULES = tuple(
    map(
        parsed_rule,
        (
            "zero_variance_fraction > 0.9 for 5 steps",
            "truncated_fraction > 0.5 for 5 steps",
            "unscored_fraction > 0.5 for 3 steps",
            "failed_calls/* > 0 for 3 steps",
            "effective_sample_size < 0.5 for 3 steps",
            "ratio_behaviour > 1.1 for 3 steps",
            "ratio_behaviour < 0.9 for 3 steps",
            "kl_behaviour > 0.1 for 3 steps",
            "skipped_updates > 0 for 3 steps",
            "change of dropped/poison > 0",
            "change of dropped/stale > 0 for 5 steps",
            "change of */gpu_xid_errors > 0",
            "*/gpu_throttled > 0 for 10 steps",
        ),
    )
)
"""Rules of every run with `logger.default_rules`. Stalls are reported by `logger.stall_warning_s`."""


class WebhookSection(Section):
    """An address that is told of a run by HTTP POST, signed with the secret in PACELINE_WEBHOOK_SECRET of the process that sends."""

    url: str = ""
    """Address. One that is a secret itself, as those of Slack, belongs into `url_variable`."""
    url_variable: Annotated[str, Field(pattern=r"^([A-Z][A-Z0-9_]{0,63})?$")] = ""
    """Environment variable, of the process that sends, that has the address."""
    events: Annotated[
        tuple[Literal["ended", "failed", "stalled", "rule", "warning"], ...], Field(min_length=1)
    ] = (
        "ended",
        "failed",
        "stalled",
        "rule",
    )
    """ended: succeeded or cancelled. failed. stalled: the learner has waited for long. rule: a rule is broken. warning: any
    other one."""

    @model_validator(mode="after")
    def _check(self) -> WebhookSection:
        if bool(self.url) == bool(self.url_variable):
            raise ValueError("a webhook has either url or url_variable")
        if self.url and (not self.url.startswith(("http://", "https://")) or "@" in self.url.split("/")[2]):
            raise ValueError(
                "url has to be http(s)://HOST[:PORT]/… without a password; put a secret one into url_variable"
            )
        return self
