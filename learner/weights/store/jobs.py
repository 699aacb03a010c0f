"""Versions that wait to be stored, the same ones in the same order on all ranks.

Promise: of the jobs that no rank has begun only the newest is kept, so a slow store is overtaken and memory stays bounded:
the kept copy, the version being written, and one that waits. One small collective in `put` decides
whether any rank has begun a job; during it no job begins here.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from paceline.groups import Version
from paceline.learner.weights.store.version_source import VersionSource


@dataclass
class Job:
    """A version to store; with `wants_snapshot` also as a snapshot."""

    number: int
    version: Version
    source: VersionSource | None
    """This rank's elements; None: only a snapshot of the newest version."""
    wants_snapshot: bool
    staged_s: float
    begun: bool = False
    held: bool = False
    """True while `put` decides about it, so that it may not begin."""


class StoreJobs:
    """Jobs of one rank; `any_rank` returns whether a fact is true on any rank."""

    def __init__(self, any_rank: Callable[[bool], bool]) -> None:
        self.closed = threading.Event()
        self._any_rank = any_rank
        self._jobs: deque[Job] = deque()
        self._count = 0
        self._changed = threading.Condition()

    def put(
        self,
        version: Version,
        take: Callable[[VersionSource | None], VersionSource] | None,
        *,
        wants_snapshot: bool,
    ) -> None:
        """Add a job, or replace the last one that has not begun. A collective call.

        `take` returns the version's elements; it is given those of the version that is replaced, if any.
        """
        with self._changed:
            last = self._jobs[-1] if self._jobs and not self._jobs[-1].begun else None
            if last is not None:
                last.held = True
        overtakes = not self._any_rank(last is None)
        replaced = last.source if overtakes and last is not None else None
        source = None if take is None else take(replaced)
        with self._changed:
            if overtakes and last is not None:
                if source is not None:
                    last.version, last.source = version, source
                last.wants_snapshot |= wants_snapshot
            else:
                self._count += 1
                job = Job(self._count, version, source, wants_snapshot, time.monotonic())
                self._jobs.append(job)
            if last is not None:
                last.held = False
            self._changed.notify_all()

    def begin(self) -> Job | None:
        """Wait for the next job, without a deadline because the learner decides when it comes; None once closed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.closed.is_set() or (len(self._jobs) > 0 and not self._jobs[0].held)
            )
            if self.closed.is_set():
                return None
            self._jobs[0].begun = True
            return self._jobs[0]

    def end(self) -> None:
        """End the job that was begun: it is stored."""
        with self._changed:
            self._jobs.popleft()

    def close(self) -> None:
        """Let no further job begin."""
        self.closed.set()
        with self._changed:
            self._changed.notify_all()
