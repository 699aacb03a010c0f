"""What people may look at of single tokens: the choice of groups, and the report about them."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.groups import Group
from paceline.learner.step.token_statistics import TokenNumbers, TokenStatistics
from paceline.spec import RunSpec
from paceline.v1 import worker_pb2

MAX_TOKENS = 100_000
"""Tokens of one report; further completions are left out."""


def observed(spec: RunSpec, rank: int, groups: Sequence[Group]) -> TokenStatistics | None:
    """Return what takes the numbers of rank 0's first groups of a step; None where none are wanted."""
    number = spec.logger.keep_token_stats
    if rank != 0 or not number or not groups or not spec.samples:
        return None
    return TokenStatistics([group.group_id for group in groups[:number]])


def report_of(
    numbers: Sequence[TokenNumbers], run_id: str, session: int, step: int
) -> worker_pb2.ConnectRequest:
    """Return the report about a step."""
    report = worker_pb2.TokenStatistics(run_id=run_id, session=session, step=step)
    tokens = 0
    for each in numbers:
        tokens += len(each.logprobs_T)
        if tokens > MAX_TOKENS:
            break
        report.completions.add(
            group_id=each.group_id,
            index=each.index,
            logprobs=each.logprobs_T.tolist(),
            entropies=each.entropies_T.tolist(),
        )
    return worker_pb2.ConnectRequest(token_statistics=report)
