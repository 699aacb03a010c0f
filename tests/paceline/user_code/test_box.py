"""Hostile user code in real processes: the planted secrets that it finds on loopback, beyond it, with
--require-isolation, and without a box; and honest code that works beside hidden secrets."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import prying
import pytest

from paceline.environment.hosting.commands import run_command
from paceline.errors import Unavailable
from paceline.host.landlock import landlock_abi
from paceline.reward.runner import RewardRunner
from paceline.spec import RewardFunctionSection
from paceline.user_code import box, surroundings
from paceline.user_code.box import Box, kept_paths, open_paths, why_no_isolation, why_refused
from paceline.user_code.surroundings import Isolation

CANARY = "canary-5f1d"
PROCESSES = {
    "environment of another process",
    "environment of another process, by a child",
    "memory of another process",
    "descriptors of another process",
    "trace of another process",
    "signal to another process",
    "abstract socket",
}
CREDENTIAL = "an SSH key"
needs_landlock = pytest.mark.skipif(
    bool(why_no_isolation()), reason=f"Landlock ABI {landlock_abi()}: {why_no_isolation()}"
)


@dataclass
class Host:
    """A host with secrets, and the targets of hostile code."""

    code: Path
    """Hostile code in a bundle."""
    aims: dict[str, Any]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    files = {
        "the token": tmp_path / "runs/token",
        "the tokens of others": tmp_path / "runs/tokens.json",
        "the ledger": tmp_path / "runs/ledger.sqlite",
        "a key": tmp_path / "tls/tls.key",
        "another bundle": tmp_path / "home/.cache/paceline/bundles/other/code/f.py",
        "the storage key": tmp_path / "keys/storage.key",
        CREDENTIAL: tmp_path / "home/.ssh/id_ed25519",
    }
    for path in files.values():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{CANARY}\n")
        path.chmod(0o600)
    code = tmp_path / "home/.cache/paceline/bundles/own/code/hostile.py"
    code.parent.mkdir(parents=True)
    code.write_text(Path(prying.__file__).read_text())
    monkeypatch.setenv("PACELINE_TOKEN_FILE", str(files["the token"]))
    monkeypatch.setenv("PACELINE_TLS_DIR", str(tmp_path / "tls"))
    for name in ("PACELINE_BUNDLE_CACHE", "XDG_CACHE_HOME", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PACELINE_STORAGE_KEY_FILE", str(files["the storage key"]))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    library = tmp_path / "python" / "lib"
    library.mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", str(library))
    for name in ("PACELINE_WEBHOOK_SECRET", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DATABASE_URL"):
        monkeypatch.setenv(name, CANARY)
    name = f"paceline-test-{os.getpid()}-{id(tmp_path)}"
    with (
        socket.socket(socket.AF_UNIX) as listener,
        open(files["the token"]) as held,
        subprocess.Popen(
            [sys.executable, "-c", "print(flush=True); input()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"SECRET": CANARY},
        ) as other,
    ):
        assert other.stdout is not None
        other.stdout.readline()  # it runs a separate program, with a separate environment
        listener.bind(f"\0{name}")
        listener.listen()
        os.set_inheritable(held.fileno(), True)
        aims = {"canary": CANARY, "pid": other.pid, "abstract": name}
        folders = {"the installation": sysconfig.get_path("purelib"), "a folder of PYTHONPATH": str(library)}
        yield Host(code, {**aims, "code": folders, "files": {what: str(path) for what, path in files.items()}})
        other.communicate(b"\n", 60)


async def found_by_reward_function(host: Host) -> set[str]:
    function = RewardFunctionSection(function=f"{host.code}:pry", kwargs={"aims": host.aims})
    async with RewardRunner([function]) as runner:
        result = await runner.score(["p"], ["c"], [[1]], {})
    assert result.failure is None, result.failure
    return set(filter(None, str(result.extra["found"][0]).split("; ")))


def test_without_a_box_every_attempt_succeeds(host: Host) -> None:
    command = [sys.executable, str(host.code), json.dumps(host.aims)]
    found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60, close_fds=False).stdout
    files = {
        f"{what} {name}" for name in host.aims["files"] for what in ("read", "append to", "link", "move the folder of")
    }
    children = {f"read {name} by a child" for name in host.aims["files"]}
    code = {f"write {name}" for name, folder in host.aims["code"].items() if os.access(folder, os.W_OK)}
    assert set(found.splitlines()) >= {
        *code,
        "own environment",
        "own descriptors",
        *PROCESSES,
        *files,
        *children,
    }


@needs_landlock
async def test_on_loopback_neither_environment_nor_processes_are_open(host: Host) -> None:
    found = await found_by_reward_function(host)
    assert not found & {"own environment", "own descriptors", *PROCESSES}
    assert "read the token" in found  # the same user's file, as docs/operate/security_promises.md says


@needs_landlock
async def test_with_hidden_secrets_only_credentials_of_other_programs_are_found(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(surroundings.VARIABLE, Isolation.SECRETS.value)
    found = await found_by_reward_function(host)
    assert f"read {CREDENTIAL}" in found
    assert not {each for each in found if CREDENTIAL not in each}


@needs_landlock
async def test_with_isolation_nothing_is_found(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(surroundings.VARIABLE, "1")
    assert await found_by_reward_function(host) == set()


@needs_landlock
@pytest.mark.parametrize("chosen", [Isolation.SECRETS, Isolation.REQUIRED])
async def test_isolated_code_works_with_its_own_files(
    tmp_path: Path, host: Host, monkeypatch: pytest.MonkeyPatch, chosen: Isolation
) -> None:
    monkeypatch.setenv(surroundings.VARIABLE, chosen.value)
    work = tmp_path / "work"
    work.mkdir()
    host.code.with_name("table.txt").write_text("4")
    host.code.with_name("works.py").write_text(
        "import os, pathlib, tempfile, random\n"
        "def reward(completions, folder, **columns):\n"
        "    folder = pathlib.Path(folder)\n"
        "    (folder / 'a').write_text('1')\n"
        "    (folder / 'deep').mkdir()\n"
        "    (folder / 'a').rename(folder / 'deep' / 'b')\n"
        "    (folder / 'deep' / 'b').open('a').write('2')\n"
        "    open('/dev/null', 'w').write('x')\n"
        "    os.listdir('/')\n"
        "    with tempfile.TemporaryDirectory() as temporary, tempfile.TemporaryFile('w', dir=temporary) as file:\n"
        "        file.write('3')\n"
        "    (folder / 'temporary').write_text(os.environ['TMPDIR'])\n"
        "    (pathlib.Path.home() / '.cache' / 'huggingface' / 'model').write_text('weights')\n"
        "    table = pathlib.Path(__file__).with_name('table.txt').read_text()\n"
        "    return [float((folder / 'deep' / 'b').read_text() + table)] * len(completions)\n"
    )
    function = RewardFunctionSection(function=f"{host.code.with_name('works.py')}:reward", kwargs={"folder": str(work)})
    async with RewardRunner([function]) as runner:
        result = await runner.score(["p"], ["c"], [[1]], {})
    assert result.failure is None, result.failure
    assert result.rewards_CF is not None
    assert result.rewards_CF.tolist() == [[124.0]]
    temporary = (work / "temporary").read_text()
    assert is_gone_from_temporary(Path(temporary))


@needs_landlock
@pytest.mark.parametrize(
    ("statement", "sentence"),
    [
        (
            "open('{closed}/new', 'w')",
            "cannot make files directly in {closed}: use TMPDIR or a folder that was there",
        ),
        ("os.mkdir('{closed}/new')", "or a worker with --no-isolation (docs/operate/security_setup.md)"),
        ("open('{closed}/runs/token')", "{closed}/runs is hidden from user code (docs/operate/security_promises.md)"),
        ("open(__file__, 'a')", "/own is read-only for user code: write into TMPDIR or another folder"),
        (
            "open('{closed}/python/lib/new', 'w')",
            "because this worker loads code from it (docs/operate/security_promises.md)",
        ),
    ],
)
async def test_code_that_the_box_refuses_a_file_is_told_why(
    host: Host, tmp_path: Path, statement: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(surroundings.VARIABLE, Isolation.SECRETS.value)
    host.code.write_text(f"import os\ndef reward(completions, **columns):\n    {statement.format(closed=tmp_path)}\n")
    async with RewardRunner([RewardFunctionSection(function=f"{host.code}:reward")]) as runner:
        result = await runner.score(["p"], ["c"], [[1]], {})
    assert result.failure is not None
    assert "Permission denied" in result.failure.message
    assert sentence.format(closed=tmp_path) in result.failure.message


def test_other_refusals_are_left_as_they_are(tmp_path: Path) -> None:
    closed = Box((f"{tmp_path}/token",))
    refused = PermissionError(errno.EACCES, "Permission denied", "/proc/1/environ")
    assert why_refused(refused, closed) == ""
    assert why_refused(ValueError("no"), closed) == ""
    refused.filename = f"{tmp_path}/new"
    for error in (refused, chained(refused)):
        assert f"cannot make files directly in {tmp_path}: " in why_refused(error, closed)
    assert why_refused(PermissionError(errno.EACCES, "of a socket, for example"), closed) == ""
    assert why_refused(refused) == "", "this process is in no box"


def is_gone_from_temporary(folder: Path) -> bool:
    return folder.parent == Path(tempfile.gettempdir()).resolve() and not folder.exists()


def chained(cause: Exception) -> Exception:
    error = RuntimeError("the file was not written")
    error.__cause__ = cause
    return error


@needs_landlock
async def test_an_agents_command_is_in_the_box_too(tmp_path: Path, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(surroundings.VARIABLE, "1")
    report = tmp_path / "work" / "report"
    report.parent.mkdir()
    source = (
        "import json, sys, prying; from pathlib import Path; "
        "Path(sys.argv[2]).write_text(json.dumps(prying.attempts(json.loads(sys.argv[1])))); print(1)"
    )
    monkeypatch.setenv("PYTHONPATH", f"{Path(prying.__file__).parent}{os.pathsep}{os.environ['PYTHONPATH']}")
    command = [sys.executable, "-c", source, json.dumps(host.aims), str(report)]
    assert await run_command(command, {}, "http://127.0.0.1:9/v1", "key", 512, str(host.code.parent)) == 1
    assert json.loads(report.read_text()) == []


def test_folders_with_something_hidden_are_opened_entry_by_entry(tmp_path: Path) -> None:
    for name in ("a/secret", "a/open", "b/deep/secret", "b/other", "c"):
        (tmp_path / name).mkdir(parents=True)
    hidden = [
        tmp_path / "a/secret",
        tmp_path / "b/deep/secret",
        tmp_path / "b/deep/secret/more",
        tmp_path / "none",
    ]
    found = {Path(path) for path in open_paths(map(str, hidden))}
    assert {path for path in found if path.is_relative_to(tmp_path)} == {
        tmp_path / "a/open",
        tmp_path / "b/other",
        tmp_path / "c",
    }
    assert not [path for path in found if tmp_path.is_relative_to(path)]
    assert {path.parent for path in found if not path.is_relative_to(tmp_path)} == {*tmp_path.parents}


def test_what_is_kept_is_readable_but_for_what_is_hidden_in_it(tmp_path: Path) -> None:
    for name in ("app/lib", "app/runs/token", "runs/venv/lib"):
        (tmp_path / name).mkdir(parents=True)
    hidden = [str(tmp_path / name) for name in ("app/runs", "runs")]
    kept = [str(tmp_path / name) for name in ("app", "runs/venv", "runs")]
    assert set(kept_paths(kept, hidden)) == {str(tmp_path / "app/lib"), str(tmp_path / "runs/venv")}


def test_only_what_this_user_can_change_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/libraries{os.pathsep}relative")
    monkeypatch.setenv("PATH", "/proc/self/task")
    assert (tmp_path / "libraries").resolve() in surroundings.loaded_code([])
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert surroundings.loaded_code([]) == []
    assert surroundings.loaded_code([tmp_path.resolve()]) == [(tmp_path / "libraries").resolve()]


def test_where_it_cannot_be_kept_nothing_is_started_with_hidden_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(box, "landlock_abi", lambda: 3)
    with pytest.raises(Unavailable, match=r"Landlock ABI 3, but ABI 6 is needed \(Linux 6.12"):
        Box(("/etc",)).close()
    Box().close()
    assert Box.read(Box(("/a",), ("/a/b",), ("/c",)).text()) == Box(("/a",), ("/a/b",), ("/c",))
