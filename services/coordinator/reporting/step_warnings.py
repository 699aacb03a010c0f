"""Explanations of steps whose rewards trained nothing, and of steps with an absurd advantage or gradient. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.spec import RunSpec

LARGEST_ADVANTAGE = 1e3
"""Absolute advantages above this are absurd: the normalised ones are about as large as the root of the group's size."""

LARGEST_GRADIENT = 1e3
"""So are gradient norms above this many times the norm that they are clipped to (at least 1), per trained token of a completion
where the reduction sums those."""


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


def out_of_scale(spec: RunSpec, metrics: Mapping[str, float]) -> str:
    """Return which advantage or gradient norm of a step is absurd before clipping, and its likely cause; empty if none is."""
    largest = metrics.get("advantage_max", 0.0)
    if largest > LARGEST_ADVANTAGE:
        return (
            f"an advantage is {largest:.6g} before clipping (advantage_max). Either a reward is that large, or grpo.advantage "
            f"{spec.grpo.advantage!r} divides by the spread of rewards that are nearly equal; see `paceline samples`, then scale "
            "or round the reward, or take an advantage without std (dr_grpo, rloo)"
        )
    summed = metrics.get("tokens", 0.0) / max(metrics.get("sequences", 0.0), 1.0)
    length = max(summed, 1.0) if spec.loss_fn.reduction == "sequence_sum" else 1.0
    bounds = {
        "grad_norm": (spec.policy.max_grad_norm, length),
        "value_grad_norm": (spec.value.max_grad_norm, 1.0),
    }
    for name, (bound, terms) in bounds.items():
        if metrics.get(name, 0.0) > LARGEST_GRADIENT * max(bound, 1.0) * terms:
            return (
                f"{name} is {metrics[name]:.6g} before clipping to {bound:g}, so the clipped step has a direction but no scale. "
                "Likely causes are very large rewards or advantages (advantage_max), a reduction that sums tokens "
                "(loss_fn.reduction), or a model that diverges (policy.optimizer.lr)"
            )
    return ""
