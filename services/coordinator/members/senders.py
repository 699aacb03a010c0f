"""Authentication of requests: each one carries the secret of its member's Welcome.

A secret is valid from its Welcome to the member's next Welcome or its end. A request with the member's earlier secret
is neither taken nor refused for good, because the worker sends it again after its next Welcome. A request of anyone who
never was a member is refused.
"""

from __future__ import annotations

import enum
import hmac
from collections.abc import Set

from paceline.services.coordinator.members.registry import Member
from paceline.v1 import common_pb2

MAX_EARLIER = 4096
"""Earlier secrets that are kept: more than the workers that come and go within the life of a message."""


class Standing(enum.Enum):
    """Standing of a request's sender."""

    MEMBER = "member"
    EARLIER = "earlier"
    """It was this member; another Welcome is due, or on its way."""
    STRANGER = "stranger"


class Senders:
    """The members whose requests are answered, by id."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._earlier: dict[tuple[str, bytes], None] = {}
        """Ids and secrets that were valid before, oldest first."""
        self._keys: dict[bytes, str] = {}
        """Member of each public key; read by ZeroMQ's thread."""

    @property
    def ids(self) -> Set[str]:
        """Return the ids of all members."""
        return self._members.keys()

    def enter(self, member: Member) -> None:
        """Add a member, or replace its secret."""
        self.leave(member.member_id)
        self._members[member.member_id] = member
        if member.exchange_key:
            self._keys[member.exchange_key] = member.member_id

    def leave(self, member_id: str) -> None:
        """Remove a member."""
        member = self._members.pop(member_id, None)
        if member is None:
            return
        if self._keys.get(member.exchange_key) == member_id:
            del self._keys[member.exchange_key]
        self._earlier[member_id, member.secret] = None
        while len(self._earlier) > MAX_EARLIER:
            del self._earlier[next(iter(self._earlier))]

    def get(self, member_id: str) -> Member | None:
        """Return the member of an id."""
        return self._members.get(member_id)

    def knows_key(self, key: bytes) -> bool:
        """Return whether a public key is that of a member. Any thread."""
        return key in self._keys

    def owner_of(self, key: bytes) -> str | None:
        """Return the member of a public key; None if there is none."""
        return self._keys.get(key)

    def of_role(self, role: common_pb2.Role.ValueType) -> list[Member]:
        """Return the members of a role."""
        return [member for member in self._members.values() if member.role == role]

    def standing(self, member_id: str, secret: bytes) -> Standing:
        """Return the sender's standing by the member id and the secret of its request."""
        member = self._members.get(member_id)
        if member is not None and hmac.compare_digest(member.secret, secret):
            return Standing.MEMBER
        return Standing.EARLIER if (member_id, secret) in self._earlier else Standing.STRANGER
