"""One sample of a group, from its record to its end: life after life until it is finished or given up.

A fault of user code ends a life and counts; whatever else takes an environment away does not. A life that has recorded turns and
can go on does so, in this order of preference: replayed, restored, and else ended as `restarted`.
"""

from __future__ import annotations

import asyncio
import logging

from paceline.backoff import ExponentialBackoff
from paceline.environment.agent_episode import AgentEpisode
from paceline.environment.class_episode import ClassEpisode
from paceline.environment.hosting.faults import CannotGoOn, EnvironmentFailed, EnvironmentLost, ServiceAway
from paceline.environment.hosting.pool import SampleDeaths
from paceline.environment.life import FinishedSample, Life
from paceline.environment.notes import sample_text
from paceline.environment.protocols import SampleJournal
from paceline.environment.setting import GroupContext

log = logging.getLogger(__name__)

FAILED, RESTARTED = "environment_failed", "restarted"
"""Reasons for which a life ends."""
EARLIER = "given up by an earlier holder of the lease"


async def finish_sample(context: GroupContext, sample: int) -> FinishedSample:
    """Return the finished or abandoned sample. Raises InvalidInput (PromptTooLong), LeaseLost."""
    record = context.lease.journal.get(sample, SampleJournal())
    counts, environment = context.setting.counts, context.setting.environment
    life = Life(sample, context.journal, counts, record)
    if record.given_up:
        return _failed(EARLIER)
    if record.finished:
        return life.finished()
    failures, pause, deaths = record.failures, ExponentialBackoff(), SampleDeaths()
    while True:
        try:
            finished = await _live(context, life, deaths)
        except EnvironmentFailed as fault:
            failures += 1
            counts.failures += 1
            give_up = failures >= environment.max_failures
            log.warning(
                "%s failed (%d of %d): %s", _name(life, context), failures, environment.max_failures, fault
            )
            await context.journal.end(sample, life.number, FAILED, str(fault), give_up)
            if give_up:
                counts.given_up += 1
                return _failed(str(fault))
            life = Life(sample, context.journal, counts, SampleJournal(life.number + 1))
            deaths = SampleDeaths()
        except CannotGoOn as fault:
            log.info("%s begins again: %s", _name(life, context), fault)
            await context.journal.end(sample, life.number, RESTARTED, str(fault), False)
            counts.restarted += 1
            life = Life(sample, context.journal, counts, SampleJournal(life.number + 1))
        except EnvironmentLost as fault:
            log.warning("%s lost its environment: %s", _name(life, context), fault)
            if isinstance(fault, ServiceAway):
                await asyncio.sleep(pause.next_s())
        else:
            counts.samples += 1
            counts.truncated += finished.text.ending == "truncated"
            return finished


async def _live(context: GroupContext, life: Life, deaths: SampleDeaths) -> FinishedSample:
    if context.setting.environment.has_class:
        return await ClassEpisode(context, life, deaths).run()
    return await AgentEpisode(context, life, deaths).run()


def _failed(detail: str) -> FinishedSample:
    return FinishedSample([], frozenset(), sample_text([], "failed", detail))


def _name(life: Life, context: GroupContext) -> str:
    return f"sample {life.sample} of group {context.lease.group_id}, life {life.number},"
