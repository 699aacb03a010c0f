"""Explanation of a step whose rewards trained nothing. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.spec import RunSpec


def no_signal(spec: RunSpec, metrics: Mapping[str, float]) -> str:
    """Return why no token of a step had an advantage, and what helps; empty if any had one, or if the algorithm has no
    advantages."""
    if metrics.get("zero_advantage_fraction") != 1.0:
        return ""
    if spec.grpo.overlong_filtering and metrics.get("truncated_fraction") == 1.0:
        return (
            "every completion was cut off at its token limit, and grpo.overlong_filtering trains none of those. Raise "
            "policy.generation.max_new_tokens"
        )
    if metrics.get("unscored_fraction") == 1.0:
        return (
            "every reward function returned None for every completion, so the rewards trained nothing. See "
            "`paceline samples`, and whether the functions find the columns and the texts that they read"
        )
    reward = metrics.get("reward")
    value = f", {reward:.3g} in the mean" if reward is not None and reward == reward else ""
    return (
        f"the completions of each group have equal rewards{value}, so the rewards trained nothing. The prompts are too "
        "hard or too easy for the model, or the rewards do not tell completions apart; see `paceline samples`"
    )
