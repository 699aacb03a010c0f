"""Proves possession of a token or a ticket by challenge and response, in both directions, so neither token nor ticket
travels.

A session begins with `AccessService/Prove`: the client offers the id of its key and a nonce, and the server answers
with its own nonce and a proof that it knows the key. The session's key follows from the offer and both nonces. This key
signs each call and each answer, so a call costs no further round trip, and a program that takes the server's port later
can neither use what it receives nor answer for the server.

The key of a token is its SHA-256, which a coordinator stores; the key of a ticket comes from the coordinator
(`services/common/access/sessions.py`). Promise: without a proof by the server no token, no ticket's key and no message
is sent. If TLS has verified the server, a token is sent as it is.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import itertools
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partialmethod
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.message import DecodeError

from paceline.tls.folder import tls_folder
from paceline.v1 import access_pb2

if TYPE_CHECKING:
    import grpc

PROVE = "/paceline.v1.AccessService/Prove"
SESSION, PROOF = "paceline-session-bin", "paceline-proof-bin"
"""Metadata of a call: its session, and its proof. An answer has PROOF too."""
RENEW = "paceline-session-unknown"
"""Trailing metadata of a call whose session the server does not know (any more)."""
UNPROVEN = "paceline_unproven"
"""Attribute of the error that a client makes itself if the server has not proven itself. No server can set it."""
NONCE_BYTES, ISSUED_BYTES, ID_BYTES = 16, 24, 16
PROVE_S = 10.0
"""Longest time in seconds for a proof."""
NO_PROOF = "the server gave no proof in time"
MAX_QUOTED = 1000
PASSING = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "RESOURCE_EXHAUSTED")
"""Statuses without an answer of the server."""
COORDINATOR, WORKER = "coordinator", "worker"
T = TypeVar("T")


def mac(key: bytes, *parts: bytes) -> bytes:
    """Return HMAC-SHA256 over the parts, each preceded by its length."""
    return hmac.digest(key, b"".join(len(part).to_bytes(4, "big") + part for part in parts), hashlib.sha256)


def token_id(sha256: bytes) -> bytes:
    """Return the id of a token from its SHA-256; nobody can derive the SHA-256 from it."""
    return mac(sha256, b"token id")[:ID_BYTES]


def call_mac(key: bytes, label: bytes, number: int, method: str) -> bytes:
    """Return the proof of a session's call (`label` b"call") or of its answer (b"answer")."""
    return mac(key, label, number.to_bytes(8, "big"), method.encode())


@dataclass(frozen=True)
class Credential:
    """The key that a client proves, and the server that must prove it too."""

    key: bytes
    server: str
    """Role that the server must have: COORDINATOR or WORKER."""
    token_id: bytes = b""
    claims: bytes = b""
    port: int = 0
    host: str = ""

    @classmethod
    def of_token(cls, token: str, port: int, host: str = "") -> Credential:
        """Return the credential of a token for the coordinator that listens on `port`, at `host` unless `host` is
        empty."""
        key = hashlib.sha256(token.encode()).digest()
        return cls(key, COORDINATOR, token_id=token_id(key), port=port, host=host)

    @classmethod
    def of_ticket(cls, ticket: access_pb2.Ticket) -> Credential:
        """Return the credential of a ticket for a worker."""
        return cls(ticket.key, WORKER, claims=ticket.claims)


@dataclass(frozen=True)
class Signed:
    """Metadata of one call, and the proof that its answer must have."""

    metadata: Any
    answer: bytes = b""
    """Empty if the answer needs no proof."""
    session: Session | None = None

    def is_proven(self, received: Any) -> bool:
        """Return whether an answer's metadata prove the server."""
        sent = dict(received or ()).get(PROOF, b"")
        return isinstance(sent, bytes) and hmac.compare_digest(self.answer, sent)


class Session:
    """The client's side of one session. Safe to use from several threads once it is open."""

    def __init__(self, credential: Credential):
        self.credential = credential
        self._offer = access_pb2.Offer(
            token_id=credential.token_id,
            claims=credential.claims,
            nonce=secrets.token_bytes(NONCE_BYTES),
            port=credential.port,
            host=credential.host,
        ).SerializeToString()
        self._key = self._header = b""
        self._numbers = itertools.count(1)

    @property
    def metadata(self) -> Any:
        """Return the metadata of the call `Prove`."""
        return ((SESSION, self._offer),)

    def open(self, answer: bytes) -> str:
        """Take the server's answer to `Prove`. Return the reason why the answer is no proof; empty if it is one."""
        try:
            proven = access_pb2.ProveResponse.FromString(answer)
        except DecodeError:
            return "its answer is no proof"
        parts = (proven.server.encode(), self._offer, proven.nonce)
        if not hmac.compare_digest(mac(self.credential.key, b"server", *parts), proven.proof):
            return "its proof is wrong"
        role = proven.server.partition(" ")[0]
        if role != self.credential.server or len(proven.nonce) != ISSUED_BYTES:
            return f"it is a {role[:20]!r}, not a {self.credential.server}"
        self._key, self._header = mac(self.credential.key, b"session", *parts), proven.nonce + self._offer
        return ""

    def sign(self, method: str) -> Signed:
        """Return the metadata of a call of `/package.Service/Method`."""
        number, name = next(self._numbers), method.lstrip("/")
        proof = access_pb2.CallProof(number=number, mac=call_mac(self._key, b"call", number, name))
        sent = ((SESSION, self._header), (PROOF, proof.SerializeToString()))
        return Signed(sent, call_mac(self._key, b"answer", number, name), self)


def local_error(code: str, details: str) -> grpc.aio.AioRpcError:
    """Return the error of a call that was not made."""
    import grpc

    return grpc.aio.AioRpcError(grpc.StatusCode[code], grpc.aio.Metadata(), grpc.aio.Metadata(), details, None)


def unproven(address: str, why: str) -> grpc.aio.AioRpcError:
    """Return the error of a call to a server that has not proven itself."""
    quoted = "".join(each if each.isprintable() else " " for each in why[:MAX_QUOTED])
    error = local_error(
        "UNAUTHENTICATED",
        f"the server at {address} has not proven that it knows this caller's token or ticket, so neither was sent: {quoted}. "
        "The token may be wrong: use the right one. If another program took this port, end that program and start the "
        "right one again",
    )
    setattr(error, UNPROVEN, True)
    return error


def is_unproven(error: Any) -> bool:
    """Return whether an error was made by `unproven`."""
    return getattr(error, UNPROVEN, False) is True


def _again(error: Any) -> grpc.aio.AioRpcError:
    return local_error("UNAVAILABLE", error.details() or "its session is unknown")


def judged(address: str, signed: Signed, error: Any) -> Any:
    """Return the error to raise for a failed call. An error that needs a proof of the server and has none is replaced
    by `unproven`, unless its status is one of PASSING."""
    if not signed.answer or error.code().name in PASSING or is_unproven(error):
        return error
    if signed.is_proven(error.trailing_metadata()):
        return error
    return unproven(address, f"it says {error.details()}")


def refused(address: str, error: Any) -> Any:
    """Return the error to raise for a failed `Prove`."""
    if error.code().name in PASSING:
        return error
    if error.code().name == "UNIMPLEMENTED":
        return unproven(address, "it does not support proofs; if it runs Paceline before 0.2.0, update it or use TLS")
    return unproven(address, f"it says {error.details() or error.code().name}")


def is_unknown(error: Any) -> bool:
    """Return whether a call failed because the server does not know its session, so that the call was not made."""
    return RENEW in dict(error.trailing_metadata() or ())


Known = Callable[[], "Credential | tuple[tuple[str, str], ...]"]
"""Returns the credential of the next call, or metadata to send without a proof. May raise grpc.aio.AioRpcError."""


class ProvenChannel:
    """The part of a channel that stubs use; proves every call, or adds the token."""

    def __init__(self, channel: grpc.Channel, address: str, known: Known):
        self._channel, self._address, self._known = channel, address, known
        self._lock = threading.Lock()
        self._session: Session | None = None

    def __enter__(self) -> ProvenChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all running calls."""
        self._channel.close()

    def _sign(self, method: str, timeout_s: float | None) -> Signed:
        known = self._known()
        if not isinstance(known, Credential):
            return Signed(known)
        limit_s = PROVE_S if timeout_s is None else min(timeout_s, PROVE_S)
        deadline_s = time.monotonic() + limit_s
        if not self._lock.acquire(timeout=max(0.0, limit_s)):
            raise local_error("DEADLINE_EXCEEDED", NO_PROOF)
        try:
            if self._session is None or self._session.credential != known:
                self._session = self._opened(Session(known), max(0.0, deadline_s - time.monotonic()))
            return self._session.sign(method)
        finally:
            self._lock.release()

    def _opened(self, session: Session, limit_s: float) -> Session:
        import grpc

        try:
            prove: Any = self._channel.unary_unary  # its types demand serializers
            answer = prove(PROVE)(b"", timeout=limit_s, metadata=session.metadata)
        except grpc.RpcError as error:
            raise refused(self._address, error) from None
        if why := session.open(answer):
            raise unproven(self._address, why)
        return session

    def _drop(self, signed: Signed) -> None:
        with self._lock:
            if self._session is signed.session:
                self._session = None

    def _unary(self, kind: str, method: str, *rest: Any, **how: Any) -> Callable[..., Any]:
        """Return a function that makes a call with one answer. A call whose session is unknown is made again, unless
        its requests are a stream, which may have begun."""
        import grpc

        call = getattr(self._channel, kind)(method, *rest, **how)

        def made(request: Any, timeout: float | None = None, **options: Any) -> Any:
            for attempt in range(2):
                signed = self._sign(method, timeout)
                try:
                    if not signed.answer:
                        return call(request, timeout=timeout, metadata=signed.metadata, **options)
                    answer, ended = call.with_call(request, timeout=timeout, metadata=signed.metadata, **options)
                except grpc.RpcError as error:
                    if not is_unknown(error):
                        raise judged(self._address, signed, error) from None
                    self._drop(signed)
                    if attempt or kind == "stream_unary":
                        raise _again(error) from None
                    continue
                if not signed.is_proven(ended.trailing_metadata()):
                    raise unproven(self._address, "its answer has no proof")
                return answer
            raise AssertionError("the second attempt returns or raises")

        return made

    def _stream(self, kind: str, method: str, *rest: Any, **how: Any) -> Callable[..., Iterator[Any]]:
        """Return a function that makes a call with a stream of answers."""
        import grpc

        call = getattr(self._channel, kind)(method, *rest, **how)

        def made(request: Any, timeout: float | None = None, **options: Any) -> Iterator[Any]:
            for attempt in range(2):
                signed = self._sign(method, timeout)
                answers = call(request, timeout=timeout, metadata=signed.metadata, **options)
                limit = threading.Timer(PROVE_S, answers.cancel)
                limit.daemon = True
                try:
                    limit.start()
                    if signed.answer and not signed.is_proven(answers.initial_metadata()):
                        next(answers, None)  # raises the error of a refused call
                        raise unproven(self._address, "its answer has no proof")
                    limit.cancel()
                    yield from answers
                    return
                except grpc.RpcError as error:
                    if not is_unknown(error):
                        raise judged(self._address, signed, error) from None
                    self._drop(signed)
                    if attempt or kind == "stream_stream":
                        raise _again(error) from None
                finally:
                    limit.cancel()
                    answers.cancel()

        return made

    unary_unary = partialmethod(_unary, "unary_unary")
    stream_unary = partialmethod(_unary, "stream_unary")
    unary_stream = partialmethod(_stream, "unary_stream")
    stream_stream = partialmethod(_stream, "stream_stream")


class AioProver:
    """Proves the calls of one asyncio channel."""

    def __init__(self, channel: Any, address: str, known: Known):
        """`channel` goes to `address`."""
        self._channel, self._address, self._known = channel, address, known
        self._lock = asyncio.Lock()
        self._session: Session | None = None

    async def sign(self, method: str, timeout_s: float = PROVE_S) -> Signed:
        """Return the metadata of a call, after the server's proof, within `timeout_s`. Raises grpc.aio.AioRpcError."""
        known = self._known()
        if not isinstance(known, Credential):
            return Signed(known)
        try:
            async with asyncio.timeout(min(timeout_s, PROVE_S)), self._lock:
                if self._session is None or self._session.credential != known:
                    self._session = await self._opened(Session(known))
                return self._session.sign(method)
        except TimeoutError:
            raise local_error("DEADLINE_EXCEEDED", NO_PROOF) from None

    async def _opened(self, session: Session) -> Session:
        import grpc

        try:
            prove = self._channel.unary_unary(PROVE)
            answer = await prove(b"", timeout=PROVE_S, metadata=session.metadata)
        except grpc.aio.AioRpcError as error:
            raise refused(self._address, error) from None
        if why := session.open(answer):
            raise unproven(self._address, why)
        return session

    def drop(self, signed: Signed) -> None:
        """Begin a new session with the next call, unless that has happened since this call was signed."""
        if self._session is signed.session:
            self._session = None

    async def call(self, method: str, make: Callable[[Any], Awaitable[T]], timeout_s: float = PROVE_S) -> T:
        """Return the answer of a call with one request; `make` begins the call with the metadata that it gets. A proof
        may take `timeout_s`. Raises grpc.aio.AioRpcError."""
        import grpc

        for attempt in range(2):
            signed = await self.sign(method, timeout_s)
            try:
                made: Any = make(signed.metadata)
                answer: T = await made
            except grpc.aio.AioRpcError as error:
                if not is_unknown(error):
                    raise judged(self._address, signed, error) from None
                self.drop(signed)
                if attempt:
                    raise _again(error) from None
                continue
            if signed.answer and not signed.is_proven(await made.trailing_metadata()):
                raise unproven(self._address, "its answer has no proof")
            return answer
        raise AssertionError("the second attempt returns or raises")

    async def check_stream(self, call: Any, signed: Signed) -> None:
        """Wait until the answer to a stream has proven the server, or TLS has. Raises grpc.aio.AioRpcError."""
        import grpc

        if not signed.answer and tls_folder() is None:
            raise unproven(self._address, "this process has neither a token nor TLS")
        if not signed.answer:
            return
        try:
            async with asyncio.timeout(PROVE_S):
                if signed.is_proven(await call.initial_metadata()):
                    return
                await call.read()
        except grpc.aio.AioRpcError as error:
            if is_unknown(error):
                self.drop(signed)
                raise _again(error) from None
            raise judged(self._address, signed, error) from None
        except TimeoutError:
            pass
        call.cancel()
        raise unproven(self._address, "its answer has no proof")
