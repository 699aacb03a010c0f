"""Weights on their way into a rollout worker's engine: the worker's reports meanwhile and afterwards."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Mapping
from typing import Any, cast

import pytest
import torch

from learner.weights.publish_result import PublishResult
from learner.weights.publisher import Publisher
from paceline.groups import Version
from paceline.weights.offers import LinkOffer
from paceline.weights.packing import plan
from protos.paceline.v1 import worker_pb2
from services.rollout.weights import RolloutWeights

DEADLINE_S = 60.0
MAX_WAIT_S = 2.0
V1 = Version(0, 1)
STORE = "/runs/run/weights"


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

    verifies_weights = False

    def __init__(self) -> None:
        self.version: Version | None = None
        self.loading, self.go_on = asyncio.Event(), asyncio.Event()

    async def update_weights(self, version: Version, tensors: Mapping[str, torch.Tensor]) -> float:
        self.loading.set()
        await self.go_on.wait()
        self.version = version
        return 0.0


class Worker:
    """A worker whose learner is in the same process, with the coordinator left out between them."""

    def __init__(self) -> None:
        self.others = set(threading.enumerate())
        self.membership, self.engine = Membership(), SlowEngine()
        self.weights = RolloutWeights(
            "run", "m", cast(Any, self.membership), cast(Any, self.engine), MAX_WAIT_S, "127.0.0.1", STORE
        )
        self.loop = asyncio.get_running_loop()
        self.results: queue.Queue[PublishResult] = queue.Queue()
        self.publisher = Publisher(
            run_id="run",
            send_offer=self._offer,
            on_result=self.results.put,
            bucket_bytes=64,
            max_wait_s=MAX_WAIT_S,
        )
        self.reporting = asyncio.create_task(self.weights.report_progress())

    def _offer(self, offer: LinkOffer) -> None:
        self.loop.call_soon_threadsafe(self.weights.offer, offer.to_proto(MAX_WAIT_S))

    def publish(self) -> None:
        self.publisher.set_members(1, ["m"])
        self.publisher.stage(V1, {"weight": torch.ones(100)})

    async def close(self) -> None:
        self.reporting.cancel()
        await asyncio.wait([self.reporting])
        self.engine.go_on.set()
        self.publisher.close()
        self.weights.close()
        for thread in set(threading.enumerate()) - self.others:  # until none has anything to report
            if thread.name.startswith("weights-"):
                await asyncio.to_thread(thread.join, DEADLINE_S)


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    worker = Worker()
    yield worker
    await worker.close()


async def test_a_slow_swap_is_reported_until_it_is_answered(worker: Worker) -> None:
    worker.publish()
    for _ in range(6):  # every quarter of the longest silence: 1.5 times that silence
        progress = await worker.membership.next("weight_progress")
        assert (progress.run_id, progress.member_id) == ("run", "m")
        assert (progress.version.session, progress.version.step) == V1
        worker.publisher.progress(progress.member_id, V1)
    assert progress.phase == worker_pb2.WEIGHT_PHASE_LOADING
    assert progress.received_bytes == 400
    worker.engine.go_on.set()
    ack = await worker.membership.next("weight_ack")
    assert ack.ok
    worker.publisher.acknowledge("m", V1, True)
    result = await asyncio.to_thread(worker.results.get, True, DEADLINE_S)
    assert (result.ok, result.attempt, result.version) == (True, 1, V1)
    assert worker.results.empty()


async def test_nothing_is_reported_while_no_stream_takes_it(worker: Worker) -> None:
    worker.membership.waiting_reports = 1
    worker.publish()
    await worker.engine.loading.wait()
    await asyncio.sleep(MAX_WAIT_S)  # four times the interval
    assert worker.membership.reports.empty()
    worker.membership.waiting_reports = 0
    await worker.membership.next("weight_progress")


async def test_the_last_yes_is_said_again_to_a_coordinator_that_was_away(worker: Worker) -> None:
    await worker.weights.answer_again()
    assert worker.membership.reports.empty()
    worker.engine.go_on.set()
    worker.publish()
    first = await worker.membership.next("weight_ack")
    await worker.weights.answer_again()
    assert await worker.membership.next("weight_ack") == first


def link_offer(**fields: Any) -> worker_pb2.WeightOffer:
    """Return an offer as a learner makes it, with the given fields changed."""
    manifest = plan({"weight": torch.ones(4)}, bucket_bytes=64).to_bytes()
    offer = LinkOffer("run", 1, "m", 1, "gloo", "127.0.0.1", 1, "prefix", *V1, manifest)
    message = offer.to_proto(MAX_WAIT_S)
    for name, value in fields.items():
        setattr(message, name, value)
    return message


def stored_offer(**fields: Any) -> worker_pb2.WeightOffer:
    message = worker_pb2.WeightOffer(run_id="run", member_id="m")
    message.version.session, message.version.step = V1
    stored = message.stored
    stored.url, stored.algorithm = STORE, "sha256"
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
    (link_offer(backend="nccl"), "a link over 'nccl' was offered; this worker has 'gloo' and 'shared'"),
    (link_offer(backend=""), "a link over '' was offered"),
    (link_offer(store_port=0), "the offer names port 0"),
    (link_offer(store_port=2**32 - 1), "the offer names port 4294967295"),
    (link_offer(store_host=""), "the offer names the host ''"),
    (link_offer(store_host="a b"), "the offer names the host 'a b'"),
    (link_offer(store_host="h" * 100_000), "the offer names the host 'hhh"),
    (link_offer(prefix=""), "the offer names the prefix ''"),
    (link_offer(prefix="a\nb"), "the offer names the prefix"),
    (link_offer(manifest=b""), "weight manifest cannot be read"),
    (link_offer(manifest=b"[" * 100_000), "weight manifest cannot be read"),
    (link_offer(manifest=b"[]"), "weight manifest cannot be read"),
    (link_offer(run_id="another"), "offer is of run 'another', this member serves 'run'"),
    (
        stored_offer(url="s3://elsewhere"),
        "weights in 's3://elsewhere' are offered; the run's are in '/runs/run/weights'",
    ),
    (stored_offer(url=""), "weights in '' are offered"),
    (stored_offer(algorithm="md5"), "checksum algorithm 'md5'"),
    (stored_offer(name="../../etc/passwd"), "an object may not be called '../../etc/passwd'"),
    (stored_offer(name=""), "an object may not be called ''"),
    (stored_offer(size_bytes=2**64 - 1), "cannot have 18446744073709551615 bytes"),
]


@pytest.mark.parametrize(("offer", "why"), BAD_OFFERS)
async def test_a_bad_offer_is_answered_with_a_sentence(
    worker: Worker, offer: worker_pb2.WeightOffer, why: str
) -> None:
    worker.weights.offer(offer)
    ack = await worker.membership.next("weight_ack")
    assert (ack.ok, ack.member_id, ack.version) == (False, "m", offer.version)
    assert why in ack.message
    assert len(ack.message) < 500
    worker.engine.go_on.set()
    worker.publish()  # a valid offer is taken as before
    assert (await worker.membership.next("weight_ack")).ok
