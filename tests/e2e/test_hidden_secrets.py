"""Hostile user code on real reward and environment workers beyond loopback, which no option isolates: it finds no secret and joins nothing,
while honest code beside it has temporary files, its working directory and its bundle's data."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import prying
import psutil
import pytest

from paceline.client import Client, state_name
from paceline.encryption.storage_key import FILE_VARIABLE, KEY_VARIABLE
from paceline.services.common.access.insecure import VARIABLE as INSECURE_VARIABLE
from paceline.services.local.cluster import LocalCluster
from paceline.spec import ClusterSection
from paceline.spec.reading import parse_spec
from paceline.tls.authority import issue, make_authority
from paceline.tls.folder import VARIABLE as TLS_VARIABLE
from paceline.user_code.box import why_no_isolation
from paceline.user_code.surroundings import VARIABLE

CANARY = f"canary-{os.urandom(6).hex()}"
RUN_TIMEOUT_S = 300.0
ADDRESSES = [
    each.address
    for addresses in psutil.net_if_addrs().values()
    for each in addresses
    if each.family is socket.AF_INET and not each.address.startswith("127.")
]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.merge,
    pytest.mark.skipif(bool(why_no_isolation()), reason=why_no_isolation()),
    pytest.mark.skipif(not ADDRESSES, reason="this host has no address beyond loopback"),
]
HOSTILE = '''

import json
import pathlib
import tempfile
import threading

ONE_AT_A_TIME = threading.Lock()  # episodes share a process, and the descriptors of one would be strange to another
AIMS = json.loads(pathlib.Path(__file__).with_name("aims.json").read_text())


def environments():
    """Return the processes in whose environment the canary is."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if AIMS["planted"] in read(f"/proc/{pid}/environ"):
                found.append(pid)
    return found


def use_files(who):
    """Work as honest code does."""
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "scratch").write_text("1")
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("2")
    pathlib.Path("results", f"{who}.txt").write_text("3")
    pathlib.Path(f"{who}.txt").write_text("4")


def report(who):
    path = pathlib.Path("results", f"{who}.json")
    with ONE_AT_A_TIME:
        if not path.exists():
            use_files(who)
            tried = {"found": attempts(AIMS), "environments": environments()}
            tried["hello"] = answer_to_hello(AIMS["coordinator"])
            path.with_suffix(".part").write_text(json.dumps(tried))
            path.with_suffix(".part").rename(path)


def reward(completions, **columns):
    report("reward")
    return [sum(c.isalpha() for c in str(text)) / 10 for text in completions]


class Game:
    def reset(self, number, **_):
        report("environment")
        self.letters = 0

    def step(self, text):
        self.letters += sum(c.isalpha() for c in text)
        return "done", None, True

    def get_reward(self):
        return self.letters / 10
'''


@pytest.fixture(params=["tls", "insecure"])
def beyond_loopback(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LocalCluster]:
    """A cluster at this host's address in the network, with secrets in files and in the environment of every process."""
    for name in (VARIABLE, KEY_VARIABLE, TLS_VARIABLE, INSECURE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    if request.param == "tls":
        make_authority(tmp_path / "ca")
        shutil.copytree(issue(tmp_path / "ca", "up", "up", ADDRESSES), tmp_path / "tls")
        monkeypatch.setenv(TLS_VARIABLE, str(tmp_path / "tls"))
    else:
        monkeypatch.setenv(INSECURE_VARIABLE, "1")
    key = tmp_path / "keys" / "storage.key"
    key.parent.mkdir()
    key.touch(0o600)
    key.write_text(os.urandom(32).hex())
    monkeypatch.setenv(FILE_VARIABLE, str(key))
    monkeypatch.setenv("PACELINE_TOKEN_FILE", str(tmp_path / "runs" / "token"))
    monkeypatch.setenv("PACELINE_BUNDLE_CACHE", str(tmp_path / "cache" / "bundles"))
    monkeypatch.setenv("PACELINE_WEBHOOK_SECRET", CANARY)
    (tmp_path / "work" / "results").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    sizes = ClusterSection(rollout_workers=1, reward_workers=1, environment_workers=1, learner_ranks=1)
    with LocalCluster(tmp_path / "runs", sizes, host=ADDRESSES[0], max_deaths=3) as cluster:
        yield cluster


def test_user_code_finds_no_secret_beyond_loopback_by_default(
    beyond_loopback: LocalCluster, chat_model: Path, tmp_path: Path
) -> None:
    other = tmp_path / "cache" / "bundles" / "other" / "f.py"
    other.parent.mkdir(parents=True)
    other.write_text(CANARY)
    files = {
        "the token": tmp_path / "runs/token",
        "the ledger": tmp_path / "runs/ledger.sqlite",
        "the storage key": tmp_path / "keys/storage.key",
        "a bundle": other,
        "a key": tmp_path / "tls/tls.key",
    }
    with_tls = files["a key"].exists()
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "hostile.py").write_text(Path(prying.__file__).read_text().partition("if __name__")[0] + HOSTILE)
    rows = [{"prompt": [{"role": "user", "content": f"go {n}"}], "number": n} for n in range(8)]
    (mine / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with socket.socket(socket.AF_UNIX) as agent, Client(beyond_loopback.address) as client:
        agent.bind(f"\0paceline-test-{os.getpid()}")
        agent.listen()
        aims = {
            "canary": "",  # every file that can be read counts
            "planted": CANARY,
            "pid": beyond_loopback.pids("coordinator")[0],
            "abstract": f"paceline-test-{os.getpid()}",
            "files": {name: str(path) for name, path in files.items() if path.exists()},
            "coordinator": beyond_loopback.address,
        }
        (mine / "aims.json").write_text(json.dumps(aims))
        tree = {
            "name": "hostile",
            "policy": {
                "model_name": str(chat_model),
                "max_total_sequence_length": 128,
                "generation": {"max_new_tokens": 8},
            },
            "data": {"train": "train.jsonl"},
            "environment": {"class": "hostile.py:Game", "processes": 1},
            "rewards": [{"function": "hostile.py:reward", "timeout_s": 120}],
            "bundle": {"include": ["aims.json"]},
            "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "max_num_steps": 2},
            "logger": {"tensorboard": False},
        }
        ended = client.wait(client.submit(parse_spec(tree, base=mine)).run_id, timeout_s=RUN_TIMEOUT_S)
    assert (state_name(ended), ended.step) == ("succeeded", 2), ended.message
    for who in ("reward", "environment"):
        seen = json.loads((tmp_path / "work" / "results" / f"{who}.json").read_text())
        assert seen == {
            "found": ["own environment"],  # the empty canary is in every text: there is an environment
            "environments": [],
            "hello": "UNAVAILABLE" if with_tls else "UNAUTHENTICATED",
        }
        assert (tmp_path / "work" / f"{who}.txt").read_text() == "4"
        log = (tmp_path / "runs" / "logs" / f"{who}-0.log").read_text()
        assert "secrets are hidden from user code: " in log
