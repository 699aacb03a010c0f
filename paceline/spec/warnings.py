"""Warnings for legal but suspicious settings, shown at submit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.spec.sections.grpo import GrpoSection
from paceline.spec.sections.loss import LossSection


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


def without_filter(grpo: GrpoSection) -> tuple[str, ...]:
    """Return a warning if groups of equal rewards are to be dropped whose advantages are not 0."""
    if not grpo.use_dynamic_sampling:
        return ()
    return (
        f"grpo.use_dynamic_sampling true with grpo.advantage {grpo.advantage!r} or loss_fn.use_kl_in_reward: a group of equal "
        "rewards has advantages there, so only groups without any reward are dropped; set use_dynamic_sampling false",
    )


def unread(algorithm: str, sections: Mapping[str, object], *, samples: bool) -> tuple[str, ...]:
    """Return a warning that names the `sections` that are set and that the algorithm does not read, if there are any.

    `sections` are those that not every algorithm reads, by name: models, which are set where they differ from their
    defaults, or sequences.
    """
    of_samples = {"rewards", "grpo", "async_grpo", "loss_fn", "value"} if samples else set()
    ignored = [
        name
        for name, section in sections.items()
        if name not in {algorithm, *of_samples} and _is_set(section)
    ]
    if not ignored:
        return ()
    return (
        f"algorithm {algorithm} does not read {', '.join(ignored)}, which the spec sets; remove what is not meant, or set "
        "another algorithm",
    )


def _is_set(section: object) -> bool:
    if isinstance(section, Sequence):
        return len(section) > 0
    return section != type(section)()
