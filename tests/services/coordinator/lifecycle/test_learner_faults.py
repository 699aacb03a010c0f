"""A learner that cannot train its step, as the control plane sees it: new sessions, then a pause that a person ends."""

from __future__ import annotations

import itertools

from control_plane import Plane, Worker, learner

from paceline.v1 import common_pb2, run_pb2, worker_pb2

ERROR = "IndexError: index 9 is out of range (rank 0)"


async def end_at_step(worker: Worker, run_id: str) -> int:
    """Report the learner's error in step 0 and leave; return the session."""
    session = int((await worker.hear("run")).session)
    report = worker_pb2.RunReport(run_id=run_id, session=session, error=ERROR, fault=worker_pb2.FAULT_STEP, step=0)
    worker.say(run_report=report)
    worker.say(leave=worker_pb2.Leave(reason=ERROR))
    await worker.hear_the_end()
    return session


async def test_three_sessions_that_end_at_a_step_pause_the_run_and_resume_tries_again(plane: Plane) -> None:
    plane.run_loops()
    run = await plane.submit()
    await plane.watch_until(run.run_id, "state", state="running")
    sessions = [0]
    for number in (1, 2, 3):
        state = (await plane.runs.Get(run_pb2.GetRequest(run_id=run.run_id))).run.state
        assert state == run_pb2.RUN_STATE_RUNNING
        sessions.append(await end_at_step(learner(plane, f"learner-{number}"), run.run_id))
    await plane.watch_until(run.run_id, "state", state="paused")
    paused = (await plane.runs.Get(run_pb2.GetRequest(run_id=run.run_id))).run
    assert paused.state == run_pb2.RUN_STATE_PAUSED
    assert f"3 sessions of the learner in a row ended at step 0; the last error: {ERROR}" in paused.message
    resumed = await plane.runs.Resume(run_pb2.ResumeRequest(run_id=run.run_id))
    assert resumed.run.state == run_pb2.RUN_STATE_RUNNING
    for number in (4, 5):  # the count begins anew
        sessions.append(await end_at_step(learner(plane, f"learner-{number}"), run.run_id))
    # One that leaves may get the next session before it is gone, which then has nobody.
    assert all(later > earlier for earlier, later in itertools.pairwise(sessions))
    assert (await plane.runs.Get(run_pb2.GetRequest(run_id=run.run_id))).run.state == run_pb2.RUN_STATE_RUNNING


async def test_a_step_fault_counts_from_a_learner_only(plane: Plane) -> None:
    plane.run_loops()
    run = await plane.submit()
    await plane.watch_until(run.run_id, "state", state="running")
    worker = learner(plane, "learner-1")
    session = (await worker.hear("run")).session
    reward = Worker(plane, common_pb2.ROLE_REWARD, "reward-1")
    await reward.hear("welcome")
    report = worker_pb2.RunReport(run_id=run.run_id, session=session, error=ERROR, fault=worker_pb2.FAULT_STEP)
    reward.say(run_report=report)
    reward.say(leave=worker_pb2.Leave())
    await reward.hear_the_end()
    assert plane.ledger.db.execute("SELECT COUNT(*) FROM session_faults").fetchone()[0] == 0
