"""A deployment on hosts that share nothing but a network, and the person who submits to it from a host of their own.

Every service runs on its own host and is started by the documented command. Beside them are an S3 server and a client, whose
disk alone has examples/arithmetic. The starting model is in the store.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isolated_host import ROOT, Host, Switch

TOKEN = "a-token-that-an-operator-copies"
MINE = "/tmp/mine"
"""The submitter's folder, on its own disk."""
BUCKET = "s3://bucket"
DEADLINE_S = 420.0


@dataclass
class Deployment:
    """The hosts by what runs on them."""

    switch: Switch
    logs: Path

    def __post_init__(self) -> None:
        self.store = self.host("store")
        self.coordinator = self.host("coordinator")
        self.client = self.host("client")
        self.address = f"{self.coordinator.address}:7070"
        self.access = ("--coordinator", self.address, "--insecure")
        """Options of a person's commands."""

    def start(self) -> None:
        """Start every service as the documents say."""
        self.store.start("python", "-m", "moto.server", "-H", self.store.address, "-p", "5000")
        self.start_coordinator(self.coordinator)
        for number in range(2):
            self.serve(self.host(f"rollout-{number}"), "rollout")
        self.serve(self.host("reward"), "reward")
        self.learner = self.host("learner-0")
        for node_rank, host in enumerate((self.learner, self.host("learner-1"))):
            self.start_node(host, node_rank)

    def start_coordinator(self, host: Host) -> None:
        """Start the coordinator on its host."""
        listen = ("--insecure", "--host", host.address, "--exchange-port", "7071")
        directories = ("--directory", "/tmp/ledger", "--store", f"{BUCKET}/runs")
        host.start("paceline", "serve", "coordinator", *listen, *directories)

    def start_node(self, host: Host, node_rank: int) -> None:
        """Start a node of the learner; the last one started is `self.node`."""
        rendezvous = f"{self.learner.address}:29400"
        self.serve(host, "learner", "--nodes", "2", "--node-rank", str(node_rank), "--rendezvous", rendezvous)
        self.node = host

    def replace_node(self) -> None:
        """End node 1 as a loss of power does, and start it on a new host."""
        self.node.end()
        self.start_node(self.host("learner-1-again"), 1)

    def serve(self, host: Host, role: str, *options: str) -> None:
        """Start a worker's service on a host."""
        host.start(
            "paceline",
            "serve",
            role,
            "--coordinator",
            self.address,
            "--insecure",
            "--host",
            host.address,
            *options,
        )

    def host(self, name: str) -> Host:
        """Return a new host, which knows the token and the store."""
        host = self.switch.host(name, self.logs)
        host.write("/tmp/token", TOKEN)
        store = host if name == "store" else self.store
        host.variables |= {
            "PACELINE_TOKEN_FILE": "/tmp/token",
            "AWS_ENDPOINT_URL": f"http://{store.address}:5000",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "NO_PROXY": "*",
        }
        return host


class Submitter:
    """A person at the client's host, whose commands have the options `access`."""

    def __init__(self, client: Host, access: Sequence[str]):
        self.host, self._access = client, access

    def prepare(self) -> None:
        """Put the example on this disk, and its model into the store."""
        for name in ("prepare.py", "reward.py", "sft.yaml", "grpo.yaml"):
            self.host.write(f"{MINE}/{name}", (ROOT / "examples" / "arithmetic" / name).read_text())
        self.host.run("sh", "-c", f"cd {MINE} && python prepare.py", timeout_s=DEADLINE_S)
        until(
            lambda: self.host.run("python", "-c", MAKE_BUCKET, check=False).returncode == 0,
            "the store answers",
        )
        self.host.run("python", "-c", UPLOAD, f"{MINE}/model", f"{BUCKET}/model", timeout_s=DEADLINE_S)
        self.host.run("rm", "-r", f"{MINE}/model")

    def submit(self, spec: str, *overrides: str) -> str:
        """Submit a spec of this disk, whose other files travel with it; return the run's id."""
        self.until_answered()
        status, said = self.paceline("submit", f"{MINE}/{spec}", *overrides, "--json")
        if status:
            raise RuntimeError(said)
        return str(json.loads(said.splitlines()[-1])["run_id"])

    def run(self, run_id: str) -> dict[str, Any]:
        """Return what `paceline runs` says of a run."""
        status, said = self.paceline("runs", "--json", check=False)
        lines = [json.loads(line) for line in said.splitlines()] if status == 0 else []
        found = [line for line in lines if line["run_id"] == run_id]
        return found[0] if found else {"step": -1, "state": "queued"}

    def reach_step(self, run_id: str, step: int) -> None:
        """Follow a run until `step` steps were trained. Raises CalledProcessError if it ends before, TimeoutExpired."""
        watch = shlex.join(("paceline", "watch", run_id, "--json", *self._access))
        until_step = shlex.join(("python", "-c", UNTIL_STEP, str(step)))
        self.host.run("sh", "-c", f"{watch} | {until_step}", timeout_s=DEADLINE_S)

    def wait(self, run_id: str) -> dict[str, Any]:
        """Follow a run until it has ended, in whatever way, and return it. Raises TimeoutExpired."""
        self.paceline("watch", run_id, "--quiet", check=False)
        return self.run(run_id)

    def until_answered(self) -> None:
        """Wait for the coordinator."""
        until(lambda: self.paceline("members", check=False)[0] == 0, "the coordinator answers")

    def paceline(self, *arguments: str, check: bool = True) -> tuple[int, str]:
        """Run a command that asks the coordinator; return its status and output."""
        command = ("paceline", *arguments, *self._access)
        done = self.host.run(*command, timeout_s=DEADLINE_S, check=False)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
        return done.returncode, done.stdout


MAKE_BUCKET = "import s3fs; s3fs.S3FileSystem().makedirs('bucket', exist_ok=True)"
UNTIL_STEP = """
import json, sys
events = map(json.loads, sys.stdin)
next(event for event in events if event["kind"] == "step" and event["content"]["step"] + 1 >= int(sys.argv[1]))
"""
UPLOAD = (
    "import sys, fsspec.generic, s3fs; s3fs.S3FileSystem().put(sys.argv[1] + '/', sys.argv[2] + '/', recursive=True)"
)


def until(condition: Any, what: str, timeout_s: float = DEADLINE_S) -> None:
    """Wait until something holds. Raises TimeoutError."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{what}: not after {timeout_s:g} s")
        time.sleep(1.0)
