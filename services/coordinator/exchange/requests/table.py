"""The one table of the kinds of requests to the exchange: who may send a request, its payload, what answers it, and the
parked requests that it wakes. The modules of this folder have the answers, one module a kind. Lease requests are
usually answered together (`transport/dispatch.py:handle_leases`)."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from paceline.array_frames import Buffer
from paceline.errors import WireError
from paceline.rate_limited_log import unforeseen
from paceline.services.coordinator.exchange.replies import Outcome, refuse
from paceline.services.coordinator.exchange.requests import (
    batch,
    episode_end,
    group,
    lease,
    lease_return,
    receipt,
    score,
    task,
    turn,
)
from paceline.services.coordinator.exchange.state import ActiveRun, Exchange
from paceline.services.coordinator.exchange.uploads.intake import Arrived
from paceline.services.coordinator.ledger.segments import Record
from paceline.v1 import common_pb2
from paceline.v1 import exchange_pb2 as pb

SMALL_HEADER_BYTES = 256 << 10
"""Largest number of header bytes of requests that are parked or not budgeted."""
DEFAULT_HEADER_BYTES = 4 << 20


@dataclass(frozen=True)
class RequestKind:
    roles: frozenset[common_pb2.Role.ValueType]
    """Roles of the workers that may send it. In one run only one of two roles holds leases (`ActiveRun.lease_role`)."""
    answer: Callable[[Exchange, ActiveRun, Arrived, float], Outcome]
    """Answers a request of the active run, at a time `now_s`, from a worker that may send it. A result with arrays was
    checked before; if it is invalid, `fault` has the reason."""
    wakes: Callable[[pb.ExchangeRequest], Collection[str]] = lambda request: ()
    """Returns the kinds of parked requests whose answers the request can change."""
    frames: int = 0
    """Largest number of payload frames."""
    needs_frames: bool = False
    header_bytes: int = DEFAULT_HEADER_BYTES
    """Largest number of bytes of the first frame. A lease returned with samples may have `TEXTS_HEADER_BYTES`."""
    check: Callable[[Arrived], Record] | None = None
    """Checks the payload frames, sets the decoded parts, and returns the record to store. Raises WireError if the
    request is invalid in every state of the ledger."""
    is_decided: Callable[[Exchange, ActiveRun, pb.ExchangeRequest, sqlite3.Row], bool] = lambda *_: False
    """Returns whether the ledger has already decided a request that came again; the row is that of its group."""
    is_urgent: bool = False
    """True if the learner waits for the answer."""

    def has_bulk(self, frames: Sequence[Buffer]) -> bool:
        """Return whether a request has arrays to be stored before its transaction."""
        return self.check is not None and (self.needs_frames or bool(frames))


def _answer_unknown(exchange: Exchange, run: ActiveRun, arrived: Arrived, now_s: float) -> Outcome:
    return refuse(arrived.request, "the request has no body that this coordinator understands; update the older side")


HOLDERS = frozenset({common_pb2.ROLE_ROLLOUT, common_pb2.ROLE_ENVIRONMENT})
ENVIRONMENT = frozenset({common_pb2.ROLE_ENVIRONMENT})
REWARD = frozenset({common_pb2.ROLE_REWARD})
LEARNER = frozenset({common_pb2.ROLE_LEARNER})
UNKNOWN = RequestKind(frozenset(), _answer_unknown)
"""Kind of a request without a body that this version knows. Anybody may send it, and it is refused."""
KINDS = {
    "lease": RequestKind(HOLDERS, lease.answer, header_bytes=SMALL_HEADER_BYTES),
    "group": RequestKind(
        HOLDERS,
        group.answer,
        wakes=lambda request: ("task",),
        frames=2,
        needs_frames=True,
        check=group.check,
        is_decided=group.is_decided,
    ),
    "lease_return": RequestKind(
        HOLDERS,
        lease_return.answer,
        wakes=lambda request: ("lease",),
        frames=1,
        header_bytes=SMALL_HEADER_BYTES,
        check=lease_return.check,
        is_decided=lease_return.is_decided,
    ),
    "turn": RequestKind(
        ENVIRONMENT,
        turn.answer,
        frames=2,
        needs_frames=True,
        header_bytes=SMALL_HEADER_BYTES,
        check=turn.check,
        is_decided=turn.is_decided,
    ),
    "episode_end": RequestKind(ENVIRONMENT, episode_end.answer, header_bytes=SMALL_HEADER_BYTES),
    "task": RequestKind(REWARD, task.answer, header_bytes=SMALL_HEADER_BYTES),
    "score": RequestKind(
        REWARD,
        score.answer,
        wakes=lambda request: ("batch", "task") if request.score.handed_back else ("batch",),
        frames=1,
        check=score.check,
        is_decided=score.is_decided,
    ),
    "batch": RequestKind(LEARNER, batch.answer, header_bytes=SMALL_HEADER_BYTES, is_urgent=True),
    "receipt": RequestKind(LEARNER, receipt.answer, wakes=lambda request: ("batch", "lease"), is_urgent=True),
}
"""Each kind of request, by the name of the request's body. Each request has the secret of a Welcome, which only a
caller with the role `worker` gets."""


def kind_of(name: str) -> RequestKind:
    return KINDS.get(name, UNKNOWN)


def validate_upload(arrived: Arrived) -> None:
    """Decode and check a result with arrays; set `fault` if it is invalid in every state of the ledger."""
    check = kind_of(arrived.kind).check
    assert check is not None, "only requests with arrays are checked"
    try:
        arrived.record = check(arrived)
    except WireError as error:
        arrived.fault = str(error)
    except Exception as error:  # whatever arrives, the other groups are stored
        logged = unforeseen.note(f"the check of a {arrived.kind}", error)
        arrived.fault = f"the coordinator failed on this request: {logged}"
