"""Runs that are paused by the faults of workers, and how their state is followed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from control_plane import DEADLINE_S, Plane, Worker

from paceline.calls.backoff import ExponentialBackoff
from paceline.v1 import common_pb2, run_pb2


def quick() -> ExponentialBackoff:
    return ExponentialBackoff(0.0, 0.0)


def impatient(plane: Plane) -> Plane:
    """Make the plane retry at the next tick."""
    plane.coordinator.runs.starter._backoff = quick()
    plane.coordinator.runs.faults._backoff = quick()
    return plane


async def state_of(plane: Plane, run_id: str) -> tuple[str, str]:
    run = (await plane.runs.Get(run_pb2.GetRequest(run_id=run_id))).run
    return run_pb2.RunState.Name(run.state).removeprefix("RUN_STATE_").lower(), run.message


async def next_state(plane: Plane, run_id: str, after: int, state: str) -> int:
    """Return the sequence of the first event after `after` that puts the run into `state`."""
    async with asyncio.timeout(DEADLINE_S):
        async for event in plane.runs.Watch(run_pb2.WatchRequest(run_id=run_id, after=after)):
            if event.kind == "state" and json.loads(event.json)["state"] == state:
                return int(event.sequence)
    raise AssertionError(f"the run ended before it was {state}")


def reward(plane: Plane, member_id: str = "reward-1") -> Worker:
    return Worker(plane, common_pb2.ROLE_REWARD, member_id)


async def put_on(worker: Worker) -> Any:
    return await worker.hear("run")
