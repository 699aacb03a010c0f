"""The services under test and their ports: those of a cluster, and beside it the page, a model server and a host's agent."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
from chaos_setting import exchange_address
from floods import Port

from paceline.services.local.cluster import LocalCluster
from paceline.spec import ClusterSection
from paceline.v1 import common_pb2

ROLES = ("coordinator", "rollout", "reward", "environment", "learner", "dashboard")
ROLE_NAMES = {
    common_pb2.ROLE_ROLLOUT: "rollout",
    common_pb2.ROLE_REWARD: "reward",
    common_pb2.ROLE_ENVIRONMENT: "environment",
    common_pb2.ROLE_LEARNER: "learner",
}
STARTS_S = 120.0
METRICS = re.compile(r"metrics at http://(\S+?)/metrics")
AGENT = re.compile(r"relay \S+ listens at .* and on (\S+)")
UNFORESEEN = re.compile(r"unexpected \w+ in .+?(?= \(and|$)", re.MULTILINE)
OPTIONS = {
    "coordinator": ["--metrics-port", "0", "--min-free-mb", "16"],
    "rollout": ["--metrics-port", "0"],
    "reward": ["--metrics-port", "0"],
}


class Deployment:
    """A cluster with all that may listen beside it."""

    def __init__(self, directory: Path, model: Path, sizes: ClusterSection, say: Any):
        self._directory, self._model = directory, model
        self.cluster = LocalCluster(directory / "runs", sizes, say=say, options=OPTIONS)
        self._beside: dict[str, subprocess.Popen[bytes]] = {}
        self._page: Path | None = None

    def __enter__(self) -> Deployment:
        self.cluster.__enter__()
        try:
            self._page = self.cluster.start_dashboard(0)
            model = ["serve", "model", str(self._model), "--port", "0", "--device", "cpu", "--name", "policy"]
            ready = ["--ready-file", str(self._directory / "model.address")]
            self._start("model server", "-c", "from paceline.services.cli.main import main; main()", *model, *ready)
            agent = ["--coordinator", self.cluster.address, "--socket", f"@fuzz-{id(self)}-{time.time_ns()}"]
            self._start("host agent", "-m", "paceline.services.host_agent.main", *agent, "--stay")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._beside.values():
            process.terminate()
        for process in self._beside.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.cluster.stop()

    def ports(self, members: Mapping[str, Any]) -> list[Port]:
        """Return the ports, once all are there; `members` are those of the coordinator."""
        cluster = self.cluster
        assert self._page is not None
        found = [
            Port("coordinator", "grpc", cluster.address),
            Port("coordinator", "exchange", exchange_address(cluster)),
            Port("dashboard", "page", _content(self._page), "/openapi.json"),
            Port(
                "model server",
                "endpoint",
                _content(self._directory / "model.address").removeprefix("http://").removesuffix("/v1"),
                "/v1/models",
            ),
            Port("host agent", "agent", _said(self._log("host agent"), AGENT)),
        ]
        for member in members.values():
            if member.address:
                found.append(Port(ROLE_NAMES[member.role], "grpc", member.address))
            if member.http_address:
                found.append(Port("rollout", "endpoint", member.http_address, "/v1/models"))
        for role in ("coordinator", "rollout", "reward"):
            for index in cluster.pids(role):
                address = _said(cluster.log_path(role, index), METRICS)
                found.append(Port(role, "metrics", address, "/metrics"))
        return found

    def resident_mb(self) -> dict[str, float]:
        """Return the resident memory of each service with its children."""
        pids = {f"{role}-{index}": pid for role in ROLES for index, pid in self.cluster.pids(role).items()} | {
            name: process.pid for name, process in self._beside.items()
        }
        sizes = {}
        for name, pid in pids.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                sizes[name] = sum(each.memory_info().rss for each in _family(pid)) / 2**20
        return sizes

    def deaths(self) -> list[str]:
        """Return the deaths of services, in words."""
        found = [
            death
            for role in ROLES
            for index in range(self.cluster.size(role))
            for death in self.cluster.deaths(role, index)
        ]
        return found + [
            f"{name} ended with {process.returncode}"
            for name, process in self._beside.items()
            if process.poll() is not None
        ]

    def unforeseen(self) -> list[str]:
        """Return the kinds of errors that nobody foresaw, by the services' logs."""
        logs = [*(self._directory / "runs" / "logs").glob("*.log"), *map(self._log, self._beside)]
        found = {f"{log.stem}: {kind}" for log in logs for kind in UNFORESEEN.findall(log.read_text(errors="replace"))}
        return sorted(found)

    def _start(self, name: str, *command: str) -> None:
        with self._log(name).open("wb") as log:
            self._beside[name] = subprocess.Popen(
                [sys.executable, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _log(self, name: str) -> Path:
        return self._directory / f"{name.replace(' ', '-')}.log"


def _family(pid: int) -> Iterator[psutil.Process]:
    process = psutil.Process(pid)
    yield process
    for child in process.children(recursive=True):
        if child.is_running():
            yield child


def _content(path: Path) -> str:
    """Return what a service writes when it listens."""
    return _waited(lambda: path.read_text().strip() if path.exists() else "", str(path))


def _said(log: Path, pattern: re.Pattern[str]) -> str:
    """Return what the newest line of a log that fits says."""
    return _waited(lambda: (pattern.findall(log.read_text(errors="replace")) or [""])[-1], str(log))


def _waited(look: Any, what: str) -> str:
    deadline_s = time.monotonic() + STARTS_S
    while not (found := look()):
        if time.monotonic() > deadline_s:
            raise AssertionError(f"nothing in {what} after {STARTS_S:g} s")
        time.sleep(0.1)
    return str(found)
