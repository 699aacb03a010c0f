"""Requests that could be given nothing yet. They wait until something changes, or until their wait time ends."""

from __future__ import annotations

from collections.abc import Collection

from paceline.services.coordinator.exchange.state import Exchange, Outcome
from paceline.services.coordinator.exchange.transport.router_socket import PendingRequest
from paceline.v1 import exchange_pb2 as pb


class ParkedRequests:
    """At most one request of a kind for each member; of a learner's member, one for each rank."""

    def __init__(self, exchange: Exchange):
        self._exchange = exchange
        self._waiting: dict[tuple[str, str, int], PendingRequest] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def answer_or_park(
        self, waiting: PendingRequest, outcome: Outcome, now_s: float
    ) -> list[tuple[PendingRequest, Outcome]]:
        """Return the answers to send, or park the request when there is nothing to give yet. An earlier request of the same
        sender is answered empty, because what is given now goes to the new one.
        """
        answers = []
        earlier = self._waiting.pop(waiting.key, None)
        if earlier is not None and earlier.request.request_id != waiting.request.request_id:
            answers.append((earlier, self._nothing(earlier)))
        if not outcome.empty or waiting.deadline_s <= now_s:
            answers.append((waiting, outcome))
        else:
            self._waiting[waiting.key] = waiting
        return answers

    def take_due(self, kinds: Collection[str], max_leases: int, now_s: float) -> list[PendingRequest]:
        """Take out up to `max_leases` requests for leases, other requests of `kinds`, and all whose wait time has ended."""
        taken = []
        for key, waiting in list(self._waiting.items()):
            due = max_leases > 0 if waiting.kind == "lease" else waiting.kind in kinds
            if due or waiting.deadline_s <= now_s:
                max_leases -= waiting.kind == "lease"
                del self._waiting[key]
                taken.append(waiting)
        return taken

    def _nothing(self, waiting: PendingRequest) -> Outcome:
        """Return the answer that there is nothing yet."""
        reply = self._exchange.reply(waiting.request, pb.REPLY_STATUS_OK)
        if waiting.kind == "batch":
            reply.batch.state, reply.batch.step = pb.BATCH_STATE_WAIT, waiting.request.batch.step
        else:
            getattr(reply, waiting.kind).SetInParent()
        return Outcome(reply)
