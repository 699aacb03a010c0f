"""Admission: how far generation may run ahead of training. Pure arithmetic, no state.

B groups make a step; η bounds the age, in steps, of tokens at admission and at a lease. With `in_order` no trained token is
older; with `ready_first` late groups train up to `hard_max_age_steps`.
"""

from __future__ import annotations


def admissible(
    open_groups: int, admitted: int, dropped: int, *, batch: int, max_age: int, max_steps: int
) -> int:
    """Return the number of groups that may be admitted now.

    A group is admitted while open < (η + 1)·B, where open counts the groups that are neither trained nor dropped, and
    never more than the remaining steps need: admitted - dropped < max_steps·B. η = 0 is synchronous GRPO.
    """
    return max(0, min((max_age + 1) * batch - open_groups, max_steps * batch - (admitted - dropped)))


def step_of_group(next_batch: int, num_ahead: int, batch: int) -> int:
    """Return the step that a group is for when `num_ahead` open groups that are in no batch yet are before it."""
    return next_batch + num_ahead // batch


def may_lease(version_step: int, step: int, max_age: int) -> bool:
    """Return whether a worker that holds `version_step` may generate for `step`: at most η behind it."""
    return version_step >= step - max_age


def must_wait(live_oldest: list[int], step: int, max_age: int) -> bool:
    """Return whether the batch of `step` should wait for a live group: one whose age is η at this step, so that it
    grows older than η if it is left out. `live_oldest` holds the oldest version that tokens of each live group can
    have.

    A group has that age at one step only, so it holds up one batch at most; a group that is older already is past help.
    """
    return any(step - oldest == max_age for oldest in live_oldest)
