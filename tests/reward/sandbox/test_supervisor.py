"""Outcomes of ordinary programs and limits, the same in every backend."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from python_path import python_path

from paceline.errors import InvalidInput
from paceline.reward.sandbox.launching import PopenChild, launch_command
from paceline.reward.sandbox.protocol import Limits, Outcome, Sandbox, SandboxFailed
from paceline.reward.sandbox.supervisor import supervise
from paceline.reward.sandbox.workspace import Workspace


def run(sandbox: Sandbox, program: str, limits: Limits | None = None, stdin: bytes = b"") -> Outcome:
    return sandbox.run(["python", "main.py"], {"main.py": program.encode()}, limits or Limits(), stdin)


def test_input_goes_in_and_outputs_and_status_come_out(any_sandbox: Sandbox) -> None:
    outcome = run(
        any_sandbox,
        "import sys\nprint(sys.stdin.read()[::-1]); print('wrong', file=sys.stderr); sys.exit(3)",
        stdin=b"abc",
    )
    assert (outcome.ended, outcome.exit_code, outcome.signal) == ("exited", 3, None)
    assert (outcome.stdout, outcome.stderr) == (b"cba\n", b"wrong\n")
    assert not outcome.succeeded
    assert outcome.duration_s > 0


def test_large_input_that_nobody_reads_stops_nothing(any_sandbox: Sandbox) -> None:
    assert run(any_sandbox, "print('done')", stdin=b"x" * (4 << 20)).stdout == b"done\n"


def test_large_input_and_output_pass_each_other(any_sandbox: Sandbox) -> None:
    data = b"y" * 900_000
    assert run(any_sandbox, "import sys\nsys.stdout.write(sys.stdin.read())", stdin=data).stdout == data


def test_a_signal_is_told(any_sandbox: Sandbox) -> None:
    outcome = run(any_sandbox, "import os\nos.kill(os.getpid(), 11)")
    assert (outcome.ended, outcome.exit_code, outcome.signal) == ("signal", None, 11)


def test_files_lie_in_its_folder_which_it_may_change(any_sandbox: Sandbox) -> None:
    program = b"""
import os, shutil, tempfile
print(open('data/numbers').read(), sorted(os.listdir()), os.path.samefile(os.getcwd(), os.environ['HOME']))
os.mkdir('new'); shutil.copy('data/numbers', 'new/copy'); os.chmod('new/copy', 0o600); os.rename('new', 'newer')
with tempfile.TemporaryFile() as file: file.write(b'x')
shutil.rmtree('newer')
"""
    outcome = any_sandbox.run(["python", "main.py"], {"main.py": program, "data/numbers": b"1 2"}, Limits())
    assert (outcome.stdout, outcome.stderr) == (b"1 2 ['data', 'main.py'] True\n", b"")


def test_threads_asyncio_and_installed_packages_work(isolating: Sandbox) -> None:
    program = """
import asyncio, concurrent.futures, numpy
async def double(x): return 2 * await asyncio.to_thread(int, x)
print(asyncio.run(double('21')), sum(concurrent.futures.ThreadPoolExecutor(4).map(abs, range(9))), int(numpy.eye(3).sum()))
"""
    outcome = run(isolating, program, Limits(memory_mb=1024))
    assert (outcome.stdout, outcome.stderr) == (b"42 36 3\n", b"")


def test_another_interpreter_runs_by_its_name(any_sandbox: Sandbox) -> None:
    outcome = any_sandbox.run(["sh", "-c", "read x; echo $((x + 1))"], {}, Limits(), b"41\n")
    assert outcome.stdout == b"42\n"


def test_a_command_that_is_not_there_says_so(any_sandbox: Sandbox) -> None:
    outcome = any_sandbox.run(["no-such-interpreter"], {}, Limits())
    assert outcome.exit_code == 127
    assert b"cannot execute 'no-such-interpreter'" in outcome.stderr


def test_output_up_to_the_bound_is_kept_whole(any_sandbox: Sandbox) -> None:
    limits = Limits(output_bytes=1000)
    assert run(any_sandbox, "print('x' * 999)", limits).succeeded
    outcome = run(any_sandbox, "print('x' * 1000)", limits)
    assert (outcome.ended, len(outcome.stdout)) == ("output", 1000)


def test_several_processes_run_where_they_are_allowed(isolating: Sandbox) -> None:
    program = "import subprocess\nprint(subprocess.run(['echo', 'child'], capture_output=True, text=True).stdout)"
    if isolating.name == "landlock":
        with pytest.raises(InvalidInput, match="backend landlock runs one process"):
            run(isolating, program, Limits(processes=4))
    else:
        assert run(isolating, program, Limits(processes=4)).stdout == b"child\n\n"


def test_more_processes_than_allowed_are_ended(isolating: Sandbox) -> None:
    if isolating.name == "landlock":
        pytest.skip("it allows one process, which the kernel holds")
    bomb = "import os, time\nfor _ in range(40):\n  try:\n    if os.fork() == 0: time.sleep(1e6)\n  except OSError: pass\ntime.sleep(1e6)"
    assert run(isolating, bomb, Limits(processes=4, time_s=5)).ended in ("processes", "time")


def test_a_program_that_did_not_start_is_no_outcome() -> None:
    """So that a fault of the sandbox is never a score."""
    command = [sys.executable, "-c", "import sys; sys.exit('no')"]
    with (
        Workspace({}) as workspace,
        pytest.raises(SandboxFailed, match=r"did not start the program \(status 1\): no"),
    ):
        supervise(lambda: PopenChild(command, workspace.path, {}), Limits(), workspace, b"word")


def test_what_was_there_before_the_program_does_not_count() -> None:
    """The copy of the caller, until it becomes the program, may be large and slow."""
    before = (
        "import os, time\nkept = bytearray(400 << 20)\nend = time.monotonic() + 1\nwhile time.monotonic() < end: pass\n"
    )
    # Given back before the word: from then on it would count, however soon the program follows.
    program = before + "del kept; os.write(2, b'word'); os.execv('/bin/echo', ['echo', 'small'])"
    with Workspace({}) as workspace:
        outcome = supervise(
            lambda: PopenChild([sys.executable, "-c", program], workspace.path, {}),
            Limits(memory_mb=100, processes=4, time_s=0.8),
            workspace,
            b"word",
        )
    assert (outcome.ended, outcome.stdout) == ("exited", b"small\n")


def test_a_sandbox_that_does_not_start_its_program_in_time_is_no_outcome() -> None:
    command = [sys.executable, "-c", "import time; time.sleep(1e6)"]
    with (
        Workspace({}) as workspace,
        pytest.raises(SandboxFailed, match=r"did not start the program \(within 0.2 s\): no reason given"),
    ):
        supervise(lambda: PopenChild(command, workspace.path, {}), Limits(), workspace, b"word", start_s=0.2)


def test_a_limit_that_cannot_be_applied_is_no_outcome() -> None:
    command = launch_command(["/bin/true"], Limits(), "word", landlock=["limit RLIMIT_NONE 1"], confined=False)
    with Workspace({}) as workspace, pytest.raises(SandboxFailed, match="RLIMIT_NONE"):
        supervise(lambda: PopenChild(command, workspace.path, {}), Limits(), workspace, b"word")


def test_a_program_dies_with_its_caller(tmp_path: Path) -> None:
    """The launcher asks the kernel for it; the filter keeps the program from taking that back."""
    program = """
import os
from paceline.reward.sandbox.launching import PopenChild, launch_command
from paceline.reward.sandbox.protocol import Limits
child = PopenChild(launch_command(["sleep", "1000"], Limits(), "w"), "/", {"PATH": "/usr/bin:/bin"})
os.read(child.stderr, 1)
print(child.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    path = python_path(Path(__file__).resolve().parents[3])
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    pid = int(ran.stdout)
    try:
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            os.sched_yield()
    except FileNotFoundError:
        pass


@pytest.mark.parametrize("name", ["time_s", "memory_mb", "processes", "output_bytes", "disk_mb", "threads"])
def test_limits_are_positive_numbers(name: str) -> None:
    for wrong in (0, -1, "10", True):
        with pytest.raises(InvalidInput, match=f"sandbox limit {name}"):
            Limits(**{name: wrong})


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../b", "", "a//b", "./a", "x" * 300, "a\0b"])
def test_files_stay_in_the_folder(any_sandbox: Sandbox, path: str) -> None:
    with pytest.raises(InvalidInput, match="relative path"):
        any_sandbox.run(["true"], {path: b""}, Limits())


def test_a_command_is_texts_and_an_input_is_bounded(any_sandbox: Sandbox) -> None:
    with pytest.raises(InvalidInput, match="list of texts"):
        any_sandbox.run([], {}, Limits())
    with pytest.raises(InvalidInput, match="16777216 bytes"):
        any_sandbox.run(["true"], {}, Limits(), bytes(17 << 20))
