"""Entries of the audit log about calls and about requests to the exchange. They name who, what and whom, never the content.

The reason of a refusal is kept where the guard gave it, or a worker's Hello was refused. Other refusals may quote the request, such as
a spec's values, so the log has their status alone.
"""

from __future__ import annotations

import hashlib
from typing import Any

import grpc

from paceline.refusal_sums import MAX_AT_ONCE, MAX_COUNT, MAX_NAME, MAX_REASON
from protos.paceline.v1 import worker_pb2
from services.common.grpc_peers import address_of
from services.common.token_guard import OF_GUARD, Call
from services.coordinator.audit_log.record import Entry
from services.coordinator.text_limits import one_line

CONNECT = "paceline.v1.WorkerService/Connect"
REPORTED = {status.name for status in OF_GUARD}
SUBJECTS = ("member_id", "run_id", "name", "sha256")
"""Fields of requests that name what a call is about."""


def entry_of_call(call: Call) -> Entry:
    """Return the entry of a call that changed something, or was refused."""
    message = getattr(call.request, "hello", call.request)  # the first message of a worker's stream
    keeps_reason = call.code in OF_GUARD or call.method == CONNECT
    return Entry(
        call.method,
        call.code.name,
        call.caller.name if call.caller else "",
        tuple(sorted(call.caller.roles)) if call.caller else (),
        call.certificate,
        address_of(call.peer),
        _subject(message) or _subject(getattr(call.answer, "run", None)),
        call.details if keeps_reason else "",
        _digest(call.request),
    )


def entry_of_request(kind: str, member_id: str, why: str, address: str) -> Entry:
    """Return the entry of a request to the exchange that was refused because of its sender."""
    return Entry(
        f"exchange/{kind or 'connection'}",
        grpc.StatusCode.PERMISSION_DENIED.name,
        address=address,
        subject=member_id,
        why=why,
    )


def entries_of_report(member_id: str, reported: worker_pb2.Refusals) -> list[Entry]:
    """Return the entries of refusals at a member's own ports, as the member reports them. Whatever it reports, each is a refusal and
    names the member, their number and texts are bounded, and a text is one line."""
    return [
        Entry(
            one_line(each.what, MAX_NAME),
            each.result if each.result in REPORTED else grpc.StatusCode.UNKNOWN.name,
            one_line(each.who, MAX_NAME),
            address=one_line(each.address, MAX_NAME),
            why=one_line(each.why, MAX_REASON),
            count=max(1, min(each.count, MAX_COUNT)),
            reported_by=member_id,
        )
        for each in reported.refusals[:MAX_AT_ONCE]
    ]


def _subject(message: Any) -> str:
    for name in SUBJECTS:
        value = getattr(message, name, "")
        if value and isinstance(value, str):
            return value
    return ""


def _digest(request: Any) -> str:
    if request is None or not hasattr(request, "SerializeToString"):
        return ""
    return hashlib.sha256(request.SerializeToString(deterministic=True)).hexdigest()
