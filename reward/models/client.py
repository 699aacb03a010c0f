"""`ModelProcess`: the runner's side of one reward model's process, for several callers at one time.

Tasks: one reads replies and gives each to its caller; one waits for the process' end. A caller waits no longer than its own
limit; a process that answers nobody for that long is killed. Whoever calls next starts it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import sys
from asyncio.subprocess import DEVNULL
from typing import Any

from paceline.errors import InvalidInput, Unavailable, Unreadable, WireError
from reward.models.settings import ModelSettings
from reward.process import ROOT, ProcessDied, ProcessTimeout, describe_end, kill_group
from reward.protocol import encode, receive_async

BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from reward.models.serving import main; main()"
LOAD_TIMEOUT_S = 1800.0
"""Limit of loading a model, its transfer from a URL included."""


class ModelProcess:
    """One child process with one model."""

    def __init__(self, function: str, settings: ModelSettings, memory_mb: int) -> None:
        """Set the model; `start` loads it. memory_mb: address space that it may add on a CPU."""
        self._load = encode(
            {"function": function, "model": settings.shared(), "memory_bytes": memory_mb << 20}
        )
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._ids = itertools.count(1)
        self._starting = asyncio.Lock()
        self._answered = 0
        self.version = ""
        """Version of the weights that scored last."""

    @property
    def usable(self) -> bool:
        """Return whether the process is started and not known to have ended."""
        return self._writer is not None

    async def start(self) -> None:
        """Start the process and load the model, unless it runs. Raises InvalidInput for a model that does not fit, Unreadable
        for one that cannot be read now, Unavailable for a process that ended or took too long."""
        async with self._starting:
            if self.usable:
                return
            await self.close()
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    self._process = await asyncio.create_subprocess_exec(
                        *(sys.executable, "-P", "-c", BOOT, ROOT, str(theirs.fileno()), str(os.getpid())),
                        stdin=DEVNULL,
                        pass_fds=(theirs.fileno(),),
                        start_new_session=True,
                    )
                except BaseException:
                    ours.close()
                    raise
            reader, writer = await asyncio.open_connection(sock=ours)
            try:
                async with asyncio.timeout(LOAD_TIMEOUT_S):
                    writer.write(self._load)
                    await writer.drain()
                    reply = await receive_async(reader)
            except BaseException as error:
                late = isinstance(error, TimeoutError)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._process.wait(), timeout=0.0 if late else 1.0)
                how = (
                    f"took more than {LOAD_TIMEOUT_S:g} s" if late else describe_end(self._process.returncode)
                )
                writer.transport.abort()
                await self.close()
                if isinstance(error, TimeoutError | EOFError | OSError | WireError):
                    raise Unavailable(
                        f"the process of the reward model {how} while it loaded the model; memory_mb of its function may be "
                        "too small"
                    ) from None
                raise
            if "refused" in reply:
                writer.transport.abort()
                await self.close()
                raise (Unreadable if reply.get("passing") else InvalidInput)(str(reply["refused"]))
            self._writer, self.version = writer, str(reply.get("loaded", ""))
            self._tasks = [asyncio.create_task(self._read(reader, self._process), name="reward model")]

    async def score(self, prompts: list[Any], completions: list[Any], timeout_s: float) -> dict[str, Any]:
        """Return the reply to one group: `scores` and `version`, or `raised`. Raises ProcessTimeout and ProcessDied."""
        if self._writer is None:
            raise ProcessDied("was not running")
        number, answered = next(self._ids), self._answered
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            async with asyncio.timeout(timeout_s):
                self._writer.write(encode({"score": number, "prompts": prompts, "completions": completions}))
                await self._writer.drain()
                return await future
        except TimeoutError:
            if self._answered == answered:
                self.kill()
            raise ProcessTimeout(f"timed out after {timeout_s:g} s") from None
        except OSError:
            raise ProcessDied("closed its connection") from None
        finally:
            self._waiting.pop(number, None)

    def kill(self) -> None:
        """Kill the process; `close` or `start` waits for its end."""
        if self._process is not None and self._process.returncode is None:
            kill_group(self._process.pid)
        if self._writer is not None:
            self._writer.transport.abort()
        self._writer = None

    async def close(self) -> None:
        """Kill the process, and wait for its end."""
        self.kill()
        tasks, self._tasks = self._tasks, []
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._process is not None:
            await self._process.wait()  # no deadline: after SIGKILL only the kernel's waits can delay the end
        self._process = None

    async def _read(self, reader: asyncio.StreamReader, process: asyncio.subprocess.Process) -> None:
        """Give each reply to its caller, until the process ends."""
        ours = True
        try:
            while True:
                reply = await receive_async(reader)
                self._answered += 1
                self.version = str(reply.get("version") or self.version)
                future = self._waiting.get(reply.get("scored", 0))
                if future is not None and not future.done():
                    future.set_result(reply)
        except (EOFError, OSError, WireError):
            ours = self._writer is None  # killed from this side
        finally:
            if ours is False:  # it is ending by itself, and the way it does is of interest
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), timeout=1.0)
            self.kill()
            await process.wait()
            died = ProcessDied(describe_end(process.returncode))
            died.by_signal = not ours and (process.returncode or 0) < 0
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(died)
