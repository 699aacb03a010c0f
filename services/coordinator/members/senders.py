"""Who may speak for which member: every request brings the secret that its member's Welcome brought.

A secret is good from its Welcome to the member's next Welcome or its end. What comes with a member's earlier secret is neither
taken nor refused for good: the worker sends it again after its next Welcome. Whoever never was a member is refused.
"""

from __future__ import annotations

import enum
import hmac
from collections.abc import Set

from protos.paceline.v1 import common_pb2
from services.coordinator.members.registry import Member

MAX_EARLIER = 4096
"""Earlier secrets that are remembered: more workers than come and go within the life of a message."""


class Standing(enum.Enum):
    """What the sender of a request is."""

    MEMBER = "member"
    EARLIER = "earlier"
    """It was the member that it says; another Welcome is due, or on its way."""
    STRANGER = "stranger"


class Senders:
    """The members whose requests are answered, by id."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._earlier: dict[tuple[str, bytes], None] = {}
        """Ids and secrets that were good before, oldest first."""

    @property
    def ids(self) -> Set[str]:
        """Ids of all of them."""
        return self._members.keys()

    def enter(self, member: Member) -> None:
        """A member joins, or comes back with another secret."""
        self.leave(member.member_id)
        self._members[member.member_id] = member

    def leave(self, member_id: str) -> None:
        """A member is gone."""
        member = self._members.pop(member_id, None)
        if member is None:
            return
        self._earlier[member_id, member.secret] = None
        while len(self._earlier) > MAX_EARLIER:
            del self._earlier[next(iter(self._earlier))]

    def get(self, member_id: str) -> Member | None:
        """The member of that id."""
        return self._members.get(member_id)

    def of_role(self, role: common_pb2.Role.ValueType) -> list[Member]:
        """The members of a role."""
        return [member for member in self._members.values() if member.role == role]

    def standing(self, member_id: str, secret: bytes) -> Standing:
        """What a request's member id and secret make of its sender."""
        member = self._members.get(member_id)
        if member is not None and hmac.compare_digest(member.secret, secret):
            return Standing.MEMBER
        return Standing.EARLIER if (member_id, secret) in self._earlier else Standing.STRANGER
