"""The state of the active run that is only in memory. A run that is started again begins with a new state."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from paceline.services.coordinator.exchange.failure_causes import DropsInARow, FailureCounts
from paceline.services.coordinator.exchange.spot_check import SpotCheck


class Training(NamedTuple):
    """The session and the step that were served last, and the number of ranks, until the step is trained."""

    session: int
    step: int
    world_size: int


class RunState:
    """State of a run while it is active. Only its methods change it."""

    def __init__(self, end_step: int = 0) -> None:
        self.end_step = end_step
        """Number of steps after which the run ends because its hours are over (`max_hours`); 0 before that."""
        self.yields_to = ""
        """Id of the waiting run that goes first. While it is set, nothing new is leased, and no batch is fixed."""
        self.unreadable_data = ""
        """Reason why the next prompt cannot be read; empty while it can."""
        self.reserved: dict[int, str] = {}
        """Id of the worker that gets no new work until it is free for a quarantined group. The key is the group id."""
        self.first_requested_s: dict[int, float] = {}
        """Time of the first request for the batch of a step. The key is the step."""
        self.first_complete_s: dict[int, float] = {}
        """Time from which the batch of a step could be fixed (only with `ready_first`). The key is the step."""
        self.training: Training | None = None
        self.ranks = 0
        """Number of ranks of the newest session's learner; 0 until it is reported."""
        self.failure_counts, self.drops_in_a_row = FailureCounts(), DropsInARow()
        self.spot_check = SpotCheck()
        self._counted = (0, 0)
        """Cache of `num_ahead`: a slot, and the number of open, unbatched groups in the slots before it."""

    def end_early(self, end_step: int) -> None:
        self.end_step = end_step

    def yield_to(self, run_id: str) -> None:
        """Let a waiting run go first; none if `run_id` is empty."""
        self.yields_to = run_id

    def note_data(self, fault: str) -> None:
        """Note why the next prompt cannot be read; `fault` is empty if it can."""
        self.unreadable_data = fault

    def note_ranks(self, ranks: int) -> None:
        self.ranks = ranks

    def note_training(self, training: Training | None) -> None:
        self.training = training

    def reserve(self, group_id: int, member_id: str) -> None:
        self.reserved[group_id] = member_id

    def unreserve(self, group_id: int) -> None:
        self.reserved.pop(group_id, None)

    def unreserve_all_of(self, member_id: str) -> None:
        self.reserved = {group: holder for group, holder in self.reserved.items() if holder != member_id}

    def note_request(self, step: int, now_s: float) -> None:
        self.first_requested_s.setdefault(step, now_s)

    def note_complete(self, step: int, now_s: float) -> float:
        """Note that the batch of a step could be fixed; return the time from which it could."""
        return self.first_complete_s.setdefault(step, now_s)

    def end_requests(self, step: int) -> None:
        """Remove the times of a step whose batch is fixed, and of the steps before it."""
        for times_s in (self.first_requested_s, self.first_complete_s):
            for passed in [s for s in times_s if s <= step]:
                del times_s[passed]

    def clear_failures(self, first_group: int) -> None:
        """Reset all counts of failures, because a person resumes the run; groups before `first_group` are not
        counted."""
        self.failure_counts, self.drops_in_a_row = FailureCounts(), DropsInARow(first_group)

    def num_ahead(self, slot: int, num_waiting: Callable[[int, int], int]) -> int:
        """Return the number of open, unbatched groups in slots before `slot`, counted from the last call's slot on.
        `num_waiting` returns this number between two slots."""
        start, ahead = self._counted if self._counted[0] <= slot else (0, 0)
        ahead += num_waiting(start, slot)
        self._counted = (slot, ahead)
        return ahead

    def slots_changed(self) -> None:
        """Clear the cache of `num_ahead`, because a group was opened or ended at a counted slot."""
        self._counted = (0, 0)
