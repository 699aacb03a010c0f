"""Entries of the audit log about calls and about requests to the exchange. They name who, what and whom, never the content.

The reason of a refusal is kept where the guard gave it, or a worker's Hello was refused. Other refusals may quote the request, such as
a spec's values, so the log has their status alone.
"""

from __future__ import annotations

import hashlib
from typing import Any

import grpc

from paceline.services.common.grpc_peers import address_of
from paceline.services.common.token_guard import OF_GUARD, Call
from paceline.services.coordinator.audit_log.record import Entry

CONNECT = "paceline.v1.WorkerService/Connect"
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
