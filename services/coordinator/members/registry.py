"""Who belongs to the system now. Pure bookkeeping with a clock; the control plane feeds it.

A member joins with Hello, lives by its reports, and leaves by a drain or by silence. A broken stream alone is not a
death: the worker may come back within the same time that silence would take.
"""

from __future__ import annotations

import secrets
from collections import deque
from dataclasses import dataclass, field

from paceline.groups import Version
from protos.paceline.v1 import common_pb2, worker_pb2
from services.coordinator.members.directive_queue import DirectiveQueue

SECRET_BYTES = 16
OFFERS_KEPT = 256
WARNINGS_KEPT = 16
ROLE_NAMES = {
    value: name.removeprefix("ROLE_").lower()
    for name, value in common_pb2.Role.items()
    if value != common_pb2.ROLE_UNSPECIFIED
}


@dataclass(frozen=True)
class Fault:
    """What keeps a member from working on a run, as it said itself."""

    run_id: str
    message: str
    kind: worker_pb2.Fault.ValueType = worker_pb2.FAULT_UNSPECIFIED
    resumable: bool = False


@dataclass
class Member:
    """One worker, as the coordinator sees it."""

    member_id: str
    role: common_pb2.Role.ValueType
    address: str
    rank: int
    last_report_s: float
    http_address: str = ""
    connected: bool = True
    """Whether its stream stands."""
    version: Version | None = None
    ahead_session: int = 0
    """Session of weights that it holds and that the ledger knows nothing of; 0: none."""
    ready_run: str = ""
    """Run that the worker has set up and can work on."""
    fault: Fault | None = None
    """Why it cannot work on its run, until it can."""
    suspected: bool = False
    """Not heard of for half the time-out: out of the epoch until it speaks."""
    expelled: bool = False
    """It missed a deadline of its weight link: out of the epoch until it says that it is ready."""
    named_in: int = 0
    """Epoch that named it; reports on earlier ones say nothing about it any more."""
    draining: bool = False
    """It was told to stop, and leaves when it has handed over what it has."""
    session: int = 0
    """Learner: session that it works in; 0 for one that waits."""
    world_size: int = 0
    """Learner: number of its ranks; 0 where it has not said so."""
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(SECRET_BYTES), repr=False)
    """Goes out with Welcome and comes back with every request to the exchange: made anew for each stream."""
    shown_secret: bytes = field(default=b"", repr=False)
    """That of an earlier Welcome, which it came back with: this one's Welcome may be lost."""
    is_heard: bool = False
    """Whether it has reported anything on this stream, so that it has its Welcome."""
    is_expected: bool = False
    """It held something before the coordinator's restart and has not come back yet."""
    offered: deque[Version] = field(default_factory=lambda: deque(maxlen=OFFERS_KEPT))
    """Versions that the learner offered to it, newest last: it can acknowledge these."""
    warned_s: deque[float] = field(default_factory=lambda: deque(maxlen=WARNINGS_KEPT))
    """When it warned of something, newest last."""
    failed_s: deque[float] = field(default_factory=lambda: deque(maxlen=WARNINGS_KEPT))
    """When it said anew why it cannot work, newest last."""
    stream_error: Exception | None = None
    """What one of its reports ended in; its stream ends with it."""
    gauges: dict[str, float] = field(default_factory=dict)
    outbox: DirectiveQueue = field(default_factory=DirectiveQueue)
    """Directives to send."""

    @property
    def role_name(self) -> str:
        """`rollout`, `reward` or `learner`."""
        return ROLE_NAMES.get(self.role, "unknown")

    def direct(self, directive: worker_pb2.ConnectResponse) -> None:
        """Queues a directive; a member that does not read is cut off and has to come back."""
        if not self.outbox.put(directive):
            self.end_stream()

    def end_stream(self) -> None:
        """Ends the member's stream in place of what is still queued."""
        self.outbox.end()


class Members:
    """All members, by id."""

    def __init__(self, timeout_s: float):
        self.timeout_s = timeout_s
        self._members: dict[str, Member] = {}

    def __len__(self) -> int:
        return len(self._members)

    def get(self, member_id: str) -> Member | None:
        """The member of that id, if it is one."""
        return self._members.get(member_id)

    def add(self, member: Member) -> None:
        """A member joins, or comes back on a new stream, which replaces the old one."""
        earlier = self._members.get(member.member_id)
        if earlier is not None:
            earlier.end_stream()
        self._members[member.member_id] = member

    def remove(self, member_id: str) -> Member | None:
        """A member is gone."""
        return self._members.pop(member_id, None)

    def of_role(self, role: common_pb2.Role.ValueType) -> list[Member]:
        """The members of a role, in the order in which they joined."""
        return [member for member in self._members.values() if member.role == role]

    def all(self) -> list[Member]:
        """Every member."""
        return list(self._members.values())

    def excuse_silence(self, pause_s: float, now_s: float) -> None:
        """Move the last reports forward by `pause_s`, because no member could be heard for so long."""
        for member in self._members.values():
            member.last_report_s = min(now_s, member.last_report_s + pause_s)

    def quiet(self, now_s: float) -> list[Member]:
        """Members with a stream, not suspected yet, that were not heard of for half the time-out."""
        return [
            member
            for member in self._members.values()
            if member.connected and not member.suspected and now_s - member.last_report_s > self.timeout_s / 2
        ]

    def silent(self, now_s: float) -> list[Member]:
        """Members not heard of for longer than the time-out; half of it where the stream broke, unless it has a learner's
        session, which a short break does not take away."""
        return [
            member
            for member in self._members.values()
            if now_s - member.last_report_s
            > (self.timeout_s if member.connected or member.session else self.timeout_s / 2)
        ]
