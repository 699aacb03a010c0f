"""The callers that a coordinator accepts, by their tokens: the bootstrap token, and those of `tokens.json`.

A change of the file counts within CHECK_S. A file that is damaged while the coordinator runs leaves the tokens as they were, with
a warning; at its start it is an error.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from paceline.errors import AccessDenied, Conflict
from paceline.rate_limited_log import RateLimitedLog
from paceline.token import VARIABLE
from services.common.access.caller import Caller, CallerRole
from services.common.access.token_table import BOOTSTRAP, NamedToken, digest_of, read_table

CHECK_S = 0.5
"""Seconds after which the file is looked at again."""

ALL_ROLES = frozenset(CallerRole)
seldom = RateLimitedLog(logging.getLogger(__name__))


class Callers(Protocol):
    """The callers of a server."""

    async def caller(self, token: str) -> Caller:
        """Return the caller with a token (empty: none). Raises AccessDenied, Unavailable."""


class TokenCallers:
    """The callers of a coordinator."""

    def __init__(
        self,
        bootstrap: Callable[[], str],
        file: Path,
        table: Path | None = None,
        clock: Callable[[], float] = time.time,
    ):
        """`bootstrap` returns the bootstrap token, `file` is its name on this host, for messages; `table` is `tokens.json`.
        Raises Conflict for a damaged table."""
        self._bootstrap, self._file, self._table, self._clock = bootstrap, file.resolve(), table, clock
        self._rows: Mapping[str, NamedToken] = {}
        self._stamp: object = None
        self._checked_s = float("-inf")
        if table is not None:
            self._stamp, self._rows = _stamp(table), read_table(table)

    async def caller(self, token: str) -> Caller:
        """Return the caller with a token. Raises AccessDenied."""
        found = self.by_digest(digest_of(token)) if token else None
        if found is not None:
            return found
        if not self._bootstrap() and not self._rows:
            why = f"this service has no token: its file {self._file} is not there, so it refuses every call"
        else:
            why = (
                f"the call has {'another' if token else 'no'} token; this service requires the token in its file {self._file}, "
                "or one of `paceline token create`"
            )
        raise AccessDenied(f"{why}. Give that file with --token-file or {VARIABLE}")

    def by_digest(self, digest: str) -> Caller | None:
        """Return the caller whose token has a digest; None for an unknown one. Raises AccessDenied for a token that is
        revoked or has expired."""
        self._read_again()
        if row := self._rows.get(digest):
            if refusal := row.refusal(self._clock()):
                raise AccessDenied(refusal)
            return Caller(row.name, frozenset({CallerRole(row.role)}), digest)
        bootstrap = self._bootstrap()
        if bootstrap and hmac.compare_digest(digest, digest_of(bootstrap)):
            return Caller(BOOTSTRAP, ALL_ROLES, digest)
        return None

    def refusal(self, caller: Caller) -> str:
        """Return why a caller that was accepted does not count any more; empty where it does."""
        try:
            return "" if self.by_digest(caller.digest) else f"the token {caller.name} is not valid any more"
        except AccessDenied as denied:
            return str(denied)

    def _read_again(self) -> None:
        now_s = time.monotonic()
        if self._table is None or now_s - self._checked_s < CHECK_S:
            return
        self._checked_s = now_s
        stamp = _stamp(self._table)
        if stamp == self._stamp:
            return
        try:
            self._rows, self._stamp = read_table(self._table), stamp
        except Conflict as fault:
            seldom.warning("table", "the tokens stay as they were: %s", fault)


def _stamp(path: Path) -> object:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
