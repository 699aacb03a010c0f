"""Weights on their way into a rollout worker's engine: the worker's reports meanwhile and afterwards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from store_pair import Pair, offer

from paceline.errors import Unavailable
from paceline.groups import Version
from paceline.services.rollout.weights import RolloutWeights
from paceline.v1 import worker_pb2

DEADLINE_S = 60.0
MAX_WAIT_S = 1.0
V1 = Version(1, 1)


class Membership:
    """Membership that records reports; `waiting_reports` of them wait for a stream."""

    def __init__(self) -> None:
        self.waiting_reports = 0
        self.reports: asyncio.Queue[worker_pb2.ConnectRequest] = asyncio.Queue()

    async def report(self, report: worker_pb2.ConnectRequest) -> None:
        self.reports.put_nowait(report)

    async def next(self, kind: str) -> Any:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                report = await self.reports.get()
                if report.WhichOneof("report") == kind:
                    return getattr(report, kind)


class SlowEngine:
    """Engine that loads a version on command."""

    def __init__(self) -> None:
        self.version: Version | None = None
        self.loading, self.go_on = asyncio.Event(), asyncio.Event()

    async def update_weights(self, version: Version, tensors: Mapping[str, torch.Tensor]) -> float:
        self.loading.set()
        await self.go_on.wait()
        self.version = version
        return 0.0


class Worker:
    """A worker and a store of weights, with the coordinator left out between them."""

    def __init__(self, directory: Path) -> None:
        self.pair = Pair(str(directory))
        self.membership, self.engine = Membership(), SlowEngine()
        self.weights = RolloutWeights(
            "run", "m", cast(Any, self.membership), cast(Any, self.engine), MAX_WAIT_S, self.pair.store.url
        )
        self.reporting = asyncio.create_task(self.weights.report_progress())

    async def publish(self) -> None:
        stored = await asyncio.to_thread(self.pair.step, V1.step)
        self.weights.offer(offer(self.pair, stored).to_proto(MAX_WAIT_S))

    async def close(self) -> None:
        self.reporting.cancel()
        await asyncio.wait([self.reporting])
        self.engine.go_on.set()
        self.weights.close()
        self.pair.writer.close()


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[Worker]:
    worker = Worker(tmp_path)
    yield worker
    await worker.close()


async def test_a_slow_swap_is_reported_until_it_is_answered(worker: Worker) -> None:
    await worker.publish()
    for _ in range(6):  # every quarter of the longest silence: 1.5 times that silence
        progress = await worker.membership.next("weight_progress")
        assert (progress.run_id, progress.member_id) == ("run", "m")
        assert (progress.version.session, progress.version.step) == V1
    assert progress.phase == worker_pb2.WEIGHT_PHASE_LOADING
    assert progress.received_bytes > 0
    worker.engine.go_on.set()
    ack = await worker.membership.next("weight_ack")
    assert ack.ok


async def test_nothing_is_reported_while_no_stream_takes_it(worker: Worker) -> None:
    worker.membership.waiting_reports = 1
    await worker.publish()
    await worker.engine.loading.wait()
    await asyncio.sleep(MAX_WAIT_S)  # four times the interval
    assert worker.membership.reports.empty()
    worker.membership.waiting_reports = 0
    await worker.membership.next("weight_progress")


async def test_the_last_yes_is_said_again_to_a_coordinator_that_was_away(worker: Worker) -> None:
    await worker.weights.answer_again()
    assert worker.membership.reports.empty()
    worker.engine.go_on.set()
    await worker.publish()
    first = await worker.membership.next("weight_ack")
    await worker.weights.answer_again()
    assert await worker.membership.next("weight_ack") == first


async def until_loading(worker: Worker) -> None:
    await worker.publish()
    await worker.engine.loading.wait()
    worker.reporting.cancel()


def test_a_loop_that_ends_while_a_version_is_loaded_is_no_fault(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SIGTERM: `asyncio.run` cancels the swap, and the receiver's thread cannot answer any more."""

    async def end() -> Worker:
        await until_loading(worker := Worker(tmp_path))
        return worker

    with asyncio.Runner() as runner:
        worker = runner.run(end())
    with pytest.raises(Unavailable, match="this worker is ending"):
        worker.weights._run_in_loop(worker.engine.update_weights(V1, {}))
    end_s = time.monotonic() + DEADLINE_S
    while "refused: this worker is ending" not in caplog.text and time.monotonic() < end_s:
        time.sleep(0.01)
    assert "refused: this worker is ending" in caplog.text
    assert "Traceback" not in caplog.text
    worker.weights.close()
    worker.pair.writer.close()


HERE = "the run's own"
"""Placeholder for the url of the test's store."""


def stored_offer(run_id: str = "run", **fields: Any) -> worker_pb2.WeightOffer:
    message = worker_pb2.WeightOffer(run_id=run_id, member_id="m")
    message.version.session, message.version.step = V1
    stored = message.stored
    stored.url, stored.algorithm = HERE, "sha256"
    stored.manifest.name = stored.anchor.name = "000000-00000001/anchor.json"
    for name, value in fields.items():
        if name == "name":
            stored.manifest.name = value
        elif name == "size_bytes":
            stored.anchor.size_bytes = value
        else:
            setattr(stored, name, value)
    return message


BAD_OFFERS = [
    (worker_pb2.WeightOffer(run_id="run"), "checksum algorithm ''"),
    (stored_offer(run_id="another"), "offer is of run 'another', but this member serves 'run'"),
    (
        stored_offer(url="s3://elsewhere"),
        "weights are offered in 's3://elsewhere', but the run's weights are in",
    ),
    (stored_offer(url=""), "weights are offered in ''"),
    (stored_offer(algorithm="md5"), "checksum algorithm 'md5'"),
    (stored_offer(name="../../etc/passwd"), "an object may not be called '../../etc/passwd'"),
    (stored_offer(name=""), "an object may not be called ''"),
    (
        stored_offer(anchor_bytes=2**60),
        "a version of 1152921504606846976 bytes is offered, but this host has",
    ),
    (stored_offer(size_bytes=2**64 - 1), "cannot have 18446744073709551615 bytes"),
]


@pytest.mark.parametrize(("bad", "why"), BAD_OFFERS)
async def test_a_bad_offer_is_answered_with_a_sentence(worker: Worker, bad: worker_pb2.WeightOffer, why: str) -> None:
    if bad.stored.url == HERE:
        bad.stored.url = worker.pair.store.url
    worker.weights.offer(bad)
    ack = await worker.membership.next("weight_ack")
    assert (ack.ok, ack.member_id, ack.version) == (False, "m", bad.version)
    assert why in ack.message
    assert len(ack.message) < 500
    worker.engine.go_on.set()
    await worker.publish()  # a valid offer is accepted as before
    assert (await worker.membership.next("weight_ack")).ok
