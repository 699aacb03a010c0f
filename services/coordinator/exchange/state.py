"""State of the exchange, which leases groups and takes groups, scores and receipts: the run, its members, and replies.

The exchange is a pure state machine over the ledger: `transport/dispatch.py` takes one request inside a transaction and
returns the reply; `transport/server.py` commits, then sends. Every answer states the content of the ledger. No state of
a group is in memory, so a restart continues from the file. Events for others to act on (a step was trained, the run is
paused) are added to `notices`. `services/coordinator/ledger/groups.py` has the states of a group and its transitions.
"""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.array_frames import Buffer
from paceline.data.prompts import PromptSource
from paceline.groups import Version
from paceline.services.coordinator.exchange.failure_causes import DropsInARow, FailureCounts
from paceline.services.coordinator.exchange.lease_durations import LeaseDurations, Throughput
from paceline.services.coordinator.exchange.spot_check import SpotCheck
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.ledger.segments import Frame, StoredFrame, UnopenedSegment
from paceline.services.coordinator.ledger.tables.batches import Splits
from paceline.services.coordinator.members.registry import Senders
from paceline.spec import RunSpec
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import PROTOCOL

MAX_GROUP_ID = 2**63 - 1
"""Largest group id: SQLite's largest integer."""

MAX_SESSIONS = 256
"""Largest number of sessions that are remembered because workers have reported them."""
UNOPENED_PERIOD_S = 60.0
"""Seconds between two warnings about segments that cannot be opened."""

BATCH_DUE = "whether the next batch can be fixed"
"""Key of a transaction's decision whether the next batch can be fixed; a scored group invalidates the decision."""


class Training(NamedTuple):
    """The session and the step that were served last, and the number of ranks, until the step is trained."""

    session: int
    step: int
    world_size: int


@dataclass(frozen=True)
class Outcome:
    """Answer to a request; if `empty` (nothing to give), the request may be parked for the wait that it asks for."""

    reply: pb.ExchangeReply
    payloads: list[Frame] = field(default_factory=list)
    empty: bool = False

    def in_memory(self) -> list[Buffer] | None:
        """Return the payload frames; None if one is on the disk, for which the event loop must not wait."""
        frames = [frame for frame in self.payloads if not isinstance(frame, StoredFrame)]
        return frames if len(frames) == len(self.payloads) else None


@dataclass(frozen=True)
class Notice:
    """An event of a transaction, to be handled after its commit."""

    kind: str
    """The kind of event: `step` (a step was trained), `paused` (until a person resumes the run), `evaluated`, `pinned`
    (a worker keeps its version), `unpinned`, `metrics` (of a learner's step), `extra` (columns that reward functions
    logged), `warning`."""
    content: dict[str, Any]
    run_id: str = ""
    """Id of the event's run; another run may be active by the time the event is handled."""


@dataclass(frozen=True)
class ActiveRun:
    run_id: str
    spec: RunSpec
    prompts: PromptSource | None
    """Prompts to train. None for supervised runs, whose learner reads the data set itself."""
    validation: PromptSource | None
    spec_yaml: str = ""
    """Spec for the workers as YAML, without keys that this version does not know."""

    @property
    def batch_size(self) -> int:
        """B: the number of groups in a step."""
        return self.spec.grpo.num_prompts_per_step

    def group_size(self, group_class: str) -> int:
        grpo = self.spec.grpo
        return grpo.num_generations_per_prompt if group_class == "train" else grpo.val_samples_per_prompt

    def share_of_group(self, group_class: str) -> float:
        """Return the number of completions in a group of this class, relative to a group to train."""
        return self.group_size(group_class) / self.group_size("train")

    @property
    def max_age(self) -> int:
        """η: the largest age, in steps, at admission and at a lease; with `in_order` also of a trained token."""
        return self.spec.async_grpo.max_trajectory_age_steps


@dataclass(eq=False)
class RunState:
    """State of the active run that is in no file; reset when the run ends or stops."""

    active: ActiveRun | None = None
    offered: dict[str, Version] = field(default_factory=dict)
    """The newest version that was offered to each rollout worker. The key is the member id. A worker may sample from a
    version before it acknowledges that version."""
    session_numbers: set[int] = field(default_factory=set)
    """The newest sessions that workers have reported or were offered; a restored ledger lacks those after its backup."""
    overdue: set[str] = field(default_factory=set)
    """Ids of workers that held leases or tasks for too long; they get no more until they have submitted a result."""
    reserved: dict[int, str] = field(default_factory=dict)
    """Id of the worker that gets no new work until it is free for a quarantined group. The key is the group id."""
    first_requested_s: dict[int, float] = field(default_factory=dict)
    """Time of the first request for the batch of a step. The key is the step."""
    first_complete_s: dict[int, float] = field(default_factory=dict)
    """Time from which the batch of a step could be fixed (only with `ready_first`). The key is the step."""
    training: Training | None = None
    ranks: int = 0
    """Number of ranks of the newest session's learner; 0 until it is reported."""
    end_step: int = 0
    """Number of steps after which the run ends because its hours are over (`max_hours`); 0 before that."""
    yields_to: str = ""
    """Id of the waiting run that goes first. While it is set, nothing new is leased, and no batch is fixed."""
    unreadable_data: str = ""
    """Reason why the next prompt cannot be read; empty while it can."""
    failure_counts: FailureCounts = field(default_factory=FailureCounts)
    drops_in_a_row: DropsInARow = field(default_factory=DropsInARow)
    spot_check: SpotCheck = field(default_factory=SpotCheck)


class Exchange(RunState):
    """State of the exchange, one per coordinator. Used on its event loop only, always inside a ledger transaction."""

    def __init__(self, ledger: Ledger):
        super().__init__()
        self.ledger = ledger
        self.groups, self.group_queries = ledger.groups, ledger.group_queries
        self.splits = Splits(ledger.db)
        self.senders = Senders()
        """Members. Other senders get no leases and no tasks, because nobody would notice that they crash."""
        self.suspected: set[str] = set()
        """Ids of members that may be gone: no batch waits for their work, and others may get it."""
        self.versions: dict[str, Version] = {}
        """Acknowledged version of each rollout worker. The key is the member id."""
        self.lease_durations = LeaseDurations()
        self.task_durations = LeaseDurations()
        self.throughput = Throughput()
        self.notices: list[Notice] = []
        self.admission_closed = ""
        """Reason why no group is admitted; empty if only the admission rule decides."""
        self.note_intruder: Callable[[str, str, str, str], None] = lambda kind, member_id, why, address: None
        """Called, from any thread, for a request that is refused because its sender is not the stated member or may not
        send it. Arguments: the request's kind, the stated member, the reason, and the peer's address if it is known."""
        self._freed = False
        self._unopened_warned_s = -math.inf
        self._counted = (0, 0)
        """Cache of `num_ahead`: a slot, and the number of open, unbatched groups in the slots before it."""

    def notice(self, kind: str, **content: Any) -> None:
        self.notices.append(Notice(kind, content, self.active.run_id if self.active else ""))

    def warn(self, message: str) -> None:
        self.notice("warning", message=message)

    def count_failure(self, run: ActiveRun, kind: str) -> int:
        """Count a failure that may come in thousands; return the count if a warning is due (1, 2, 4, 8 …), else 0."""
        self.ledger.count(run.run_id, f"failures:{kind}")
        number = self.ledger.counters(run.run_id)[f"failures:{kind}"]
        return number if number & (number - 1) == 0 else 0

    def take_notices(self) -> list[Notice]:
        notices, self.notices = self.notices, []
        return notices

    def note_unopened(self, fault: UnopenedSegment) -> None:
        """Warn that a group cannot be read or stored until a segment can be opened; this is tried again later."""
        now_s = time.monotonic()
        if now_s - self._unopened_warned_s < UNOPENED_PERIOD_S:
            return
        self._unopened_warned_s = now_s
        self.warn(
            f"{fault}. Groups wait for this segment, and opening it is retried automatically; check its permissions and "
            "the limit of open files"
        )

    # Versions

    def note_session(self, session: int) -> None:
        self.session_numbers = set(sorted({*self.session_numbers, session})[-MAX_SESSIONS:])

    def offer(self, member_id: str, version: Version) -> None:
        self.note_session(version.session)
        self.offered[member_id] = max(version, self.offered.get(member_id, version))

    def newest_of(self, member_id: str) -> Version | None:
        """Return the newest version that a worker's tokens can have; None if there is none."""
        versions = (self.versions.get(member_id), self.offered.get(member_id))
        return max((version for version in versions if version is not None), default=None)

    # Shared by the handlers

    def takes_no_work(self, run: ActiveRun) -> bool:
        """Return whether nothing is leased, because the run is paused, yields to another run, or has all batches."""
        row = self.ledger.run(run.run_id)
        return bool(
            row["state"] != "running"
            or self.yields_to
            or row["next_step"] >= run.spec.max_num_steps
            or self.has_last_batch(row)
        )

    def has_last_batch(self, row: sqlite3.Row) -> bool:
        """Return whether the active run ends early and all its batches are fixed."""
        return bool(0 < self.end_step <= max(row["next_batch"], row["next_step"]))

    def num_steps(self, run: ActiveRun) -> int:
        return self.end_step or run.spec.max_num_steps

    def is_active(self, run_id: str) -> bool:
        return self.active is not None and self.active.run_id == run_id

    def withheld(self, run: ActiveRun) -> bool:
        """Return whether the run is paused for a reason that would recur, so that its learner gets no batch."""
        row = self.ledger.run(run.run_id)
        return bool(row["state"] == "paused" and row["message"])

    def scoring_withheld(self, run: ActiveRun) -> bool:
        """Return whether failing reward functions paused the run; corrected ones score the groups after `resume`."""
        return self.withheld(run) and self.ledger.drop_reason_of_pause(run.run_id) == "reward_failed"

    def pause(self, run: ActiveRun, message: str, drop_reason: str = "") -> None:
        """Pause the run for a person, in this transaction. `drop_reason` is set if dropped groups are the reason."""
        if self.withheld(run):
            return
        self.ledger.update_run(run.run_id, state="paused", message=message)
        content = {"state": "paused", "message": message}
        self.ledger.add_event(run.run_id, "state", content | ({"drop_reason": drop_reason} if drop_reason else {}))
        self.notice("paused", message=message)

    def sessions(self, run: ActiveRun) -> range:
        return range(1, self.ledger.run(run.run_id)["session"] + 1)

    def group(self, run: ActiveRun, group_id: int) -> sqlite3.Row | None:
        if group_id > MAX_GROUP_ID:
            return None
        return self.group_queries.get(run.run_id, group_id)

    def take_freed(self) -> bool:
        """Return whether a group was dropped since the last call, so that its slot is free."""
        freed, self._freed = self._freed, False
        return freed

    def num_ahead(self, run: ActiveRun, slot: int) -> int:
        """Return the number of open, unbatched groups in slots before `slot`; continues from the last call's slot."""
        start, ahead = self._counted if self._counted[0] <= slot else (0, 0)
        ahead += self.group_queries.num_waiting(run.run_id, start, slot)
        self._counted = (slot, ahead)
        return ahead

    def slots_changed(self) -> None:
        """Clear the cache of `num_ahead`, because a group was opened or ended at a counted slot."""
        self._counted = (0, 0)

    def learner_waits(self, run: ActiveRun) -> bool:
        """Return whether the next batch was requested and cannot be fixed yet."""
        return self.ledger.run(run.run_id)["next_batch"] in self.first_requested_s

    def drop(
        self,
        run: ActiveRun,
        row: sqlite3.Row,
        reason: str,
        tokens: int | None = None,
        *,
        error: str = "",
        totals: Collection[float] = (),
    ) -> None:
        """Drop a group for `reason`: its slot is freed, and its tokens are accounted as dropped. `error` is the text of
        its failure, `totals` the rewards of its completions. Pauses the run after too many drops in a row."""
        self._drop(run.run_id, row, reason, row["tokens"] if tokens is None else tokens)
        if row["class"] != "train" or reason == "by_request":
            return
        in_a_row = self.ledger.run(run.run_id)["dropped_in_a_row"] + 1
        self.ledger.update_run(run.run_id, dropped_in_a_row=in_a_row)
        drops = self.drops_in_a_row
        drops.add(row["group_id"], reason, error, totals)
        if drops.is_of_one_cause(run.batch_size, lambda why: self.group_queries.first_under_way(run.run_id, why)):
            self.pause(run, drops.explain(run.run_id), reason)
        elif in_a_row >= run.spec.grpo.max_generation_batches * run.batch_size:
            self.pause(run, drops.explain_limit(in_a_row, reason, run.run_id), reason)

    def note_failure(self, row: sqlite3.Row, work: str, reason: str, error: str, failures: int, allowed: int) -> None:
        """Warn that an attempt at a group's `work` failed; repeated equal failures are only counted."""
        if failures < allowed:
            if self.failure_counts.failed(error):
                self.warn(f"{work} group {row['group_id']} failed ({failures} of {allowed}): {error}")
        elif number := self.failure_counts.dropped(error):
            alike = f", the {number}th for this cause" if number > 1 else ""
            self.warn(f"group {row['group_id']} was dropped as {reason!r}{alike}: {error}")

    def clear_failures(self, first_group: int) -> None:
        """Reset all counts of failures, because a person resumes the run; groups before `first_group` are not counted."""
        self.failure_counts, self.drops_in_a_row = FailureCounts(), DropsInARow()
        self.drops_in_a_row.first_group = first_group

    def end_drops_in_a_row(self, run: ActiveRun) -> None:
        self.drops_in_a_row.reset()
        if self.ledger.run(run.run_id)["dropped_in_a_row"]:
            self.ledger.update_run(run.run_id, dropped_in_a_row=0)

    def _drop(self, run_id: str, row: sqlite3.Row, reason: str, tokens: int) -> None:
        group_id = row["group_id"]
        self.groups.drop(run_id, group_id, reason)
        self.ledger.remove_payloads(run_id, group_id)
        if self.is_active(run_id):
            self.reserved.pop(group_id, None)
            self.slots_changed()
            self._freed = True
        self.ledger.deaths.remove_group(run_id, group_id)
        if row["class"] == "train":
            self.ledger.count(run_id, f"groups:dropped:{reason}")
            self.ledger.count(run_id, f"tokens:dropped:{reason}", tokens)
            self.ledger.free_slots.add(run_id, row["slot"])

    def end_run(self, run_id: str) -> None:
        """Drop the open groups as run_ended, and remove unfinished evaluations."""
        for group_class in self._open_classes(run_id):
            if group_class != "train":
                self.remove_groups(run_id, group_class)
                continue
            for row in self.group_queries.open_of_class(run_id, group_class):
                self._drop(run_id, row, "run_ended", row["tokens"])
        self.ledger.deaths.remove_run(run_id)
        self._deactivate(run_id)

    def remove_groups(self, run_id: str, group_class: str) -> None:
        self.ledger.note_removed_records(self.ledger.episodes.remove_class(run_id, group_class))
        self.ledger.note_removed_records(self.groups.remove(run_id, group_class))

    def _open_classes(self, run_id: str) -> list[str]:
        return ["train", *(f"eval:{step}" for step in self.ledger.evaluations.pending_steps(run_id))]

    def stop_work(self, run_id: str) -> None:
        """Stop work on a run that may continue later: its groups stay open, and leases and tasks are revoked."""
        for group_class in self._open_classes(run_id):
            self.groups.revoke_class(run_id, group_class)
        self.ledger.evaluations.unpin_all(run_id)
        self._deactivate(run_id)

    def _deactivate(self, run_id: str) -> None:
        if self.active is not None and self.active.run_id == run_id:
            RunState.__init__(self)

    # Replies

    def committed(self, request: pb.ExchangeRequest) -> Outcome:
        """Answer that the result is in the ledger once this transaction is committed."""
        return Outcome(self.reply(request, pb.REPLY_STATUS_COMMITTED))

    def duplicate(self, request: pb.ExchangeRequest, message: str) -> Outcome:
        """Answer that an earlier result won."""
        return Outcome(self.reply(request, pb.REPLY_STATUS_DUPLICATE, message))

    def stale(self, request: pb.ExchangeRequest, message: str) -> Outcome:
        return Outcome(self.reply(request, pb.REPLY_STATUS_STALE, message))

    def refuse(self, request: pb.ExchangeRequest, message: str) -> Outcome:
        """Answer that the message is invalid in every state."""
        return Outcome(self.reply(request, pb.REPLY_STATUS_INVALID, message))

    def reply(
        self, request: pb.ExchangeRequest, status: pb.ReplyStatus.ValueType, message: str = ""
    ) -> pb.ExchangeReply:
        term, request_id = self.ledger.term, request.request_id
        return pb.ExchangeReply(protocol=PROTOCOL, request_id=request_id, term=term, status=status, message=message)
