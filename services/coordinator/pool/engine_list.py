"""The list of rollout workers that may be asked for tokens, which environment workers of the active run get at every change:
a join, a leave, a version that was acknowledged, a drain, a suspicion, an expulsion.
"""

from __future__ import annotations

from paceline.services.coordinator.exchange import engines
from paceline.services.coordinator.exchange.state import Exchange
from paceline.services.coordinator.members.registry import Members
from paceline.v1 import common_pb2, worker_pb2


class EngineList:
    """The list of the active run; it is sent whole, and only to members that have another one."""

    def __init__(self, members: Members, exchange: Exchange):
        self._members, self._exchange = members, exchange

    def update(self) -> None:
        """Send the list to every environment worker that has an older one."""
        run = self._exchange.active
        if run is None or not run.spec.environment.is_used:
            return
        listed = worker_pb2.Engines(run_id=run.run_id)
        for engine in engines.serving(self._exchange, run):
            entry = listed.engines.add(member_id=engine.member_id, address=engine.address)
            entry.version.session, entry.version.step = engine.version
        for member in self._members.of_role(common_pb2.ROLE_ENVIRONMENT):
            if member.connected and member.engines != listed:
                member.engines = listed
                member.direct(worker_pb2.ConnectResponse(engines=listed))
