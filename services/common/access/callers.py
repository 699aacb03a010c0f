"""Identifies the callers that a service accepts, by their tokens. A coordinator accepts the bootstrap token and those
in `tokens.json`; a worker's services ask the coordinator which caller a token's id belongs to. An answer counts for
FRESH_S, so a revoked token is refused within that time. While the coordinator does not answer, its last answer counts:
a refusal without a limit, any other answer for KEPT_S. Meanwhile a caller with the worker's token is a worker, and a
caller with a ticket has the ticket's roles.

The token decides the role. The name in a client certificate is recorded, and a call over a connection of a revoked name
is refused whatever its token. A change of `tokens.json` or of the file of revoked names takes effect within a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import grpc

from paceline.calls.proof import COORDINATOR, WORKER, AioProver, is_unproven
from paceline.calls.proof import token_id as id_of
from paceline.calls.token import VARIABLE, is_same, known_token, read_token, token_path
from paceline.errors import AccessDenied, Conflict, Unavailable
from paceline.files.whole_file import file_stamp
from paceline.rate_limited_log import RateLimitedLog
from paceline.services.common.access.rights import Caller, CallerRole
from paceline.services.common.access.sessions import ticket_key
from paceline.services.common.access.token_table import (
    BOOTSTRAP,
    REVOKED_NAME,
    NamedToken,
    digest_of,
    keep_copy,
    read_revoked,
    read_table,
)
from paceline.tls.channels import RenewedChannel, open_aio_channel
from paceline.v1 import access_pb2, access_pb2_grpc

ALL_ROLES = frozenset(CallerRole)
NO_ROWS: Mapping[str, NamedToken] = {}


class Callers(Protocol):
    async def caller(self, token: str, certificate: str = "") -> Caller:
        """Return the caller that `token` identifies, with the name in the caller's client certificate. Token and name
        may be empty. Raises AccessDenied, Unavailable."""


class TokenCallers:
    def __init__(
        self,
        bootstrap: Callable[[], str],
        file: Path,
        table: Path | None = None,
        clock: Callable[[], float] = time.time,
        note: Callable[[str, str], None] = lambda what, name: None,
        server: str = COORDINATOR,
    ):
        """`bootstrap` returns the bootstrap token, and `file` is its path for messages. `table` is `tokens.json`; the
        revoked certificates are beside it. `note` gets each change of either file, and the name that the change is
        about. `server` is as in `Keys`. Raises Conflict for a damaged file."""
        self._note, self.server = note, server
        self._digests: dict[bytes, str] = {}
        """Digests of the tokens in `_digested`, by the tokens' ids."""
        self._digested: tuple[Mapping[str, NamedToken], str] = NO_ROWS, ""
        self._bootstrap, self._file, self._clock = bootstrap, file.resolve(), clock
        self._table: PolledFile[Mapping[str, NamedToken]] | None = None
        self._revoked: PolledFile[Mapping[str, float]] | None = None
        if table is not None:
            self._table = PolledFile(table, read_table, self._note_tokens)
            self._revoked = PolledFile(table.with_name(REVOKED_NAME), read_revoked, self._note_certificates)
            self._keep_copies()

    async def caller(self, token: str, certificate: str = "") -> Caller:
        return self._caller(digest_of(token) if token else "", certificate)

    def key(self, offer: access_pb2.Offer) -> bytes:
        """See `Keys`."""
        if digest := self.digest(offer.token_id):
            return bytes.fromhex(digest)
        raise self._denied(is_other=True)

    async def proven(self, offer: access_pb2.Offer, method: str, certificate: str = "") -> Caller:
        """See `Keys`."""
        return self._caller(self.digest(offer.token_id), certificate)

    def digest(self, token_id: bytes) -> str:
        """Return the digest of the token with this id, valid or not; empty if there is none."""
        rows, bootstrap = self._rows(), self._bootstrap()
        if rows is not self._digested[0] or bootstrap != self._digested[1]:
            digests = [*rows, *([digest_of(bootstrap)] if bootstrap else [])]
            self._digests = {id_of(bytes.fromhex(each)): each for each in digests}
            self._digested = rows, bootstrap
        return self._digests.get(token_id, "")

    def _caller(self, digest: str, certificate: str) -> Caller:
        if refusal := self._refusal_of_certificate(certificate):
            raise AccessDenied(refusal)
        caller = self.by_digest(digest) if digest else None
        if caller is not None:
            return replace(caller, certificate=certificate) if certificate else caller
        raise self._denied(is_other=bool(digest))

    def _denied(self, *, is_other: bool) -> AccessDenied:
        has_token = bool(self._bootstrap() or self._rows())
        also = ", or a token from `paceline token create`"
        return AccessDenied(_refusal(self._file, has_token=has_token, is_other=is_other, also=also))

    def by_digest(self, digest: str) -> Caller | None:
        """Return the caller whose token has this digest, or None. Raises AccessDenied for a revoked or expired token."""
        if row := self._rows().get(digest):
            if refusal := row.refusal(self._clock()):
                raise AccessDenied(refusal)
            return Caller(row.name, frozenset({CallerRole(row.role)}), digest)
        bootstrap = self._bootstrap()
        if bootstrap and hmac.compare_digest(digest, digest_of(bootstrap)):
            return Caller(BOOTSTRAP, ALL_ROLES, digest)
        return None

    def refusal(self, caller: Caller) -> str:
        """Return the reason why a caller that was accepted is no longer valid; empty while the caller is valid."""
        if refusal := self._refusal_of_certificate(caller.certificate):
            return refusal
        try:
            return "" if self.by_digest(caller.digest) else f"the token {caller.name} is not valid any more"
        except AccessDenied as denied:
            return str(denied)

    def _rows(self) -> Mapping[str, NamedToken]:
        return self._table.content if self._table is not None else NO_ROWS

    def _keep_copies(self) -> None:
        """Copy changes that were made by hand. If the disk refuses, the copies stay as they are."""
        for file in (self._table, self._revoked):
            with contextlib.suppress(OSError):
                if file is not None:
                    keep_copy(file.path)

    def _note_tokens(self, before: Mapping[str, NamedToken], after: Mapping[str, NamedToken]) -> None:
        self._keep_copies()
        for sha256 in before.keys() | after.keys():
            old, new = before.get(sha256), after.get(sha256)
            if new is None:
                self._note("tokens/removed", before[sha256].name)
            elif new.revoked_s and not (old and old.revoked_s):
                self._note("tokens/revoked", new.name)
            elif old is None:
                self._note("tokens/created", new.name)

    def _note_certificates(self, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        self._keep_copies()
        for name in before.keys() ^ after.keys():
            self._note("certificates/revoked" if name in after else "certificates/restored", name)

    def _refusal_of_certificate(self, name: str) -> str:
        if not name or self._revoked is None or name not in self._revoked.content:
            return ""
        return f"the certificates of {name} were revoked; ask an operator for a certificate with another name"


CHECK_S = 0.5
"""Seconds between two checks of a polled file."""

ContentT = TypeVar("ContentT")
seldom = RateLimitedLog(logging.getLogger(__name__))


class PolledFile(Generic[ContentT]):
    """A small file that commands replace while a service runs; a change is read within CHECK_S. If the file is damaged
    at first, that is an error; if it is damaged later, its previous content stays in effect, with a warning."""

    def __init__(
        self,
        path: Path,
        read: Callable[[Path], ContentT],
        changed: Callable[[ContentT, ContentT], None] = lambda before, after: None,
    ):
        """`read` returns the content, also for a missing file; `changed` gets old and new content. Raises Conflict."""
        self.path, self._read, self._changed = path, read, changed
        self._stamp, self._content = file_stamp(path), read(path)
        self._checked_s = float("-inf")

    @property
    def content(self) -> ContentT:
        now_s = time.monotonic()
        if now_s - self._checked_s < CHECK_S:
            return self._content
        self._checked_s = now_s
        stamp = file_stamp(self.path)
        if stamp != self._stamp:
            try:
                before, self._content = self._content, self._read(self.path)
                self._stamp = stamp
                self._changed(before, self._content)
            except Conflict as fault:
                seldom.warning(self.path.name, "%s. The file's previous content stays in effect", fault)
        return self._content


FRESH_S = 2.0
KEPT_S = 300.0
CALL_S = 5.0
MAX_KEPT = 1024
"""Largest number of the coordinator's answers that are kept; refusals and the newest other answers stay."""
OWN_TOKEN = "the worker's own token (the coordinator does not answer)"
"""Name that a caller with the worker's token gets if the coordinator does not answer."""
AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
IDENTIFY = "paceline.v1.AccessService/Identify"


@dataclass(frozen=True)
class _Answer:
    caller: Caller | None
    refusal: str
    time_s: float


class WorkerCallers:
    server = WORKER

    def __init__(self, coordinator: str, call_key: Callable[[], bytes] = bytes):
        """`coordinator` is HOST:PORT. If it is empty, only the worker's token is accepted, and this token grants every
        role. `call_key` returns the key of the worker's newest Welcome, or empty bytes before the first Welcome."""
        self._coordinator, self._call_key = coordinator, call_key
        self._answers: OrderedDict[bytes, _Answer] = OrderedDict()
        self._channel: Any = None
        self._prover: AioProver | None = None

    async def caller(self, token: str, certificate: str = "") -> Caller:
        worker_token = read_token(token_path())
        if not worker_token or not token:
            raise AccessDenied(_refusal(token_path(), has_token=bool(worker_token)))
        own = Caller(OWN_TOKEN, frozenset({CallerRole.WORKER})) if is_same(token, worker_token) else None
        return await self._caller(id_of(bytes.fromhex(digest_of(token))), own)

    def key(self, offer: access_pb2.Offer) -> bytes:
        """See `Keys`. A worker proves only that it knows tickets."""
        if offer.claims:
            return ticket_key(self._call_key(), offer.claims)
        raise AccessDenied("a worker takes no proof of a token; call it with a ticket of the coordinator")

    async def proven(self, offer: access_pb2.Offer, method: str, certificate: str = "") -> Caller:
        """See `Keys`. The roles of a ticket count, as long as the coordinator names no other roles."""
        claims = access_pb2.Claims.FromString(offer.claims)
        if claims.method != method:
            raise AccessDenied(f"the ticket is for {claims.method}, not for {method}")
        ticketed = Caller(claims.caller, _roles(claims.roles))
        if not claims.token_id:
            return ticketed
        caller = await self._caller(claims.token_id, ticketed)
        return replace(caller, roles=caller.roles & ticketed.roles)

    async def _caller(self, token_id: bytes, kept: Caller | None) -> Caller:
        """Return the caller whose token has this id. While the coordinator does not answer, return `kept` if there is
        one."""
        if not self._coordinator:
            if kept is not None:
                return Caller(BOOTSTRAP, ALL_ROLES)
            raise AccessDenied(_refusal(token_path(), has_token=True, is_other=True))
        answer = await self._answer(token_id, kept)
        if answer.caller is None:
            raise AccessDenied(answer.refusal or _refusal(token_path(), has_token=True, is_other=True))
        return answer.caller

    async def _answer(self, token_id: bytes, own: Caller | None) -> _Answer:
        kept, now_s = self._answers.get(token_id), time.monotonic()
        if kept is not None and now_s - kept.time_s < FRESH_S:
            return kept
        try:
            answer = await self._ask(token_id)
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            # If another program has taken the coordinator's port, the coordinator is away.
            code = grpc.StatusCode.DEADLINE_EXCEEDED if isinstance(error, TimeoutError) else error.code()
            is_away = code in AWAY or is_unproven(error)
            if is_away and kept is not None and (kept.caller is None or now_s - kept.time_s < KEPT_S):
                return kept
            if is_away and own is not None:
                return _Answer(own, "", now_s)
            raise Unavailable(
                f"this worker cannot ask the coordinator at {self._coordinator} about the call's token: "
                f"{code.name.lower()}"
            ) from None
        self._answers[token_id] = answer
        self._answers.move_to_end(token_id)
        while len(self._answers) > MAX_KEPT:
            known = (key for key, each in self._answers.items() if not each.refusal)
            del self._answers[next(known, next(iter(self._answers)))]
        return answer

    async def _ask(self, token_id: bytes) -> _Answer:
        request = access_pb2.IdentifyRequest(token_id=token_id)
        if self._prover is None:
            self._channel = RenewedChannel(lambda: open_aio_channel(self._coordinator))
            self._prover = AioProver(self._channel, self._coordinator, known_token(self._coordinator))
        identify: Any = access_pb2_grpc.AccessServiceStub(self._channel).Identify
        async with asyncio.timeout(2 * CALL_S):
            made = lambda sent: identify(request, timeout=CALL_S, metadata=sent)  # noqa: E731
            answer = await self._prover.call(IDENTIFY, made, CALL_S)
        return _Answer(
            Caller(answer.name, _roles(answer.roles)) if answer.name else None, answer.refusal, time.monotonic()
        )


def _roles(names: Iterable[str]) -> frozenset[CallerRole]:
    return frozenset(CallerRole(role) for role in names if role in set(CallerRole))


def _refusal(path: Path, *, has_token: bool, is_other: bool = False, also: str = "") -> str:
    file = path.resolve()
    if not has_token:
        why = f"this service has no token, because the file {file} is missing; the service refuses every call"
    else:
        has = "another" if is_other else "no"
        why = f"the call has {has} token; this service requires the token in the file {file}{also}"
    return f"{why}. Give the token's file with --token-file or {VARIABLE}"
