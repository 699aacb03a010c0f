"""Coordinator and command line work without what the control image leaves out, and the lock files are as they should be."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from service_processes import wait_for

from paceline.services.demo.smoke import write_run

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ROOT / "deploy" / "docker" / "locks"
STARTS_S = 120.0


def lock() -> object:
    """The module that makes the lock files."""
    spec = importlib.util.spec_from_file_location("lock", ROOT / "deploy/docker/lock.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def without(module: str, *arguments: str) -> list[str]:
    """A command that runs a module where the packages that only workers have cannot be imported."""
    locked = lock()
    left_out = (*locked.ONLY_WORKERS, *locked.ONLY_TABLES)  # type: ignore[attr-defined]
    names = [
        *(name.replace("-", "_") for name in left_out),
        "pyarrow",
        "pandas",
        "PIL",
        "tensorboard_data_server",
    ]
    code = f"import sys; sys.modules.update(dict.fromkeys({names})); from {module} import main; main()"
    return [sys.executable, "-c", code, *arguments]


class Coordinator(NamedTuple):
    address: str
    directory: Path


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    folder = tmp_path_factory.mktemp("coordinator")
    directory, ready, log = folder / "runs", folder / "ready", folder / "log"
    options = ("--directory", str(directory), "--port", "0", "--ready-file", str(ready))
    with log.open("w") as out:
        process = subprocess.Popen(
            without("paceline.services.coordinator.main", *options), cwd=ROOT, stdout=out, stderr=out
        )
    try:
        wait_for(ready, process, STARTS_S)
        yield Coordinator(ready.read_text().strip(), directory)
    finally:
        process.kill()
        process.wait(STARTS_S)


def test_a_run_is_submitted_and_started_without_torch(coordinator: Coordinator, tmp_path: Path) -> None:
    spec = write_run(tmp_path / "files", str(tmp_path / "store"), 1)
    environment = os.environ | {"PACELINE_COORDINATOR": coordinator.address}

    def run(*arguments: str) -> str:
        command = without("paceline.services.cli.main", *arguments)
        ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=STARTS_S)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    assert "smoke-1" in run("submit", str(spec))
    deadline_s = time.monotonic() + STARTS_S
    while '"running"' not in (found := run("runs", "--json")):  # its data and its tokenizer were read
        assert time.monotonic() < deadline_s, found
        time.sleep(0.2)


def test_the_page_is_served_without_torch_and_found_healthy(coordinator: Coordinator, tmp_path: Path) -> None:
    ready, log = tmp_path / "page", tmp_path / "page.log"
    options = ("--coordinator", coordinator.address, "--port", "0", "--ready-file", str(ready))
    environment = os.environ | {"PACELINE_TOKEN_FILE": str(coordinator.directory / "token")}
    with log.open("w") as out:
        command = without("paceline.services.cli.main", "serve", "dashboard", *options)
        page = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out)
    try:
        wait_for(ready, page, STARTS_S)
        address = f"http://{ready.read_text().strip()}"
        found = healthy(f"{address}/")
        assert found.returncode == 0, found.stderr
        missing = healthy(f"{address}/nothing")
        assert missing.returncode == 1
        assert "status 404" in missing.stderr
    finally:
        page.kill()
        page.wait(STARTS_S)
    gone = healthy(f"{address}/")
    assert gone.returncode == 1
    assert address in gone.stderr
    assert "key=" not in log.read_text()


def healthy(address: str) -> subprocess.CompletedProcess[str]:
    command = without("paceline.services.common.serving.healthcheck", address, "--timeout", "20")
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=STARTS_S)


@pytest.mark.parametrize("name", ["build", "control", "tables", "worker", "vllm", "torch-cpu", "run", "dev"])
def test_every_locked_package_has_a_version_and_hashes(name: str) -> None:
    packages = lock().blocks(re.sub(r"^#.*\n", "", (LOCKS / f"{name}.txt").read_text(), flags=re.M))  # type: ignore[attr-defined]
    assert packages
    for package in packages:
        assert re.match(r"[A-Za-z0-9._-]+==\S+", package), package
        assert "--hash=sha256:" in package, package


@pytest.mark.parametrize("name", ["control", "worker"])
def test_locks_have_the_versions_that_are_tested(name: str) -> None:
    module = lock()
    tested = dict(
        (module.name_of(line.split("==")[0]), line.split("==")[1].strip())  # type: ignore[attr-defined]
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    )
    locked = dict(re.findall(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", (LOCKS / f"{name}.txt").read_text(), flags=re.M))
    assert {
        key: version for key, version in locked.items() if tested.get(module.name_of(key), version) != version
    } == {}  # type: ignore[attr-defined]
    wanted = {module.name_of(r) for r in module.requirements()[name]} - {"torch"}  # type: ignore[attr-defined]
    assert wanted <= {module.name_of(key) for key in locked}  # type: ignore[attr-defined]
    forbidden = {*module.ONLY_WORKERS, *module.ONLY_TABLES} if name == "control" else {"torch", "triton"}  # type: ignore[attr-defined]
    assert not forbidden & set(locked)


@pytest.mark.parametrize(
    ("arguments", "path", "message"),
    [(["contrl"], "/", "there is no lock contrl"), (["control"], "/", "uv is not on the path; install it")],
)
def test_a_lock_that_cannot_be_made_is_refused_in_a_sentence(
    arguments: list[str], path: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", path)
    monkeypatch.setattr(sys, "argv", ["lock.py", *arguments])
    with pytest.raises(SystemExit, match=message):
        lock().main()  # type: ignore[attr-defined]


def test_the_audit_fails_on_what_it_cannot_look_up_and_has_every_locked_package() -> None:
    makefile = (ROOT / "Makefile").read_text()
    calls = re.findall(r"bin/pip-audit (--.*)", makefile)
    assert len(calls) == 2
    assert all(call.startswith("--strict ") for call in calls)
    (audited,) = re.findall(r"for lock in ([a-z ]+); do \(set -x; \$\(AUDIT_VENV\)", makefile)
    pin = re.compile(r"^[A-Za-z0-9._-]+==[^\s;\\]+", re.M)
    looked_up = {found for name in audited.split() for found in pin.findall((LOCKS / f"{name}.txt").read_text())}
    for path in LOCKS.glob("*.txt"):
        if path.stem != "torch-cpu":  # torch's version is that of constraints.txt
            assert set(pin.findall(path.read_text())) <= looked_up, path.name
