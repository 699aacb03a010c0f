"""One process of user code with the episodes in it: its lanes, its end, and who is to blame for that.

A slot is started once. When a thread of it hangs it is retired: it takes no further episodes, those in it go on, and it ends
with the last of them. When its process dies, a new slot takes its place.
"""

from __future__ import annotations

import asyncio
from typing import Any

from paceline.spec.code_paths import file_of
from paceline.user_code.ends import ProcessDied, ProcessTimeout
from paceline.user_code.shared_process import SharedProcess
from paceline.user_code.surroundings import Surroundings

PING_S = 5.0
"""A process that does not answer this long is hung as a whole: user code holds the interpreter, or it is stopped."""


class Slot:
    """A process and the episodes in it."""

    def __init__(self, load: dict[str, Any], num_lanes: int) -> None:
        named = [*load["classes"].values(), *load["tools"], load["agent"], load["train_call"]]
        surroundings = Surroundings(tuple(file_of(code) for code in named if code))
        self.process = SharedProcess("paceline.environment.hosting.worker", {"load": load}, surroundings)
        self.num_sessions = 0
        self.retired = False
        self.killed = False
        """Its process was killed from this side, for one of its calls."""
        self.emptied = asyncio.Event()
        """Set while no episode is in it."""
        self.emptied.set()
        self.num_calls = 0
        """Calls of user code that run in it now."""
        self.calls = asyncio.Semaphore(num_lanes)
        """Limit of coroutines; each lane is a limit of its own."""
        self._lanes = [asyncio.Lock() for _ in range(num_lanes)]
        self._lane_sessions = [0] * num_lanes
        self._hung: set[int] = set()

    @property
    def usable(self) -> bool:
        """Return whether the process runs."""
        return self.process.usable

    def enter(self) -> int:
        """Take a further episode; return its lane."""
        self.num_sessions += 1
        self.emptied.clear()
        lane = min(range(len(self._lanes)), key=self._lane_sessions.__getitem__)
        self._lane_sessions[lane] += 1
        return lane

    def leave(self, lane: int) -> None:
        """Let an episode go. A retired slot ends with its last one."""
        self.num_sessions -= 1
        self._lane_sessions[lane] -= 1
        if not self.num_sessions:
            self.emptied.set()
            if self.retired:
                self.process.kill()

    def lane(self, lane: int) -> asyncio.Lock:
        """Return the lock of a lane: one synchronous call at a time."""
        return self._lanes[lane]

    def is_hung(self, lane: int) -> bool:
        """Return whether the thread of a lane hangs: its episodes are lost."""
        return lane in self._hung

    def hang(self, lane: int | None) -> None:
        """Retire the slot, because the thread of a call hangs."""
        self.retired = True
        if lane is not None:
            self._hung.add(lane)

    def kill(self) -> None:
        """Kill the process for one of its calls; the others' episodes are lost by no fault of theirs."""
        self.killed = True
        self.process.kill()

    async def answers(self) -> bool:
        """Return whether the process answers at all; if not, it is killed."""
        try:
            await self.process.ask({"op": "ping"}, PING_S)
        except ProcessTimeout:
            self.kill()
            return False
        except ProcessDied:
            return False
        return True
