"""An episode of an agent: a function or a command line that sends its requests to a session of its own.

The program runs until it ends, the time that it uses itself is over, or the lease is lost. A program that ends after a request met
a limit has been cut off; its turns count all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

from paceline.environment.agent_session import AgentTurns
from paceline.environment.hosting.commands import run_command
from paceline.environment.hosting.faults import CannotGoOn, EnvironmentFailed
from paceline.environment.hosting.pool import SampleDeaths
from paceline.environment.life import FinishedSample, Life
from paceline.environment.limits import Stopwatch
from paceline.environment.protocols import SessionAddress
from paceline.environment.setting import GroupContext
from paceline.errors import Conflict

DONE, TRUNCATED = "done", "truncated"


class AgentEpisode:
    """One life of a sample whose environment is a program."""

    def __init__(self, context: GroupContext, life: Life, deaths: SampleDeaths):
        self._context, self._life, self._deaths = context, life, deaths
        self._section = context.setting.environment
        self._watch = Stopwatch(self._section.timeout_s)

    async def run(self) -> FinishedSample:
        """Return the finished sample. Raises EpisodeFault, LeaseLost."""
        if self._life.turns and not self._section.deterministic:
            raise CannotGoOn("environment.deterministic is false, so its program begins again")
        if self._context.sessions is None:
            raise Conflict("an agent's episode needs a server for its requests, and there is none")
        replays = bool(self._life.turns)
        session = AgentTurns(self._context, self._life, self._watch, self._trains)
        async with self._context.sessions.open(session) as address:
            try:
                reward, ending, detail = await self._until_over(session, address)
            finally:
                self._watch.stop()
                self._context.setting.counts.environment_s += self._watch.used_s
                await session.close()
        finished = await session.finish(reward, ending, detail)
        self._context.setting.counts.replayed += replays
        return finished

    async def _until_over(
        self, session: AgentTurns, address: SessionAddress
    ) -> tuple[float | None, str, str]:
        """Return reward, ending and detail of the program."""
        program = asyncio.create_task(self._program(address), name="agent")
        clock = asyncio.create_task(self._until_time_is_up(session), name="agent's time")
        try:
            await asyncio.wait((program, clock, session.lost), return_when=asyncio.FIRST_COMPLETED)
            if session.lost.done():
                session.lost.result()
            if not program.done():
                return None, TRUNCATED, f"environment.timeout_s {self._section.timeout_s:g}"
            try:
                reward = program.result()
            except EnvironmentFailed:
                if not session.limit:
                    raise
                return None, TRUNCATED, session.limit
            return reward, TRUNCATED if session.limit else DONE, session.limit
        finally:
            for task in (program, clock):
                task.cancel()
            await asyncio.gather(program, clock, return_exceptions=True)
            if session.lost.done():
                session.lost.exception()

    async def _program(self, address: SessionAddress) -> float | None:
        row = self._context.row
        self._watch.start()
        if self._section.agent:
            return await self._context.code.solve(row, *address, self._deaths)
        folder = self._context.setting.spec.folder
        return await run_command(self._section.command, row, *address, self._section.memory_mb, folder)

    async def _until_time_is_up(self, session: AgentTurns) -> None:
        """Wait until the program has used its seconds; those in which it waits for an answer do not count."""
        while session.waits or self._watch.left_s > 0:
            session.changed.clear()
            left_s = None if session.waits else self._watch.left_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):  # wait_for of Python 3.11 may swallow a cancellation
                    await session.changed.wait()

    async def _trains(self, messages: Sequence[Any], tools: Sequence[Any]) -> bool:
        if not self._section.train_call:
            return True
        return await self._context.code.trains(list(messages), list(tools), self._deaths)
