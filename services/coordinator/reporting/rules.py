"""Rules on a run's metrics, and explanations of steps that trained nothing or are out of scale. Pure. A rule warns at
the step at which its condition has held for the rule's number of steps, and again only after a step at which it did
not hold. A step without the metric changes nothing."""

from __future__ import annotations

import fnmatch
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from paceline.spec import RunSpec
from paceline.spec.sections.system import DEFAULT_RULES, LoggerSection, Rule, parsed_rule

COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
ROUNDING = 1e-7
"""Relative difference to a rule's number that is ignored: 0.7 as float32 is below 0.7."""
MAX_REPLAYED = 1000
"""Largest number of steps before a coordinator's start that are replayed."""


class Broken(NamedTuple):
    """A rule, with the metric and the value of the step that breaks it."""

    rule: Rule
    metric: str
    value: float

    @property
    def message(self) -> str:
        steps = f" for {self.rule.steps} steps" if self.rule.steps > 1 else ""
        change = "the change of " if self.rule.of_change else ""
        return f"{change}{self.metric} has been {self.rule.op} {self.rule.value:g}{steps}: it is {self.value:.6g} now"


class Rules:
    """The rules of one run, and the number of steps for which the condition of each has held."""

    def __init__(self, rules: Sequence[Rule]):
        self._rules = rules
        self._held: dict[tuple[Rule, str], int] = {}
        """Number of consecutive steps at which a rule's condition has held. The key is the rule and the metric."""
        self._before: dict[str, float] = {}
        """Newest value of each metric whose change a rule tests."""

    @property
    def reach(self) -> int:
        """Number of earlier steps to replay after a restart, so that the warnings are the same as without it."""
        return min(MAX_REPLAYED, max((rule.steps for rule in self._rules), default=0) + 1)

    def check(self, metrics: Mapping[str, float | None]) -> list[Broken]:
        """Count the next step, and return the rules that its metrics break."""
        numbers = {name: value for name, value in metrics.items() if value is not None and value == value}
        broken = []
        for rule in self._rules:
            names = [rule.metric] if "*" not in rule.metric else fnmatch.filter(numbers, rule.metric)
            for name in names:
                value = numbers.get(name)
                if rule.of_change and value is not None:
                    value -= self._before.get(name, 0.0)
                if value is not None and self._holds(rule, name, value):
                    broken.append(Broken(rule, name, value))
        self._before |= {
            name: value
            for name, value in numbers.items()
            if any(rule.of_change and fnmatch.fnmatchcase(name, rule.metric) for rule in self._rules)
        }
        return broken

    def replay(self, steps: Iterable[Mapping[str, float | None]]) -> None:
        """Count earlier steps, oldest first, whose warnings were given already."""
        for metrics in steps:
            self.check(metrics)

    def _holds(self, rule: Rule, name: str, value: float) -> bool:
        """Count a step; return whether the rule is broken at exactly this step."""
        if math.isclose(value, rule.value, rel_tol=ROUNDING):
            value = rule.value
        held = self._held.get((rule, name), 0) + 1 if COMPARE[rule.op](value, rule.value) else 0
        self._held[rule, name] = held
        return held == rule.steps


def rules_of(logger: LoggerSection) -> list[Rule]:
    configured = [parsed_rule(text) for text in logger.rules]
    return configured + [rule for rule in DEFAULT_RULES if logger.default_rules and rule not in configured]


LARGEST_ADVANTAGE = 1e3
"""Absolute advantages above this are absurd: normalised ones are about as large as the root of the group's size."""

LARGEST_GRADIENT = 1e3
"""A gradient norm is absurd if it is above this number times the norm to which it is clipped (at least 1). If the
reduction sums tokens, this bound is multiplied by the mean number of trained tokens of a completion."""


def no_signal(spec: RunSpec, metrics: Mapping[str, float]) -> str:
    """Return why no token of a step had an advantage, and a remedy; empty if a token had one, or none is used."""
    if metrics.get("zero_advantage_fraction") != 1.0:
        return ""
    if spec.grpo.overlong_filtering and metrics.get("truncated_fraction") == 1.0:
        return (
            "every completion was cut off at its token limit, and grpo.overlong_filtering trains no such completion. Raise "
            "policy.generation.max_new_tokens"
        )
    if metrics.get("unscored_fraction") == 1.0:
        return (
            "every reward function returned None for every completion, so the rewards trained nothing. See "
            "`paceline samples`, and check that the functions find the columns and the texts that they read"
        )
    reward = metrics.get("reward")
    value = f" of {reward:.3g} on average" if reward is not None and reward == reward else ""
    return (
        f"the completions of each group have equal rewards{value}, so the rewards trained nothing. The prompts are too "
        "hard or too easy for the model, or the rewards do not distinguish completions; see `paceline samples`"
    )


def out_of_scale(spec: RunSpec, metrics: Mapping[str, float]) -> str:
    """Return which advantage or gradient norm of a step is absurd before clipping, and its likely cause; else empty."""
    largest = metrics.get("advantage_max", 0.0)
    if largest > LARGEST_ADVANTAGE:
        return (
            f"an advantage is {largest:.6g} before clipping (advantage_max). Either a reward is that large, or grpo.advantage "
            f"{spec.grpo.advantage!r} divides by the spread of rewards that are nearly equal; see `paceline samples`, then scale "
            "or round the reward, or take an advantage without std (dr_grpo, rloo)"
        )
    summed = metrics.get("tokens", 0.0) / max(metrics.get("sequences", 0.0), 1.0)
    length = max(summed, 1.0) if spec.loss_fn.reduction == "sequence_sum" else 1.0
    bounds = {"grad_norm": (spec.policy.max_grad_norm, length), "value_grad_norm": (spec.value.max_grad_norm, 1.0)}
    for name, (bound, terms) in bounds.items():
        if metrics.get(name, 0.0) > LARGEST_GRADIENT * max(bound, 1.0) * terms:
            return (
                f"{name} is {metrics[name]:.6g} before clipping to {bound:g}, so the clipped step has a direction but no scale. "
                "Likely causes are very large rewards or advantages (advantage_max), a reduction that sums tokens "
                "(loss_fn.reduction), or a model that diverges (policy.optimizer.lr)"
            )
    return ""
