"""One process of user code, for one caller at a time: start, calls, end.

Tasks: one watch per process life waits for its end, and then kills the rest of its process group, so that a grandchild
that still holds the socket cannot hide the death; readers see EOF after that. `start` waits for the watch of the life
before. The process dies with the thread that started it (PR_SET_PDEATHSIG), so the event loop has to run in a thread that
lasts. Every wait for an answer has the caller's time limit.
"""

from __future__ import annotations

import asyncio
import contextlib
from asyncio.subprocess import Process
from typing import Any

from paceline.errors import InvalidInput, Unreadable, WireError
from paceline.user_code.ends import (
    ProcessDied,
    ProcessTimeout,
    describe_end,
    kill_group,
    starved_seconds,
    usage,
)
from paceline.user_code.frames import receive_async
from paceline.user_code.spawning import spawn
from paceline.user_code.surroundings import Place, Surroundings


class UserProcess:
    """One child process that runs `main` of a module. Used by one caller at a time."""

    def __init__(
        self, module: str, load_frame: bytes, start_timeout_s: float, surroundings: Surroundings
    ) -> None:
        """Set the module and its first frame; `start` starts the process. start_timeout_s: limit of the start with the user
        code's imports."""
        self._surroundings = surroundings
        self._module = module
        self._load_frame = load_frame
        self._start_timeout_s = start_timeout_s
        self._process: Process | None = None
        self._place: Place | None = None
        self._watch: asyncio.Task[None] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    @property
    def pid(self) -> int | None:
        """Process id, from the start to the kill; None else."""
        return self._process.pid if self._process else None

    @property
    def usable(self) -> bool:
        """Return whether the process is started and not known to have ended."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start a new process, after ending the one before, and load the user's code.

        Raises InvalidInput when it cannot be loaded (Unreadable: not now), ProcessTimeout, ProcessDied (also while importing).
        """
        await self.close()
        self._process, ours, self._place = await spawn(self._module, self._surroundings)
        self._watch = asyncio.create_task(self._wait_for_end(self._process), name="user process")
        try:
            self._reader, self._writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()
            self.kill()
            raise
        reply = await self.ask(self._load_frame, timeout_s=self._start_timeout_s)
        if "refused" in reply:
            await self.close()
            kind = Unreadable if reply.get("passing") else InvalidInput
            raise kind(str(reply["refused"]))

    async def ask(self, *frames: bytes, timeout_s: float) -> dict[str, Any]:
        """Send `frames` and return the reply. Raises ProcessTimeout or ProcessDied; the process is gone then.

        A cancelled call ends the process too, because one in the middle of a call cannot serve the next caller.
        """
        if self._reader is None or self._writer is None or self._process is None or self._watch is None:
            raise ProcessDied("was not running")
        process, watch = self._process, self._watch
        used_s: list[
            float
        ] = []  # at half of the time, because the measurement reads all processes of the machine
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
                    f"timed out after {timeout_s:g} s, with {since_s:.2f} s of a processor in the second half"
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
        """Kill the process and its children; `close` or `start` waits until they are gone."""
        if self._process is not None and self._process.returncode is None:
            kill_group(self._process.pid)
        self._process = None
        if self._writer is not None:
            self._writer.transport.abort()
        self._reader = self._writer = None

    async def close(self) -> None:
        """Kill the process, and wait for its end."""
        self.kill()
        watch, self._watch = self._watch, None
        if watch is not None:
            await watch  # no deadline: after SIGKILL only the kernel's waits can delay the end
        place, self._place = self._place, None
        if place is not None:
            await asyncio.to_thread(place.remove)

    async def _wait_for_end(self, process: Process) -> None:
        await process.wait()
        kill_group(process.pid)
