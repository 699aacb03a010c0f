"""The roster: the rollout workers that receive weights. Each change gets a new number, which protos call `epoch`.

It names the workers that are ready and not pinned by an evaluation, suspected or expelled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from paceline.services.coordinator.exchange import evaluation
from paceline.services.coordinator.exchange.state import ActiveRun, Exchange
from paceline.services.coordinator.members.registry import Member, Members
from paceline.services.coordinator.pool.host_plans import HostPlans
from paceline.v1 import common_pb2, worker_pb2

NAMED = 16
"""Most members that a line of the log names: with thousands, each of which joins, the lines would fill the disk."""

log = logging.getLogger(__name__)


class Roster:
    """The newest roster of the active run; `learner` returns the member that has to know it."""

    def __init__(self, members: Members, exchange: Exchange, learner: Callable[[], Member | None]):
        self._members, self._exchange, self._learner = members, exchange, learner
        self.number = 0
        """Number of the newest roster, also after `clear`."""
        self.run_id = ""
        """Run of the newest roster; empty when the roster has to be sent to the learner again."""
        self.member_ids: list[str] = []
        self._host_member_ids: list[str] = []
        self.plans = HostPlans(members, exchange, learner)
        """Where the hosts of the roster's members read."""

    def clear(self) -> None:
        """Clear the roster, because the run is over or the learner needs it again."""
        self.run_id, self.member_ids, self._host_member_ids = "", [], []

    def update(self) -> None:
        """Send the learner a new roster, if the set of members has changed."""
        run = self._exchange.active
        if run is None:
            return
        member_ids = self._receivers(run)
        host_ids = [i for i in member_ids if (m := self._members.get(i)) is not None and m.host is not None]
        if (run.run_id, member_ids, host_ids) == (self.run_id, self.member_ids, self._host_member_ids):
            self.plans.update(self.number, self.member_ids)  # a stream may be new
            return
        earlier_ids = self.member_ids
        self.run_id, self.member_ids, self._host_member_ids = run.run_id, member_ids, host_ids
        self.number += 1
        for member_id in set(member_ids) - set(earlier_ids):
            if (newcomer := self._members.get(member_id)) is not None:
                newcomer.named_in = self.number
                newcomer.host_plan = None  # the learner waits for its answer, also where it holds the version
        log.info("epoch %d of run %s: %s", self.number, run.run_id, _named(member_ids))
        directive = worker_pb2.Epoch(
            run_id=run.run_id, number=self.number, member_ids=member_ids, host_member_ids=host_ids
        )
        if (learner := self._learner()) is not None:
            learner.direct(worker_pb2.ConnectResponse(epoch=directive))
        self.plans.update(self.number, self.member_ids)

    def _receivers(self, run: ActiveRun) -> list[str]:
        pinned = evaluation.pinned_member(self._exchange, run)
        return [
            member.member_id
            for member in self._members.of_role(common_pb2.ROLE_ROLLOUT)
            if member.ready_run == run.run_id
            and member.connected
            and not member.suspected
            and not member.expelled
            and member.member_id != pinned
        ]


def _named(member_ids: Sequence[str]) -> str:
    """Return the members of a roster for a line of the log."""
    if not member_ids:
        return "nobody"
    more = len(member_ids) - NAMED
    return ", ".join(member_ids[:NAMED]) + (f" and {more} more" if more > 0 else "")
