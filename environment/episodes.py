"""`GroupEpisodes`: the episodes of a leased group, from the lease to the group's rows.

Tasks: one for each sample; they wait for turns, for user code and for the journal. The first that cannot go on (the lease is lost,
the prompt is too long) ends the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

import numpy as np

from paceline.environment.hosting.pool import UserCode
from paceline.environment.life import FinishedSample
from paceline.environment.protocols import EpisodeLease, GroupRows, Journal, SessionHost, TokenSource
from paceline.environment.rows import build_rows, joined
from paceline.environment.sample import finish_sample
from paceline.environment.setting import EpisodeSetting, GroupContext
from paceline.groups import IntArray, Rows

T = TypeVar("T")


class GroupEpisodes:
    """The episodes of one leased group."""

    def __init__(
        self,
        setting: EpisodeSetting,
        lease: EpisodeLease,
        source: TokenSource,
        journal: Journal,
        code: UserCode,
        sessions: SessionHost | None = None,
    ) -> None:
        """`setting` and `code` are the run's, started; `sessions` are needed for agents."""
        self._context = GroupContext(setting, lease, source, journal, code, sessions)

    async def run(self) -> GroupRows:
        """Return the finished group. Raises InvalidInput (PromptTooLong) for a row that cannot be used, LeaseLost."""
        samples = range(self._context.lease.num_samples)
        finished = await _all_or_none([finish_sample(self._context, sample) for sample in samples])
        return group_rows(finished, self._context.setting)


def group_rows(finished: Sequence[FinishedSample], setting: EpisodeSetting) -> GroupRows:
    """Return the rows of finished samples as a group."""
    built = [
        build_rows(
            sample.turns, sample.left_out, setting.text_of, truncated=sample.text.ending == "truncated"
        )
        for sample in finished
    ]
    completions, owners, turns = joined(built)
    setting.counts.rows += len(completions)
    prompt_ids: IntArray = np.empty(0, np.int32)
    if completions and completions[0].prompt_ids is not None:
        prompt_ids = completions[0].prompt_ids
    return GroupRows(
        prompt_ids, completions, Rows(len(finished), owners, turns), [sample.text for sample in finished]
    )


async def _all_or_none(work: Sequence[Awaitable[T]]) -> list[T]:
    """Return all results; when one fails, end the others, wait for them, and raise its exception."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
