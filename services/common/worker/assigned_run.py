"""The run that the coordinator's directives assign to a rollout or reward worker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from paceline.services.common.worker.run_setup import failed_set_up
from paceline.v1 import worker_pb2

Report = Callable[[worker_pb2.ConnectRequest], Awaitable[None]]


class AssignedRun:
    """The newest assignment, and the failure of its set-up for as long as the set-up is retried."""

    def __init__(self) -> None:
        self.assignment: worker_pb2.RunAssignment | None = None
        self.failure: worker_pb2.ConnectRequest | None = None
        """Report of the last set-up, if it failed."""
        self.changed = asyncio.Event()
        """Set by a directive that changes the work; the worker clears it."""
        self.on_readiness: Callable[[bool], Awaitable[None]] = _ignore
        """Callback with whether the worker can work on its run, called whenever that changes."""

    def assign(self, assignment: worker_pb2.RunAssignment) -> bool:
        """Take a directive to work on a run; return whether the run is another one than before.

        A run that is assigned again after a failed set-up is set up again at once.
        """
        is_new = self.assignment is None or self.assignment.run_id != assignment.run_id
        if is_new or self.failure is not None:
            self.failure = None
            self.assignment = assignment
            self.changed.set()
        return is_new

    async def idle(self) -> None:
        """Take a directive to work on nothing."""
        self.assignment = self.failure = None
        self.changed.set()
        await self.on_readiness(True)

    async def failed(self, run_id: str, error: Exception, report: Report) -> None:
        """Report that the run cannot be set up now."""
        self.failure = failed_set_up(run_id, error)
        await report(self.failure)
        await self.on_readiness(False)

    async def set_up(self) -> None:
        """Note that the set-up has succeeded."""
        self.failure = None
        await self.on_readiness(True)

    async def report(self, run_id: str | None, report: Report) -> None:
        """Report the run `run_id` as ready, or else the failure, if there is one."""
        if run_id is not None:
            await report(worker_pb2.ConnectRequest(run_report=worker_pb2.RunReport(run_id=run_id)))
        elif self.failure is not None:
            await report(self.failure)


async def _ignore(ready: bool) -> None:
    """Default callback: do nothing."""
