"""Counts of the groups that each worker completed since the coordinator's start. Pure; the scaling policy reads them.

The unit is a group to train: a group of an evaluation counts by its share of the completions of one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable


class Throughput:
    """Groups by the worker whose result was committed."""

    def __init__(self) -> None:
        self.generated: defaultdict[str, float] = defaultdict(float)
        """Generated groups by rollout or environment worker."""
        self.scored: defaultdict[str, float] = defaultdict(float)
        """Scored groups by reward worker."""

    def note_generated(self, member_id: str, share: float) -> None:
        """Count a group that was generated; `share` is its completions by those of a group to train."""
        self.generated[member_id] += share

    def note_scored(self, member_id: str, share: float) -> None:
        """Count a group that was scored."""
        self.scored[member_id] += share

    def keep(self, member_ids: Iterable[str]) -> None:
        """Forget workers that are not among `member_ids`, so that the counts do not grow with every worker that ever was."""
        kept = set(member_ids)
        for counts in (self.generated, self.scored):
            for member_id in counts.keys() - kept:
                del counts[member_id]
