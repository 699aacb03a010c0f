"""Errors of paceline.errors in place of gRPC's, for the callers of a client."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.calls.retry_hint import from_error
from paceline.errors import (
    USUAL_S,
    AccessDenied,
    Busy,
    Conflict,
    InvalidInput,
    NotFound,
    NotPermitted,
    PacelineError,
    Unavailable,
)
from paceline.tls.diagnosis import why_no_channel
from paceline.tls.folder import TlsFolder

if TYPE_CHECKING:
    import grpc

ERRORS = {
    "INVALID_ARGUMENT": InvalidInput,
    "NOT_FOUND": NotFound,
    "FAILED_PRECONDITION": Conflict,
    "RESOURCE_EXHAUSTED": Busy,
    "UNAUTHENTICATED": AccessDenied,
    "PERMISSION_DENIED": NotPermitted,
    "UNAVAILABLE": Unavailable,
    "DEADLINE_EXCEEDED": Unavailable,
    "CANCELLED": Unavailable,
}
"""Errors by status name; every other status is a PacelineError."""

LASTING = (
    "NOT_FOUND",
    "INVALID_ARGUMENT",
    "UNIMPLEMENTED",
    "UNAUTHENTICATED",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
)
"""Statuses that a repeated call does not change."""


def status_name(error: grpc.RpcError) -> str:
    """Return the name of a gRPC error's status, such as UNAVAILABLE."""
    code = getattr(error, "code", lambda: None)()
    return str(code.name) if code is not None else "UNKNOWN"


def translated(
    error: grpc.RpcError, coordinator: str, other: str | None = None, folder: TlsFolder | None = None
) -> PacelineError:
    """Return the error that a caller should see in place of a gRPC one. `coordinator` is its address; `other` names a worker that
    was called in its place, `folder` the caller's certificates."""
    name = status_name(error)
    details = str(getattr(error, "details", lambda: error)() or error)
    if name == "UNAVAILABLE" and other is None and (fault := why_no_channel(coordinator, folder)):
        return Unavailable(fault)
    if name == "UNAVAILABLE" and other is None:
        return Unavailable(
            f"no coordinator answers at {coordinator}; start one with `paceline serve coordinator` or name "
            "another with --coordinator"
        )
    if name == "UNIMPLEMENTED" and other is None:
        return PacelineError(f"the coordinator at {coordinator} is of a version without this call; update it")
    if name in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
        return Unavailable(f"the {other or f'coordinator at {coordinator}'} does not answer: {details}")
    if name == "RESOURCE_EXHAUSTED":
        return Busy(details, from_error(error) or USUAL_S)
    found: type[PacelineError] = ERRORS.get(name, PacelineError)
    return found(details)
