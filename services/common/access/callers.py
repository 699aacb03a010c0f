"""The callers that a coordinator accepts, by their tokens: the bootstrap token, and those of `tokens.json`.

The token decides the role. A client certificate says on which host it is used: its name is recorded, and a call over a connection
of a revoked name is refused whatever its token. A change of either file counts within a second.

A small file that commands replace while a service runs: read anew when it has changed, within CHECK_S.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from paceline.calls.token import VARIABLE
from paceline.errors import AccessDenied, Conflict
from paceline.rate_limited_log import RateLimitedLog
from paceline.services.common.access.caller import Caller, CallerRole
from paceline.services.common.access.revoked_certificates import FILE_NAME as REVOKED_NAME
from paceline.services.common.access.revoked_certificates import read_revoked
from paceline.services.common.access.token_table import BOOTSTRAP, NamedToken, digest_of, read_table

ALL_ROLES = frozenset(CallerRole)


class Callers(Protocol):
    """The callers of a server."""

    async def caller(self, token: str, certificate: str = "") -> Caller:
        """Return the caller with a token (empty: none) and the name in its client certificate (empty: none). Raises
        AccessDenied, Unavailable."""


class TokenCallers:
    """The callers of a coordinator."""

    def __init__(
        self,
        bootstrap: Callable[[], str],
        file: Path,
        table: Path | None = None,
        clock: Callable[[], float] = time.time,
        note: Callable[[str, str], None] = lambda what, name: None,
    ):
        """`bootstrap` returns the bootstrap token, `file` is its name on this host, for messages; `table` is `tokens.json`,
        beside which the revoked certificates are; `note` is called for each change of either, with what happened and the name.
        Raises Conflict for a damaged file."""
        self._note = note
        self._bootstrap, self._file, self._clock = bootstrap, file.resolve(), clock
        self._table = self._revoked = None
        if table is not None:
            self._table = PolledFile(table, read_table, self._note_tokens)
            self._revoked = PolledFile(table.with_name(REVOKED_NAME), read_revoked, self._note_certificates)

    async def caller(self, token: str, certificate: str = "") -> Caller:
        """Return the caller with a token. Raises AccessDenied."""
        if refusal := self._refusal_of_certificate(certificate):
            raise AccessDenied(refusal)
        found = self.by_digest(digest_of(token)) if token else None
        if found is not None:
            return replace(found, certificate=certificate) if certificate else found
        if not self._bootstrap() and not self._rows():
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
        if row := self._rows().get(digest):
            if refusal := row.refusal(self._clock()):
                raise AccessDenied(refusal)
            return Caller(row.name, frozenset({CallerRole(row.role)}), digest)
        bootstrap = self._bootstrap()
        if bootstrap and hmac.compare_digest(digest, digest_of(bootstrap)):
            return Caller(BOOTSTRAP, ALL_ROLES, digest)
        return None

    def refusal(self, caller: Caller) -> str:
        """Return why a caller that was accepted does not count any more; empty where it does."""
        if refusal := self._refusal_of_certificate(caller.certificate):
            return refusal
        try:
            return "" if self.by_digest(caller.digest) else f"the token {caller.name} is not valid any more"
        except AccessDenied as denied:
            return str(denied)

    def _rows(self) -> Mapping[str, NamedToken]:
        return self._table.content if self._table is not None else {}

    def _note_tokens(self, before: Mapping[str, NamedToken], after: Mapping[str, NamedToken]) -> None:
        for sha256 in before.keys() | after.keys():
            old, new = before.get(sha256), after.get(sha256)
            if new is None:
                self._note("tokens/removed", before[sha256].name)
            elif new.revoked_s and not (old and old.revoked_s):
                self._note("tokens/revoked", new.name)
            elif old is None:
                self._note("tokens/created", new.name)

    def _note_certificates(self, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        for name in before.keys() ^ after.keys():
            self._note("certificates/revoked" if name in after else "certificates/restored", name)

    def _refusal_of_certificate(self, name: str) -> str:
        if not name or self._revoked is None or name not in self._revoked.content:
            return ""
        return f"the certificates of {name} were revoked; ask an operator for one with another name"


CHECK_S = 0.5
"""Seconds after which the file is looked at again."""

ContentT = TypeVar("ContentT")
seldom = RateLimitedLog(logging.getLogger(__name__))


class PolledFile(Generic[ContentT]):
    """One file. When it is damaged at first, that is an error; later its content stays as it was, with a warning."""

    def __init__(
        self,
        path: Path,
        read: Callable[[Path], ContentT],
        changed: Callable[[ContentT, ContentT], None] = lambda before, after: None,
    ):
        """`read` returns the content, also of a file that is not there; `changed` is called with the contents before and after a
        change. Raises Conflict for a damaged file."""
        self._path, self._read, self._changed = path, read, changed
        self._stamp, self._content = _stamp(path), read(path)
        self._checked_s = float("-inf")

    @property
    def content(self) -> ContentT:
        """Return the content, at most CHECK_S old."""
        now_s = time.monotonic()
        if now_s - self._checked_s < CHECK_S:
            return self._content
        self._checked_s = now_s
        stamp = _stamp(self._path)
        if stamp != self._stamp:
            try:
                before, self._content = self._content, self._read(self._path)
                self._stamp = stamp
                self._changed(before, self._content)
            except Conflict as fault:
                seldom.warning(self._path.name, "%s; what it said before still counts", fault)
        return self._content


def _stamp(path: Path) -> object:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
