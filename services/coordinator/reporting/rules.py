"""Rules on a run's metrics: which of them a step breaks. Pure.

A rule warns at the step at which its condition has held for as many steps as it says, and again only after a step at which it did not
hold. A step without the metric changes nothing.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from paceline.spec.sections.system import DEFAULT_RULES, LoggerSection, Rule, parsed_rule

COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
ROUNDING = 1e-7
"""Relative difference to a rule's number that counts as none: 0.7 as float32 is below 0.7."""
MAX_REPLAYED = 1000
"""Steps of before a coordinator's start that are looked at."""


class Broken(NamedTuple):
    """A rule that a step breaks."""

    rule: Rule
    metric: str
    value: float

    @property
    def message(self) -> str:
        """The fact, in a sentence."""
        steps = f" for {self.rule.steps} steps" if self.rule.steps > 1 else ""
        change = "the change of " if self.rule.of_change else ""
        return f"{change}{self.metric} has been {self.rule.op} {self.rule.value:g}{steps}: it is {self.value:.6g} now"


class Rules:
    """The rules of one run, and for how many steps each holds."""

    def __init__(self, rules: Sequence[Rule]):
        self._rules = rules
        self._held: dict[tuple[Rule, str], int] = {}
        """Steps in a row at which a rule's condition held, by metric."""
        self._before: dict[str, float] = {}
        """Newest values of metrics whose change a rule is about."""

    @property
    def reach(self) -> int:
        """Return the number of steps before a start that have to be replayed for the same warnings as without a restart."""
        return min(MAX_REPLAYED, max((rule.steps for rule in self._rules), default=0) + 1)

    def check(self, metrics: Mapping[str, float | None]) -> list[Broken]:
        """Take the metrics of the next step; return the rules that it breaks."""
        known = {name: value for name, value in metrics.items() if value is not None and value == value}
        broken = []
        for rule in self._rules:
            names = [rule.metric] if "*" not in rule.metric else _fitting(rule.metric, known)
            for name in names:
                value = known.get(name)
                if rule.of_change and value is not None:
                    value -= self._before.get(name, 0.0)
                if value is not None and self._holds(rule, name, value):
                    broken.append(Broken(rule, name, value))
        self._before |= {
            name: value
            for name, value in known.items()
            if any(rule.of_change and fnmatchcase(name, rule.metric) for rule in self._rules)
        }
        return broken

    def replay(self, steps: Iterable[Mapping[str, float | None]]) -> None:
        """Take the metrics of earlier steps, oldest first, of which warnings were given then."""
        for metrics in steps:
            self.check(metrics)

    def _holds(self, rule: Rule, name: str, value: float) -> bool:
        """Count a step; return whether the rule is broken by just that one."""
        if math.isclose(value, rule.value, rel_tol=ROUNDING):
            value = rule.value
        held = self._held.get((rule, name), 0) + 1 if COMPARE[rule.op](value, rule.value) else 0
        self._held[rule, name] = held
        return held == rule.steps


def rules_of(logger: LoggerSection) -> list[Rule]:
    """Return the rules of a run."""
    own = [parsed_rule(text) for text in logger.rules]
    return own + [rule for rule in DEFAULT_RULES if logger.default_rules and rule not in own]


def _fitting(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that fit a pattern."""
    return [name for name in names if fnmatchcase(name, pattern)]
