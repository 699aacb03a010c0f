"""Sessions of callers that prove a token or a ticket, at the server (`paceline/calls/proof.py` has the client's side),
and the tickets that a coordinator issues.

A server keeps nothing of a session until its first proven call, so strangers cannot fill its memory. Then it keeps the
numbers that the session has used, so no call counts twice. The least recently used sessions end when there are too
many, and their callers begin new ones. No clock is read.
"""

from __future__ import annotations

import hmac
import itertools
import secrets
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Protocol, TypeVar

from google.protobuf.message import DecodeError, Message

from paceline.calls.proof import ISSUED_BYTES, NONCE_BYTES, call_mac, mac, token_id
from paceline.errors import AccessDenied, NotFound
from paceline.services.common.access.rights import RPCS, Caller
from paceline.v1 import access_pb2

COUNTER_BYTES = 8
MAX_OFFER_BYTES = 2048
MAX_SESSIONS = 16_384
WINDOW = 4096
"""A call may arrive after at most this many later calls of its session."""
MessageT = TypeVar("MessageT", bound=Message)
OF_WORKERS = tuple(f"paceline.v1.{name}/" for name in ("RolloutService", "RewardService", "LearnerService"))


class Keys(Protocol):
    """The keys that a server knows."""

    server: str
    """Role of the server, then a space and its directory or member id."""

    def key(self, offer: access_pb2.Offer) -> bytes:
        """Return the key that an offer names. Raises AccessDenied."""

    async def proven(self, offer: access_pb2.Offer, method: str, certificate: str = "") -> Caller:
        """Return the caller that has proven its key. Raises AccessDenied, Unavailable."""


@dataclass
class _Numbers:
    """Numbers of a session's calls: the highest, and in bit i whether highest - i was used."""

    highest: int = 0
    used: int = 0

    def take(self, number: int) -> bool:
        """Return whether a number is new, and note it."""
        behind = self.highest - number
        if number < 1 or behind >= WINDOW or (behind >= 0 and self.used >> behind & 1):
            return False
        if behind < 0:
            self.used = self.used << -behind & (1 << WINDOW) - 1 if -behind < WINDOW else 0
            self.highest, behind = number, 0
        self.used |= 1 << behind
        return True


class Sessions:
    def __init__(self, keys: Keys, max_sessions: int = MAX_SESSIONS):
        self._keys, self._max = keys, max_sessions
        self._secret = secrets.token_bytes(32)
        self._issued = itertools.count(1)
        self._numbers: dict[int, _Numbers] = {}
        """The used sessions; the session with the oldest call is first."""
        self._ended = 0
        """Number of the newest session that ended because there were too many; earlier unused sessions have ended
        too."""
        self.ports: frozenset[int] = frozenset()
        """Ports at which callers with a token may reach this server."""
        self.hosts: frozenset[str] = frozenset()
        """Addresses on which this server listens."""

    def answer(self, sent: bytes) -> access_pb2.ProveResponse:
        """Return the proof for an offer. Raises AccessDenied."""
        offer = _parsed(access_pb2.Offer, sent)
        if len(offer.nonce) != NONCE_BYTES or len(sent) > MAX_OFFER_BYTES:
            raise AccessDenied("the call has no offer of a session")
        if not offer.claims and not (offer.port in self.ports and _is_reached(offer.host, self.hosts)):
            ports, hosts = (" or ".join(map(str, sorted(each))) for each in (self.ports, self.hosts))
            raise AccessDenied(
                f"this server listens on port {ports} of {hosts}, but its caller dials port {offer.port} of {offer.host[:80]}, so "
                "another program passes the calls on. If that is your own tunnel or proxy, give it the same port and address, "
                f"or set PACELINE_COORDINATOR_PORT={ports} for the caller"
            )
        count = next(self._issued).to_bytes(COUNTER_BYTES, "big")
        nonce = count + self._tag(count, sent)
        proof = mac(self._keys.key(offer), b"server", self._keys.server.encode(), sent, nonce)
        return access_pb2.ProveResponse(nonce=nonce, proof=proof, server=self._keys.server)

    def check(self, session: bytes, proof: bytes, method: str) -> tuple[access_pb2.Offer, bytes]:
        """Return the offer of a proven call, and the proof for its answer. Raises AccessDenied."""
        nonce, sent = session[:ISSUED_BYTES], session[ISSUED_BYTES:]
        count = nonce[:COUNTER_BYTES]
        if len(sent) > MAX_OFFER_BYTES or not hmac.compare_digest(nonce[COUNTER_BYTES:], self._tag(count, sent)):
            raise AccessDenied("this server does not know the call's session; begin a new one")
        offer, call = _parsed(access_pb2.Offer, sent), _parsed(access_pb2.CallProof, proof)
        key = mac(self._keys.key(offer), b"session", self._keys.server.encode(), sent, nonce)
        if not hmac.compare_digest(call_mac(key, b"call", call.number, method), call.mac):
            raise AccessDenied(f"the proof of this call of {method} is wrong; begin a new session")
        if not self._take(int.from_bytes(count, "big"), call.number):
            raise AccessDenied("the proof of the call was used before, or is too old; begin a new session")
        return offer, call_mac(key, b"answer", call.number, method)

    def _tag(self, count: bytes, sent: bytes) -> bytes:
        """Return the part of a nonce by which this server recognises it."""
        return mac(self._secret, count, sent)[: ISSUED_BYTES - COUNTER_BYTES]

    def _take(self, session: int, number: int) -> bool:
        numbers = self._numbers.pop(session, None)
        if numbers is None:
            if session <= self._ended:
                return False
            numbers = _Numbers()
        self._numbers[session] = numbers
        if len(self._numbers) > self._max:
            longest_unused = next(iter(self._numbers))
            del self._numbers[longest_unused]
            self._ended = max(self._ended, longest_unused)
        return numbers.take(number)


def _is_reached(host: str, listening: frozenset[str]) -> bool:
    """Return whether a caller that dials `host` can reach a server that listens on these addresses. Programs of other users
    can take the same port of another loopback address. An empty host is not compared."""
    addresses = [ip_address(each.partition("%")[0]) for each in listening]
    if not host or any(each.is_unspecified for each in addresses):
        return True
    try:
        dialled = ip_address(host)
    except ValueError:  # a name
        return any(not each.is_loopback for each in addresses)
    dialled = getattr(dialled, "ipv4_mapped", None) or dialled
    if dialled.is_loopback or dialled.is_unspecified:
        return dialled in addresses
    return any(not each.is_loopback for each in addresses)


def _parsed(kind: type[MessageT], sent: bytes) -> MessageT:
    try:
        return kind.FromString(sent)
    except DecodeError:
        raise AccessDenied(f"the call has no valid {kind.DESCRIPTOR.name}") from None


def issue(call_key: bytes, member_id: str, method: str, caller: Caller | None) -> access_pb2.Ticket:
    """Return a ticket for one method of the worker with `call_key`. The caller must be permitted to call it."""
    claims = access_pb2.Claims(member_id=member_id, method=method)
    if caller is not None:
        claims.caller, claims.token_id = caller.name, token_id(bytes.fromhex(caller.digest)) if caller.digest else b""
        claims.roles.extend(sorted(caller.roles))
    sent = claims.SerializeToString()
    return access_pb2.Ticket(claims=sent, key=ticket_key(call_key, sent))


def ticket_key(call_key: bytes, claims: bytes) -> bytes:
    """Return the key of a ticket. Raises AccessDenied if the worker has no `call_key`."""
    if not call_key:
        raise AccessDenied("this worker belongs to no coordinator now, so it takes no tickets")
    return mac(call_key, b"ticket", claims)


def check_ticket_method(method: str) -> None:
    """Raise NotFound unless workers have the method."""
    if method not in RPCS or not method.startswith(OF_WORKERS):
        raise NotFound(f"no worker has the method {method[:120]!r}")
