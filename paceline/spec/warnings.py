"""Warnings for legal but suspicious settings, shown at submit."""

from __future__ import annotations

from paceline.spec.loss import LossSection


def settings_warnings(loss_fn: LossSection, max_age: int, *, samples: bool) -> tuple[str, ...]:
    """Return one sentence for each suspicious setting; `max_age` in steps, `samples` false for a run on a data set's
    examples."""
    return tuple(text for text in (_uncorrected(loss_fn, max_age) if samples else "",) if text)


def _uncorrected(loss_fn: LossSection, age: int) -> str:
    """Return a warning if samples of older weights train uncorrected (docs/objectives.md has the cost)."""
    corrected = loss_fn.truncated_importance_sampling_ratio is not None or loss_fn.ratio_anchor == "behaviour"
    if age == 0 or corrected:
        return ""
    return (
        f"async_grpo.max_trajectory_age_steps {age} with loss_fn.truncated_importance_sampling_ratio null and "
        f"ratio_anchor {loss_fn.ratio_anchor!r}: nothing corrects for samples of older weights (masks only drop some of "
        "them), which costs accuracy from a few steps of age on; set truncated_importance_sampling_ratio to 2, or "
        "max_trajectory_age_steps to 0"
    )
