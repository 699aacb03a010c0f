"""Counts failures of groups by cause. Equal failures are reported together; too many drops in a row for one cause pause
the run. A cause is an error's text without its variable parts: numbers, quoted values, excerpts of the prompt, and
the text of an exception whose file and line are known (its type, file and line stay). The counts are in memory and
restart with the coordinator."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection

BATCHES_OF_ONE_CAUSE = 2
"""Multiple of a batch's groups: if this many groups are dropped in a row for one cause, the run is paused."""

MIN_OF_ONE_CAUSE = 4
"""Smallest number of groups dropped in a row for one cause that pauses a run, however small its batches are."""

NOT_GENERATED = ("bad_prompt", "prompt_too_long", "invalid_result", "environment_failed")
"""Drop reasons of groups that could not be generated."""

FAILED = (*NOT_GENERATED, "reward_failed")
"""Drop reasons with a cause that a person can remove while the run is paused."""

MAX_CAUSES = 256
"""Largest number of causes that are counted at a time."""

EXCERPT = re.compile(r",? for the (?:prompt|messages|completion) .*", re.DOTALL)
RAISED = re.compile(r"(\braised [\w.]+): .* (\([^()]+:\d+ in [^()]+\))", re.DOTALL)
"""Pattern of an exception of user code. Its text may hold anything, so only type, file and line belong to a cause."""
VALUES = re.compile(r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]|(?<!\.py:)(?<![\w.])\d[\d,.]*")


def cause_of(error: str) -> str:
    return VALUES.sub("…", EXCERPT.sub("", RAISED.sub(r"\1 \2", error)))[:500]


class FailureCounts:
    """Failures of one run by cause. The first failure, the first drop, and the drops 10, 100, 1000 … are reported."""

    def __init__(self) -> None:
        self._failures: dict[str, int] = {}
        self._drops: dict[str, int] = {}

    def failed(self, error: str) -> bool:
        """Count a failure that does not drop its group; return whether to report it."""
        return _add(self._failures, cause_of(error)) == 1

    def dropped(self, error: str) -> int:
        """Count a drop; return the number of drops for this cause if it should be reported, else 0."""
        number = _add(self._drops, cause_of(error))
        return number if number in (1, 10) or (number >= 100 and str(number).strip("0") == "1") else 0


class DropsInARow:
    """Groups dropped in a row for one cause, with no trainable group between them."""

    def __init__(self, first_group: int = 0) -> None:
        self.first_group = first_group
        """Groups below this id were admitted before the cause was removed and are not counted."""
        self.reset()

    def reset(self) -> None:
        self.reason = self.cause = self.error = ""
        self._group_ids: list[int] = []
        self.lowest, self.highest = math.inf, -math.inf

    def end_of_generation(self) -> None:
        """Note that a group was generated: reset a count of groups that could not be generated."""
        if self.reason in NOT_GENERATED:
            self.reset()

    @property
    def number(self) -> int:
        return len(self._group_ids)

    def add(self, group_id: int, reason: str, error: str, totals: Collection[float] = ()) -> None:
        """Count a dropped group. Reasons that are unrelated to data and rewards are ignored."""
        if reason not in (*FAILED, "no_variance") or group_id < self.first_group:
            return
        cause = cause_of(error)
        if (reason, cause) != (self.reason, self.cause):
            self.reset()
            self.reason, self.cause, self.error = reason, cause, error
        self._group_ids.append(group_id)
        numbers = [total for total in totals if not math.isnan(total)]
        self.lowest, self.highest = min([self.lowest, *numbers]), max([self.highest, *numbers])

    def is_of_one_cause(self, batch: int, first_under_way: Callable[[str], int | None]) -> bool:
        """Return whether enough groups failed for one cause to pause the run; `batch` is the number of groups in a
        step. `first_under_way` returns, for the reason of the drops, the first group whose attempt has not ended;
        groups after it are not counted. Failures come faster than successes, so in a data set with some bad prompts
        many of these are dropped before the first good one is generated."""
        limit = max(BATCHES_OF_ONE_CAUSE * batch, MIN_OF_ONE_CAUSE)
        if self.reason not in FAILED or self.number < limit:
            return False
        first = first_under_way(self.reason)
        return first is None or sum(group_id < first for group_id in self._group_ids) >= limit

    def explain(self, run_id: str) -> str:
        return (
            f"{self.number} groups in a row were dropped as {self.reason!r} for one cause: {self.error}. "
            f"{_REMEDIES[self.reason]}, then `paceline resume {run_id}`"
        )

    def explain_limit(self, in_a_row: int, last_reason: str, run_id: str) -> str:
        text = (
            f"{in_a_row} groups in a row were dropped (the last as {last_reason!r}), and none could be trained "
            "(grpo.max_generation_batches)"
        )
        if self.reason == "no_variance" and self.number == in_a_row:
            text += f": {self._without_variance()}"
        elif self.error:
            text += f": {self.error}"
        return f"{text}. Check the rewards and the data, then `paceline resume {run_id}`"

    def _without_variance(self) -> str:
        number = f"{self.number} groups"
        if self.lowest > self.highest:
            return f"every reward function returned None for every completion of {number}"
        if self.highest <= 0:
            return (
                f"no completion of {number} scored above 0, and no reward function failed; an untrained model may solve none "
                "of the prompts: use easier prompts, a stronger model, or a reward with parts that are easier to get"
            )
        if self.lowest == self.highest:
            return (
                f"every completion of {number} scored {self.highest:g}, so no completion is better than another; check that the "
                "function is right and that not every prompt is solved"
            )
        return (
            f"in each of {number} all completions scored alike, between {self.lowest:g} and {self.highest:g}; use more "
            "completions for a prompt, or prompts that are sometimes solved"
        )


_REMEDIES = {
    "prompt_too_long": "Remove the long prompts from the data set, which is read again, or submit the run again with a larger "
    "policy.max_total_sequence_length if the model allows it",
    "bad_prompt": "Correct the data set or the chat template (both are read again)",
    "invalid_result": "Install the same version of Paceline on workers and coordinator",
    "environment_failed": "Correct the environment (environment workers load its file again)",
    "reward_failed": "Correct the function (reward workers load its file again)",
}


def _add(counts: dict[str, int], cause: str) -> int:
    if cause not in counts and len(counts) >= MAX_CAUSES:
        del counts[next(iter(counts))]
    counts[cause] = counts.get(cause, 0) + 1
    return counts[cause]
