"""The exchange under load: a real coordinator process, simulated workers, no model.

    python benchmarks/exchange.py [--groups 10000] [--workers 20] [--tokens 1000] [--json]

Rollout workers lease and hand in groups of random tokens, a reward worker scores them, a learner of one rank takes
the batches and sends receipts, all over the real protocol. Printed: groups per second from lease to trained, payload,
the 99th percentile of a lease request that found work, and the coordinator's resident memory early and at the end:
it must not grow with the number of finished groups.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from paceline.client import Client
from paceline.groups import Completion, Group, VersionSpan
from paceline.spec import ClusterSection
from paceline.spec_io import parse_spec
from paceline.up import LocalCluster
from paceline.wire import PROTOCOL, encode_completions
from protos.paceline.v1 import common_pb2, worker_pb2
from protos.paceline.v1 import exchange_pb2 as pb
from services.member import Membership

COMPLETIONS = 4
GROUPS_PER_STEP = 50


class SimulatedWorker:
    """A member of one role that speaks the real protocol and computes nothing."""

    def __init__(self, coordinator: str, role: common_pb2.Role.ValueType, name: str):
        self.name = name
        self.role = role
        self.run_id = ""
        self.session = 0
        self.ready = asyncio.Event()
        self.membership = Membership(coordinator, self._hello, self._on_directive)

    def _hello(self) -> worker_pb2.Hello:
        return worker_pb2.Hello(
            role=self.role, member_id=self.name, protocol=PROTOCOL, run_id=self.run_id, session=self.session
        )

    async def _on_directive(self, directive: worker_pb2.ConnectResponse) -> None:
        if directive.WhichOneof("directive") != "run":
            return
        self.run_id, self.session = directive.run.run_id, directive.run.session
        report = worker_pb2.RunReport(run_id=self.run_id, session=self.session)
        await self.membership.report(worker_pb2.ConnectRequest(run_report=report))
        if self.role == common_pb2.ROLE_ROLLOUT:
            await self.acknowledge(0)
        self.ready.set()

    async def acknowledge(self, step: int) -> None:
        """Says that it holds version `step`."""
        ack = worker_pb2.WeightAck(run_id=self.run_id, member_id=self.name, ok=True)
        ack.version.session, ack.version.step = 1, step
        await self.membership.report(worker_pb2.ConnectRequest(weight_ack=ack))

    async def ask(self, **body: Any) -> tuple[pb.ExchangeReply, list[bytes]]:
        """One exchange request."""
        return await self.membership.request(
            pb.ExchangeRequest(run_id=self.run_id, session=self.session, **body)
        )


async def generate(worker: SimulatedWorker, version: list[int], tokens: int, lease_s: list[float]) -> None:
    """Leases and hands in random tokens, for ever."""
    random = np.random.default_rng(abs(hash(worker.name)))
    await worker.ready.wait()
    while True:
        started_s = time.perf_counter()
        reply, _ = await worker.ask(lease=pb.LeaseRequest(room=COMPLETIONS, wait_s=0.0))
        if not reply.lease.leases:
            await asyncio.sleep(0.02)
        for lease in reply.lease.leases:
            lease_s.append(time.perf_counter() - started_s)
            completions = [
                Completion(
                    random.integers(0, 50_000, tokens, dtype=np.int32),
                    random.normal(-1, 0.1, tokens).astype(np.float32),
                    (VersionSpan(1, version[0], 0, tokens),),
                    "stop",
                )
                for _ in range(COMPLETIONS)
            ]
            prompt_ids = np.arange(1, 20, dtype=np.int32)
            group = Group(lease.group_id, prompt_ids, tuple(completions))
            result = pb.GroupResult(
                group_id=lease.group_id,
                attempt=lease.attempt,
                texts=[""] * COMPLETIONS,
                finish_reasons=["stop"] * COMPLETIONS,
                digest=group.digest(),
            )
            request = pb.ExchangeRequest(run_id=worker.run_id, group=result)
            await worker.membership.request(request, [encode_completions(prompt_ids, completions)])


async def score(worker: SimulatedWorker) -> None:
    """Scores whatever comes, for ever."""
    await worker.ready.wait()
    while True:
        reply, _ = await worker.ask(task=pb.TaskRequest(room=64, wait_s=5.0))
        await asyncio.gather(
            *(
                worker.ask(
                    score=pb.ScoreResult(
                        group_id=task.group_id,
                        attempt=task.attempt,
                        digest=task.digest,
                        rewards=[0.0, 1.0] * (COMPLETIONS // 2),
                        functions=["exact_match"],
                    )
                )
                for task in reply.task.tasks
            )
        )


async def train(
    worker: SimulatedWorker, rollout: list[SimulatedWorker], version: list[int], steps: int, on_step: Any
) -> None:
    """Takes every batch, sends its receipt, and has the workers acknowledge the next version."""
    await worker.ready.wait()
    for step in range(steps):
        while True:
            asked = pb.BatchRequest(step=step, rank=0, world_size=1, wait_s=10.0)
            reply, _ = await worker.ask(batch=asked)
            if reply.batch.state == pb.BATCH_STATE_READY:
                break
        groups = [pb.BatchGroup(group_id=g.group_id, digest=g.digest) for g in reply.batch.groups]
        receipt = pb.Receipt(
            step=step, rank=0, world_size=1, groups=groups, tokens=len(groups) * COMPLETIONS * on_step.tokens
        )
        done, _ = await worker.ask(receipt=receipt)
        assert done.status == pb.REPLY_STATUS_COMMITTED, done.message
        version[0] = step + 1
        for member in rollout:
            await member.acknowledge(step + 1)
        on_step(step)


class Progress:
    """The coordinator's memory by step."""

    def __init__(self, pid: int, tokens: int):
        self.tokens = tokens
        self.rss_mb: list[float] = []
        self._process = psutil.Process(pid)

    def __call__(self, step: int) -> None:
        self.rss_mb.append(self._process.memory_info().rss / 1e6)


async def load(address: str, pid: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs the whole load; returns the figures."""
    steps = arguments.groups // GROUPS_PER_STEP
    rollout = [
        SimulatedWorker(address, common_pb2.ROLE_ROLLOUT, f"rollout-{i}") for i in range(arguments.workers)
    ]
    reward = SimulatedWorker(address, common_pb2.ROLE_REWARD, "reward-0")
    learner = SimulatedWorker(address, common_pb2.ROLE_LEARNER, "learner-0")
    version, lease_s, progress = [0], [], Progress(pid, arguments.tokens)
    lasting: list[Coroutine[Any, Any, None]] = [w.membership.run() for w in (*rollout, reward, learner)]
    lasting += [generate(w, version, arguments.tokens, lease_s) for w in rollout] + [score(reward)]
    tasks = [asyncio.create_task(coroutine) for coroutine in lasting]
    try:
        await learner.ready.wait()
        started_s = time.perf_counter()
        await train(learner, rollout, version, steps, progress)
        seconds = time.perf_counter() - started_s
    finally:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
    groups = steps * GROUPS_PER_STEP
    early = len(progress.rss_mb) // 10
    return {
        "groups": groups,
        "groups_per_s": groups / seconds,
        "payload_mb_per_s": groups * COMPLETIONS * arguments.tokens * 8 / 1e6 / seconds,
        "lease_p99_ms": float(np.percentile(lease_s, 99)) * 1e3,
        "rss_mb_early": progress.rss_mb[early],
        "rss_mb_end": progress.rss_mb[-1],
    }


def main() -> None:
    """Starts a coordinator, loads it, prints the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=1000, help="tokens of one completion")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "train.jsonl"
        data.write_text("".join(json.dumps({"prompt": str(i), "answer": str(i)}) + "\n" for i in range(1000)))
        spec = parse_spec(
            {
                "policy": {"model_name": "none", "max_total_sequence_length": 100_000},
                "data": {"train": str(data)},
                "grpo": {
                    "num_prompts_per_step": GROUPS_PER_STEP,
                    "num_generations_per_prompt": COMPLETIONS,
                    "max_num_steps": arguments.groups // GROUPS_PER_STEP,
                },
                "async_grpo": {"max_trajectory_age_steps": 4},
                "rewards": [{"function": "exact_match"}],
                "logger": {"tensorboard": False},
            }
        )
        cluster = LocalCluster(Path(folder) / "runs", ClusterSection())
        try:
            address = cluster.start_coordinator()
            with Client(address) as client:
                client.submit(spec)
            figures = asyncio.run(load(address, cluster.pids("coordinator")[0], arguments))
        finally:
            cluster.stop()
    if arguments.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:>18} {value:12.1f}")


if __name__ == "__main__":
    main()
