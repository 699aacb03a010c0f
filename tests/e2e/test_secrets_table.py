"""The table of secrets on the page of promises, compared with the messages, and with all that a small run leaves and says."""

from __future__ import annotations

import base64
import contextlib
import importlib
import inspect
import os
import pkgutil
import re
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from secret_recorder import install, recorded

import paceline.v1
from paceline.client import Client, state_name
from paceline.encryption.storage_key import FILE_VARIABLE, KEY_VARIABLE
from paceline.errors import PacelineError
from paceline.models.registered import read_reference
from paceline.services.common.access.page_keys import Access, Role
from paceline.services.common.access.rights import CallerRole
from paceline.services.common.access.token_table import create
from paceline.services.local.cluster import LocalCluster
from paceline.spec import ClusterSection, RunSpec
from paceline.tls.authority import issue, make_authority
from paceline.tls.folder import VARIABLE as TLS_VARIABLE
from paceline.user_code.surroundings import PASSED_VARIABLE
from paceline.v1.registry_pb2 import RegisteredModel

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operate" / "security_promises.md"
RUN_TIMEOUT_S = 300.0
NAMED = re.compile(r"secret|(?<!page_)token|proof|key|password|credential")
VARIABLES = ("JUDGE_API_KEY", "PACELINE_SANDBOX_TOKEN", "PACELINE_WEBHOOK_SECRET", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY",
             "REWARD_PASSWORD")  # fmt: skip
REWARD = """
import os

def digits(completions, **columns):
    assert len(os.environ["REWARD_PASSWORD"]) == 32, "it gets its variable"
    return [sum(c.isdigit() for c in text) / 4 for text in completions]

def faulty(completions, **columns):
    raise ValueError("a fault of the reward")
"""


def rows() -> list[list[str]]:
    """Return the rows of the table of secrets."""
    section = PAGE.read_text().partition("\n## Secrets\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def fields(message: Descriptor) -> Iterator[str]:
    """Yield the fields of a message and of those within it that may have a secret."""
    for field in message.fields:
        is_text = field.type in (FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_STRING)
        if is_text and NAMED.search(field.name) and not message.GetOptions().map_entry:
            yield f"{message.name}.{field.name}"
    for nested in message.nested_types:
        yield from fields(nested)


def test_every_message_with_a_secret_is_in_the_table() -> None:
    named = set(re.findall(r"`(\w+\.\w+)`", " ".join(row[2] for row in rows())))
    found: set[str] = set()
    for module in pkgutil.iter_modules(paceline.v1.__path__):
        if module.name.endswith("_pb2"):
            file = importlib.import_module(f"paceline.v1.{module.name}").DESCRIPTOR
            found |= {name for message in file.message_types_by_name.values() for name in fields(message)}
    assert found == named


def forms(secret: bytes) -> set[bytes]:
    """Return a secret as it may be written: itself, as hexadecimal digits, as base64, and as Python and JSON show it."""
    text = repr(secret)[2:-1].encode()
    return {secret, secret.hex().encode(), base64.b64encode(secret).rstrip(b"="), text}


class Walk:
    """Everything that was said or written, and the secrets that it must not have."""

    def __init__(self) -> None:
        self.secrets: dict[str, set[bytes]] = {}
        self.files_of: dict[str, set[str]] = {}
        """Names of the files in which a secret may lie."""
        self.said: dict[str, bytes] = {}

    def add(self, name: str, secrets: Iterable[bytes | str], *files: str) -> None:
        values = {each.encode() if isinstance(each, str) else each for each in secrets}
        assert all(len(each) >= 16 for each in values), name
        self.secrets[name] = values
        self.files_of[name] = set(files)

    def note(self, where: str, content: object) -> None:
        text = content if isinstance(content, bytes) else f"{content!r} {content}".encode()
        if hasattr(content, "SerializeToString"):
            text += content.SerializeToString()
        self.said[where] = self.said.get(where, b"") + text

    def call(self, where: str, function: Callable[[], Any]) -> None:
        """Note what a call returns, all of it if it is an iterator, or its error."""
        try:
            found = function()
            for each in found if isinstance(found, Iterator | list) else [found]:
                self.note(where, each)
        except (PacelineError, TypeError, ValueError, LookupError) as error:
            self.note(where, error)

    def files(self, folder: Path) -> None:
        for path in folder.rglob("*"):
            if path.is_file() and not path.is_symlink():
                self.note(str(path), path.read_bytes())

    def found(self) -> list[str]:
        """Return where which secret was found, outside of the table."""
        return [
            f"{name} in {where}"
            for name, secrets in self.secrets.items()
            for where, text in self.said.items()
            if Path(where).name not in self.files_of[name]
            and any(form in text for secret in secrets for form in forms(secret))
        ]


@pytest.fixture(params=["tls", "plain"])
def walk(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Walk:
    """Secrets in the environment and in files; with TLS also certificates and a storage key."""
    for name in (FILE_VARIABLE, KEY_VARIABLE, TLS_VARIABLE, "PACELINE_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    walk = Walk()
    for name in VARIABLES:
        monkeypatch.setenv(name, os.urandom(16).hex())
        walk.add(name, [os.environ[name]])
    monkeypatch.setenv(PASSED_VARIABLE, "REWARD_PASSWORD")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "recorder"))
    monkeypatch.setenv("PACELINE_TOKEN_FILE", str(tmp_path / "runs" / "token"))
    monkeypatch.setenv("PACELINE_BUNDLE_CACHE", str(tmp_path / "cache" / "bundles"))
    monkeypatch.setenv("PACELINE_ANSWER_CACHE", str(tmp_path / "cache" / "answers"))
    if request.param == "tls":
        make_authority(tmp_path / "ca")
        shutil.copytree(issue(tmp_path / "ca", "up", "up"), tmp_path / "tls")
        monkeypatch.setenv(TLS_VARIABLE, str(tmp_path / "tls"))
        for name in ("ca/ca.key", "tls/tls.key"):
            lines = (tmp_path / name).read_text().splitlines()[1:-1]
            walk.add(name, [line for line in lines if len(line) >= 16], Path(name).name)
        key = tmp_path / "keys" / "storage.key"
        key.parent.mkdir(mode=0o700)
        key.write_text(os.urandom(32).hex())
        monkeypatch.setenv(FILE_VARIABLE, str(key))
        walk.add("storage key", [key.read_text(), bytes.fromhex(key.read_text())], "storage.key")
    return walk


def test_the_walk_finds_a_secret_in_each_form() -> None:
    secret = os.urandom(16)
    for form in forms(secret):
        walk = Walk()
        walk.add("a secret", [secret], "token")
        walk.note("/runs/token", form)
        assert walk.found() == []
        walk.note("/runs/logs/reward-0.log", b"before" + form + b"after")
        assert walk.found() == ["a secret in /runs/logs/reward-0.log"]


def calls_of(walk: Walk, client: Client, run_id: str) -> None:
    """Make every call of the client and of its records and models that only reads, and those that the coordinator
    refuses."""
    given: dict[str, Any] = {
        "run_id": run_id, "other_run_id": run_id, "group_id": 1, "step": 1, "worker": None, "group_ids": [1],
        "prompt": "1+1=", "prompts": ["1+1="], "completions": ["2"], "member_id": "nobody", "from_step": 0,
        "name": "sums", "version": 1, "reason": "a test", "names": ["step"], "reference": read_reference("sums:1"), "model": RegisteredModel(name="sums"),
    }  # fmt: skip
    for part, target in (("client", client), ("records", client.records), ("models", client.models)):
        for name, method in inspect.getmembers(target, callable):
            if name.startswith("_") or name in ("close", "submit"):
                continue
            parameters = inspect.signature(method).parameters.values()
            needed = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
            walk.call(f"{part}.{name}", lambda m=method, n=needed: m(*(given.get(each, "x") for each in n)))
    for name in client.records.log_names():
        walk.call(f"log {name}", lambda name=name: client.records.log_tail(name))


@pytest.mark.slow
@pytest.mark.merge
def test_nothing_that_a_run_says_or_writes_has_a_secret_outside_of_the_table(
    walk: Walk, make_spec: Callable[..., RunSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = install(tmp_path / "recorder")
    source = tmp_path / "work" / "rewards.py"
    source.parent.mkdir()
    source.write_text(REWARD)
    monkeypatch.chdir(source.parent)
    judge_port = socket.create_server(("127.0.0.1", 0))
    judge_port.settimeout(RUN_TIMEOUT_S)
    url = f"http://127.0.0.1:{judge_port.getsockname()[1]}/v1"
    endpoint = {"base_url": url, "model": "m", "api_key_env": "JUDGE_API_KEY", "attempts": 1}
    judge = {"function": "judge", "kwargs": {"endpoint": endpoint, "rubric": "r", "template": "{prompt} {completion}"}}
    good = [{"function": f"{source}:digits"}]
    sizes = ClusterSection(rollout_workers=1, reward_workers=1, learner_ranks=1)
    with (
        contextlib.closing(judge_port),
        LocalCluster(tmp_path / "runs", sizes, max_deaths=3) as cluster,
        Client(cluster.address) as client,
    ):
        directory = cluster.directory
        walk.add("bootstrap token", [(directory / "token").read_text().strip()], "token")
        access = Access(directory / "token")
        walk.add("keys of the page", [access.key(Role.READER), access.key(Role.OPERATOR)])
        walk.add("named token", [create(directory / "tokens.json", "ann", CallerRole.SUBMITTER, 0.0)])

        def succeed(run_id: str) -> None:
            ended = client.wait(run_id, timeout_s=RUN_TIMEOUT_S)
            assert state_name(ended) == "succeeded", ended.message

        def fail_at_the_judge(run_id: str) -> None:
            """Cut requests off until those of the first group were reported as failed: it has at most four. Refuse all
            later ones, because the reward worker would wait for their answers when the next run needs it."""
            for _ in range(5):
                judge_port.accept()[0].close()
            judge_port.close()

        def warn(run_id: str) -> None:
            for event in client.watch(run_id):
                if event.kind == "warning":
                    break
                assert event.content.get("state") != "paused", "it says no reason"

        for steps, rewards, outcome in (
            (4, good, succeed),
            (2, [*good, judge], fail_at_the_judge),
            (2, [{"function": f"{source}:faulty"}], warn),
        ):
            spec = make_spec(rewards=rewards, grpo={"max_num_steps": steps}, logger={"tensorboard": True})
            run_id = client.submit(spec).run_id
            outcome(run_id)
            walk.call("events", lambda run_id=run_id: client.events(run_id))
            if rewards is not good:
                walk.call("cancel", lambda run_id=run_id: client.cancel(run_id))
        for broken in (
            {"data": {"train": str(directory / "token")}},
            {"policy": {"model_name": str(tmp_path / "tls")}},
        ):
            walk.call(f"submit {broken}", lambda broken=broken: client.submit(make_spec(**broken)))
        calls_of(walk, client, run_id)
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                walk.note(f"command line of {process.pid}", " ".join(process.cmdline()))
    made = recorded(record)
    assert "paceline.services.coordinator.members.registry" in made
    assert "paceline.services.learner.training.publishing" in made
    for module, secrets in made.items():
        walk.add(module, secrets, "token" if module == "paceline.calls.token" else "")
    shutil.rmtree(record.parent)
    walk.files(tmp_path)
    assert len(walk.said) > 60
    assert walk.found() == []
