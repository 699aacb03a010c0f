"""A rollout worker between two runs."""

from __future__ import annotations

import asyncio

from protos.paceline.v1 import worker_pb2
from services.rollout.worker import RolloutWorker

PATIENCE_S = 10.0


async def test_a_worker_ends_while_it_still_closes_a_run_that_is_over():
    closing, closed = asyncio.Event(), asyncio.Event()

    class SlowToClose(RolloutWorker):
        async def _work_on(self, assignment: worker_pb2.RunAssignment) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                closing.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    closed.set()

    worker = SlowToClose("127.0.0.1:1", "rollout-0", "cpu", 1.0, "127.0.0.1")
    belonging = asyncio.create_task(worker.membership.run())
    await worker._on_directive(worker_pb2.ConnectResponse(run=worker_pb2.RunAssignment(run_id="grpo-1")))
    working = asyncio.create_task(worker.work())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await worker._on_directive(worker_pb2.ConnectResponse(idle=worker_pb2.Idle()))
    await asyncio.wait_for(closing.wait(), PATIENCE_S)

    working.cancel()
    ended, _ = await asyncio.wait((working,), timeout=PATIENCE_S)
    belonging.cancel()
    await asyncio.wait((belonging,))

    assert ended, "the worker waits for a next run although it was told to end"
    assert working.cancelled()
    assert closed.is_set()
