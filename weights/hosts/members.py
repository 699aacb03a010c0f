"""Tracks the members that get weights by the relays of their hosts: the version and the silence of each member.

It sends nothing: the coordinator tells each host where to read. A member has `max_wait_s` for its first report on a
version, and as long between two reports. While bytes arrive there is no other limit; without new bytes the limit is
twenty times `max_wait_s` plus the time that the bytes need at the slowest rate. A new version starts no deadline for a
member that still loads an earlier one. A member that fails `PATIENCE` times in a row must read the object store. One
thread waits for deadlines and calls `on_result`; one condition guards the state.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from paceline.groups import Version
from paceline.rate_limited_log import unforeseen
from paceline.weights.progress import Failure, PublishResult, longest_s

PATIENCE = 3
CLOSE_WAIT_S = 2.0


@dataclass
class _Member:
    held: Version | None = None
    begun_s: float = 0.0
    loading_s: float = 0.0
    """Monotonic time of the first report that all bytes arrived; 0 before that report."""
    deadline_s: float = math.inf
    last_s: float = math.inf
    """Monotonic time beyond which reports without new bytes do not extend the deadline."""
    received_bytes: int = 0
    working_on: Version | None = None
    failures: int = 0
    attempts: int = 0


class HostMembers:
    """The members of one run. `on_result` is called from this object's thread."""

    def __init__(
        self,
        max_wait_s: float,
        on_result: Callable[[PublishResult], None],
        clock: Callable[[], float] = time.monotonic,
        is_heard: Callable[[], bool] = lambda: True,
    ) -> None:
        """`is_heard` returns whether reports of members can arrive; if not, no member counts as silent."""
        self._max_wait_s, self._on_result = max_wait_s, on_result
        self._clock, self._is_heard = clock, is_heard
        self._members: dict[str, _Member] = {}
        self._gone: dict[str, _Member] = {}
        """Members that left, kept with their failures."""
        self._epoch = 0
        self._newest: Version | None = None
        self._size_bytes = 0
        self._results: list[PublishResult] = []
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="weights-members", daemon=True)
        self._thread.start()

    def set_members(self, epoch: int, member_ids: Iterable[str]) -> None:
        """Replace the members that get weights by the relays of their hosts."""
        with self._changed:
            self._epoch = epoch
            earlier, self._members = self._members, {}
            for member_id in member_ids:
                member = earlier.pop(member_id, None)
                if member is None:
                    member = _Member(failures=self._gone.pop(member_id, _Member()).failures)
                    self._members[member_id] = member
                    self._begin(member)
                self._members[member_id] = member
            self._gone |= earlier
            while len(self._gone) > 4096:
                del self._gone[next(iter(self._gone))]
            self._changed.notify_all()

    def failed_often(self, member_id: str) -> bool:
        """Return whether relays failed to reach this member too often in a row."""
        with self._changed:
            member = self._members.get(member_id) or self._gone.get(member_id)
            return member is not None and member.failures >= PATIENCE

    def publish(self, version: Version, size_bytes: int) -> None:
        with self._changed:
            self._newest, self._size_bytes = version, size_bytes
            for member in self._members.values():
                if member.deadline_s == math.inf:  # else its deadline has passed already
                    self._begin(member)
            self._changed.notify_all()

    def progress(self, member_id: str, version: Version, received_bytes: int, loading: bool) -> None:
        """Record a member's report that it works on a version."""
        with self._changed:
            member = self._members.get(member_id)
            if member is None or (member.held is not None and version <= member.held):
                return
            now = self._clock()
            if version != member.working_on or (loading and not member.loading_s):
                member.received_bytes = 0
                member.loading_s = now if loading else 0.0
                if loading or member.last_s == math.inf:  # a change of version alone is no progress
                    member.last_s = now + longest_s(self._max_wait_s, self._size_bytes)
            if received_bytes > member.received_bytes and not loading:
                member.received_bytes = received_bytes
                member.last_s = now + longest_s(self._max_wait_s, self._size_bytes)
            member.working_on = version
            member.deadline_s = min(now + self._max_wait_s, member.last_s)
            self._changed.notify_all()

    def answer(self, member_id: str, version: Version, ok: bool, message: str) -> None:
        """Record a member's answer: the member samples from `version`, or `message` is the reason why not."""
        with self._changed:
            member = self._members.get(member_id)
            if member is None or self._newest is None or version > self._newest:
                return
            if ok and (member.held is None or version > member.held):
                member.held, member.failures = version, 0
                self._note(member_id, member, version, "", "")
            elif not ok:
                member.failures += 1
                self._note(member_id, member, version, "refused", f"the member refused: {message}")
            member.working_on = None
            self._begin(member)
            self._changed.notify_all()

    def extend(self) -> None:
        """Restart all deadlines, because the control plane was away and may have caused the failures."""
        with self._changed:
            for member in (*self._members.values(), *self._gone.values()):
                member.failures = 0
            for member in self._members.values():
                if member.deadline_s != math.inf:
                    self._begin(member)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_WAIT_S)

    def _begin(self, member: _Member) -> None:
        """Begin the deadline for the newest version, unless the member holds it."""
        member.deadline_s = member.last_s = math.inf
        member.working_on, member.loading_s, member.received_bytes = None, 0.0, 0
        if self._newest is not None and (member.held is None or member.held < self._newest):
            member.begun_s = self._clock()
            member.attempts += 1
            member.deadline_s = member.begun_s + self._max_wait_s

    def _note(self, member_id: str, member: _Member, version: Version, failure: Failure, error: str) -> None:
        now = self._clock()
        loading_s = member.loading_s or now
        self._results.append(
            PublishResult(
                member_id,
                self._epoch,
                member.attempts,
                version,
                ok=not failure,
                transfer_s=max(0.0, loading_s - member.begun_s) if member.begun_s else 0.0,
                ack_s=now - loading_s,
                size_bytes=self._size_bytes,
                failure=failure,
                error=error,
            )
        )

    def _run(self) -> None:
        while True:
            with self._changed:
                now = self._clock()
                for member_id, member in self._members.items():
                    if member.deadline_s > now:
                        continue
                    if self._is_heard():
                        self._give_up(member_id, member)
                    else:
                        self._begin(member)
                results, self._results = self._results, []
                if not results:
                    if self._closed:
                        return
                    next_s = min((m.deadline_s for m in self._members.values()), default=math.inf)
                    # No deadline while all members hold the newest version: the next one may take as long as a step.
                    self._changed.wait(None if next_s == math.inf else max(0.001, next_s - now))
                    continue
            for result in results:
                try:
                    self._on_result(result)
                except Exception as error:  # raised by the listener; other members' deadlines have to go on
                    unforeseen.note("the result of bringing weights to a host", error)

    def _give_up(self, member_id: str, member: _Member) -> None:
        version = member.working_on or self._newest
        assert version is not None
        silent = member.deadline_s < member.last_s
        what = f"no report within {self._max_wait_s} s" if silent else "reports, but no new bytes"
        phase = "loading" if member.loading_s else "receiving"
        member.failures += 1
        self._note(member_id, member, version, "silent" if member.loading_s else "link", f"{phase}: {what}")
        member.working_on = None
        self._begin(member)
