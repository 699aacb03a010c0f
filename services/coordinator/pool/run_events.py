"""Interface from the pool to the owner of the runs: events that it passes on, and state that it reads."""

from __future__ import annotations

import asyncio
from typing import Protocol

from paceline.services.coordinator.exchange.state import Exchange, Notice
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.members.registry import Member
from paceline.services.coordinator.reporting.run_log import RunLog
from paceline.v1 import worker_pb2


class Wakes(Protocol):
    """The server of the exchange, for requests that wait for the pool."""

    def wake(self, *kinds: str) -> None:
        """Check the parked requests of these kinds again."""


class WorkerFaults(Protocol):
    """Handlers of the faults of workers."""

    async def on_error(self, member: Member, report: worker_pb2.RunReport) -> None:
        """Handle a member that cannot work on the active run."""

    async def on_ready(self, member: Member) -> None:
        """Handle a member that has set up the active run."""


class RunEvents(Protocol):
    """The owner of the runs; the coordinator implements it."""

    @property
    def ledger(self) -> Ledger:
        """The record of all runs."""

    @property
    def exchange(self) -> Exchange:
        """The state of the active run."""

    @property
    def lock(self) -> asyncio.Lock:
        """The lock that serialises transactions."""

    @property
    def run_log(self) -> RunLog:
        """The log of the active run's events."""

    @property
    def server(self) -> Wakes:
        """The server with the parked requests."""

    @property
    def faults(self) -> WorkerFaults:
        """The handlers of members' faults."""

    @property
    def stopping(self) -> bool:
        """Return whether the coordinator ends."""

    async def act_on(self, notices: list[Notice]) -> None:
        """Act on the notices of a transaction."""

    async def pause_on_fault(self, run_id: str, message: str, *, retried: bool = False) -> None:
        """Pause a run that cannot go on."""

    async def learner_finished(self, session: int) -> None:
        """End the run if the learner was the last to finish."""

    async def warn(self, messages: list[str]) -> None:
        """Add warnings to the events of the active run."""

    async def tell_watchers(self) -> None:
        """Wake watchers, because there are new events."""
