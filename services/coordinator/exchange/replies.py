"""Answers to requests. Each states the content of the ledger."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.array_frames import Buffer
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.ledger.segments import Frame, StoredFrame
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import PROTOCOL


@dataclass(frozen=True)
class Outcome:
    """Answer to a request; if `empty` (nothing to give), the request may be parked for the wait that it asks for."""

    reply: pb.ExchangeReply
    payloads: list[Frame] = field(default_factory=list)
    empty: bool = False

    def in_memory(self) -> list[Buffer] | None:
        """Return the payload frames; None if one is on the disk, for which the event loop must not wait."""
        frames = [frame for frame in self.payloads if not isinstance(frame, StoredFrame)]
        return frames if len(frames) == len(self.payloads) else None


class Replies:
    """Makes replies of the coordinator's term."""

    def __init__(self, ledger: Ledger):
        self._ledger = ledger

    def ok(self, request: pb.ExchangeRequest) -> pb.ExchangeReply:
        """Return a reply to be filled with what the request asks for."""
        return self._reply(request, pb.REPLY_STATUS_OK)

    def committed(self, request: pb.ExchangeRequest) -> Outcome:
        """Answer that the result is in the ledger once this transaction is committed."""
        return Outcome(self._reply(request, pb.REPLY_STATUS_COMMITTED))

    def duplicate(self, request: pb.ExchangeRequest, message: str) -> Outcome:
        """Answer that an earlier result won."""
        return Outcome(self._reply(request, pb.REPLY_STATUS_DUPLICATE, message))

    def stale(self, request: pb.ExchangeRequest, message: str) -> Outcome:
        return Outcome(self._reply(request, pb.REPLY_STATUS_STALE, message))

    def refuse(self, request: pb.ExchangeRequest, message: str) -> Outcome:
        """Answer that the message is invalid in every state."""
        return Outcome(self._reply(request, pb.REPLY_STATUS_INVALID, message))

    def _reply(
        self, request: pb.ExchangeRequest, status: pb.ReplyStatus.ValueType, message: str = ""
    ) -> pb.ExchangeReply:
        term, request_id = self._ledger.term, request.request_id
        return pb.ExchangeReply(protocol=PROTOCOL, request_id=request_id, term=term, status=status, message=message)
