"""State of the exchange, which leases groups and takes groups, scores and receipts: the run and its members.

The exchange is a pure state machine over the ledger: `transport/dispatch.py` takes one request inside a transaction and
returns the reply; `transport/transactions.py` commits before the reply is sent. Every answer states the content of the
ledger. No state of a group is in memory, so a restart continues from the file. Each part of the state has one owner,
whose methods alone change it: `active` (the run and its `state`), `workers`, `senders`, and `notices`, which others
handle after the commit (a step was trained, the run is paused). `services/coordinator/ledger/groups.py` has the states
of a group and its transitions.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cached_property

from paceline.data.prompts import PromptSource
from paceline.services.coordinator.exchange.notices import Notices
from paceline.services.coordinator.exchange.run_state import RunState
from paceline.services.coordinator.exchange.workers import Workers
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.ledger.tables.batches import Splits
from paceline.services.coordinator.members.registry import Senders
from paceline.spec import RunSpec
from paceline.v1 import common_pb2

BATCH_DUE = "whether the next batch can be fixed"
"""Key of a transaction's decision whether the next batch can be fixed; a scored group invalidates the decision."""


@dataclass(frozen=True)
class GroupClass:
    """A class of groups: those to train, which batches take and whose tokens are accounted, or those that are only
    measured, for the evaluation of version `step`."""

    step: int = -1

    @property
    def trains(self) -> bool:
        return self.step < 0

    def size(self, run: ActiveRun) -> int:
        """Return the number of completions in a group."""
        grpo = run.spec.grpo
        return grpo.num_generations_per_prompt if self.trains else grpo.val_samples_per_prompt

    def count(self, exchange: Exchange, run: ActiveRun, name: str, tokens: int) -> None:
        """Add to a counter of the token accounting, which has no tokens of evaluations."""
        if self.trains:
            exchange.ledger.count(run.run_id, name, tokens)


TRAIN = GroupClass()


def class_of(row: sqlite3.Row) -> GroupClass:
    """Return the class of a group from its row, where it is `train` or `eval:<step>`."""
    return TRAIN if row["class"] == "train" else GroupClass(int(row["class"].removeprefix("eval:")))


@dataclass(frozen=True)
class ActiveRun:
    run_id: str
    spec: RunSpec
    prompts: PromptSource | None
    """Prompts to train. None for supervised runs, whose learner reads the data set itself."""
    validation: PromptSource | None
    spec_yaml: str = ""
    """Spec for the workers as YAML, without keys that this version does not know."""
    state: RunState = field(default_factory=RunState, compare=False)

    @property
    def batch_size(self) -> int:
        """B: the number of groups in a step."""
        return self.spec.grpo.num_prompts_per_step

    @cached_property
    def lease_role(self) -> common_pb2.Role.ValueType:
        """Role of the workers that hold the run's leases."""
        return common_pb2.ROLE_ENVIRONMENT if self.spec.environment.is_used else common_pb2.ROLE_ROLLOUT

    @property
    def num_steps(self) -> int:
        return self.state.end_step or self.spec.max_num_steps

    @property
    def max_age(self) -> int:
        """η: the largest age, in steps, at admission and at a lease; with `in_order` also of a trained token."""
        return self.spec.async_grpo.max_trajectory_age_steps

    def has_last_batch(self, row: sqlite3.Row) -> bool:
        """Return whether the run ends early and all its batches are fixed; `row` is the run's row."""
        return bool(0 < self.state.end_step <= max(row["next_batch"], row["next_step"]))


class Exchange:
    """State of the exchange, one per coordinator. Used on its event loop only, always inside a ledger transaction."""

    def __init__(self, ledger: Ledger):
        self.ledger = ledger
        self.groups, self.group_queries = ledger.groups, ledger.group_queries
        self.splits = Splits(ledger.db)
        self.active: ActiveRun | None = None
        self.senders = Senders()
        """Members. Other senders get no leases and no tasks, because nobody would notice that they crash."""
        self.notices = Notices(lambda: self.active.run_id if self.active else "")
        self.workers = Workers(self.notices)
        self.admission_closed = ""
        """Reason why no group is admitted; empty if only the admission rule decides."""
        self.note_intruder: Callable[[str, str, str, str], None] = lambda kind, member_id, why, address: None
        """Called, from any thread, for a request that is refused because its sender is not the stated member or may not
        send it. Arguments: the request's kind, the stated member, the reason, and the peer's address if it is known."""
        self._freed = False

    def activate(self, run: ActiveRun) -> None:
        self.active = run

    def close_admission(self, reason: str) -> None:
        """Admit no group for this reason; if it is empty, only the admission rule decides."""
        self.admission_closed = reason

    def report_intruders(self, note_intruder: Callable[[str, str, str, str], None]) -> None:
        self.note_intruder = note_intruder

    def undo(self, number: int) -> None:
        """Undo the changes that a rolled-back part of the transaction made here; before it there were `number`
        notices."""
        self.notices.undo(number)
        if self.active is not None:
            self.active.state.slots_changed()

    def count_failure(self, run: ActiveRun, kind: str) -> int:
        """Count a failure that may come in thousands; return the count if a warning is due (1, 2, 4, 8 …), else 0."""
        self.ledger.count(run.run_id, f"failures:{kind}")
        number = self.ledger.counters(run.run_id)[f"failures:{kind}"]
        return number if number & (number - 1) == 0 else 0

    # Shared by the handlers

    def takes_no_work(self, run: ActiveRun) -> bool:
        """Return whether nothing is leased, because the run is paused, yields to another run, or has all batches."""
        row = self.ledger.run(run.run_id)
        return bool(
            row["state"] != "running"
            or run.state.yields_to
            or row["next_step"] >= run.spec.max_num_steps
            or run.has_last_batch(row)
        )

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
        self.notices.add("paused", message=message)

    def sessions(self, run: ActiveRun) -> range:
        return range(1, self.ledger.run(run.run_id)["session"] + 1)

    def take_freed(self) -> bool:
        """Return whether a group was dropped since the last call, so that its slot is free."""
        freed, self._freed = self._freed, False
        return freed

    def learner_waits(self, run: ActiveRun) -> bool:
        """Return whether the next batch was requested and cannot be fixed yet."""
        return self.ledger.run(run.run_id)["next_batch"] in run.state.first_requested_s

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
        if not class_of(row).trains or reason == "by_request":
            return
        in_a_row = self.ledger.run(run.run_id)["dropped_in_a_row"] + 1
        self.ledger.update_run(run.run_id, dropped_in_a_row=in_a_row)
        drops = run.state.drops_in_a_row
        drops.add(row["group_id"], reason, error, totals)
        if drops.is_of_one_cause(run.batch_size, lambda why: self.group_queries.first_under_way(run.run_id, why)):
            self.pause(run, drops.explain(run.run_id), reason)
        elif in_a_row >= run.spec.grpo.max_generation_batches * run.batch_size:
            self.pause(run, drops.explain_limit(in_a_row, reason, run.run_id), reason)

    def note_failure(
        self, run: ActiveRun, row: sqlite3.Row, work: str, reason: str, error: str, failures: int, allowed: int
    ) -> None:
        """Warn that an attempt at a group's `work` failed; repeated equal failures are only counted."""
        if failures < allowed:
            if run.state.failure_counts.failed(error):
                self.notices.warn(f"{work} group {row['group_id']} failed ({failures} of {allowed}): {error}")
        elif number := run.state.failure_counts.dropped(error):
            alike = f", the {number}th for this cause" if number > 1 else ""
            self.notices.warn(f"group {row['group_id']} was dropped as {reason!r}{alike}: {error}")

    def end_drops_in_a_row(self, run: ActiveRun) -> None:
        run.state.drops_in_a_row.reset()
        if self.ledger.run(run.run_id)["dropped_in_a_row"]:
            self.ledger.update_run(run.run_id, dropped_in_a_row=0)

    def _drop(self, run_id: str, row: sqlite3.Row, reason: str, tokens: int) -> None:
        group_id = row["group_id"]
        self.groups.drop(run_id, group_id, reason)
        self.ledger.remove_payloads(run_id, group_id)
        if self.active is not None and self.active.run_id == run_id:
            self.active.state.unreserve(group_id)
            self.active.state.slots_changed()
            self._freed = True
        self.ledger.deaths.remove_group(run_id, group_id)
        if class_of(row).trains:
            self.ledger.count(run_id, f"groups:dropped:{reason}")
            self.ledger.count(run_id, f"tokens:dropped:{reason}", tokens)
            self.ledger.free_slots.add(run_id, row["slot"])

    def end_run(self, run_id: str) -> None:
        """Drop the open groups as run_ended, and remove unfinished evaluations."""
        train, *evaluations = self._open_classes(run_id)
        for row in self.group_queries.open_of_class(run_id, train):
            self._drop(run_id, row, "run_ended", row["tokens"])
        for group_class in evaluations:
            self.remove_groups(run_id, group_class)
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
        if self.is_active(run_id):
            self.active = None
            self.workers.end_run()
