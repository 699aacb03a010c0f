"""Unreadable payloads: untrained groups are generated again, trained ones are reported, and the exchange continues."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from damage_shared import asked, client
from exchange_drivers import COMMITTED, OK, Learner, MakeWorld, Reward, Rollout, World, fill
from exchange_service import FOREVER_S, Service, serving
from ledger_files import both_forms

from paceline.encryption.storage_key import storage_key
from paceline.errors import LedgerFault
from paceline.services.coordinator.ledger import segments
from paceline.services.coordinator.ledger.segments import BLOCK_BYTES, Record
from paceline.services.coordinator.ledger.tables.batches import batch_digest, extend_chain
from paceline.v1 import common_pb2
from paceline.v1 import exchange_pb2 as pb

pytestmark = [both_forms, pytest.mark.usefixtures("at_rest")]


@pytest.fixture(autouse=True)
def _a_segment_for_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "MAX_SEGMENT_BYTES", 1)


@pytest.fixture(params=["a bit", "cut", "gone", "unreadable"])
def damage(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Damages the payload of a group on the disk that is no longer in memory."""

    def spoil(world: World, group_id: int, kind: str = "result") -> None:
        row = world.ledger.db.execute(
            "SELECT segment FROM payloads WHERE group_id = ? AND kind = ?", (group_id, kind)
        ).fetchone()
        spoil_file(world.ledger.payloads.folder / f"{row['segment']:08d}.seg", request.param, monkeypatch)

    return spoil


def spoil_file(path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytearray(path.read_bytes())
    if how == "a bit":
        content[150 if storage_key() is None else BLOCK_BYTES + 150] ^= 4
        path.write_bytes(content)
    elif how == "cut":
        path.write_bytes(content[:30])
    elif how == "gone":
        path.unlink()
    else:
        pread, spoilt = os.pread, path.stat().st_ino

        def fail(fd: int, size: int, start: int) -> bytes:
            if os.fstat(fd).st_ino == spoilt:
                raise OSError(5, "Input/output error")
            return pread(fd, size, start)

        monkeypatch.setattr(segments.os, "pread", fail)


def warnings(service: Service) -> list[str]:
    return [notice.content["message"] for notice in service.notices if notice.kind == "warning"]


async def test_a_group_that_cannot_be_read_for_its_scores_is_generated_again(world: World, damage: object) -> None:
    rollout = Rollout(world)
    for lease in rollout.lease(4):
        assert rollout.finish(lease) == COMMITTED
    world.restart()
    damage(world, 0)  # type: ignore[operator]
    async with serving(world) as service:
        reward = client(service, "reward", common_pb2.ROLE_REWARD)
        reply = await reward.ask(pb.ExchangeRequest(task=pb.TaskRequest(room=8, wait_s=FOREVER_S)))
        assert [task.group_id for task in reply.task.tasks] == [1]
        assert world.group(0)["state"] == "admitted"
        assert [(world.counters[name]) for name in ("failures:damaged", "tokens:wasted")] == [1, 9]
        assert world.counters["tokens:generated"] == 9
        assert "group 0 is generated again: " in warnings(service)[0]
    (lease,) = rollout.lease(2)
    assert (lease.group_id, lease.attempt) == (0, 2)
    assert rollout.finish(lease) == COMMITTED
    assert world.counters["tokens:generated"] == 18


@pytest.mark.parametrize("order", ["ready_first", "in_order"])
async def test_a_batch_with_a_group_that_cannot_be_read_is_fixed_anew(
    make_world: MakeWorld, damage: object, order: str
) -> None:
    world = make_world(async_grpo={"order": order})
    rollout, reward = Rollout(world), Reward(world)
    fill(rollout, reward, 2)
    session = world.new_session()
    world.restart()
    damage(world, 1)  # type: ignore[operator]
    async with serving(world) as service:
        learner = client(service, "learner", common_pb2.ROLE_LEARNER, session=session)
        reply = await learner.ask(asked(0, 0.0, session))
        assert (reply.status, reply.batch.state) == (OK, pb.BATCH_STATE_WAIT)
        assert world.states() | {2: "admitted", 3: "admitted"} == {
            0: "scored",
            1: "admitted",
            2: "admitted",
            3: "admitted",
        }
        await learner.send(asked(0, FOREVER_S, session))
        assert world.row["next_batch"] == 0
    (replaced,) = world.ledger.db.execute("SELECT * FROM replaced_batches").fetchall()
    assert json.loads(replaced["group_ids"]) == [0, 1]
    assert json.loads(replaced["dropped_ids"]) == [1]
    assert replaced["reason"].startswith("damaged: ")
    assert fill(rollout, reward, 1) == [1]
    assert Learner(world, session=session).train(0) == [[0, 1]]
    (batch,) = world.ledger.db.execute("SELECT * FROM batches").fetchall()
    assert batch["revision"] == 1
    digest = batch_digest([world.group(0), world.group(1)])
    assert batch["chain"] == extend_chain(replaced["chain"], 0, digest)


async def test_a_batch_that_a_session_has_trained_pauses_the_run_when_it_cannot_be_read(
    world: World, damage: object
) -> None:
    rollout, reward, learner = Rollout(world), Reward(world), Learner(world)
    fill(rollout, reward, 2)
    assert learner.train(0) == [[0, 1]]
    session = world.new_session()
    world.restart()
    damage(world, 0)  # type: ignore[operator]
    async with serving(world) as service:
        again = client(service, "again", common_pb2.ROLE_LEARNER, session=session)
        for _ in range(2):
            reply = await again.ask(asked(0, 0.0, session))
            assert (reply.status, reply.batch.state) == (OK, pb.BATCH_STATE_WAIT)
        assert [notice.kind for notice in service.notices] == ["paused"]
    assert world.row["state"] == "paused"
    assert "group 0 of step 0 cannot be read, and a session has trained it already" in world.row["message"]
    assert world.states()[0] == "trained"
    world.check = False  # the damage stays


def test_what_an_earlier_worker_began_is_forgotten_when_it_cannot_be_read(world: World, damage: object) -> None:
    rollout = Rollout(world)
    lease, other = rollout.lease(4)
    rollout.return_lease(lease, rollout.completions(lease))
    row = world.ledger.db.execute("SELECT * FROM payloads WHERE kind = 'prefix'").fetchone()
    if row["segment"] is None:  # its bytes may be in SQLite or in a segment
        (place,) = world.ledger.payloads.append([Record.of(row["header"], row["arrays"])])
        with world.ledger.transaction():
            world.ledger.db.execute(
                "UPDATE payloads SET header = x'', arrays = x'', segment = ?, start = ?, header_size = ?,"
                " header_crc = ?, arrays_size = ?, arrays_crc = ? WHERE kind = 'prefix'",
                place,
            )
    world.restart()
    segment = world.ledger.payloads.folder / "00000001.seg"
    damage(world, 0, "prefix")  # type: ignore[operator]
    if segment.exists():
        content = bytearray(segment.read_bytes())
        content[0] ^= 1  # in the header, which is read at once
        segment.write_bytes(content)
    (again,) = rollout.lease(2)
    assert (again.group_id, again.attempt, again.prefix_frame) == (0, 2, 0)
    assert world.counters["failures:damaged"] == 1
    assert rollout.finish(again) == COMMITTED
    assert rollout.finish(other) == COMMITTED


def test_a_disk_that_cannot_be_written_still_ends_the_coordinator(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = Rollout(world)
    (lease,) = rollout.lease(2)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(segments.SegmentWriter, "append", full)
    with pytest.raises(LedgerFault, match="groups cannot be written"):
        rollout.finish(lease)


def test_lost_groups_are_told_of_ever_less_often(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(1, 5):
        rollout, reward = Rollout(world), Reward(world)
        for lease in rollout.lease(2):
            assert rollout.finish(lease) == COMMITTED
        world.restart()
        for path in world.ledger.payloads.folder.iterdir():
            path.unlink()
        assert reward.tasks() == []
        assert world.counters["failures:damaged"] == number
    assert [w["message"].rsplit("(", 1)[1] for w in world.kinds("warning")] == [
        f"{number} damaged payloads in this run)" for number in (1, 2, 4)
    ]


async def test_nothing_is_read_on_the_event_loop(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = Rollout(world)
    for lease in rollout.lease(2):
        assert rollout.finish(lease) == COMMITTED
    world.restart()
    pread, readers = os.pread, []

    def read(fd: int, size: int, start: int) -> bytes:
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        readers.append(fd)
        return pread(fd, size, start)

    monkeypatch.setattr(segments.os, "pread", read)
    async with serving(world) as service:
        reward = client(service, "reward", common_pb2.ROLE_REWARD)
        reply = await reward.ask(pb.ExchangeRequest(task=pb.TaskRequest(room=8, wait_s=FOREVER_S)))
        assert [task.group_id for task in reply.task.tasks] == [0]
    assert len(readers) == (2 if storage_key() is None else 3)  # the segment's first block, header, arrays
