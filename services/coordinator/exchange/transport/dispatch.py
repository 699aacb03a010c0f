"""Dispatches each request to its handler in a savepoint: a failed request is rolled back alone, and the other requests
of its transaction stay."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from paceline.errors import LedgerFault, WireError
from paceline.rate_limited_log import RateLimitedLog, unforeseen
from paceline.services.coordinator.exchange.replies import Outcome, refuse, stale
from paceline.services.coordinator.exchange.requests import batch
from paceline.services.coordinator.exchange.requests.lease import lease_groups
from paceline.services.coordinator.exchange.requests.table import HOLDERS, KINDS, UNKNOWN, RequestKind, kind_of
from paceline.services.coordinator.exchange.state import ActiveRun, Exchange
from paceline.services.coordinator.exchange.transport.router_socket import PendingRequest
from paceline.services.coordinator.exchange.uploads.intake import Arrived
from paceline.services.coordinator.members.registry import Standing
from paceline.v1 import common_pb2
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import PROTOCOL


def handle(exchange: Exchange, arrived: Arrived, now_s: float) -> Outcome:
    """Answer one request, inside a transaction. A result with arrays was checked before. Bad messages are answered
    `invalid`, outdated ones `stale`; neither changes any state."""
    run, facts = exchange.active, kind_of(arrived.kind)
    try:
        refusal = refusal_of_sender(exchange, arrived.request) or _refusal(exchange, arrived, facts)
        if refusal is not None:
            return refusal
        assert run is not None
        return facts.answer(exchange, run, arrived, now_s)
    except WireError as error:
        return refuse(arrived.request, str(error))


def handle_leases(exchange: Exchange, requests: Sequence[Arrived]) -> list[Outcome]:
    """Answer lease requests of different workers together, inside a transaction."""
    refusals = [
        refusal_of_sender(exchange, arrived.request) or _refusal(exchange, arrived, KINDS["lease"])
        for arrived in requests
    ]
    welcome = [arrived.request for arrived, refusal in zip(requests, refusals, strict=True) if refusal is None]
    outcomes = iter(lease_groups(exchange, exchange.active, welcome) if exchange.active and welcome else ())
    return [next(outcomes) if refusal is None else refusal for refusal in refusals]


def refusal_of_sender(exchange: Exchange, request: pb.ExchangeRequest) -> Outcome | None:
    """Refuse a sender that is not (or no longer) a member of this term. Needs no transaction."""
    term = exchange.ledger.term
    if request.protocol != PROTOCOL:
        why = f"protocol {request.protocol} is not the coordinator's {PROTOCOL}; update the older side"
        return refuse(request, why, term)
    if request.term != term:
        why = f"term {request.term} is not the coordinator's term {term}; the request's term ended when the coordinator restarted"
        return stale(request, why, term)
    standing = exchange.senders.standing(request.member_id, request.secret)
    if standing is Standing.STRANGER:
        return refuse(
            request,
            f"no member {request.member_id[:64]!r} has the secret of this request; say Hello, and send the "
            "secret of the last Welcome with each request",
        )
    if standing is Standing.EARLIER:
        return stale(request, "the request's secret is outdated; wait for the next Welcome", term=0)
    return None


def is_introduction(request: pb.ExchangeRequest) -> bool:
    """Return whether the request only introduces the sender of a connection; it is not answered."""
    return request.request_id == 0 and request.WhichOneof("body") is None


def refusal_of_key(exchange: Exchange, request: pb.ExchangeRequest, key: bytes) -> Outcome | None:
    """Refuse a request that came over a connection with another key than the one in the member's Hello."""
    member = exchange.senders.get(request.member_id)
    if member is not None and member.introduction.exchange_key == key:
        return None
    return refuse(
        request,
        f"the connection's key does not match the key that member {request.member_id[:64]!r} registered in its Hello; "
        "send over the member's own connection",
    )


def _refusal(exchange: Exchange, arrived: Arrived, facts: RequestKind) -> Outcome | None:
    """Answer a member's request if it needs no handler; return None if it needs one."""
    request, run = arrived.request, exchange.active
    if run is None or request.run_id != run.run_id:
        if arrived.kind == "batch":
            return batch.end(exchange, request)
        return stale(request, f"run {request.run_id[:64]!r} is not the current run")
    refusal = _refusal_of_wrong_sender(exchange, run, arrived, facts)
    if refusal is not None and refusal.reply.status == pb.REPLY_STATUS_INVALID:
        exchange.note_intruder(arrived.kind, request.member_id, refusal.reply.message, "")
    return refusal


def _refusal_of_wrong_sender(
    exchange: Exchange, run: ActiveRun, arrived: Arrived, facts: RequestKind
) -> Outcome | None:
    """Refuse a member's request that belongs to another role, rank or session."""
    request, kind = arrived.request, arrived.kind
    member = exchange.senders.get(request.member_id)
    assert member is not None, "`refusal_of_sender` is called before"
    sent_by = member.introduction.role
    role = run.lease_role if facts.roles is HOLDERS else next(iter(facts.roles), sent_by)
    if kind == "lease" and sent_by == common_pb2.ROLE_ROLLOUT:
        role = sent_by  # in a run with an environment it is answered without leases
    if role == common_pb2.ROLE_ENVIRONMENT and not run.spec.environment.is_used:
        return refuse(request, f"a {kind} request is refused, because run {run.run_id} has no environment")
    if sent_by != role:
        name = common_pb2.Role.Name(role).removeprefix("ROLE_").lower()
        return refuse(
            request, f"only a {name} worker may send a {kind} request; {member.member_id} is a {member.role_name}"
        )
    if role != common_pb2.ROLE_LEARNER or facts is UNKNOWN:
        return None
    body = request.batch if kind == "batch" else request.receipt
    rank = body.rank
    is_newest = request.session == exchange.ledger.run(request.run_id)["session"]
    if is_newest and run.state.ranks and body.world_size != run.state.ranks:
        return refuse(
            request,
            f"rank {rank} of {body.world_size} is not a rank of the current learner, which has {run.state.ranks} ranks",
        )
    if rank != member.introduction.rank:
        return refuse(
            request,
            f"the request has rank {rank}, but {member.member_id} said Hello as rank {member.introduction.rank}",
        )
    if rank == 0 and request.session != member.session:
        return stale(request, f"session {request.session} is not (or no longer) a session of {member.member_id}")
    return None


seldom = RateLimitedLog(logging.getLogger(__name__))


def handle_alone(exchange: Exchange, waiting: PendingRequest, now_s: float) -> Outcome:
    """Answer one request in its own savepoint: its fault must not undo the others of the transaction."""
    try:
        with _undone_alone(exchange):
            return handle(exchange, waiting, now_s)
    except (sqlite3.Error, LedgerFault):
        raise  # the ledger itself failed: nothing may be acknowledged any more
    except Exception as error:
        logged = unforeseen.note(f"a {waiting.kind} request", error)
        return refuse(waiting.request, f"the coordinator failed on this request: {logged}")


@contextmanager
def handled_together(exchange: Exchange) -> Iterator[list[Outcome]]:
    """Yield a list for the outcomes of several requests in one savepoint. If one of them fails, all are rolled back and
    the list is emptied: the caller handles them one by one."""
    outcomes: list[Outcome] = []
    try:
        with _undone_alone(exchange):
            yield outcomes
    except (sqlite3.Error, LedgerFault):
        raise
    except Exception as error:  # `handle_alone` logs it when that request runs by itself
        seldom.warning("together", "requests failed together and are tried one by one: %r", error)
        outcomes.clear()


@contextmanager
def _undone_alone(exchange: Exchange) -> Iterator[None]:
    """If the body fails, roll back the body's part of the transaction."""
    notices = len(exchange.notices)
    try:
        with exchange.ledger.savepoint():
            yield
    except BaseException:
        exchange.undo(notices)
        raise
