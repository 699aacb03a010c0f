"""Containers without a container engine: images and compose services are those of the list of roles, and fit the services' own
options; what the options and the health check promise is tried with real processes.
"""

import ast
import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from service_processes import wait_for

from paceline.apps.dashboard.main import main as dashboard_main
from paceline.errors import InvalidInput
from paceline.services.cli.main import serve
from paceline.services.common.serving.endpoints import advertised_host
from paceline.services.coordinator.main import main as coordinator_main
from paceline.services.environment.main import main as environment_main
from paceline.services.learner.main import main as learner_main
from paceline.services.reward.main import main as reward_main
from paceline.services.rollout.main import main as rollout_main

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
ROLES: dict[str, dict[str, Any]] = yaml.safe_load((DEPLOY / "helm/paceline/files/roles.yaml").read_text())["roles"]
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SCRIPTS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
COMMANDS: dict[str, click.Command] = {
    "coordinator": coordinator_main,
    "rollout": rollout_main,
    "reward": reward_main,
    "environment": environment_main,
    "learner": learner_main,
    "dashboard": dashboard_main,
}
SERVICES = [name for name, role in ROLES.items() if role["workload"] != "command"]
STARTS_S = 30.0


@pytest.fixture(autouse=True)
def trusted_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """As compose and the chart set it; the options are parsed here."""
    monkeypatch.setenv("PACELINE_INSECURE", "1")


def stages() -> dict[str, list[tuple[str, str]]]:
    """(word, rest) of each instruction of the Dockerfile, by stage; those before the first stage under ""."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "docker/Dockerfile").read_text(), flags=re.M).replace("\\\n", " ")
    found: dict[str, list[tuple[str, str]]] = {"": []}
    for line in filter(None, text.splitlines()):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            found[rest.split(" AS ")[1]] = []
        found[list(found)[-1]].append((word, rest.strip()))
    return found


STAGES = stages()


def last(stage: str, word: str) -> str:
    return [rest for name, rest in STAGES[stage] if name == word][-1]


def parsed(role: str, arguments: list[str]) -> dict[str, Any]:
    """The options as the service understands them; raises click.UsageError for one that it does not have."""
    return COMMANDS[role].make_context(role, arguments).params


def entry(target: str, role: str) -> list[str]:
    """The options of a target's entry point, which has to be the role's command."""
    words = json.loads(last(target, "ENTRYPOINT"))
    command = ROLES[role]["command"].split()
    assert words[: len(command)] == command
    return list(words[len(command) :])


def targets() -> list[tuple[str, str]]:
    return [
        (role, role if image == about["images"][0] else f"{role}-{image}")
        for role, about in ROLES.items()
        for image in about["images"]
    ]


def test_every_role_of_the_list_has_its_targets_and_no_other_has() -> None:
    stages = {target for _, target in targets()}
    assert stages <= set(STAGES)
    bases = {last(target, "FROM").split()[0] for target in stages}
    others = {name for name in STAGES if name and name not in bases and name not in stages}
    assert not [name for name in others if any(word in ("ENTRYPOINT", "CMD") for word, _ in STAGES[name])]
    for role, target in targets():
        image = last(target, "FROM").split()[0]
        assert image in ROLES[role]["images"]
        assert last(target, "LABEL").split("description=")[1] == json.dumps(ROLES[role]["summary"])
        assert f'title="Paceline {target}"' in last(target, "LABEL")


def test_the_list_has_every_service_of_the_project() -> None:
    assert {role["command"].split()[0] for role in ROLES.values()} == set(SCRIPTS)
    assert set(SERVICES) == set(COMMANDS)


@pytest.mark.parametrize("role", SERVICES)
def test_what_the_list_says_is_what_the_service_does(role: str) -> None:
    about = ROLES[role]
    script, *words = about["command"].split()
    started = serve.entries[words[-1]][0] if words else SCRIPTS[script]
    folder = started.rpartition(".")[0].removeprefix("paceline.").replace(".", "/")
    assert folder in (f"services/{role}", f"apps/{role}")
    assert parsed(role, []).get("grace_s", 0) == about["grace_s"]
    source = "\n".join(path.read_text() for path in (ROOT / folder).glob("*.py"))
    names = {
        node.value
        for node in ast.walk(ast.parse(source.replace("from __future__ import annotations", "")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    if not about["health"].startswith("/"):
        assert not about["health"] or about["health"] in names
    for called, ports in about["calls"].items():
        assert ports == "any" or set(ports) <= set(ROLES[called]["ports"])


@pytest.mark.parametrize(("role", "target"), targets())
def test_an_image_starts_its_service_without_root(role: str, target: str) -> None:
    assert last(target, "FROM").split()[0] in STAGES
    user = last(last(target, "FROM").split()[0], "USER")
    assert user.isdigit()
    assert int(user) > 0
    if role == "cli":
        return
    fixed = entry(target, role)
    options = parsed(role, fixed + json.loads(last(target, "CMD")))
    assert options["host"] == "0.0.0.0"
    ports = ROLES[role]["ports"]
    assert options["port"] == ports["grpc" if "grpc" in ports else "http"]
    assert last(target, "EXPOSE").split() == [str(port) for port in ports.values()]
    health = json.loads(last(target, "HEALTHCHECK").partition("CMD ")[2])
    address = f"127.0.0.1:{options['port']}"
    asked = address if "grpc" in ports else f"http://{address}{ROLES[role]['health']}"
    assert health == ["python", "-m", "paceline.services.common.serving.healthcheck", asked]
    if role != "coordinator":
        assert options["coordinator"] == f"coordinator:{ROLES['coordinator']['ports']['grpc']}"


def test_control_images_keep_what_services_open(tmp_path: Path) -> None:
    kept = (
        "site/botocore/data/endpoints.json",
        "site/botocore/data/s3/2006-03-01/service-2.json.gz",
        "site/numpy/_core/_multiarray_umath.so",
        "site/transformers/models/auto/processing_auto.py",
        "site/transformers/models/qwen3/configuration_qwen3.py",
        "site/transformers/models/qwen3/tokenization_qwen3.py",
        "bin/paceline",
        "bin/python",
    )
    unused = (
        "site/botocore/data/ec2/2016-11-15/paginators-1.json",
        "site/botocore/data/ec2/2016-11-15/service-2.json.gz",
        "site/transformers/models/qwen3/modeling_qwen3.py",
        "site/transformers/models/qwen3/__pycache__/modeling_qwen3.cpython-311.pyc",
        "site/transformers/models/clip/image_processing_clip.py",
        "site/transformers/models/whisper/processing_whisper.py",
    )
    for name in (*kept, *unused):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"12345")
    for command in last("control-packages", "RUN").split(" && "):
        if command.strip().startswith("find "):
            subprocess.run(shlex.split(command.replace("/opt/paceline/lib", str(tmp_path))), check=True, timeout=60)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == set(kept)


@pytest.mark.parametrize("build", ["control-packages", "control-build", "tables-build", "worker-build", "gpu-build"])
def test_packages_are_compiled_when_an_image_is_built(build: str) -> None:
    """Its root is read-only: what is not compiled then is compiled at each start of each process."""
    installs = [command for command in last(build, "RUN").split(" && ") if " pip install " in command]
    assert installs
    assert not [command for command in installs if "--no-compile" in command]


def test_what_is_copied_into_images_exists_and_is_let_through() -> None:
    let_through = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for word, rest in (pair for stage in STAGES.values() for pair in stage):
        if word == "COPY" and not rest.startswith("--from"):
            for path in rest.split()[:-1]:
                assert (ROOT / path).exists(), path
                assert any(path == allowed or path.startswith(f"{allowed}/") for allowed in let_through), path
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    copied = {rest.split()[0] for _, rest in STAGES["source"]}
    assert {name.removesuffix("*") for name in packaged} <= copied


@pytest.mark.parametrize("stage", ["control", "tables", "worker", "gpu"])
def test_images_of_two_revisions_share_the_layers_of_the_same_files(stage: str) -> None:
    words = [(word, rest) for word, rest in STAGES[stage] if word in ("ARG", "RUN", "COPY")]
    revision = words.index(("ARG", "REVISION=unknown"))
    assert "COPY" in [word for word, _ in words[:revision]]
    assert not {"RUN", "COPY"} & {word for word, _ in words[revision:]}


def test_no_compiler_is_in_images_but_those_for_gpus() -> None:
    for stage, words in STAGES.items():
        text = " ".join(rest for _, rest in words)
        assert (" gcc" in text) == (stage == "gpu"), stage
        assert "build-essential" not in text


def test_no_file_of_the_project_names_a_package_index() -> None:
    names = re.compile(r"(pypi\.org|pythonhosted|download\.pytorch\.org|registry\.npmjs)")
    paths = [*DEPLOY.rglob("*"), *(ROOT / ".ci").iterdir(), ROOT / "Makefile", ROOT / "constraints.txt"]
    assert not [path.name for path in paths if path.is_file() and names.search(path.read_text(errors="replace"))]


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_compose_runs_every_role(profile: str) -> None:
    services = {name: service for name, service in COMPOSE["services"].items() if profile in service["profiles"]}
    assert {name.removesuffix("-gpu") for name in services} == set(SERVICES)
    for name, service in services.items():
        role = name.removesuffix("-gpu")
        fixed = entry(service["build"]["target"], role)
        options = parsed(role, fixed + service["command"])
        assert float(service["stop_grace_period"].removesuffix("s")) > options.get("grace_s", 0)
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        if role == "learner":
            assert options["ranks"] == 2
        runs_user_code = any("--require-isolation" in each.opts for each in COMMANDS[role].params)
        assert ("PACELINE_REQUIRE_ISOLATION" in service["environment"]) == runs_user_code
        assert (service["environment"].get("PACELINE_BUNDLE_CACHE") == "/bundles") == runs_user_code
        assert any(each.endswith(":/bundles") for each in service["volumes"]) == runs_user_code
        if role != "coordinator":
            assert service["depends_on"] == {"coordinator": {"condition": "service_healthy"}}
            assert options["coordinator"].split(":")[0] in services
            assert service["deploy"]["replicas"] == ROLES[role]["compose"]["replicas"]


def test_compose_builds_and_mounts_what_the_list_says() -> None:
    cli = {name for name, service in COMPOSE["services"].items() if service["profiles"] == ["cli"]}
    assert cli == {"cli"}
    for name, service in COMPOSE["services"].items():
        role = ROLES[name.removesuffix("-gpu")]
        assert (name.removesuffix("-gpu"), service["build"]["target"]) in targets()
        assert service["build"]["target"] == name
        mounts = {f"{folder}:/{folder}" + ("" if mode == "rw" else ":ro") for folder, mode in role["mounts"].items()}
        assert mounts == {each for each in service["volumes"] if each.startswith(("runs:", "store:"))}
        assert f"cache-{name.removesuffix('-gpu')}:/cache" in service["volumes"]
        assert ("gpu" in str(service.get("deploy", ""))) == name.endswith("-gpu")


def test_compose_confines_every_container_and_gives_it_the_token() -> None:
    for name, service in COMPOSE["services"].items():
        role = ROLES[name.removesuffix("-gpu")]
        assert service["init"] is True, name
        assert service["tmpfs"] == ["/tmp"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["restart"] == ("no" if name == "cli" else "unless-stopped"), name
        given = {
            key: service["environment"][key] for key in ("OMP_NUM_THREADS", "PACELINE_TOKEN_FILE", "PACELINE_INSECURE")
        }
        assert given == {"OMP_NUM_THREADS": "1", "PACELINE_TOKEN_FILE": "/token/token", "PACELINE_INSECURE": "1"}, name
        mounts = {mount for mount in service["volumes"] if ":/token" in mount or ":/work" in mount}
        token = "token:/token" if name == "coordinator" else "token:/token:ro"
        assert mounts == {token, "${PACELINE_WORK:-./work}:/work:ro"}, name
        if name != "cli":
            assert service["command"][-len(role["compose"]["options"]) :] == role["compose"]["options"] or (
                not role["compose"]["options"]
            ), name
        published = role["compose"].get("publish")
        ports = role["ports"].get("grpc", role["ports"].get("http"))
        assert service.get("ports") == ([f"127.0.0.1:{published}:{ports}"] if published else None), name


def test_workers_of_a_run_reach_the_exports_that_it_may_start_from() -> None:
    """`policy.model_name: run:sft-1` is a folder of the store; all of them load its tokenizer at least."""
    workers = [name for name, about in ROLES.items() if about["workload"] in ("pool", "learner")]
    assert set(workers) == {"rollout", "reward", "environment", "learner"}
    for name, service in COMPOSE["services"].items():
        if name.removesuffix("-gpu") in workers:
            assert [each for each in service["volumes"] if each.startswith("store:/store")], name


def test_compose_gives_the_storage_key_to_those_that_read_and_write_files() -> None:
    given = {name: service["environment"].get("PACELINE_STORAGE_KEY") for name, service in COMPOSE["services"].items()}
    holders = {name for name, value in given.items() if value == "${PACELINE_STORAGE_KEY:-}"}
    assert holders == {"coordinator", "learner", "learner-gpu", "cli"}


def test_compose_publishes_nothing_beyond_this_host() -> None:
    published = [port for service in COMPOSE["services"].values() for port in service.get("ports", [])]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)
    assert len({port.split(":")[1] for port in published}) == len(published)
    assert COMPOSE["services"]["dashboard"]["ports"] == ["127.0.0.1:7081:7080"]


def test_compose_keeps_ledger_and_store_where_the_coordinator_looks() -> None:
    options = parsed("coordinator", COMPOSE["services"]["coordinator"]["command"])
    writes = COMPOSE["services"]["coordinator"]["volumes"]
    assert f"runs:{options['directory']}" in writes
    assert f"store:{options['store']}" in writes
    named = {
        mount.split(":")[0]
        for service in COMPOSE["services"].values()
        for mount in service["volumes"]
        if not mount.startswith("$")
    }
    assert named == set(COMPOSE["volumes"])


@pytest.mark.skipif(
    shutil.which("hadolint", path=str(Path(sys.executable).parent)) is None,
    reason="hadolint has no build for this platform",
)
def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    found = subprocess.run([hadolint, DEPLOY / "docker/Dockerfile"], capture_output=True, text=True, timeout=60)
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
        process = subprocess.Popen([sys.executable, "-m", "paceline.services.reward.main", *options], cwd=ROOT)
        try:
            wait_for(ready, process, STARTS_S)
            yield process, ready.read_text().strip()
        finally:
            process.kill()
            process.wait(STARTS_S)


def health(address: str, timeout_s: float, service: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "paceline.services.common.serving.healthcheck",
            address,
            "--timeout",
            str(timeout_s),
            "--service",
            service,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_health_check_follows_the_service(reward_service: tuple[subprocess.Popen[bytes], str]) -> None:
    process, address = reward_service
    assert address.startswith("127.0.0.1:")  # listens on 0.0.0.0, which nobody can dial
    for service in ("", "paceline.v1.RewardService"):
        well = health(address, 20.0, service)
        assert well.returncode == 0, well.stderr
    assert health(address, 20.0, "paceline.v1.LearnerService").returncode == 1
    process.kill()
    process.wait(STARTS_S)
    ill = health(address, 0.5)
    assert ill.returncode == 1
    assert address in ill.stderr
