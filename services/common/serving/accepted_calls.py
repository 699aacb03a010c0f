"""The mark in a response's initial metadata with which a rollout worker says that it has begun to work on a request.

A call that ends without an answer was lost in the middle of the work only if it has this mark: a worker that could not be
reached, or that refused the request, never sent it.
"""

from __future__ import annotations

from typing import Any

KEY = "paceline-accepted"
ACCEPTED = ((KEY, "1"),)


async def was_accepted(call: Any) -> bool:
    """Wait for a call's initial metadata or its end; return whether the worker has accepted the request."""
    return KEY in dict(await call.initial_metadata() or ())
