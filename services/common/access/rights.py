"""Defines the caller of an rpc, and the table of rights, which names the roles that may make each call. A call without
a row is refused to everybody. Tests compare the table with the methods of every proto, and with what real servers
permit. `services/coordinator/exchange/requests/table.py` has the workers that may send each request to the exchange."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum


class CallerRole(StrEnum):
    """Role of a caller. The table RPCS says which calls each role may make."""

    VIEWER = "viewer"
    SUBMITTER = "submitter"
    OPERATOR = "operator"
    WORKER = "worker"
    SCRAPER = "scraper"


@dataclass(frozen=True)
class Caller:
    name: str
    roles: frozenset[CallerRole]
    digest: str = ""
    """SHA-256 of the caller's token, in hexadecimal digits."""
    certificate: str = ""
    """Name in the caller's client certificate, or empty. The name gives no right; revoking it removes all rights."""

    @property
    def steers_all(self) -> bool:
        """Return whether the caller may control the runs of others."""
        return CallerRole.OPERATOR in self.roles


_CURRENT: ContextVar[Caller | None] = ContextVar("caller", default=None)


def current_caller() -> Caller | None:
    """Return the caller of the rpc that this task answers; None outside an rpc, or without a guard."""
    return _CURRENT.get()


def set_caller(caller: Caller) -> None:
    """Set the caller of this task's rpc. gRPC answers each call in a separate task, which ends with the call."""
    _CURRENT.set(caller)


VIEWER, SUBMITTER, OPERATOR, WORKER, SCRAPER = CallerRole


@dataclass(frozen=True)
class Right:
    roles: frozenset[CallerRole]
    changes: bool = False
    """True if the call changes something. The audit log records such a call, whether it was permitted or not."""
    own_run: bool = False
    """True if a submitter may make the call only for their own runs; the request's field `run_id` names the run."""


def _reads(*more: CallerRole) -> Right:
    return Right(frozenset({VIEWER, SUBMITTER, OPERATOR, *more}))


def _changes(*roles: CallerRole) -> Right:
    return Right(frozenset(roles), changes=True)


GENERATE = "paceline.v1.RolloutService/Generate"
STEERS = Right(frozenset({SUBMITTER, OPERATOR}), changes=True, own_run=True)
RPCS: Mapping[str, Right] = {
    "paceline.v1.RunService/Submit": _changes(SUBMITTER, OPERATOR),
    "paceline.v1.RunService/Get": _reads(),
    "paceline.v1.RunService/List": _reads(),
    "paceline.v1.RunService/Watch": _reads(),
    "paceline.v1.RunService/Cancel": STEERS,
    "paceline.v1.RunService/Pause": STEERS,
    "paceline.v1.RunService/Resume": STEERS,
    "paceline.v1.RunService/DropGroups": STEERS,
    "paceline.v1.RunService/Checkpoint": STEERS,
    "paceline.v1.WorkerService/Connect": _changes(WORKER),
    "paceline.v1.WorkerService/ListMembers": _reads(WORKER),
    "paceline.v1.WorkerService/Drain": _changes(OPERATOR),
    "paceline.v1.BundleService/Missing": Right(frozenset({SUBMITTER, OPERATOR})),
    "paceline.v1.BundleService/Put": _changes(SUBMITTER, OPERATOR),
    "paceline.v1.BundleService/Fetch": Right(frozenset({WORKER, OPERATOR})),
    "paceline.v1.RecordsService/GetMetrics": _reads(),
    "paceline.v1.RecordsService/ListEvents": _reads(),
    "paceline.v1.RecordsService/ListSamples": _reads(),
    "paceline.v1.RecordsService/ListAttempts": _reads(),
    "paceline.v1.RecordsService/GetGroupLife": _reads(),
    "paceline.v1.RecordsService/GetBooks": _reads(),
    "paceline.v1.RecordsService/VerifyRun": _reads(),
    "paceline.v1.RecordsService/ListBatches": _reads(),
    "paceline.v1.RecordsService/ListCheckpoints": _reads(),
    "paceline.v1.RecordsService/GetSpec": _reads(),
    "paceline.v1.RecordsService/CompareSpecs": _reads(),
    "paceline.v1.RecordsService/ReadLog": _reads(),
    "paceline.v1.RecordsService/ListGauges": _reads(),
    "paceline.v1.RecordsService/GetGaugeHistory": _reads(),
    "paceline.v1.RecordsService/GetTokenStatistics": _reads(),
    "paceline.v1.StatusService/Status": _reads(SCRAPER),
    "paceline.v1.ModelService/Register": STEERS,
    "paceline.v1.ModelService/List": _reads(),
    "paceline.v1.ModelService/Show": _reads(),
    "paceline.v1.ModelService/Promote": _changes(OPERATOR),
    "paceline.v1.ModelService/Rollback": _changes(OPERATOR),
    "paceline.v1.AccessService/Identify": _reads(WORKER, SCRAPER),
    "paceline.v1.AccessService/Prove": _reads(WORKER, SCRAPER),  # the token guard answers it, to strangers too
    "paceline.v1.AccessService/IssueTicket": _reads(WORKER),  # for methods whose rows permit the caller
    # The workers' services do not know who submitted a run, so no call here is limited to a submitter's own runs.
    GENERATE: Right(frozenset({SUBMITTER, OPERATOR, WORKER})),
    "paceline.v1.RolloutService/Status": _reads(),
    "paceline.v1.RolloutService/Drain": _changes(OPERATOR),
    "paceline.v1.RewardService/Score": Right(frozenset({SUBMITTER, OPERATOR})),
    "paceline.v1.RewardService/ListFunctions": _reads(),
    "paceline.v1.LearnerService/Status": _reads(),
    "paceline.v1.LearnerService/Checkpoint": _changes(OPERATOR),
    "paceline.v1.LearnerService/Export": _changes(OPERATOR),
}
"""The right to each rpc, by `package.Service/Method`."""
COMPLETIONS = RPCS[GENERATE].roles
"""Roles that may use the OpenAI-compatible endpoint if it requires a token (`services/common/serving/json_http.py`)."""
METRICS = RPCS["paceline.v1.StatusService/Status"].roles
"""Roles that may read `/metrics` and `/scale` if these require a token."""
