"""A run with hostile reward code on isolated workers: it finds nothing, speaks for nobody, and no planted secret is in anything that the
run and the commands leave."""

from __future__ import annotations

import base64
import json
import os
import re
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import prying
import psutil
import pytest
from service_processes import PACELINE

from paceline.client import Client, state_name
from paceline.encryption.storage_key import KEY_VARIABLE, storage_key
from paceline.files.line_file import LineReader
from paceline.services.local.cluster import ROLES, LocalCluster
from paceline.spec import ClusterSection, RunSpec
from paceline.user_code.box import why_no_isolation
from paceline.user_code.surroundings import VARIABLE
from paceline.v1.common_pb2 import ROLE_REWARD

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_no_isolation()), reason=why_no_isolation())]

PLANTED = (
    "PACELINE_WEBHOOK_SECRET",
    "HF_TOKEN",
    "AWS_SECRET_ACCESS_KEY",
    "JUDGE_API_KEY",
    "WANDB_API_KEY",
    "MLFLOW_TRACKING_TOKEN",
    "PACELINE_SANDBOX_TOKEN",
)
SCRAPED = ("coordinator", "rollout", "reward", "learner")
COMMANDS = (
    ("status",),
    ("status", "--json"),
    ("runs", "--json"),
    ("members", "--json"),
    ("metrics", "RUN"),
    ("samples", "RUN", "--json"),
    ("watch", "RUN", "--json"),
    ("plan", "no-such-file.yaml"),
    ("report", "RUN"),
    ("doctor",),
    ("token", "list"),
    ("submit", "no-such-file.yaml"),
    ("cancel", "no-such-run"),
)


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Secrets in the environment of every process, by what they are."""
    planted = {name: f"canary-{index:02}-{os.urandom(6).hex()}" for index, name in enumerate(PLANTED)}
    planted[KEY_VARIABLE] = os.urandom(32).hex()
    for name, value in planted.items():
        monkeypatch.setenv(name, value)
    planted["the webhook's address"] = f"canary-url-{os.urandom(6).hex()}"
    monkeypatch.setenv("ALERT_URL", "http://127.0.0.1:9/hooks/" + planted["the webhook's address"])
    return planted


@pytest.fixture
def isolated(tmp_path: Path, secrets: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    """A cluster whose workers isolate user code; `LocalCluster` would keep the token's variable."""
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.setenv("PACELINE_TOKEN_FILE", str(tmp_path / "runs" / "token"))
    monkeypatch.setenv("PACELINE_BUNDLE_CACHE", str(tmp_path / "cache" / "bundles"))
    with LocalCluster(
        tmp_path / "runs",
        ClusterSection(rollout_workers=1, reward_workers=1, learner_ranks=1),
        options={role: ["--metrics-port", "0"] for role in SCRAPED},
    ) as cluster:
        cluster.start_trackers()
        yield cluster


def test_no_secret_gets_out(
    isolated: LocalCluster, secrets: dict[str, str], make_spec: Callable[..., RunSpec], tmp_path: Path
) -> None:
    code = tmp_path / "mine" / "hostile.py"
    code.parent.mkdir()
    code.write_text(Path(prying.__file__).read_text())
    other = tmp_path / "cache" / "bundles" / "other" / "f.py"
    other.parent.mkdir(parents=True)
    other.write_text(secrets["HF_TOKEN"])
    token = (tmp_path / "runs" / "token").read_text().strip()
    with socket.socket(socket.AF_UNIX) as agent, Client(isolated.address) as client:
        agent.bind(f"\0paceline-test-{os.getpid()}")
        agent.listen()
        aims = {
            "canary": "",  # every file that can be read counts
            "pid": isolated.pids("coordinator")[0],
            "abstract": f"paceline-test-{os.getpid()}",
            "files": {
                "the token": str(tmp_path / "runs/token"),
                "the ledger": str(tmp_path / "runs/ledger.sqlite"),
                "a bundle": str(other),
            },
            "coordinator": isolated.address,
            "exchange": exchange_of(isolated),
            "member": reward_worker(client),
        }
        spec = make_spec(
            rewards=[{"function": f"{code}:pry", "kwargs": {"aims": aims}, "timeout_s": 120}],
            grpo={"max_num_steps": 2},
            logger={"webhooks": [{"url_variable": "ALERT_URL"}]},
        )
        run = client.submit(spec)
        ended = client.wait(run.run_id, timeout_s=240)
        scraped = {role: metrics_of(isolated, role) for role in SCRAPED}
        lines = [" ".join(process.cmdline()) for process in processes(isolated)]
        limits = [process.rlimit(psutil.RLIMIT_CORE)[0] for process in processes(isolated)]
    assert (state_name(ended), ended.step) == ("succeeded", 2), ended.message
    with LineReader(tmp_path / "runs" / run.run_id / "extra.jsonl", storage_key()) as lines_of_extra:
        columns = [json.loads(line)["extra"] for _, _, line in lines_of_extra]
    found = {name: {text for row in columns for text in row[name]} for name in ("found", "hello", "request")}
    assert found["found"] == {"own environment"}  # an empty canary is in every text: there is an environment
    assert found["hello"] == {"UNAUTHENTICATED"}
    assert {text.split(" ")[0] for text in found["request"]} == {"REPLY_STATUS_INVALID"}
    assert set(limits) == {0}

    assert all(b"process_resident_memory_bytes" in text for text in scraped.values())
    assert run.run_id.encode() in scraped["coordinator"]
    left = {"command lines": "\n".join(lines).encode()}
    left.update({f"metrics of the {role}": text for role, text in scraped.items()})
    for command in (
        *COMMANDS,
        ("certs", "init", str(tmp_path / "ca")),
        ("certs", "show", str(tmp_path / "ca")),
    ):
        arguments = [run.run_id if word == "RUN" else word for word in command]
        done = subprocess.run(
            [*PACELINE, *arguments],
            capture_output=True,
            timeout=120,
            cwd=tmp_path,
            env=os.environ | {"PACELINE_COORDINATOR": isolated.address},
        )
        left[" ".join(command)] = done.stdout + done.stderr
    isolated.stop()
    holders = {tmp_path / "runs" / "token", other, *(tmp_path / "ca").rglob("*.key")}
    for path in tmp_path.rglob("*"):
        if path.is_file() and path not in holders:
            left[str(path)] = path.read_bytes()
    key = next((tmp_path / "ca").rglob("*.key")).read_text().splitlines()[1]
    wanted = {**secrets, "the token": token, "a private key": key}
    assert len(left) > 30
    leaks = [(what, where) for what, value in wanted.items() for where, data in left.items() if holds(data, value)]
    assert not leaks
    assert holds(other.read_bytes(), secrets["HF_TOKEN"])


def reward_worker(client: Client) -> str:
    """Return the id of the reward worker, once it has joined."""
    deadline_s = time.monotonic() + 60
    while not (found := [each.member_id for each in client.members() if each.role == ROLE_REWARD]):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    return str(found[0])


def exchange_of(cluster: LocalCluster) -> str:
    """Return the exchange's endpoint."""
    return logged(cluster, "coordinator", r"exchange on (tcp://[\d.:]+)")


def metrics_of(cluster: LocalCluster, role: str) -> bytes:
    """Return all that the one process of a role tells Prometheus."""
    with urllib.request.urlopen(logged(cluster, role, r"metrics at (http://\S+)"), timeout=60) as answer:
        text: bytes = answer.read()
    return text


def logged(cluster: LocalCluster, role: str, pattern: str) -> str:
    """Return the group of a pattern that is in the log of the one process of a role by now."""
    (index,) = cluster.pids(role)
    log = cluster.log_path(role, index).read_text()
    found = re.search(pattern, log)
    assert found, log
    return found[1]


def processes(cluster: LocalCluster) -> list[psutil.Process]:
    """Every process of the cluster, whatever started it."""
    services = [psutil.Process(pid) for role in ROLES for pid in cluster.pids(role).values()]
    return [process for one in services for process in (one, *one.children(recursive=True))]


def holds(data: bytes, secret: str) -> bool:
    """Return whether a secret is in some bytes, plain or in base64."""
    text = secret.encode()
    return text in data or base64.b64encode(text)[:-4] in data
