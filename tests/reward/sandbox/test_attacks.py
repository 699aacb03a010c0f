"""Hostile programs in each backend that this machine has, and once in a simulated restricted pod."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import restricted_pod
from sandbox_attacks import ATTACKS, SECRET, Attack, Surroundings, run_attack, surroundings

from paceline.reward.sandbox.choosing import NoSandbox
from paceline.reward.sandbox.protocol import Limits, Outcome, Sandbox, SandboxFailed

ROOT = Path(__file__).resolve().parents[3]
SUPPORT = ROOT / "tests" / "support" / "user_code"
HARMLESS = (
    "TCP to loopback",
    "unix sockets",
    "the caller's environment",
    "reading outside",
    "links to the outside",
)
"""Attacks that may run without isolation: they only look."""


@pytest.fixture(params=ATTACKS)
def attack_name(request: pytest.FixtureRequest) -> str:
    if ATTACKS[request.param].x86_64_only and os.uname().machine != "x86_64":
        pytest.skip("its numbers of system calls are those of x86_64")
    return str(request.param)


def test_an_attack_is_contained_and_named(isolating: Sandbox, attack_name: str, tmp_path: Path) -> None:
    """Nothing outside is read, changed, reached or left; the outcome or the program's own error names what refused it."""
    attack = ATTACKS[attack_name]
    with surroundings(tmp_path) as around:
        outcome = run_unstarved(isolating, attack, around)
        assert around.faults(outcome, attack) == []


def run_unstarved(isolating: Sandbox, attack: Attack, around: Surroundings) -> Outcome:
    """Run an attack; start it again, as a reward worker does, if a busy machine gave it no processor."""
    for _ in range(9):
        with contextlib.suppress(SandboxFailed):
            return run_attack(isolating, attack, around)
    return run_attack(isolating, attack, around)


@pytest.mark.parametrize("name", HARMLESS)
def test_without_isolation_the_same_check_finds_the_escape(name: str, tmp_path: Path) -> None:
    """So that no test above passes because its attack does not work."""
    attack = ATTACKS[name]
    with surroundings(tmp_path) as around:
        outcome = run_attack(NoSandbox(), attack, around)
        assert around.faults(outcome, attack) != []


def test_a_program_beside_the_attacks_goes_on(isolating: Sandbox, tmp_path: Path) -> None:
    """Bombs run on one thread; right answers come on another all the while."""
    bombs = ("fork bomb", "thread bomb", "10 GB bit by bit", "1 GB of output", "a full disk by many files")
    stopped = threading.Event()
    answers: list[bytes] = []

    def work() -> None:
        while not stopped.is_set() or len(answers) < 5:
            files = {"main.py": b"print(int(input()) ** 2)"}
            answers.append(isolating.run(["python", "main.py"], files, Limits(), b"12\n").stdout)

    worker = threading.Thread(target=work)
    with surroundings(tmp_path) as around:
        worker.start()
        endings = [run_attack(isolating, ATTACKS[name], around).ended for name in bombs]
        stopped.set()
        worker.join()
    assert all(ended in ATTACKS[name].endings for name, ended in zip(bombs, endings, strict=True))
    assert set(answers) == {b"144\n"}


@pytest.mark.merge
@pytest.mark.slow
def test_every_attack_is_contained_in_a_restricted_pod() -> None:
    """User 1000 without capabilities under the runtimes' default filter: `auto` finds `landlock`, and it holds."""
    command = [sys.executable, str(Path(restricted_pod.__file__)), "python", "-B"]
    path = os.pathsep.join([str(ROOT), str(SUPPORT)])
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)  # pytest's own folders are closed to other users
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": path,
            "TMPDIR": folder,
            "PACELINE_ATTACKED": SECRET,
        }
        ran = subprocess.run(
            [*command, str(SUPPORT / "sandbox_attacks.py"), "auto"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    if "landlock: this kernel has Landlock ABI" in ran.stderr:
        pytest.skip("this kernel has no Landlock")
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert report.pop("backend") == "landlock"
    assert report.pop("uid") == 1000 or os.getuid() or restricted_pod.interpreter_for_others() is None
    assert {name: found["faults"] for name, found in report.items() if found["faults"]} == {}
    assert len(report) >= len(ATTACKS) - 1
