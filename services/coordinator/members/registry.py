"""Keeps the current members. Pure bookkeeping with a clock; the control plane feeds it.

A member joins with Hello, stays by its reports, and leaves by a drain or by silence. If only its stream breaks, the
worker may return within a time-out. Each request to the exchange carries the secret of its member's Welcome, which is
valid until the next Welcome or the member's end. A request with an earlier secret is neither accepted nor refused for
good, because the worker sends it again after its next Welcome. A request with any other secret is refused.
"""

from __future__ import annotations

import asyncio
import enum
import hmac
import secrets
import time
from collections import deque
from collections.abc import Callable, Hashable, Set
from dataclasses import dataclass, field

from paceline.groups import Version
from paceline.services.common.access.rights import Caller
from paceline.services.common.worker.score_extras import FunctionSums, LoggedMetrics
from paceline.v1 import common_pb2, worker_pb2

MAX_WAITING = 256
"""Largest number of queued directives of kinds that do not replace an earlier one."""

ACKS_AT_ONCE = 1000
"""Largest number of acknowledgements in one directive."""

MAX_ACKS = 64 * ACKS_AT_ONCE
REPLACING = frozenset({"epoch", "keep_checkpoints", "checkpoint", "drain", "expelled", "host_plan", "engines"})
"""Kinds of directives that replace a queued one of the same kind."""


class DirectiveQueue:
    """Directives for one member. The queue has one reader, and all writers are on the reader's event loop."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, worker_pb2.ConnectResponse] = {}
        """Directives in sending order."""
        self._acks: dict[tuple[str, int, int], worker_pb2.WeightAck] = {}
        """Acknowledgements, sent after `_waiting`. The key is member id, session and step."""
        self._numbers = 0
        self._plain = 0
        self._ended = False
        self._bell = asyncio.Event()

    def __len__(self) -> int:
        """Return the number of directives that `get` would return."""
        return len(self._waiting) + -(-len(self._acks) // ACKS_AT_ONCE)

    def put(self, directive: worker_pb2.ConnectResponse) -> bool:
        """Queue a directive; return False if too many wait because the member does not read."""
        kind = directive.WhichOneof("directive") or ""
        if kind == "weight_ack":
            return self.put_ack(directive.weight_ack)
        key: Hashable
        if kind in REPLACING:
            key = kind
        elif kind == "weight_progress":
            progress = directive.weight_progress
            key = (kind, progress.member_id, progress.version.session, progress.version.step)
        else:
            self._numbers += 1
            self._plain += 1
            key = self._numbers
            if self._plain > MAX_WAITING:
                return False
        self._waiting.pop(key, None)
        self._waiting[key] = directive
        self._bell.set()
        return True

    def put_ack(self, ack: worker_pb2.WeightAck) -> bool:
        """Queue an acknowledgement; return False if too many wait because the member does not read."""
        self._acks[ack.member_id, ack.version.session, ack.version.step] = ack
        self._bell.set()
        return len(self._acks) <= MAX_ACKS

    def end(self) -> None:
        self._ended = True
        self._waiting.clear()
        self._acks.clear()
        self._bell.set()

    async def get(self) -> worker_pb2.ConnectResponse | None:
        """Return the next directive; None at the end of the stream."""
        while not self._ended and not self._waiting and not self._acks:
            self._bell.clear()
            await self._bell.wait()
        if self._ended:
            return None
        if self._waiting:
            key = next(iter(self._waiting))
            self._plain -= isinstance(key, int)
            return self._waiting.pop(key)
        first = list(self._acks)[:ACKS_AT_ONCE]
        acks = worker_pb2.WeightAcks(acks=[self._acks.pop(key) for key in first])
        return worker_pb2.ConnectResponse(weight_acks=acks)


SECRET_BYTES, KEY_BYTES = 16, 32
OFFERS_KEPT = 256
WARNINGS_KEPT = 16
ROLE_NAMES = {
    value: name.removeprefix("ROLE_").lower()
    for name, value in common_pb2.Role.items()
    if value != common_pb2.ROLE_UNSPECIFIED
}


@dataclass(frozen=True)
class Fault:
    run_id: str
    message: str
    kind: worker_pb2.Fault.ValueType = worker_pb2.FAULT_UNSPECIFIED
    resumable: bool = False


@dataclass(frozen=True)
class Introduction:
    """Facts of a worker from its Hello."""

    role: common_pb2.Role.ValueType
    address: str = ""
    rank: int = 0
    http_address: str = ""
    world_size: int = 0
    """Number of a learner's ranks; 0 if unknown."""
    learner_id: str = ""
    """Id, never shown, that the ranks of a learner with several ranks share."""
    shown_secret: bytes = field(default=b"", repr=False)
    """Earlier secret in the worker's Hello. The next Hello may have it too, because this stream's Welcome may be
    lost."""
    exchange_key: bytes = b""
    """Public key of the worker's connections to the exchange; empty if they are not encrypted."""
    caller: Caller | None = None
    """Caller that joined as this member; None without access control."""


@dataclass(slots=True)
class Stream:
    """One control stream; a worker that returns gets a new one."""

    secret: bytes = field(default_factory=lambda: secrets.token_bytes(SECRET_BYTES), repr=False)
    """Secret that is sent with Welcome and required in every request to the exchange."""
    call_key: bytes = field(default_factory=lambda: secrets.token_bytes(KEY_BYTES), repr=False)
    """Key of the tickets for calls of this worker."""
    is_heard: bool = False
    """True if the worker has reported on this stream, which shows that it got its Welcome."""
    error: Exception | None = None
    host_plan: worker_pb2.HostPlan | None = None
    """Plan that was sent for the worker's host."""
    engines: worker_pb2.Engines | None = None
    """List of rollout workers that was last sent to an environment worker."""
    outbox: DirectiveQueue = field(default_factory=DirectiveQueue)


@dataclass(slots=True)
class HeldWeights:
    """The weights that a worker has or was offered, and its membership in the rosters."""

    version: Version | None = None
    ahead_session: int = 0
    """Session of the worker's weights if the ledger does not know that session, else 0."""
    offered: deque[Version] = field(default_factory=lambda: deque(maxlen=OFFERS_KEPT))
    """Versions that the learner has offered to the worker, newest last; it may acknowledge only these."""
    named_in: int = 0
    """Number (epoch) of the roster that the worker entered last; reports on earlier rosters are ignored."""
    expelled: bool = False
    """True if the worker missed a deadline for a version; it is not in the roster until it reports that it is ready."""


@dataclass(slots=True)
class Measures:
    """Numbers that a worker reports."""

    gauges: dict[str, float] = field(default_factory=dict)
    paused_s: float = 0.0
    """Total seconds for which the worker's sampler paused for new weights."""
    logged: LoggedMetrics = field(default_factory=LoggedMetrics)
    """Values that the worker's reward functions logged since the last step."""
    functions: FunctionSums = field(default_factory=FunctionSums)
    """Calls of the worker's reward functions since the last step."""


@dataclass(slots=True)
class ReportTimes:
    """Monotonic times of bounded kinds of reports, newest last."""

    warned_s: deque[float] = field(default_factory=lambda: deque(maxlen=WARNINGS_KEPT))
    failed_s: deque[float] = field(default_factory=lambda: deque(maxlen=WARNINGS_KEPT))
    """Times of new faults."""


@dataclass(slots=True)
class Member:
    member_id: str
    introduction: Introduction
    last_report_s: float
    connected: bool = True
    suspected: bool = False
    """True if the worker was silent for half the time-out; it is not in the roster until it reports again."""
    draining: bool = False
    """True if the worker is stopping; it leaves when it has returned its leases and tasks."""
    is_expected: bool = False
    """True if the worker held leases or a session before the coordinator's restart and has not returned yet."""
    session: int = 0
    """Current session of a learner; 0 while it waits for one."""
    ready_run: str = ""
    """Run that the worker has set up."""
    fault: Fault | None = None
    """Reason why the worker cannot work on its run; None if it can."""
    host: worker_pb2.HostAgent | None = None
    """Relay of the worker's host; None if there is none."""
    weights: HeldWeights = field(default_factory=HeldWeights)
    measures: Measures = field(default_factory=Measures)
    times: ReportTimes = field(default_factory=ReportTimes)
    stream: Stream = field(default_factory=Stream)

    @property
    def role(self) -> common_pb2.Role.ValueType:
        return self.introduction.role

    @property
    def role_name(self) -> str:
        """Return `rollout`, `reward`, `learner` or `environment`."""
        return ROLE_NAMES.get(self.role, "unknown")

    def direct(self, directive: worker_pb2.ConnectResponse) -> None:
        """Queue a directive; if too many wait, end the stream, so that the member has to reconnect."""
        if not self.stream.outbox.put(directive):
            self.end_stream()

    def end_stream(self) -> None:
        """End the member's stream; queued directives are not sent."""
        self.stream.outbox.end()


class Members:
    def __init__(self, timeout_s: float):
        self.timeout_s = timeout_s
        self._members: dict[str, Member] = {}

    def __len__(self) -> int:
        return len(self._members)

    def get(self, member_id: str) -> Member | None:
        return self._members.get(member_id)

    def add(self, member: Member) -> None:
        """Add a member; if it returns on a new stream, the old stream ends."""
        earlier = self._members.get(member.member_id)
        if earlier is not None:
            earlier.end_stream()
        self._members[member.member_id] = member

    def remove(self, member_id: str) -> Member | None:
        return self._members.pop(member_id, None)

    def of_role(self, role: common_pb2.Role.ValueType) -> list[Member]:
        return [member for member in self._members.values() if member.role == role]

    def all(self) -> list[Member]:
        return list(self._members.values())

    def ignore_silence(self, pause_s: float, now_s: float) -> None:
        """Move the times of the last reports forward by `pause_s` seconds, in which no report could be read."""
        for member in self._members.values():
            member.last_report_s = min(now_s, member.last_report_s + pause_s)

    def quiet(self, now_s: float) -> list[Member]:
        """Return connected, unsuspected members that have been silent for half the time-out."""
        return [
            member
            for member in self._members.values()
            if member.connected and not member.suspected and now_s - member.last_report_s > self.timeout_s / 2
        ]

    def silent(self, now_s: float) -> list[Member]:
        """Return members that have been silent for the time-out. If the stream broke, half of the time-out is enough,
        except for a learner with a session, because a short break does not end a session."""
        return [
            member
            for member in self._members.values()
            if now_s - member.last_report_s
            > (self.timeout_s if member.connected or member.session else self.timeout_s / 2)
        ]


BEAT_S = 0.1
IGNORED_S = 0.05
"""Seconds by which a beat may be late without counting as a pause."""


class LoopLag:
    """Adds up the event loop's pauses. `watch` runs the beat; `take` also counts a pause that has not ended yet."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._due_s = clock() + BEAT_S
        self._lag_s = 0.0

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(max(0.0, self._due_s - self._clock()))
            self.beat()

    def beat(self) -> None:
        """Note a beat; an early one changes nothing."""
        now_s = self._clock()
        late_s = now_s - self._due_s
        if late_s > IGNORED_S:
            self._lag_s += late_s
        if late_s >= 0:
            self._due_s = now_s + BEAT_S

    def take(self) -> float:
        """Return the seconds of pauses since the last call."""
        self.beat()
        lag_s, self._lag_s = self._lag_s, 0.0
        return lag_s


MAX_EARLIER = 4096
"""Largest number of earlier secrets that are kept: more than the workers that leave while a message is on its way."""


class Standing(enum.Enum):
    """Relation of a request's sender to the members."""

    MEMBER = "member"
    EARLIER = "earlier"
    """The secret is an earlier one of this member, which sends the request again after its next Welcome."""
    STRANGER = "stranger"


class Senders:
    """The members whose requests are answered. The key is the member id."""

    def __init__(self, max_earlier: int = MAX_EARLIER) -> None:
        self._max_earlier = max_earlier
        self._members: dict[str, Member] = {}
        self._earlier: dict[tuple[str, bytes], None] = {}
        """Earlier pairs of member id and secret, oldest first."""
        self._keys: dict[bytes, str] = {}
        """Member ids. The key is the member's public key. ZeroMQ's thread reads this mapping."""

    @property
    def ids(self) -> Set[str]:
        return self._members.keys()

    def enter(self, member: Member) -> None:
        """Add a member, or replace its secret."""
        self.leave(member.member_id)
        self._members[member.member_id] = member
        if member.introduction.exchange_key:
            self._keys[member.introduction.exchange_key] = member.member_id

    def leave(self, member_id: str) -> None:
        member = self._members.pop(member_id, None)
        if member is None:
            return
        if self._keys.get(member.introduction.exchange_key) == member_id:
            del self._keys[member.introduction.exchange_key]
        self._earlier[member_id, member.stream.secret] = None
        while len(self._earlier) > self._max_earlier:
            del self._earlier[next(iter(self._earlier))]

    def get(self, member_id: str) -> Member | None:
        return self._members.get(member_id)

    def knows_key(self, key: bytes) -> bool:
        """Return whether a public key belongs to a member. May be called from any thread."""
        return key in self._keys

    def owner_of(self, key: bytes) -> str | None:
        """Return the id of the member with a public key; None if there is none."""
        return self._keys.get(key)

    def of_role(self, role: common_pb2.Role.ValueType) -> list[Member]:
        return [member for member in self._members.values() if member.role == role]

    def standing(self, member_id: str, secret: bytes) -> Standing:
        """Return the standing of the sender of a request with this member id and secret."""
        member = self._members.get(member_id)
        if member is not None and hmac.compare_digest(member.stream.secret, secret):
            return Standing.MEMBER
        return Standing.EARLIER if (member_id, secret) in self._earlier else Standing.STRANGER
