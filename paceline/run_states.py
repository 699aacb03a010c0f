"""The states of a run, as users write them."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.v1.run_pb2 import Run


class RunState(StrEnum):
    """State of a run; each equals its name as text (`"running"`)."""

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @classmethod
    def of(cls, run: Run) -> RunState:
        """Return the state of a run's message."""
        from paceline.v1 import run_pb2

        return cls(run_pb2.RunState.Name(run.state).removeprefix("RUN_STATE_").lower())


ENDED_STATES = (RunState.SUCCEEDED, RunState.FAILED, RunState.CANCELLED)


def state_name(run: Run) -> str:
    """Return a run's state in lower case: queued, running, paused, succeeded, failed or cancelled."""
    return RunState.of(run).value
