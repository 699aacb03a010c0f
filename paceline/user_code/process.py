"""Processes of user code: `UserProcess` for one caller at a time, and `SharedProcess` for several, with ids.

The output of user code is copied to standard error within limits, and processes that it leaves behind are ended
(`paceline/user_code/left_over.py`).

Tasks of a UserProcess: a watch for each process waits for its end and then kills the rest of its process group, so
that a grandchild with the socket cannot hide the death; readers then see EOF. `start` waits for the watch of the previous
process. Tasks of a SharedProcess: one reads replies and gives each to its caller, until the process ends; then every
waiting caller gets an error. A process dies with the thread that started it (PR_SET_PDEATHSIG), so the event loop must
run in a thread that lasts. Every wait for an answer has the caller's time limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from typing import Any, NamedTuple

from paceline.errors import InvalidInput, Unreadable, WireError
from paceline.user_code import left_over
from paceline.user_code.ends import (
    ProcessDied,
    ProcessNotStarted,
    ProcessTimeout,
    describe_end,
    kill_group,
    starved_seconds,
    usage,
)
from paceline.user_code.frames import encode, receive_async
from paceline.user_code.surroundings import ROOT, ProcessSettings, Surroundings

BOOT = (
    "import sys, importlib; sys.path.insert(0, sys.argv[1]); import paceline; sys.path.pop(0); "
    "importlib.import_module(sys.argv[4]).main()"
)
"""Code of the child. It must import the same code as this process."""


class Spawned(NamedTuple):
    """A started process of user code."""

    process: Process
    local: socket.socket
    """This side's socket."""
    settings: ProcessSettings | None
    """Settings, whose files are removed after the end of the process."""
    output: left_over.CopiedOutput | None
    """Copy of the process's output, which is closed after the end of the process."""


async def spawn(module: str, surroundings: Surroundings | None) -> Spawned:
    """Start a process that runs `main()` of a module in a separate session. The process connects with
    `paceline.user_code.child.connect`. -P keeps the working directory off the process' import path. Without
    `surroundings`, for code of this project, the process has the environment and the standard error of this process,
    and no box. Raises ProcessNotStarted."""
    settings: ProcessSettings | None = None
    try:
        settings = None if surroundings is None else surroundings.prepare()
        return await _spawn(module, settings)
    except BaseException as error:
        if settings is not None:
            await asyncio.to_thread(settings.remove)
        if isinstance(error, OSError):
            raise ProcessNotStarted(f"could not be started: {error}") from error
        raise


async def _spawn(module: str, settings: ProcessSettings | None) -> Spawned:
    output = None if settings is None else await left_over.CopiedOutput.opened()
    local, remote = socket.socketpair()
    arguments = [ROOT, str(remote.fileno()), str(os.getpid()), module]
    arguments += [] if settings is None else [settings.box.text()]
    try:
        with remote, left_over.starting() as started:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-c", BOOT, *arguments),
                stdin=DEVNULL,
                stdout=None if output is None else output.write_fd,
                stderr=None if output is None else output.write_fd,
                env=None if settings is None else settings.environment,
                pass_fds=(remote.fileno(),),
                start_new_session=True,
            )
            started(process.pid)
    except BaseException:
        local.close()
        raise
    finally:
        if output is not None:
            os.close(output.write_fd)
    return Spawned(process, local, settings, output)


class _Child:
    def __init__(self, module: str, surroundings: Surroundings | None) -> None:
        self._module, self._surroundings = module, surroundings
        self._process: Process | None = None
        self._settings: ProcessSettings | None = None
        self._output: left_over.CopiedOutput | None = None
        self._writer: asyncio.StreamWriter | None = None

    @property
    def pid(self) -> int | None:
        """Process id; None if there is no process."""
        return self._process.pid if self._process is not None else None

    async def _connected(self) -> tuple[Process, asyncio.StreamReader, asyncio.StreamWriter]:
        """Start a process; return it with its connection. Raises ProcessNotStarted."""
        process, local, self._settings, self._output = await spawn(self._module, self._surroundings)
        self._process = process
        self._spawned(process)
        try:
            return process, *await asyncio.open_connection(sock=local)
        except BaseException:
            local.close()
            self.kill()
            raise

    def _spawned(self, process: Process) -> None:
        """Begin to watch a process that is not connected yet."""

    def kill(self) -> None:
        """Kill the process and its children; `close` or `start` waits for their end."""
        if self._process is not None and self._process.returncode is None:
            kill_group(self._process.pid)
        if self._writer is not None:
            self._writer.transport.abort()
        self._writer = None

    async def _remove_files(self) -> None:
        output, self._output = self._output, None
        if output is not None:
            await output.close()
        settings, self._settings = self._settings, None
        if settings is not None:
            await asyncio.to_thread(settings.remove)


class UserProcess(_Child):
    """One child process that runs `main` of a module, for one caller at a time."""

    def __init__(self, module: str, load_frame: bytes, start_timeout_s: float, surroundings: Surroundings) -> None:
        """Take the module and its first frame for `start`; `start_timeout_s` limits the start with its imports."""
        super().__init__(module, surroundings)
        self._load_frame = load_frame
        self._start_timeout_s = start_timeout_s
        self._watch: asyncio.Task[None] | None = None
        self._reader: asyncio.StreamReader | None = None

    @property
    def usable(self) -> bool:
        """Return whether the process is started and has not ended as far as is known."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """End the previous process, start a new one, and load the user's code. Raises InvalidInput if the code cannot
        be loaded, Unreadable if it cannot be loaded now, ProcessTimeout, ProcessDied (also while importing)."""
        await self.close()
        _, self._reader, self._writer = await self._connected()
        reply = await self.ask(self._load_frame, timeout_s=self._start_timeout_s)
        if "refused" in reply:
            await self.close()
            kind = Unreadable if reply.get("passing") else InvalidInput
            raise kind(str(reply["refused"]))

    def _spawned(self, process: Process) -> None:
        self._watch = asyncio.create_task(self._wait_for_end(process), name="user process")

    async def ask(self, *frames: bytes, timeout_s: float) -> dict[str, Any]:
        """Send `frames` and return the reply. Raises ProcessTimeout or ProcessDied, after which the process has ended.
        A cancelled call ends the process too, because a process within a call cannot serve the next caller."""
        if self._reader is None or self._writer is None or self._process is None or self._watch is None:
            raise ProcessDied("was not running")
        process, watch = self._process, self._watch
        used_s: list[float] = []  # at half of the time, because the measurement reads all processes of the machine
        half = asyncio.get_running_loop().call_later(timeout_s / 2, lambda: used_s.append(usage(process.pid)))
        try:
            async with asyncio.timeout(timeout_s):
                self._writer.writelines(frames)
                await self._writer.drain()
                return await receive_async(self._reader)
        except TimeoutError:
            timeout = ProcessTimeout(f"timed out after {timeout_s:g} s")
            since_s = starved_seconds(process.pid, sum(used_s), timeout_s / 2)
            if since_s is not None:
                timeout = ProcessTimeout(
                    f"timed out after {timeout_s:g} s, with {since_s:.2f} s of processor time in the second half"
                )
                timeout.starved = True
            self.kill()
            raise timeout from None
        except (EOFError, OSError):
            if process.returncode is None:  # it closed the socket, or is ending
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        await asyncio.shield(watch)
            died = ProcessDied(describe_end(process.returncode))
            # Another caller of `kill` may have dropped the process meanwhile.
            died.by_signal = (process.returncode or 0) < 0 and process is self._process
            self.kill()
            raise died from None
        except WireError as error:
            self.kill()
            raise ProcessDied(f"broke the protocol: {error}") from None
        except BaseException:
            self.kill()
            raise
        finally:
            half.cancel()

    def kill(self) -> None:
        super().kill()
        self._process = self._reader = None

    async def close(self) -> None:
        """Kill the process, and wait for its end."""
        self.kill()
        watch, self._watch = self._watch, None
        if watch is not None:
            await watch  # no deadline: after SIGKILL only the kernel's waits can delay the end
        await self._remove_files()

    async def _wait_for_end(self, process: Process) -> None:
        await process.wait()
        kill_group(process.pid)
        await left_over.ended(process.pid)


class SharedProcess(_Child):
    """One child process that runs `main` of a module, for several callers."""

    def __init__(self, module: str, load: dict[str, Any], surroundings: Surroundings | None) -> None:
        """Take the module and its first message for `start`; `surroundings` is None for code of this project."""
        super().__init__(module, surroundings)
        self._load = encode(load)
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.last_id = 0
        """Id of the newest message that was sent."""
        self.num_answered = 0

    @property
    def usable(self) -> bool:
        return self._writer is not None

    async def start(self, timeout_s: float) -> dict[str, Any]:
        """End the previous process, start a new one, and return its reply to the first message. Raises ProcessTimeout
        and ProcessDied, after which the process has ended."""
        await self.close()
        process, reader, writer = await self._connected()
        try:
            async with asyncio.timeout(timeout_s):
                writer.write(self._load)
                await writer.drain()
                reply = await receive_async(reader)
        except BaseException as error:
            late = isinstance(error, TimeoutError)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.0 if late else 1.0):
                    await process.wait()
            returncode = process.returncode
            writer.transport.abort()
            await self.close()
            if late:
                raise ProcessTimeout(f"took more than {timeout_s:g} s") from None
            if isinstance(error, EOFError | OSError | WireError):
                died = ProcessDied(describe_end(returncode))
                died.by_signal = (returncode or 0) < 0
                raise died from None
            raise
        self._writer = writer
        self._reading = asyncio.create_task(self._read(reader, process), name="user process")
        return reply

    async def ask(self, message: dict[str, Any], timeout_s: float | None) -> dict[str, Any]:
        """Send a message and return its reply. Raises ProcessTimeout, after which the process continues, and
        ProcessDied. Without a limit the caller needs its own deadline."""
        if self._writer is None:
            raise ProcessDied("was not running")
        self.last_id = number = self.last_id + 1
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            async with asyncio.timeout(timeout_s):
                self._writer.write(encode({"id": number, **message}))
                await self._writer.drain()
                return await future
        except TimeoutError:
            raise ProcessTimeout(f"timed out after {timeout_s:g} s") from None
        except OSError:
            raise ProcessDied("closed its connection") from None
        finally:
            self._waiting.pop(number, None)
            if future.done() and not future.cancelled():
                future.exception()  # it may have come with the time-out

    def send(self, message: dict[str, Any]) -> None:
        """Send a message whose reply nobody needs. Do nothing if the process does not run."""
        if self._writer is not None:
            self.last_id += 1
            self._writer.write(encode({"id": self.last_id, **message}))

    async def close(self) -> None:
        self.kill()
        reading, self._reading = self._reading, None
        if reading is not None:
            await asyncio.gather(reading, return_exceptions=True)
        if (process := self._process) is not None:
            await process.wait()  # no deadline: after SIGKILL only the kernel's waits can delay the end
            kill_group(process.pid)
            self._process = None
            await left_over.ended(process.pid)
        await self._remove_files()

    def replied(self, reply: dict[str, Any]) -> None:
        """Process a reply before its caller gets it."""

    async def _read(self, reader: asyncio.StreamReader, process: Process) -> None:
        ended_here, fault = False, ""
        try:
            while True:
                reply = await receive_async(reader)
                self.num_answered += 1
                self.replied(reply)
                future = self._waiting.get(reply.get("id", 0))
                if future is not None and not future.done():
                    future.set_result(reply)
        except WireError as error:
            fault = f"broke the protocol: {error}"
        except (EOFError, OSError):
            pass
        finally:
            ended_here = self._writer is None
            if not ended_here and not fault:  # it is ending by itself, and callers get its return code
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        await process.wait()
            by_signal = not ended_here and not fault and (process.returncode or 0) < 0
            self.kill()
            await process.wait()
            kill_group(process.pid)
            died = ProcessDied(fault or describe_end(process.returncode))
            died.by_signal = by_signal
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(died)
