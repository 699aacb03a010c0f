"""Runs the episodes of a leased group and returns their transcripts.

Tasks: one for each sample; it waits for turns, for user code and for the turn log. If one task cannot continue (the
lease is lost, or the prompt is too long), the other tasks are cancelled.

A fault of user code ends a life and counts as a failure; any other loss of an environment does not count as one. A life
with recorded turns is replayed if possible, else restored, else it ends as `restarted`.

An agent's program (a function or a command line) runs until it ends, until its own time is used up, or until the lease
is lost. If the program ends after a request reached a limit, the sample is truncated, but its turns count.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

import numpy as np

from paceline.calls.backoff import ExponentialBackoff
from paceline.environment.agent_conversation import AgentTurns
from paceline.environment.class_episode import ClassEpisode
from paceline.environment.hosting.commands import run_command
from paceline.environment.hosting.pool import SampleDeaths, UserCode
from paceline.environment.life import FinishedSample, Life, sample_text
from paceline.environment.protocols import (
    CannotGoOn,
    ConversationAddress,
    ConversationHost,
    EnvironmentFailed,
    EnvironmentLost,
    EpisodeLease,
    FinishedGroup,
    RecordedSample,
    ServiceAway,
    TokenSource,
    TurnLog,
)
from paceline.environment.setting import EpisodeSetting, GroupContext, Stopwatch
from paceline.environment.transcripts import build_transcripts, join_transcripts
from paceline.errors import Conflict
from paceline.groups import IntArray, Rows

T = TypeVar("T")


async def run_episodes(
    setting: EpisodeSetting,
    lease: EpisodeLease,
    source: TokenSource,
    turn_log: TurnLog,
    code: UserCode,
    conversations: ConversationHost | None = None,
) -> FinishedGroup:
    """Return the finished group of a lease. `setting` and the started `code` are the run's; agents need
    `conversations`.

    Raises LeaseLost, and InvalidInput if the row of the data set cannot be used (PromptTooLong).
    """
    context = GroupContext(setting, lease, source, turn_log, code, conversations)
    finished = await _all_or_none([_finish_sample(context, sample) for sample in range(lease.num_samples)])
    return _finished_group(finished, setting)


def _finished_group(finished: Sequence[FinishedSample], setting: EpisodeSetting) -> FinishedGroup:
    built = [
        build_transcripts(sample.turns, sample.left_out, setting.text_of, truncated=sample.text.ending == "truncated")
        for sample in finished
    ]
    completions, owners, turns = join_transcripts(built)
    setting.counts.rows += len(completions)
    prompt_ids: IntArray = np.empty(0, np.int32)
    if completions and completions[0].prompt_ids is not None:
        prompt_ids = completions[0].prompt_ids
    return FinishedGroup(
        prompt_ids, completions, Rows(len(finished), owners, turns), [sample.text for sample in finished]
    )


async def _all_or_none(work: Sequence[Awaitable[T]]) -> list[T]:
    """Return the results of all awaitables. If one awaitable fails, cancel the others, wait until they have ended, and
    raise its exception."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


log = logging.getLogger(__name__)

FAILED, RESTARTED = "environment_failed", "restarted"
EARLIER = "given up by an earlier holder of the lease"


async def _finish_sample(context: GroupContext, sample: int) -> FinishedSample:
    recorded = context.lease.recorded.get(sample, RecordedSample())
    counts, environment = context.setting.counts, context.setting.environment
    life = Life(sample, context.turn_log, recorded)
    if recorded.given_up:
        return _failed(EARLIER)
    if recorded.finished:
        return life.finished()
    failures, pause, deaths = recorded.failures, ExponentialBackoff(), SampleDeaths()
    while True:
        try:
            episode = ClassEpisode if environment.has_class else AgentEpisode
            finished = await episode(context, life, deaths).run()
        except EnvironmentFailed as fault:
            failures += 1
            counts.failures += 1
            give_up = failures >= environment.max_failures
            log.warning("%s failed (%d of %d): %s", _name(life, context), failures, environment.max_failures, fault)
            await context.turn_log.end(sample, life.number, FAILED, str(fault), give_up)
            if give_up:
                return _failed(str(fault))
            life = Life(sample, context.turn_log, RecordedSample(life.number + 1))
            deaths = SampleDeaths()
        except CannotGoOn as fault:
            log.info("%s begins again: %s", _name(life, context), fault)
            await context.turn_log.end(sample, life.number, RESTARTED, str(fault), False)
            counts.restarted += 1
            life = Life(sample, context.turn_log, RecordedSample(life.number + 1))
        except EnvironmentLost as fault:
            log.warning("%s lost its environment: %s", _name(life, context), fault)
            if isinstance(fault, ServiceAway):
                await asyncio.sleep(pause.next_s())
        else:
            counts.samples += 1
            return finished


def _failed(detail: str) -> FinishedSample:
    return FinishedSample([], frozenset(), sample_text([], "failed", detail))


def _name(life: Life, context: GroupContext) -> str:
    return f"sample {life.sample} of group {context.lease.group_id}, life {life.number},"


DONE, TRUNCATED = "done", "truncated"


class AgentEpisode:
    def __init__(self, context: GroupContext, life: Life, deaths: SampleDeaths):
        self._context, self._life, self._deaths = context, life, deaths
        self._section = context.setting.environment
        self._watch = Stopwatch(self._section.timeout_s)

    async def run(self) -> FinishedSample:
        """Return the finished sample. Raises EpisodeFault, LeaseLost."""
        if self._life.turns and not self._section.deterministic:
            raise CannotGoOn("environment.deterministic is false, so the program begins again")
        if self._context.conversations is None:
            raise Conflict("an agent's episode needs a conversation server, and there is none")
        replays = bool(self._life.turns)
        turns = AgentTurns(self._context, self._life, self._watch, self._trains)
        async with self._context.conversations.open(turns) as address:
            try:
                reward, ending, detail = await self._until_over(turns, address)
            finally:
                self._watch.stop()
                await turns.close()
        finished = await turns.finish(reward, ending, detail)
        self._context.setting.counts.replayed += replays
        return finished

    async def _until_over(self, turns: AgentTurns, address: ConversationAddress) -> tuple[float | None, str, str]:
        program = asyncio.create_task(self._program(address), name="agent")
        clock = asyncio.create_task(self._until_time_is_up(turns), name="agent's time")
        try:
            await asyncio.wait((program, clock, turns.lost), return_when=asyncio.FIRST_COMPLETED)
            if turns.lost.done():
                turns.lost.result()
            if not program.done():
                return None, TRUNCATED, f"environment.timeout_s {self._section.timeout_s:g}"
            try:
                reward = program.result()
            except EnvironmentFailed:
                if not turns.limit:
                    raise
                return None, TRUNCATED, turns.limit
            return reward, TRUNCATED if turns.limit else DONE, turns.limit
        finally:
            for task in (program, clock):
                task.cancel()
            await asyncio.gather(program, clock, return_exceptions=True)
            if turns.lost.done():
                turns.lost.exception()

    async def _program(self, address: ConversationAddress) -> float | None:
        row = self._context.row
        self._watch.start()
        if self._section.agent:
            return await self._context.code.solve(row, *address, self._deaths)
        folder = self._context.setting.spec.folder
        return await run_command(self._section.command, row, *address, self._section.memory_mb, folder)

    async def _until_time_is_up(self, turns: AgentTurns) -> None:
        while turns.waits or self._watch.left_s > 0:
            turns.changed.clear()
            left_s = None if turns.waits else self._watch.left_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):  # wait_for of Python 3.11 may swallow a cancellation
                    await turns.changed.wait()

    async def _trains(self, messages: Sequence[Any], tools: Sequence[Any]) -> bool:
        if not self._section.train_call:
            return True
        return await self._context.code.trains(list(messages), list(tools), self._deaths)
