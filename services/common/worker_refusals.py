"""Strangers that a worker's own ports, and its host's agent, have refused, on their way to the coordinator's audit log.

`Membership` sends them with its heartbeats, one message a second at most, and keeps them while the coordinator is away.
"""

from __future__ import annotations

from paceline.refusal_sums import RefusalSums
from services.common.grpc_peers import address_of
from services.common.token_guard import OF_GUARD, Call


class WorkerRefusals(RefusalSums):
    """The refusals of one worker."""

    def note_call(self, call: Call) -> None:
        """Take a call, or an HTTP request, that was refused because of who made it; whatever else a guard notes is left out."""
        if call.code in OF_GUARD:
            who = call.caller.name if call.caller else ""
            self.note(call.method, call.code.name, address_of(call.peer), call.details, who=who)
