"""One process for several callers: each gets its reply in any order, and all get the end."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from paceline.errors import InvalidInput
from paceline.user_code import child, surroundings
from paceline.user_code.box import Box
from paceline.user_code.ends import ProcessDied, ProcessNotStarted, ProcessTimeout
from paceline.user_code.frames import encode
from paceline.user_code.process import SharedProcess
from paceline.user_code.surroundings import Surroundings

MODULE = "echo_process"
FOLDER = Path(__file__).resolve().parents[2] / "support" / "processes"


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child imports `paceline` from where this process does, and everything else from its path."""
    monkeypatch.setenv("PYTHONPATH", str(FOLDER), prepend=os.pathsep)


@pytest.fixture
async def process() -> AsyncIterator[SharedProcess]:
    shared = SharedProcess(MODULE, {"what": "code"}, Surroundings())
    assert await shared.start(60) == {"loaded": {"what": "code"}}
    yield shared
    await shared.close()


@pytest.mark.parametrize("what", ["tempfile.mkdtemp", "asyncio.create_subprocess_exec"])
async def test_a_host_without_room_is_no_fault_of_the_code(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Surroundings, "box", lambda self: Box((str(tmp_path / "hidden"),)))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(what, refuse)
    process = SharedProcess(MODULE, {"what": "code"}, Surroundings())
    with pytest.raises(ProcessNotStarted, match=r"could not be started: .*No space left") as caught:
        await process.start(60)
    assert caught.value.by_signal
    assert os.listdir(tmp_path) == []
    await process.close()


async def test_replies_come_in_any_order(process: SharedProcess) -> None:
    early = [asyncio.create_task(process.ask({"do": "keep", "say": number}, 60)) for number in range(3)]
    await asyncio.sleep(0)
    last = await process.ask({"do": "answer kept", "say": "last"}, 60)
    assert last["said"] == "last"
    assert [reply["said"] for reply in await asyncio.gather(*early)] == [0, 1, 2]
    assert process.num_answered == 4
    assert (await process.ask({"do": "print"}, 60))["said"] == "printed"


async def test_a_caller_that_waits_too_long_leaves_the_process_to_the_others(process: SharedProcess) -> None:
    with pytest.raises(ProcessTimeout, match=r"timed out after 0.1 s"):
        await process.ask({"do": "keep"}, 0.1)
    process.send({"do": "keep"})
    assert (await process.ask({"do": "answer kept", "say": 1}, 60))["said"] == 1


@pytest.mark.parametrize(
    ("do", "how", "by_signal"),
    [
        ("die", "died with signal SIGSEGV", True),
        ("exit", "ended its process with exit code 7", False),
        ("nonsense", "broke the protocol: a process of user code sent b'abc'", False),
    ],
)
async def test_an_end_reaches_everyone(process: SharedProcess, do: str, how: str, by_signal: bool) -> None:
    waiting = asyncio.create_task(process.ask({"do": "keep"}, 60))
    await asyncio.sleep(0)
    for call in (process.ask({"do": do}, 60), waiting):
        with pytest.raises(ProcessDied, match=how) as died:
            await call
        assert died.value.by_signal is by_signal
    assert not process.usable
    with pytest.raises(ProcessDied, match="was not running"):
        await process.ask({"do": "keep"}, 60)
    assert "loaded" in await process.start(60)


async def test_a_process_that_is_killed_from_here_did_not_die_by_a_signal(process: SharedProcess) -> None:
    waiting = asyncio.create_task(process.ask({"do": "sleep"}, 60))
    await asyncio.sleep(0)
    pid = process.pid
    assert pid is not None
    process.kill()
    with pytest.raises(ProcessDied) as died:
        await waiting
    assert died.value.by_signal is False
    await process.close()
    assert not psutil.pid_exists(pid)


async def test_a_module_that_cannot_start_is_named() -> None:
    shared = SharedProcess("no.such.module", {}, None)
    with pytest.raises(ProcessDied, match="exit code 1"):
        await shared.start(60)


def test_messages_are_json() -> None:
    assert encode({"a": [1, None]})[4:] == b'{"a": [1, null]}'
    with pytest.raises(InvalidInput, match="user code accepts only JSON values"):
        encode({"a": object()})


def test_the_parts_are_where_the_process_expects_them() -> None:
    assert (child.OOM_SCORE, surroundings.ROOT.endswith("paceline")) == (500, False)
