"""Errors in the shape of the OpenAI API: status, and a body with message, type, param and code."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.chat.messages import Json, Unsupported
from paceline.errors import (
    AccessDenied,
    Busy,
    Conflict,
    InvalidInput,
    NotFound,
    NotPermitted,
    PacelineError,
    Unavailable,
)

STATUS: Sequence[tuple[type[PacelineError], int, str, str | None]] = (
    (Busy, 429, "rate_limit_error", "rate_limit_exceeded"),
    (AccessDenied, 401, "authentication_error", "invalid_api_key"),
    (NotPermitted, 403, "permission_error", None),
    (NotFound, 404, "invalid_request_error", "model_not_found"),
    (InvalidInput, 400, "invalid_request_error", None),
    (Conflict, 409, "conflict_error", None),
    (Unavailable, 503, "service_unavailable_error", None),
    (PacelineError, 500, "server_error", None),
)
"""Error, status, type and code; the first match wins."""


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> Json:
    """Return the body of an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_answer(error: PacelineError) -> tuple[int, Json]:
    """Return status and body of an error that was raised on purpose."""
    status, kind, code = next(
        (status, kind, code) for error_type, status, kind, code in STATUS if isinstance(error, error_type)
    )
    param = error.field if isinstance(error, Unsupported) else "model" if status == 404 else None
    return status, error_body(str(error), kind, param, code)
