"""What a spec may say and hardly anybody wants: allowed, and told at submit in a sentence each."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.spec.run import RunSpec


def doubts(spec: RunSpec) -> tuple[str, ...]:
    """Sentences for the person who submits, none for most specs."""
    return tuple(doubt for doubt in (_uncorrected(spec),) if doubt)


def _uncorrected(spec: RunSpec) -> str:
    """Data of older weights, trained as if they were the current ones' (docs/objectives.md has what that costs)."""
    loss_fn, age = spec.loss_fn, spec.async_grpo.max_trajectory_age_steps
    corrected = loss_fn.truncated_importance_sampling_ratio is not None or loss_fn.ratio_anchor == "behaviour"
    if spec.examples is not None or age == 0 or corrected:
        return ""
    return (
        f"async_grpo.max_trajectory_age_steps {age} with loss_fn.truncated_importance_sampling_ratio null and "
        f"ratio_anchor {loss_fn.ratio_anchor!r}: nothing corrects for samples of older weights (masks only drop some of "
        "them), which costs accuracy from a few steps of age on; set truncated_importance_sampling_ratio to 2, or "
        "max_trajectory_age_steps to 0"
    )
