"""A segment that exists but cannot be opened for a moment: its groups wait, and none counts as damaged."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from damage_shared import asked, client
from exchange_drivers import COMMITTED, Learner, Reward, Rollout, World, fill
from exchange_service import DEADLINE_S, FOREVER_S, serving

from paceline.services.coordinator.exchange.transport.receiver import ServerLimits
from paceline.services.coordinator.ledger import segments as payloads
from paceline.services.coordinator.ledger.segments import PayloadStore, Record, UnopenedSegment
from paceline.v1 import common_pb2
from paceline.v1 import exchange_pb2 as pb


class Segments:
    """Replaces the system's `open` for segments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.error: OSError | None = None
        """Error on opening a segment for reading."""
        self.refused = asyncio.Event()
        """Set after such an attempt."""
        self.unwritable = ""
        """Suffix of paths that cannot be opened in any mode."""
        self.unwritten = threading.Event()
        """Set after such an attempt, from any thread."""
        self._open = os.open
        monkeypatch.setattr(payloads.os, "open", self)

    def __call__(self, path: Any, flags: int, *arguments: Any, **named: Any) -> int:
        if self.error is not None and str(path).endswith(".seg") and not flags & (os.O_WRONLY | os.O_RDWR):
            self.refused.set()
            raise self.error
        if self.unwritable and str(path).endswith(self.unwritable):
            self.unwritten.set()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        return self._open(path, flags, *arguments, **named)


@pytest.fixture(params=[errno.EMFILE, errno.EACCES])
def segments(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Segments:
    stand_in = Segments(monkeypatch)
    stand_in.error = OSError(request.param, os.strerror(request.param))
    return stand_in


def generated(world: World, number: int = 1) -> None:
    rollout = Rollout(world)
    for lease in rollout.lease(2 * number):
        assert rollout.finish(lease) == COMMITTED
    world.restart()


def returned_prefix(world: World) -> Rollout:
    """Return a worker that returned a group unfinished; its arrays are in a segment that is not in memory."""
    rollout = Rollout(world)
    (lease,) = rollout.lease(2)
    rollout.return_lease(lease, rollout.completions(lease))
    row = world.ledger.db.execute("SELECT * FROM payloads WHERE kind = 'prefix'").fetchone()
    if row["segment"] is None:
        (place,) = world.ledger.payloads.append([Record.of(row["header"], row["arrays"])])
        with world.ledger.transaction():
            world.ledger.db.execute(
                "UPDATE payloads SET header = x'', arrays = x'', segment = ?, start = ?, header_size = ?,"
                " header_crc = ?, arrays_size = ?, arrays_crc = ? WHERE kind = 'prefix'",
                place,
            )
    world.restart()
    return rollout


def test_a_task_waits_and_the_run_is_told_once(world: World, segments: Segments) -> None:
    generated(world)
    reward = Reward(world)
    assert reward.tasks() == []
    assert reward.tasks() == []
    assert world.group(0)["state"] == "generated"
    assert "failures:damaged" not in world.counters
    (warning,) = world.kinds("warning")
    assert "cannot be opened" in warning["message"]
    assert "opening it is retried automatically" in warning["message"]
    segments.error = None
    (task,) = reward.tasks()
    assert reward.score(task) == COMMITTED


def test_a_batch_waits_as_it_was_fixed(world: World, segments: Segments) -> None:
    error, segments.error = segments.error, None
    fill(Rollout(world), Reward(world), 2)
    world.restart()
    segments.error = error
    learner = Learner(world)
    assert learner.part(0) is None
    assert learner.part(0) is None
    segments.error = None
    assert learner.train(0) == [[0, 1]]
    assert world.ledger.db.execute("SELECT * FROM replaced_batches").fetchall() == []
    assert "failures:damaged" not in world.counters


def test_a_group_that_was_begun_waits_and_others_are_leased(world: World, segments: Segments) -> None:
    rollout = returned_prefix(world)
    assert [lease.group_id for lease in rollout.lease(4)] == [1]
    assert world.group(0)["state"] == "admitted"
    segments.error = None
    (lease,) = rollout.lease(2)
    assert (lease.group_id, lease.attempt, lease.prefix_frame) == (0, 2, 1)
    assert rollout.finish(lease) == COMMITTED


def test_a_result_is_taken_though_its_beginning_cannot_be_compared(world: World, segments: Segments) -> None:
    error, segments.error = segments.error, None
    rollout = returned_prefix(world)
    (lease,) = rollout.lease(2)
    world.restart()  # its segment is not open any more
    segments.error = error
    assert rollout.finish(lease) == COMMITTED
    segments.error = None  # verified afterwards


async def test_the_coordinator_goes_on_and_asks_again_by_itself(world: World, segments: Segments) -> None:
    error, segments.error = segments.error, None
    fill(Rollout(world), Reward(world), 2)
    generated(world)
    session = world.new_session()
    segments.error = error
    async with serving(world) as service, asyncio.timeout(DEADLINE_S):
        learner = client(service, "learner", common_pb2.ROLE_LEARNER, session=session)
        reward = client(service, "reward", common_pb2.ROLE_REWARD)
        await learner.send(asked(0, FOREVER_S, session))
        await segments.refused.wait()
        segments.refused.clear()
        await reward.send(pb.ExchangeRequest(task=pb.TaskRequest(room=8, wait_s=FOREVER_S)))
        await segments.refused.wait()
        segments.error = None
        part, tasks = await learner.receive(), await reward.receive()
    assert [group.group_id for group in part.batch.groups] == [0, 1]
    assert [task.group_id for task in tasks.task.tasks] == [2]


async def test_groups_wait_for_a_segment_that_cannot_be_begun_and_leases_go_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments, limits = Segments(monkeypatch), ServerLimits(store_again_s=(0.01, 10.0))
    async with serving(world, limits=limits) as service, asyncio.timeout(DEADLINE_S):
        worker, other, driver = service.rollout("worker"), service.rollout("other"), Rollout(world, "worker")
        (given,) = (await worker.ask(pb.ExchangeRequest(lease=pb.LeaseRequest(room=2)))).lease.leases
        segments.unwritable = ".seg"
        await worker.send(*driver.result(given), number=2)
        await asyncio.to_thread(segments.unwritten.wait, DEADLINE_S)
        leased = await other.ask(pb.ExchangeRequest(lease=pb.LeaseRequest(room=2)))
        assert [lease.group_id for lease in leased.lease.leases] == [1]
        segments.unwritable = ""
        assert (await worker.receive()).status == COMMITTED
    (warning,) = [notice.content["message"] for notice in service.notices if notice.kind == "warning"]
    assert "no segment can be created" in warning


async def test_a_coordinator_that_stops_does_not_wait_for_a_segment(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments, limits = Segments(monkeypatch), ServerLimits(store_again_s=(3600.0, 3600.0))
    async with asyncio.timeout(DEADLINE_S), serving(world, limits=limits) as service:
        worker, driver = service.rollout("worker"), Rollout(world, "worker")
        (given,) = (await worker.ask(pb.ExchangeRequest(lease=pb.LeaseRequest(room=2)))).lease.leases
        segments.unwritable = ".seg"
        await worker.send(*driver.result(given), number=2)
        await asyncio.to_thread(segments.unwritten.wait, DEADLINE_S)


@pytest.mark.parametrize("unwritable", [".seg", "-segments"])
def test_a_segment_that_could_not_be_begun_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unwritable: str
) -> None:
    store, segments = PayloadStore(tmp_path / "ledger"), Segments(monkeypatch)
    for _ in range(2):
        segments.unwritable = unwritable
        with pytest.raises(UnopenedSegment):
            store.append([Record.of(b"header", b"arrays")])
        assert list(store.folder.iterdir()) == []
    segments.unwritable = ""
    (place,) = store.append([Record.of(b"header", b"arrays")])
    assert place.segment == 1
    store.close()
