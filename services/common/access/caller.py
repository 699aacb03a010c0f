"""A caller: the name and the roles of whoever makes a call, and the caller of the call under way."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum


class CallerRole(StrEnum):
    """What a caller is trusted with (`services/common/access/rights.py` has the calls of each)."""

    VIEWER = "viewer"
    SUBMITTER = "submitter"
    OPERATOR = "operator"
    WORKER = "worker"
    SCRAPER = "scraper"


@dataclass(frozen=True)
class Caller:
    """Who makes a call."""

    name: str
    roles: frozenset[CallerRole]
    digest: str = ""
    """SHA-256 of its token, in hexadecimal digits."""
    certificate: str = ""
    """Name in its client certificate; empty without one. It gives no right, but a revoked one takes all of them."""

    @property
    def steers_all(self) -> bool:
        """Return whether it may steer the runs of others."""
        return CallerRole.OPERATOR in self.roles


_CURRENT: ContextVar[Caller | None] = ContextVar("caller", default=None)


def current_caller() -> Caller | None:
    """Return the caller of the rpc that this task answers; None outside of one, or where no guard is."""
    return _CURRENT.get()


def set_caller(caller: Caller) -> None:
    """Set the caller of this task's rpc. gRPC answers each call in a task of its own, which ends with the call."""
    _CURRENT.set(caller)
