"""One process of user code, for several callers at a time: each message has an id, and so has its reply.

Tasks: one reads replies and gives each to its caller, until the process ends; then every caller that waits gets the end. A
caller waits no longer than its own limit; whether the process is killed then is the caller's decision.
"""

from __future__ import annotations

import asyncio
import contextlib
from asyncio.subprocess import Process
from typing import Any

from paceline.errors import WireError
from paceline.user_code.ends import ProcessDied, ProcessTimeout, describe_end, kill_group
from paceline.user_code.frames import encode, receive_async
from paceline.user_code.spawning import spawn
from paceline.user_code.surroundings import Place, Surroundings


class SharedProcess:
    """One child process that runs `main` of a module."""

    def __init__(self, module: str, load: dict[str, Any], surroundings: Surroundings | None) -> None:
        """Set the module and its first message; `start` starts the process. `surroundings` is None for code of this project."""
        self._surroundings = surroundings
        self._module, self._load = module, encode(load)
        self._process: Process | None = None
        self._place: Place | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.last_id = 0
        """Id of the newest message."""
        self.num_answered = 0
        """Replies so far."""

    @property
    def pid(self) -> int | None:
        """Process id, from the start to its end; None else."""
        return self._process.pid if self._process is not None else None

    @property
    def usable(self) -> bool:
        """Return whether the process is started and not known to have ended."""
        return self._writer is not None

    async def start(self, timeout_s: float) -> dict[str, Any]:
        """Start the process, after ending the one before, and return its reply to the first message. Raises ProcessTimeout
        and ProcessDied; the process is gone then."""
        await self.close()
        self._process, ours, self._place = await spawn(self._module, self._surroundings)
        try:
            reader, writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()
            raise
        try:
            async with asyncio.timeout(timeout_s):
                writer.write(self._load)
                await writer.drain()
                reply = await receive_async(reader)
        except BaseException as error:
            late = isinstance(error, TimeoutError)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.0 if late else 1.0):
                    await self._process.wait()
            returncode = self._process.returncode
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
        self._reading = asyncio.create_task(self._read(reader, self._process), name="user process")
        return reply

    async def ask(self, message: dict[str, Any], timeout_s: float | None) -> dict[str, Any]:
        """Send a message and return its reply. Raises ProcessTimeout, with which the process goes on, and ProcessDied. Without
        a limit the caller has its own deadline."""
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
        """Send a message whose reply nobody needs. Nothing happens when the process does not run."""
        if self._writer is not None:
            self.last_id += 1
            self._writer.write(encode({"id": self.last_id, **message}))

    def kill(self) -> None:
        """Kill the process and its children; `close` or `start` waits for its end."""
        if self._process is not None and self._process.returncode is None:
            kill_group(self._process.pid)
        if self._writer is not None:
            self._writer.transport.abort()
        self._writer = None

    async def close(self) -> None:
        """Kill the process, and wait for its end."""
        self.kill()
        reading, self._reading = self._reading, None
        if reading is not None:
            await asyncio.gather(reading, return_exceptions=True)
        if self._process is not None:
            await self._process.wait()  # no deadline: after SIGKILL only the kernel's waits can delay the end
            kill_group(self._process.pid)
        self._process = None
        place, self._place = self._place, None
        if place is not None:
            await asyncio.to_thread(place.remove)

    def replied(self, reply: dict[str, Any]) -> None:
        """Take note of a reply, before its caller gets it."""

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
            if not ended_here and not fault:  # it is ending by itself, and the way it does is of interest
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
