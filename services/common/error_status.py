"""The one table from an error to the gRPC status that answers it."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from google.protobuf.message import DecodeError

from paceline.errors import (
    AccessDenied,
    Busy,
    Conflict,
    InvalidInput,
    NotFound,
    NotPermitted,
    PacelineError,
    Unavailable,
    WireError,
)

STATUS: Sequence[tuple[type[Exception], grpc.StatusCode]] = (
    (DecodeError, grpc.StatusCode.INVALID_ARGUMENT),  # of a message in a stream
    (InvalidInput, grpc.StatusCode.INVALID_ARGUMENT),
    (WireError, grpc.StatusCode.INVALID_ARGUMENT),
    (NotFound, grpc.StatusCode.NOT_FOUND),
    (Conflict, grpc.StatusCode.FAILED_PRECONDITION),
    (Busy, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (Unavailable, grpc.StatusCode.UNAVAILABLE),
    (AccessDenied, grpc.StatusCode.UNAUTHENTICATED),
    (NotPermitted, grpc.StatusCode.PERMISSION_DENIED),
    (PacelineError, grpc.StatusCode.INTERNAL),
)
"""Error and status; the first match wins."""


def status_of(error: Exception) -> grpc.StatusCode | None:
    """Return the status of an error; None for one that nobody foresaw."""
    return next((code for kind, code in STATUS if isinstance(error, kind)), None)
