"""What user code leaves behind: its processes end, and its output is bounded with a sentence."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from paceline.reward.runner import RewardRunner
from paceline.spec import RewardFunctionSection
from paceline.user_code import left_over
from paceline.user_code.left_over import MARK, OutputLimit

DEADLINE_S = 60.0
LEAVING = """
import os, subprocess, sys, time

def leave(completions, **columns):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with open(columns["file"][0], "w") as file:
                file.write(str(os.getpid()))
            os.rename(columns["file"][0], columns["file"][0] + ".pid")
            time.sleep(600)
        os._exit(0)
    while not os.path.exists(columns["file"][0] + ".pid"):
        time.sleep(0.01)
    if columns["dies"][0]:
        os._exit(3)
    return [1.0 for _ in completions]
"""
SERVICE = """
import asyncio, subprocess, sys
from paceline.reward.runner import RewardRunner
from paceline.spec import RewardFunctionSection
from paceline.user_code.left_over import adopt, end_strays

async def score(function, file, dies):
    async with RewardRunner([RewardFunctionSection(function=function)]) as runner:
        await runner.score(["p"], ["c"], [[]], {"file": [file], "dies": [dies]})
        if sys.argv[4] == "waits":
            print("scored", flush=True)
            await asyncio.sleep(600)

adopt()
other = subprocess.Popen(["sleep", "600" if sys.argv[4] == "ends" else "0"], start_new_session=True)
asyncio.run(score(sys.argv[1], sys.argv[2], sys.argv[3] == "dies"))
end_strays()
assert other.poll() is None, "not of user code"
other.kill()
"""
SUPERVISOR = """
import sys
from pathlib import Path
import psutil
from paceline.services.common.processes.supervisor import Service
from paceline.user_code.left_over import adopt

adopt()
service = Service("reward-0", [sys.executable, *sys.argv[2:]], {}, Path(sys.argv[1]), lambda text: None, lambda error: None)
service.start()
print(sys.stdin.readline())
service.terminate()
service.wait_ended(10.0)
print(psutil.Process().children())
"""
HANGING = """
import asyncio, os, sys, time
from paceline.services.common.serving import grpc_server
from paceline.user_code.left_over import MARK, adopt

async def main(stop):
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 600)

adopt()
if os.fork() == 0:
    os.setsid()
    script = "echo $$ > $0.part; mv $0.part $0; exec sleep 600"
    if os.fork() == 0:
        os.execve("/bin/sh", ["sh", "-c", script, sys.argv[1]], {**os.environ, MARK: "1"})
    os._exit(0)
os.wait()
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
grpc_server.THREADS_S = 0.1
grpc_server.run_service(main)
"""
REAPING = """
import os, subprocess, time
from paceline.user_code import left_over

left_over.REAP_S = 0.01
left_over.adopt()
with left_over.starting(user_code=False) as started:
    awaited = subprocess.Popen(["sh", "-c", "exit 7"], start_new_session=True)
    started(awaited.pid)
ordinary = subprocess.Popen(["sh", "-c", "exit 8"])
subprocess.run(["sh", "-c", "sleep 0.1 &"], start_new_session=True)
until_s = time.monotonic() + 60
while left_over._strays() or not left_over._children(os.getpid()) == [awaited.pid, ordinary.pid]:
    assert time.monotonic() < until_s
    time.sleep(0.05)
assert (awaited.wait(), ordinary.wait()) == (7, 8)
"""


@pytest.fixture
def function(tmp_path: Path) -> str:
    path = tmp_path / "rewards.py"
    path.write_text(LEAVING)
    return f"{path}:leave"


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    """The file to which a stray writes its process id; the stray ends after the test."""
    path = tmp_path / "stray.pid"
    yield path
    if path.exists():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(path.read_text()), signal.SIGKILL)


def is_alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return str(psutil.Process(pid).status()) != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.parametrize("end", ["goes on", "dies"])
def test_a_process_that_left_its_group_ends_with_the_runner(function: str, file: Path, end: str) -> None:
    command = [sys.executable, "-c", SERVICE, function, str(file.with_suffix("")), end, "ends"]
    subprocess.run(command, timeout=DEADLINE_S, check=True)
    assert not is_alive(int(file.read_text()))


def test_what_a_killed_worker_left_behind_ends_with_its_supervisor(tmp_path: Path, function: str, file: Path) -> None:
    worker = ["-c", SERVICE, function, str(file.with_suffix("")), "goes on", "waits"]
    command = [sys.executable, "-c", SUPERVISOR, str(tmp_path / "log"), *worker]
    supervisor = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        while not file.exists():
            assert supervisor.poll() is None
            psutil.wait_procs([], timeout=0.01)
        (child,) = psutil.Process(supervisor.pid).children()
        child.kill()
        output, _ = supervisor.communicate(b"end\n", timeout=DEADLINE_S)
    finally:
        supervisor.kill()
        supervisor.wait()
    assert not is_alive(int(file.read_text()))
    assert output.split() == [b"end", b"[]"], "a zombie is left"


def test_a_service_that_abandons_a_thread_ends_what_is_left_and_says_so(file: Path) -> None:
    process = subprocess.run([sys.executable, "-c", HANGING, str(file)], timeout=DEADLINE_S)
    assert process.returncode == 1
    assert not is_alive(int(file.read_text()))


def test_adopted_processes_are_reaped_and_awaited_ones_are_not() -> None:
    subprocess.run([sys.executable, "-c", REAPING], timeout=DEADLINE_S, check=True)


def test_a_long_chain_of_processes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(left_over, "_children", lambda pid: [pid + 1] if pid < 3000 else [])
    assert left_over._with_descendants([1]) == list(range(1, 3001))


def test_only_user_code_is_marked() -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
    with subprocess.Popen(["cat"], env=os.environ | {MARK: "1"}, **pipes) as marked:
        assert marked.stdin is not None
        assert marked.stdout is not None
        marked.stdin.write(b"started")
        assert marked.stdout.read(7) == b"started"
        assert left_over.is_marked(marked.pid)
        marked.kill()
    assert not left_over.is_marked(os.getpid())
    assert not left_over.is_marked(2**22)


def test_output_is_bounded_by_rate_and_each_day_with_a_sentence() -> None:
    limit = OutputLimit(rate=10, burst=20, daily=55)
    assert limit.admit(b"x" * 20, 0.0) == b"x" * 20
    assert limit.admit(b"y" * 5, 0.0).endswith(b"a part of it is left out; let it print less]\n")
    assert limit.admit(b"y" * 5, 0.5) == b""
    assert limit.admit(b"z" * 10, 2.0) == b"[10 bytes of output of user code were left out]\n" + b"z" * 10
    assert limit.admit(b"z" * 10, 3.0) == b"z" * 10
    last = limit.admit(b"z" * 30, 9.0)
    assert last.startswith(b"z" * 15 + b"\n")
    assert b"MB a day" in last
    assert limit.admit(b"z" * 30, 99.0) == b""
    assert limit.admit(b"z" * 10, 90_000.0).endswith(b"z" * 10), "the next day"


async def test_a_function_that_prints_without_end_fills_no_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(left_over, "_output", OutputLimit(rate=1, burst=1000))
    path = tmp_path / "rewards.py"
    path.write_text(
        "import os\ndef loud(completions, **columns):\n    print('first')\n"
        "    os.write(2, b'x' * 5_000_000)\n    os.system('yes | head -c 5000000')\n    os.write(2, b'reason')\n"
        "    return [1.0 for _ in completions]\n"
    )
    async with asyncio.timeout(DEADLINE_S), RewardRunner([RewardFunctionSection(function=f"{path}:loud")]) as runner:
        result = await runner.score(["p"], ["c"], [[]], {})
        assert result.failure is None
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("first\n")
    assert len(err) < 1200 + left_over.LAST_BYTES
    assert err.endswith("reason\n")
    assert "a part of it is left out" in err
