"""The publisher against members in separate processes, which stop and die in the middle of a version."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from python_path import python_path

from learner.weights.publisher import Publisher, PublishResult
from paceline.groups import Version
from paceline.weights.offers import LinkOffer

MEMBER = Path(__file__).parents[2] / "support" / "processes" / "link_member.py"
ROOT = MEMBER.parents[3]
DEADLINE_S = 120.0
MIB = 1 << 20
MAX_WAIT_S = 3.0


class Member:
    """A member's process, the pipe to it, and what it said."""

    def __init__(self, member_id: str, fault: str, fault_bytes: int) -> None:
        self.member_id = member_id
        self.weights: queue.Queue[dict[str, Any]] = queue.Queue()
        self.ready = threading.Event()
        self.process = subprocess.Popen(
            [sys.executable, str(MEMBER), str(MAX_WAIT_S), fault, str(fault_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(ROOT)},
            text=True,
        )

    def offer(self, offer: LinkOffer) -> None:
        document = dataclasses.asdict(offer) | {"manifest": base64.b64encode(offer.manifest).decode()}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(document) + "\n")
        self.process.stdin.flush()

    def read(self, acknowledge: Callable[[str, Version, bool, str], None]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = json.loads(line)
            if event["event"] == "ready":
                self.ready.set()
            elif event["event"] == "weights":
                self.weights.put(event)
            else:
                acknowledge(self.member_id, Version(*event["version"]), event["ok"], event["message"])

    def end(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # an offer that the dead member never read
            self.process.stdin.close()
        self.process.stdout.close()


class Fleet:
    """A publisher, its members, and the results it reported, by member."""

    def __init__(self, backend: str = "gloo") -> None:
        self.members: dict[str, Member] = {}
        self.results: dict[str, queue.Queue[PublishResult]] = {}
        self.readers: list[threading.Thread] = []
        self.publisher = Publisher(
            run_id="run",
            send_offer=lambda offer: self.members[offer.member_id].offer(offer),
            on_result=lambda result: self.results[result.member_id].put(result),
            bucket_bytes=MIB,
            max_wait_s=MAX_WAIT_S,
            backend=backend,
        )

    def add(self, *members: tuple[str, str, int]) -> list[Member]:
        added = [Member(*member) for member in members]
        for member in added:
            self.members[member.member_id] = member
            self.results[member.member_id] = queue.Queue()
            reader = threading.Thread(target=member.read, args=(self.publisher.acknowledge,))
            reader.start()
            self.readers.append(reader)
        for member in added:
            assert member.ready.wait(DEADLINE_S), f"{member.member_id} did not start"
        return added

    def result(self, member: Member, ok: bool | None = None) -> PublishResult:
        while True:
            result = self.results[member.member_id].get(timeout=DEADLINE_S)
            if ok is None or result.ok == ok:
                return result

    def end(self) -> None:
        self.publisher.close()
        for member in self.members.values():
            member.end()
        for reader in self.readers:
            reader.join(DEADLINE_S)


@pytest.fixture
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    fleet = Fleet(getattr(request, "param", "gloo"))
    yield fleet
    fleet.end()


def fingerprint(tensor: torch.Tensor) -> list[object]:
    raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return [str(tensor.dtype), list(tensor.shape), hashlib.sha256(raw).hexdigest()]


def weights(size_bytes: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(size_bytes // 512, 128, generator=generator)
    return {
        "embed.weight": embedding,
        "layer.weight": torch.randn(37, 11, generator=generator).bfloat16(),
        "none.weight": torch.empty(0, 5),
        "scale": torch.tensor(1.5),
        "count": torch.arange(7),
        "head.weight": embedding,
    }


def expected(tensors: dict[str, torch.Tensor]) -> dict[str, list[object]]:
    return {name: fingerprint(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize("fleet", ["gloo", "shared"], indirect=True)
def test_two_members_get_every_byte_and_keep_their_links(fleet: Fleet) -> None:
    members = fleet.add(("a", "none", 0), ("b", "none", 0))
    fleet.publisher.set_members(1, ["a", "b"])
    for step in (1, 2):
        tensors = weights(4 * MIB, seed=step)
        fleet.publisher.stage(Version(0, step), tensors)
        for member in members:
            result = fleet.result(member)
            assert (result.ok, result.error, result.version, result.attempt) == (True, "", (0, step), 1)
            assert result.size_bytes > 4 * MIB
            assert (result.form_s > 0) == (step == 1)
            arrived = member.weights.get(timeout=DEADLINE_S)
            assert arrived["version"] == [0, step]
            assert arrived["tensors"] == expected(tensors)
    assert fleet.publisher.acknowledged() == {"a": (0, 2), "b": (0, 2)}


def test_a_member_stopped_in_the_middle_holds_up_nobody_and_catches_up(fleet: Fleet) -> None:
    healthy, stopped = fleet.add(("a", "none", 0), ("b", "stop", 8 * MIB))
    fleet.publisher.set_members(1, ["a", "b"])
    oldest = weights(32 * MIB)
    fleet.publisher.stage(Version(0, 1), oldest)
    os.waitid(os.P_PID, stopped.process.pid, os.WSTOPPED | os.WNOWAIT)

    newest = weights(32 * MIB, seed=2)
    fleet.publisher.stage(Version(0, 2), newest)
    assert [fleet.result(healthy).version, fleet.result(healthy).version] == [(0, 1), (0, 2)]
    failure = fleet.result(stopped)
    assert (failure.ok, failure.version, failure.attempt) == (False, (0, 1), 1)
    assert failure.error.startswith("transfer: ")
    assert stopped.weights.empty()

    os.kill(stopped.process.pid, signal.SIGCONT)
    held = [fleet.result(stopped, ok=True)]
    if held[0].version == (0, 1):  # the rest of it was still under way and arrived whole: a late yes counts
        held.append(fleet.result(stopped, ok=True))
        assert stopped.weights.get(timeout=DEADLINE_S)["tensors"] == expected(oldest)
    assert held[-1].version == (0, 2)
    assert held[-1].attempt > 1
    assert stopped.weights.get(timeout=DEADLINE_S)["tensors"] == expected(newest)
    assert stopped.weights.empty()


def test_a_member_killed_in_the_middle_is_reported_and_a_joiner_gets_the_newest(fleet: Fleet) -> None:
    healthy, killed = fleet.add(("a", "none", 0), ("b", "kill", 8 * MIB))
    fleet.publisher.set_members(1, ["a", "b"])
    fleet.publisher.stage(Version(0, 1), weights(32 * MIB))
    assert killed.process.wait(DEADLINE_S) == -signal.SIGKILL
    failure = fleet.result(killed)
    assert (failure.ok, failure.version) == (False, (0, 1))
    assert failure.error

    newest = weights(32 * MIB, seed=2)
    fleet.publisher.set_members(2, ["a"])
    fleet.publisher.stage(Version(0, 2), newest)
    assert [fleet.result(healthy).version, fleet.result(healthy).version] == [(0, 1), (0, 2)]

    (joiner,) = fleet.add(("c", "none", 0))
    fleet.publisher.set_members(3, ["a", "c"])
    joined = fleet.result(joiner)
    assert (joined.ok, joined.version, joined.epoch) == (True, (0, 2), 3)
    assert joiner.weights.get(timeout=DEADLINE_S)["tensors"] == expected(newest)
    assert fleet.publisher.acknowledged() == {"a": (0, 2), "c": (0, 2)}


STUCK = """
import threading
from learner.weights.publisher import Publisher
from paceline.groups import Version
import torch
offered = threading.Event()
publisher = Publisher(run_id="run", send_offer=lambda offer: offered.set(), on_result=print,
                      bucket_bytes=1 << 20, max_wait_s=1200.0)
publisher.set_members(1, ["deaf"])
publisher.stage(Version(0, 1), {"weight": torch.zeros(3)})
assert offered.wait(30.0)
publisher.close()
"""


def test_a_process_ends_cleanly_although_a_member_never_came() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", STUCK],
        timeout=DEADLINE_S,  # far below the 1200 s that the link would wait
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr.decode()
