"""Answers to requests. Each answer states the content of the ledger, in the term of the coordinator. It repeats the
term of its request, which is the coordinator's once the sender is checked (`transport/dispatch.py:refusal_of_sender`);
an answer that is given before this check sets `term`."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.array_frames import Buffer
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


def ok(request: pb.ExchangeRequest) -> pb.ExchangeReply:
    """Return a reply to be filled with what the request asks for."""
    return _reply(request, pb.REPLY_STATUS_OK).reply


def committed(request: pb.ExchangeRequest) -> Outcome:
    """Answer that the result is in the ledger once this transaction is committed."""
    return _reply(request, pb.REPLY_STATUS_COMMITTED)


def duplicate(request: pb.ExchangeRequest, message: str) -> Outcome:
    """Answer that an earlier result won."""
    return _reply(request, pb.REPLY_STATUS_DUPLICATE, message)


def stale(request: pb.ExchangeRequest, message: str, term: int | None = None) -> Outcome:
    return _reply(request, pb.REPLY_STATUS_STALE, message, term)


def refuse(request: pb.ExchangeRequest, message: str, term: int | None = None) -> Outcome:
    """Answer that the message is invalid in every state."""
    return _reply(request, pb.REPLY_STATUS_INVALID, message, term)


def _reply(
    request: pb.ExchangeRequest, status: pb.ReplyStatus.ValueType, message: str = "", term: int | None = None
) -> Outcome:
    reply = pb.ExchangeReply(protocol=PROTOCOL, request_id=request.request_id, status=status, message=message)
    reply.term = request.term if term is None else term
    return Outcome(reply)
