"""`ModelProcess`: the runner's side of one reward model's process, for several callers at one time.

A caller waits no longer than its own limit; a process that answers nobody for that long is killed. Whoever calls next
starts it again.
"""

from __future__ import annotations

import asyncio
from typing import Any

from paceline.errors import InvalidInput, Unavailable, Unreadable
from paceline.reward.models.settings import ModelSettings
from paceline.user_code.ends import ProcessDied, ProcessTimeout
from paceline.user_code.shared_process import SharedProcess

LOAD_TIMEOUT_S = 1800.0
"""Limit of loading a model, its transfer from a URL included."""


class ModelProcess:
    """One child process with one model."""

    def __init__(self, function: str, settings: ModelSettings, memory_mb: int) -> None:
        """Set the model; `start` loads it. memory_mb: address space that it may add on a CPU."""
        load = {"function": function, "model": settings.shared(), "memory_bytes": memory_mb << 20}
        self._shared = SharedProcess("paceline.reward.models.serving", load, None)
        self._starting = asyncio.Lock()
        self.version = ""
        """Version of the weights that scored last."""

    @property
    def pid(self) -> int | None:
        """Process id, from the start to its end; None else."""
        return self._shared.pid

    @property
    def usable(self) -> bool:
        """Return whether the process is started and not known to have ended."""
        return self._shared.usable

    async def start(self) -> None:
        """Start the process and load the model, unless it runs. Raises InvalidInput for a model that does not fit, Unreadable
        for one that cannot be read now, Unavailable for a process that ended or took too long."""
        async with self._starting:
            if self.usable:
                return
            try:
                reply = await self._shared.start(LOAD_TIMEOUT_S)
            except (ProcessTimeout, ProcessDied) as error:
                raise Unavailable(
                    f"the process of the reward model {error} while it loaded the model; memory_mb of its function may be too "
                    "small"
                ) from None
            if "refused" in reply:
                await self._shared.close()
                raise (Unreadable if reply.get("passing") else InvalidInput)(str(reply["refused"]))
            self.version = str(reply.get("loaded", ""))

    async def score(self, prompts: list[Any], completions: list[Any], timeout_s: float) -> dict[str, Any]:
        """Return the reply to one group: `scores` and `version`, or `raised`. Raises ProcessTimeout and ProcessDied."""
        answered = self._shared.num_answered
        try:
            reply = await self._shared.ask({"prompts": prompts, "completions": completions}, timeout_s)
        except ProcessTimeout:
            if self._shared.num_answered == answered:
                self.kill()
            raise
        self.version = str(reply.get("version") or self.version)
        return reply

    def kill(self) -> None:
        """Kill the process; `close` or `start` waits for its end."""
        self._shared.kill()

    async def close(self) -> None:
        """Kill the process, and wait for its end."""
        await self._shared.close()
