"""State of the workers that is in no file: their versions, and the ages of their leases and tasks, by which overdue
workers are found. Has no I/O; the pool advances the clock.

A lease has no deadline, because a completion may take any time. But a connected worker that submits nothing, while the
others do, holds groups that they could generate. A worker is overdue when it has held a lease, and submitted nothing,
for longer than both LIMIT_S and LIMIT_MULTIPLE times the pool's median from lease to result. It is also overdue when
its last MAX_REFUSED results were refused. No worker is overdue unless another one has submitted a result since, or is
idle and able to work.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Collection, Iterable

from paceline.groups import Version
from paceline.services.coordinator.exchange.notices import Notices
from paceline.v1 import exchange_pb2 as pb

MAX_SESSIONS = 256
"""Largest number of sessions that are remembered because workers have reported them."""

LIMIT_S = 60.0
LIMIT_MULTIPLE = 10.0

MAX_REFUSED = 3
"""Number of results refused in a row from which on a worker is overdue."""

MIN_RESULTS = 8
"""Number of the other workers' results from which on their median is used."""

NO_MEDIAN_S = 600.0
"""Seconds after which a worker is overdue while the other workers have fewer than MIN_RESULTS results."""

WINDOW = 256
"""Number of newest results from which the median is computed."""

LONGEST_STEP_S = 10.0
"""Largest number of seconds that are counted between two checks: in a longer gap the coordinator stood still."""


class LeaseDurations:
    """Ages of leases (or of score tasks) and the workers' newest results."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._checked_s: float | None = None
        self._since_s: dict[tuple[str, int, int], float] = {}
        """Time, in seconds of `_now_s`, at which each lease was first seen. The key is worker, group and attempt."""
        self._results: deque[tuple[str, float]] = deque(maxlen=WINDOW)
        """Worker and seconds from lease to result, for each of the newest results."""
        self._submitted_s: dict[str, float] = {}
        """Time, in seconds of `_now_s`, of the last accepted result. The key is the worker."""
        self._refused: dict[str, int] = {}
        """Number of results that were refused in a row. The key is the worker."""

    def note_submission(self, member_id: str, group_id: int, attempt: int) -> None:
        """Note that a worker's result was accepted, or that another worker's result had won."""
        since_s = self._since_s.get((member_id, group_id, attempt), self._now_s)
        self._results.append((member_id, self._now_s - since_s))
        self._submitted_s[member_id] = self._now_s
        self._refused.pop(member_id, None)

    def note_progress(self, member_id: str) -> None:
        """Note that a worker has submitted a part of a result, which proves that it works."""
        self._submitted_s[member_id] = self._now_s

    def note_refusal(self, member_id: str) -> None:
        self._refused[member_id] = self._refused.get(member_id, 0) + 1

    def check(
        self, now_s: float, held: Iterable[tuple[str, int, int]], able: Collection[str] = ()
    ) -> list[tuple[str, str]]:
        """Return the overdue workers, each with the reason. `held` has worker, group and attempt of each current
        lease; `able` has the workers that could take leases."""
        if self._checked_s is not None:
            self._now_s += min(max(0.0, now_s - self._checked_s), LONGEST_STEP_S)
        self._checked_s = now_s
        self._since_s = {lease: self._since_s.get(lease, self._now_s) for lease in held}
        oldest_s: dict[str, float] = {}
        for (member_id, _, _), since_s in self._since_s.items():
            oldest_s[member_id] = min(since_s, oldest_s.get(member_id, since_s))
        current = oldest_s.keys() | {member_id for member_id, _ in self._results}
        self._submitted_s = {m: s for m, s in self._submitted_s.items() if m in current}
        self._refused = {m: n for m, n in self._refused.items() if m in current}
        return [
            (member_id, why)
            for member_id in oldest_s
            if (why := self._why(member_id, oldest_s[member_id], has_free=not oldest_s.keys() >= set(able)))
        ]

    def _why(self, member_id: str, oldest_s: float, *, has_free: bool) -> str:
        """Return why a worker is overdue; empty if it is not. `has_free` is true if another worker is idle."""
        others = [seconds for other, seconds in self._results if other != member_id]
        since_s = max(oldest_s, self._submitted_s.get(member_id, oldest_s))
        enough_results = len(others) >= MIN_RESULTS
        others_submit = any(s >= since_s for other, s in self._submitted_s.items() if other != member_id)
        if not (has_free or (others_submit and enough_results)):
            return ""  # the others are no faster
        if self._refused.get(member_id, 0) >= MAX_REFUSED:
            return f"the last {self._refused[member_id]} groups that the worker submitted were refused"
        waited_s = self._now_s - since_s
        median_s = statistics.median(others) if enough_results else NO_MEDIAN_S / LIMIT_MULTIPLE
        limit_s = max(LIMIT_S, LIMIT_MULTIPLE * median_s)
        if waited_s <= limit_s:
            return ""
        pace = f"need {median_s:.0f} s from lease to result" if enough_results else "have nothing to do"
        return f"the worker has submitted nothing for {waited_s:.0f} s, and other workers {pace} (the limit is {limit_s:.0f} s)"


class Throughput:
    """Numbers of committed groups by worker, since the coordinator's start, for the scaling policy. The unit is a group
    to train; a group of an evaluation counts in proportion to its completions. Tokens and turns, which include those of
    evaluations, are for the metrics of steps."""

    def __init__(self) -> None:
        self.generated: defaultdict[str, float] = defaultdict(float)
        """Number of generated groups. The key is the rollout or environment worker."""
        self.scored: defaultdict[str, float] = defaultdict(float)
        """Number of scored groups. The key is the reward worker."""
        self.tokens = 0
        self.turns = 0

    def add_generated(self, member_id: str, share: float) -> None:
        if share:
            self.generated[member_id] += share

    def add_scored(self, member_id: str, share: float) -> None:
        if share:
            self.scored[member_id] += share

    def add_tokens(self, tokens: int, turns: int = 0) -> None:
        self.tokens += tokens
        self.turns += turns

    def keep(self, member_ids: Iterable[str]) -> None:
        """Remove workers that are not among `member_ids`, because the counts would grow with every new worker."""
        kept = set(member_ids)
        for counts in (self.generated, self.scored):
            for member_id in counts.keys() - kept:
                del counts[member_id]


class Workers:
    """State of the workers, members or not. Only its methods change it."""

    def __init__(self, notices: Notices):
        self._notices = notices
        self.versions: dict[str, Version] = {}
        """Acknowledged version of each rollout worker. The key is the member id."""
        self.offered: dict[str, Version] = {}
        """The newest version that was offered to each rollout worker in the active run. The key is the member id. A
        worker may sample from a version before it acknowledges that version."""
        self.session_numbers: set[int] = set()
        """The newest sessions that workers have reported or were offered; a restored ledger lacks those after its
        backup."""
        self.suspected: set[str] = set()
        """Ids of members that may be gone: no batch waits for their work, and others may get it."""
        self.overdue: set[str] = set()
        """Ids of workers that held leases or tasks for too long; they get no more until they have submitted a
        result."""
        self.lease_durations, self.task_durations = LeaseDurations(), LeaseDurations()
        self.throughput = Throughput()

    def note_session(self, session: int) -> None:
        self.session_numbers = set(sorted({*self.session_numbers, session})[-MAX_SESSIONS:])

    def offer(self, member_id: str, version: Version) -> None:
        self.note_session(version.session)
        self.offered[member_id] = max(version, self.offered.get(member_id, version))

    def acknowledge(self, member_id: str, version: Version) -> None:
        """Note that a worker samples from `version`."""
        self.note_session(version.session)
        self.versions[member_id] = version

    def newest_of(self, member_id: str) -> Version | None:
        """Return the newest version that a worker's tokens can have; None if there is none."""
        versions = (self.versions.get(member_id), self.offered.get(member_id))
        return max((version for version in versions if version is not None), default=None)

    def suspect(self, member_id: str) -> None:
        self.suspected.add(member_id)

    def clear_suspicion(self, member_id: str) -> None:
        self.suspected.discard(member_id)

    def note_overdue(self, member_id: str) -> None:
        self.overdue.add(member_id)

    def note_group(self, member_id: str, result: pb.GroupResult, share: float = 0.0) -> None:
        """Note that a worker submitted a group. `share` counts it in the throughput, relative to a group to train; 0 if
        another worker's result won."""
        self.lease_durations.note_submission(member_id, result.group_id, result.attempt)
        self.throughput.add_generated(member_id, share)
        if member_id in self.overdue:
            self._end_overdue(member_id, "a group", "leases")

    def note_scores(self, member_id: str, result: pb.ScoreResult, share: float = 0.0) -> None:
        """Note that a worker submitted scores, as `note_group` does."""
        self.task_durations.note_submission(member_id, result.group_id, result.attempt)
        self.throughput.add_scored(member_id, share)
        if member_id in self.overdue:
            self._end_overdue(member_id, "scores", "tasks")

    def _end_overdue(self, member_id: str, submitted: str, work: str) -> None:
        self.overdue.remove(member_id)
        self._notices.warn(f"{member_id} has submitted {submitted} and gets {work} again")

    def remove(self, member_id: str) -> None:
        self.versions.pop(member_id, None)
        self.offered.pop(member_id, None)
        self.overdue.discard(member_id)
        self.suspected.discard(member_id)

    def clear_versions(self) -> None:
        """Clear the acknowledged versions, because they are of a run that is over."""
        self.versions.clear()

    def end_run(self) -> None:
        """Clear what belongs to the active run, because it ends or stops."""
        self.offered, self.session_numbers, self.overdue = {}, set(), set()
