"""The limit of open files, and a coordinator that reaches it."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from control_plane import Plane, rollout

from paceline.services.common.processes.starting import Capacity, raise_file_limit
from paceline.services.common.serving.grpc_server import GrpcServer

DEADLINE_S = 60.0

RAISE = (
    "import logging, resource, sys; logging.basicConfig(level=logging.INFO)\n"
    "from paceline.services.common.processes.starting import raise_file_limit\n"
    "print(raise_file_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))"
)


def test_the_soft_limit_becomes_the_hard_one_and_both_are_said() -> None:
    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512))

    root = Path(__file__).parents[4]
    ended = subprocess.run(
        [sys.executable, "-c", RAISE], preexec_fn=lower, capture_output=True, text=True, cwd=root, check=True
    )
    assert ended.stdout.split() == ["512", "512", "512"]
    assert "limit of open files: 512 (soft limit at start: 64)" in ended.stderr


def test_a_limit_that_is_as_high_as_it_gets_stays() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        assert raise_file_limit() == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_members_are_bounded_below_the_limit_and_it_is_said_before(caplog: pytest.LogCaptureFixture) -> None:
    capacity = Capacity(1024)
    assert capacity.max_members == 432
    assert 2 * capacity.max_members + 64 < 1024
    with caplog.at_level(logging.WARNING):
        assert capacity.refusal(100) == ""
        assert not caplog.records
        assert [capacity.refusal(members) for members in range(388, 432)] == [""] * 44
    assert [record.getMessage() for record in caplog.records] == [
        "389 members: this coordinator can serve about 432 members with its limit of 1024 open files; raise ulimit -n"
    ]
    assert "can serve about 432 members" in capacity.refusal(432)


def test_a_second_port_has_its_share_of_the_files() -> None:
    capacity = Capacity(1024, has_people_port=True)
    assert capacity.max_members == 266
    assert 2 * capacity.max_connections + capacity.max_members < 1024


async def test_a_worker_too_many_is_refused_with_the_remedy_and_the_others_stay(tmp_path: Path) -> None:
    plane = await Plane.started(tmp_path, capacity=Capacity(164))  # room for two
    first, second = rollout(plane, "rollout-1"), rollout(plane, "rollout-2")
    await first.hear("welcome")
    await second.hear("welcome")
    third = rollout(plane, "rollout-3")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await third.hear("welcome")
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "can serve about 2 members with its limit of 164 open files; raise ulimit -n" in (
        caught.value.details() or ""
    )
    first.hang_up()
    await first.hear_the_end()
    again = rollout(plane, "rollout-1")  # a member that returns needs no additional capacity
    await again.hear("welcome")
    await plane.stop()


async def test_housekeeping_without_a_free_file_is_a_warning_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plane = await Plane.started(tmp_path)
    looked, calls = asyncio.Event(), 0

    def check(now_s: float) -> list[str]:
        nonlocal calls
        calls += 1
        if calls > 1:
            looked.set()
            return []
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(plane.coordinator.duties._observers.watchdog, "check", check)
    plane.run_loops()
    async with asyncio.timeout(DEADLINE_S):
        await looked.wait()
    assert "Too many open files" in caplog.text
    await plane.stop()


async def test_connections_beyond_the_bound_are_closed_at_once(tmp_path: Path) -> None:
    """Connections without requests must not use up the files that the ledger needs."""
    server = GrpcServer("127.0.0.1", 0, max_connections=2)
    async with server:
        streams = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(4)]
        async with asyncio.timeout(DEADLINE_S):
            greeted = [await reader.read(1) for reader, _ in streams]
        for _, writer in streams:
            writer.close()
    assert sorted(greeted) == [b"", b"", b"\x00", b"\x00"]
