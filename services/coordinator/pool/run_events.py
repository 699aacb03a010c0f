"""What the pool tells of its members to whoever runs the runs, and what it needs to know of them."""

from __future__ import annotations

import asyncio
from typing import Protocol

from protos.paceline.v1 import worker_pb2
from services.coordinator.exchange.state import Exchange, Notice
from services.coordinator.ledger.ledger import Ledger
from services.coordinator.members.registry import Member
from services.coordinator.reporting.run_log import RunLog


class Wakes(Protocol):
    """The server of the exchange, as far as requests wait for the pool."""

    def wake(self, *kinds: str) -> None:
        """Looks again at the parked requests of these kinds."""


class WorkerFaults(Protocol):
    """What workers say when they cannot work on the run."""

    async def on_error(self, member: Member, report: worker_pb2.RunReport) -> None:
        """A member cannot work on the active run."""

    async def on_ready(self, member: Member) -> None:
        """A member has set up the active run."""


class RunEvents(Protocol):
    """Implemented by the coordinator."""

    @property
    def ledger(self) -> Ledger:
        """The record of all runs."""

    @property
    def exchange(self) -> Exchange:
        """The state of the active run."""

    @property
    def lock(self) -> asyncio.Lock:
        """Keeps transactions apart."""

    @property
    def run_log(self) -> RunLog:
        """Where events go."""

    @property
    def server(self) -> Wakes:
        """Where requests wait."""

    @property
    def faults(self) -> WorkerFaults:
        """Where members' faults go."""

    @property
    def stopping(self) -> bool:
        """Whether the coordinator ends."""

    async def act_on(self, notices: list[Notice]) -> None:
        """Does what follows from what happened in a transaction."""

    async def pause_on_fault(self, run_id: str, message: str, *, retried: bool = False) -> None:
        """The run cannot go on as it is."""

    async def learner_finished(self, session: int) -> None:
        """The learner has done all that was to be done in this session."""

    async def warn(self, messages: list[str]) -> None:
        """Events of the active run for people."""

    async def tell_watchers(self) -> None:
        """There are events that nobody has read yet."""
