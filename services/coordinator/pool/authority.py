"""Authority of reports: a report counts only if it comes from the right role and, for a learner, from the right
session.

Any other report comes from a member that is confused or lies. It is ignored, and the run goes on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from paceline.errors import NotFound
from paceline.groups import Version
from paceline.services.coordinator.exchange.state import ActiveRun, Exchange
from paceline.services.coordinator.ledger.ledger import ACTIVE_STATES, Ledger
from paceline.services.coordinator.members.registry import WARNINGS_KEPT, Member
from paceline.services.coordinator.pool.assignments import Assignments
from paceline.services.coordinator.reporting.member_files import fault_of
from paceline.services.coordinator.text_limits import cut
from paceline.v1 import common_pb2, worker_pb2

WARNINGS_PERIOD_S = 60.0
"""Period in which a member may warn WARNINGS_KEPT times, and report as many new faults."""

MAX_HASH = 128
"""Characters of a digest or a chain."""
MAX_PATH_BYTES = 4096
MAX_SOURCES = 4096
TEXTS = {
    "weight_ack": ("message",),
    "run_report": ("error", "warning"),
    "publish": ("error",),
    "leave": ("reason",),
}
"""Texts of a report that people read."""


def cut_texts(report: worker_pb2.ConnectRequest) -> None:
    """Cut the texts that end up in events, messages and logs."""
    kind = report.WhichOneof("report") or ""
    for name in TEXTS.get(kind, ()):
        reported = getattr(report, kind)
        setattr(reported, name, cut(getattr(reported, name)))


class Authority:
    """Checks of the reports of one coordinator's members."""

    def __init__(self, assignments: Assignments, ledger: Ledger, exchange: Exchange):
        self._assignments, self._ledger, self._exchange = assignments, ledger, exchange
        self._checks: dict[str, Callable[[Member, worker_pb2.ConnectRequest, ActiveRun], str]] = {
            "weight_offer": self._check_offer,
            "weight_ack": self._check_ack,
            "weight_progress": self._check_progress,
            "run_report": self._check_run_report,
            "checkpoint": self._check_checkpoint,
            "staged": self._check_staged,
            "publish": self._check_publish,
            "host_version": self._check_host_version,
            "token_statistics": self._check_token_statistics,
        }

    def refusal(self, member: Member, report: worker_pb2.ConnectRequest) -> str:
        """Return why a report of this member does not count; empty when it does."""
        kind = report.WhichOneof("report")
        if kind is None:
            return "this coordinator does not know such a report; is it older than the worker?"
        check = self._checks.get(kind)
        if check is None:
            return ""
        run, run_id = self._exchange.active, getattr(report, kind).run_id
        if run is None or run_id != run.run_id:
            return f"run {run_id[:80]!r} is not the current one"
        return check(member, report, run)

    def is_late(self, report: worker_pb2.ConnectRequest) -> bool:
        """Return whether a report acknowledges a version of a run that has ended meanwhile, as the last one of a run usually does."""
        if report.WhichOneof("report") != "weight_ack":
            return False
        try:
            return self._ledger.run(report.weight_ack.run_id)["state"] not in ("queued", *ACTIVE_STATES)
        except NotFound:
            return False

    def _check_offer(self, member: Member, report: worker_pb2.ConnectRequest, run: ActiveRun) -> str:
        return self._check_learner(member, report.weight_offer.version)

    def _check_staged(self, member: Member, report: worker_pb2.ConnectRequest, run: ActiveRun) -> str:
        return self._check_learner(member, report.staged.version)

    def _check_host_version(self, member: Member, report: worker_pb2.ConnectRequest, run: ActiveRun) -> str:
        version = report.host_version
        if not 0 < len(version.sources) <= MAX_SOURCES or len(version.sources) != len(
            version.source_agent_ids
        ):
            return f"it names {len(version.sources)} hosts of the learner and {len(version.source_agent_ids)} agents"
        return self._check_learner(member, version.version)

    def _check_publish(self, member: Member, report: worker_pb2.ConnectRequest, run: ActiveRun) -> str:
        return self._check_learner(member, report.publish.version)

    def _check_token_statistics(
        self, member: Member, report: worker_pb2.ConnectRequest, run: ActiveRun
    ) -> str:
        reported, row = report.token_statistics, self._ledger.run(run.run_id)
        if self._assignments.learner() is not member or reported.session != row["session"]:
            return f"it does not have the learner's session {row['session']}"
        if reported.step >= row["next_batch"]:
            return f"step {reported.step} has no batch yet"
        return fault_of(reported)

    def _check_learner(self, member: Member, version: common_pb2.PolicyVersion) -> str:
        session = self._session()
        if self._assignments.learner() is not member:
            return f"it does not have the learner's session {session}"
        if version.session != session:
            return f"version {version.step} is of session {version.session}, the newest is {session}"
        return ""

    def _check_ack(self, member: Member, report: worker_pb2.ConnectRequest, run: ActiveRun) -> str:
        return self._check_receiver(member, report.weight_ack.member_id, report.weight_ack.version)

    def _check_progress(self, member: Member, report: worker_pb2.ConnectRequest, run: ActiveRun) -> str:
        reported = report.weight_progress
        return self._check_receiver(member, reported.member_id, reported.version)

    def _check_receiver(self, member: Member, member_id: str, reported: common_pb2.PolicyVersion) -> str:
        version = Version(reported.session, reported.step)
        if member.role != common_pb2.ROLE_ROLLOUT:
            return f"a {member.role_name} worker receives no weights"
        if member_id != member.member_id:
            return f"it is about {member_id[:80]!r}"
        if version not in member.offered:
            return f"{tuple(version)} was not offered to it"
        if not self._assignments.is_published(version):
            return f"{tuple(version)} is a version that the run has not come to"
        return ""

    def _check_checkpoint(self, member: Member, report: worker_pb2.ConnectRequest, run: ActiveRun) -> str:
        reported = report.checkpoint
        if not self._assignments.had_session(member, run.run_id, reported.session):
            return f"session {reported.session} was not this worker's"
        if (
            max(len(reported.sha256), len(reported.chain)) > MAX_HASH
            or len(reported.path.encode()) > MAX_PATH_BYTES
        ):
            return "its digest, chain or path is too long"
        return ""

    def _check_run_report(self, member: Member, report: worker_pb2.ConnectRequest, run: ActiveRun) -> str:
        reported, session = report.run_report, self._session()
        if member.role == common_pb2.ROLE_LEARNER:
            if reported.session != session:
                return f"session {reported.session} is not the newest, {session}"
            # The other ranks report their own errors.
            if self._exchange.ranks and member.rank >= self._exchange.ranks:
                return f"rank {member.rank} is none of the learner's, which has {self._exchange.ranks}"
            if not (reported.error or reported.warning) and self._assignments.learner() is not member:
                return f"it does not have the learner's session {session}"
            if len(reported.export_path.encode()) > MAX_PATH_BYTES:
                return "the path of its export is too long"
        elif reported.finished or reported.export_path or reported.vocab_size:
            return f"a {member.role_name} worker exports nothing and has no vocabulary"
        if reported.warning:
            return self._check_number("warned", member.warned_s)
        if (
            reported.error and member.role != common_pb2.ROLE_LEARNER
        ):  # a learner's fault ends its session, and there are few sessions
            is_repeated = member.fault is not None and member.fault.message == reported.error
            return "" if is_repeated else self._check_number("failed", member.failed_s)
        return ""

    def _check_number(self, what: str, said_s: deque[float]) -> str:
        """Limit the number of a member's reports, because each is an event of the run."""
        now_s = time.monotonic()
        if len(said_s) == WARNINGS_KEPT and now_s - said_s[0] < WARNINGS_PERIOD_S:
            return f"it has {what} {WARNINGS_KEPT} times within {WARNINGS_PERIOD_S:g} s"
        said_s.append(now_s)
        return ""

    def _session(self) -> int:
        run = self._exchange.active
        return int(self._ledger.run(run.run_id)["session"]) if run is not None else 0
