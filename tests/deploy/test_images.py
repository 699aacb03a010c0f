"""Containers without a container engine: every command line is parsed by the service that it starts, and what the
options and the health check promise is tried with real processes.
"""

import json
import re
import shutil
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from paceline.errors import InvalidInput
from services.common.advertise import advertised_host
from services.coordinator.main import main as coordinator_main
from services.environment.main import main as environment_main
from services.learner.main import main as learner_main
from services.reward.main import main as reward_main
from services.rollout.main import main as rollout_main

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
COMMANDS: dict[str, click.Command] = {
    "coordinator": coordinator_main,
    "rollout": rollout_main,
    "reward": reward_main,
    "environment": environment_main,
    "learner": learner_main,
}
STARTS_S = 30.0


def instructions(role: str) -> list[tuple[str, str]]:
    """(word, rest) of each instruction of a role's Dockerfile."""
    text = (DEPLOY / f"{role}.Dockerfile").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.M).replace("\\\n", " ")
    return [
        (word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line)
    ]


def last(role: str, word: str) -> str:
    return [rest for name, rest in instructions(role) if name == word][-1]


def parsed(role: str, arguments: list[str]) -> dict[str, Any]:
    """The options as the service understands them; raises click.UsageError for one that it does not have."""
    return COMMANDS[role].make_context(role, arguments).params


def compose() -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return tree


@pytest.mark.parametrize("role", COMMANDS)
def test_each_role_has_an_image_of_two_stages_without_root(role: str) -> None:
    words = instructions(role)
    stages = [rest for word, rest in words if word == "FROM"]
    assert stages == ["${BASE} AS build", "${BASE}"]
    assert words[0][0] == "ARG"
    assert words[0][1].startswith("BASE=")
    user = last(role, "USER")
    assert user.isdigit()
    assert int(user) > 0
    for word, rest in words:
        if word == "COPY" and not rest.startswith("--from"):
            *paths, _ = rest.split()
            assert all((ROOT / path).exists() for path in paths), rest


@pytest.mark.parametrize("role", COMMANDS)
def test_an_image_starts_its_service_with_options_that_it_has(role: str) -> None:
    script, *fixed = json.loads(last(role, "ENTRYPOINT"))
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts[script].startswith(f"services.{role}")
    options = parsed(role, fixed + json.loads(last(role, "CMD")))
    assert options["host"] == "0.0.0.0"
    assert str(options["port"]) in last(role, "EXPOSE").split()
    health = json.loads(last(role, "HEALTHCHECK").partition("CMD ")[2])
    assert health == ["python", "-m", "services.common.healthcheck", f"127.0.0.1:{options['port']}"]
    if role != "coordinator":
        known = parsed("coordinator", json.loads(last("coordinator", "ENTRYPOINT"))[1:])
        assert options["coordinator"] == f"coordinator:{known['port']}"


def test_no_file_of_the_project_names_a_package_index() -> None:
    names = re.compile(r"(pypi\.org|pythonhosted|download\.pytorch\.org|registry\.npmjs)")
    paths = [*DEPLOY.iterdir(), *(ROOT / ".ci").iterdir(), ROOT / "Makefile", ROOT / "constraints.txt"]
    assert not [path.name for path in paths if path.is_file() and names.search(path.read_text())]


def test_compose_runs_every_pool_on_cpus() -> None:
    services = compose()["services"]
    pools = {name: service for name, service in services.items() if "cpu" in service["profiles"]}
    assert set(pools) == set(COMMANDS)
    assert pools["rollout"]["deploy"]["replicas"] == 2
    assert pools["reward"]["deploy"]["replicas"] == 1
    assert pools["environment"]["deploy"]["replicas"] == 1
    for role, service in pools.items():
        assert service["build"]["dockerfile"] == f"deploy/{role}.Dockerfile"
        _, *fixed = json.loads(last(role, "ENTRYPOINT"))
        options = parsed(role, fixed + service.get("command", json.loads(last(role, "CMD"))))
        if role == "learner":
            assert options["ranks"] == 2
        if "grace_s" in options:
            assert float(service["stop_grace_period"].removesuffix("s")) > options["grace_s"]
        if role != "coordinator":
            assert service["depends_on"] == {"coordinator": {"condition": "service_healthy"}}
            assert options["coordinator"].split(":")[0] in services


def test_compose_publishes_nothing_beyond_this_host() -> None:
    published = [port for service in compose()["services"].values() for port in service.get("ports", [])]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_checkpoints_lie_where_the_coordinator_names_them() -> None:
    tree = compose()
    directory = parsed("coordinator", json.loads(last("coordinator", "CMD")))["directory"]
    for role in ("coordinator", "learner"):
        assert f"runs:{directory}" in tree["services"][role]["volumes"]
    named = {
        mount.split(":")[0]
        for service in tree["services"].values()
        for mount in service["volumes"]
        if not mount.startswith("$")
    }
    assert named == set(tree["volumes"])


@pytest.mark.skipif(
    shutil.which("hadolint", path=str(Path(sys.executable).parent)) is None,
    reason="hadolint has no build for this platform",
)
def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    found = subprocess.run(
        [hadolint, *sorted(DEPLOY.glob("*.Dockerfile"))], capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 0, found.stdout


def test_a_worker_tells_the_address_that_it_was_given_or_listens_on() -> None:
    assert advertised_host("127.0.0.1", "", "coordinator.invalid:7070") == "127.0.0.1"
    assert advertised_host("0.0.0.0", "node-7", "coordinator.invalid:7070") == "node-7"


def test_a_worker_on_every_address_tells_the_one_towards_the_coordinator() -> None:
    assert advertised_host("0.0.0.0", "", "127.0.0.1:7070") == "127.0.0.1"
    with pytest.raises(InvalidInput, match="give --advertise-host"):
        advertised_host("0.0.0.0", "", "127.0.0.1:no-such-port")


@pytest.fixture
def reward_service(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A reward worker that listens on every address, with no coordinator; its process and its address."""
    ready = tmp_path / "address"
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # taken, and not listening
        coordinator = f"127.0.0.1:{nobody.getsockname()[1]}"
        options = [
            "--coordinator",
            coordinator,
            "--insecure",
            "--host",
            "0.0.0.0",
            "--ready-file",
            str(ready),
        ]
        process = subprocess.Popen([sys.executable, "-m", "services.reward.main", *options], cwd=ROOT)
        try:
            deadline_s = time.monotonic() + STARTS_S
            while not ready.exists():
                assert process.poll() is None, "the service ended"
                assert time.monotonic() < deadline_s, f"no address within {STARTS_S} s"
                time.sleep(0.02)
            yield process, ready.read_text().strip()
        finally:
            process.kill()
            process.wait(STARTS_S)


def health(address: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "services.common.healthcheck", address, "--timeout", str(timeout_s)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_health_check_follows_the_service(reward_service: tuple[subprocess.Popen[bytes], str]) -> None:
    process, address = reward_service
    assert address.startswith("127.0.0.1:")  # listens on 0.0.0.0, which nobody can dial
    well = health(address, 20.0)
    assert well.returncode == 0, well.stderr
    process.kill()
    process.wait(STARTS_S)
    ill = health(address, 0.5)
    assert ill.returncode == 1
    assert address in ill.stderr
