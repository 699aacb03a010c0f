"""Command lines as agents: their row and conversation, their reward, and their end with all that they started."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.environment.hosting.commands import run_command
from paceline.environment.protocols import EnvironmentFailed, EnvironmentLost
from paceline.errors import InvalidInput
from paceline.user_code.box import why_no_isolation
from paceline.user_code.surroundings import VARIABLE, Isolation

ROW = {"question": "1 + 1", "level": 3}


async def run(source: str, *arguments: str, memory_mb: int = 512, folder: str = "") -> float | None:
    command = [sys.executable, "-c", source, *arguments]
    return await run_command(command, ROW, "http://127.0.0.1:9/v1", "key", memory_mb, folder)


async def test_columns_and_session_get_in_and_the_last_line_is_the_reward(tmp_path: Path) -> None:
    source = (
        "import os, sys; print('noise'); print(sys.argv[1:], os.getcwd(), file=sys.stderr); "
        "assert sys.argv[1:] == ['1 + 1 at 3', '{\"a\": 1}']; assert os.environ['OPENAI_API_KEY'] == 'key'; "
        "assert os.environ['OPENAI_BASE_URL'].endswith('/v1'); print(len(os.getcwd()) / 2)"
    )
    reward = await run(source, "{question} at {level}", '{"a": 1}', folder=str(tmp_path))
    assert reward == len(str(tmp_path)) / 2


async def test_a_host_without_room_is_no_fault_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    with pytest.raises(EnvironmentLost, match=r"could not be started: .*temporarily unavailable"):
        await run("print(1)")


@pytest.mark.parametrize(
    ("source", "reward"),
    [
        ("print('done')", None),
        ("", None),
        ("print(1)\nprint()", 1.0),
        ("print('x' * 10**7); print(0.5)", 0.5),
    ],
)
async def test_an_output_without_a_number_at_its_end_is_no_reward(source: str, reward: float | None) -> None:
    assert await run(source) == reward


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("import sys; sys.exit('no key')", "exit code 1: no key"),
        ("import os; os.kill(os.getpid(), 9)", "died with signal SIGKILL"),
        ("x = bytearray(1 << 30)", "exit code 1: MemoryError"),
        ("print('nan')", "printed the reward nan"),
    ],
)
async def test_a_command_that_fails_is_named(source: str, fault: str) -> None:
    with pytest.raises(EnvironmentFailed, match=fault):
        await run(source)


async def test_an_unknown_program_or_column_is_named() -> None:
    with pytest.raises(EnvironmentFailed, match="no-such-program: No such file"):
        await run_command(["no-such-program"], ROW, "u", "k", 512)
    with pytest.raises(
        InvalidInput, match=r"names \{answer\}, but the data set has no such column; it has question, level"
    ):
        await run_command(["echo", "{answer}"], ROW, "u", "k", 512)


async def test_it_ends_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    os.mkfifo(pids)
    source = (
        "import os, subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        "open(sys.argv[1], 'w').write(f'{os.getpid()} {child.pid}'); time.sleep(600)"
    )
    running = asyncio.create_task(run(source, str(pids)))
    found = [psutil.Process(int(pid)) for pid in (await asyncio.to_thread(pids.read_text)).split()]
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    _, alive = await asyncio.to_thread(psutil.wait_procs, found, 20)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


async def test_a_child_that_holds_the_output_does_not_hold_the_episode() -> None:
    source = (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); print(0.25)"
    )
    async with asyncio.timeout(60):
        assert await run(source) == 0.25


def test_the_environment_of_the_service_is_not_changed() -> None:
    values: dict[str, Any] = dict(os.environ)
    asyncio.run(run("print(1)"))
    assert dict(os.environ) == values


@pytest.mark.skipif(bool(why_no_isolation()), reason=why_no_isolation())
async def test_a_command_that_its_box_refuses_a_file_is_told_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, Isolation.SECRETS.value)
    monkeypatch.setenv("PACELINE_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("PACELINE_BUNDLE_CACHE", str(tmp_path / "bundles"))
    (tmp_path / "token").write_text("secret")
    with pytest.raises(
        EnvironmentFailed, match=r"Permission denied: '\S+'; this worker hides its secrets .*--no-isolation"
    ):
        await run(f"open({str(tmp_path / 'new')!r}, 'w')")
    with pytest.raises(EnvironmentFailed, match="Permission denied"):
        await run(f"open({str(tmp_path / 'token')!r})")
    source = "import os, tempfile; tempfile.mkstemp(); print(len(os.environ['TMPDIR']))"
    assert (await run(source) or 0) > len(tempfile.gettempdir())
