"""`/metrics` of a coordinator's process, and the bounds of its port."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from aiohttp import ClientSession

from paceline.errors import Conflict
from paceline.services.common.access.callers import WorkerCallers
from paceline.services.common.serving.scrape import MAX_CONNECTIONS, metrics_endpoint

ROOT = Path(__file__).resolve().parents[4]
STARTS_S = 60.0


async def test_nothing_listens_without_a_port() -> None:
    async with metrics_endpoint("127.0.0.1", None, WorkerCallers("")) as port:
        assert port is None


async def test_the_text_format_is_served_and_connections_are_bounded() -> None:
    async with metrics_endpoint("127.0.0.1", 0, WorkerCallers("")) as port, ClientSession() as client:
        assert port is not None
        async with client.get(f"http://127.0.0.1:{port}/metrics") as answer:
            assert answer.status == 200
            assert answer.content_type == "text/plain"
            assert "python_info" in await answer.text()
        async with client.get(f"http://127.0.0.1:{port}/ledger") as answer:
            assert answer.status == 404
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MAX_CONNECTIONS + 1)]
        assert b"Retry-After: 1\r\n" in await held[-1][0].read()  # refused and closed at once
        for _, writer in held:
            writer.close()


async def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(Conflict, match="choose another --metrics-port"):
            async with metrics_endpoint("127.0.0.1", other.getsockname()[1], WorkerCallers("")):
                pass


def test_a_coordinator_tells_its_state(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [
        sys.executable,
        "-m",
        "paceline.services.coordinator.main",
        "--directory",
        str(tmp_path / "runs"),
    ]
    with log.open("w") as out:
        process = subprocess.Popen([*command, "--port", "0", "--metrics-port", "0"], cwd=ROOT, stderr=out, stdout=out)
    try:
        deadline_s = time.monotonic() + STARTS_S
        while "metrics at " not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        url = log.read_text().split("metrics at ")[1].split()[0]
        while True:
            with urllib.request.urlopen(url, timeout=10) as answer:
                text = answer.read().decode()
            if 'paceline_coordinator_members{pool="rollout"} 0.0' in text:
                break
            assert time.monotonic() < deadline_s, text
            time.sleep(0.1)
        assert 'paceline_coordinator_runs{state="failed"} 0.0' in text
        assert "paceline_coordinator_disk_free_bytes" in text
    finally:
        process.terminate()
        assert process.wait(STARTS_S) == 0
