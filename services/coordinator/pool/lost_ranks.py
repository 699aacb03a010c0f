"""Ranks of learners that are silent while others of their learner are heard.

The others wait in collectives for such a rank: they do not see that a process is stopped or that its host is gone. A rank that
left in good order is not lost, and neither are ranks that the coordinator alone cannot hear: a learner whose ranks come back
on new streams, after a break of the network or a restart, has the whole limit from then on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from paceline.services.coordinator.members.registry import Member


@dataclass
class _Learner:
    """Ranks of one learner, those that are no member any more included."""

    joined_s: float
    """When the last of its ranks joined or came back."""
    heard_s: dict[str, float] = field(default_factory=dict)
    """Time of the last report by member id."""


class LostRanks:
    """The ranks of all learners that have several."""

    def __init__(self, limit_s: float):
        """`limit_s` is the longest silence of a rank."""
        self._limit_s = limit_s
        self._learners: dict[str, _Learner] = {}

    def joined(self, learner_id: str, now_s: float) -> None:
        """Note that a rank has joined or has come back; `learner_id` is empty for every other member."""
        if learner_id:
            self._learners.setdefault(learner_id, _Learner(now_s)).joined_s = now_s

    def left(self, learner_id: str, member_id: str) -> None:
        """Note that a rank has left in good order."""
        if learner_id in self._learners:
            self._learners[learner_id].heard_s.pop(member_id, None)

    def ignore_silence(self, pause_s: float) -> None:
        """Move all times forward, because nobody could be heard for so long."""
        for learner in self._learners.values():
            learner.joined_s += pause_s
            learner.heard_s = {member_id: heard_s + pause_s for member_id, heard_s in learner.heard_s.items()}

    def check(self, members: Iterable[Member], now_s: float) -> Iterator[tuple[str, list[Member]]]:
        """Yield, once for each learner that has lost ranks, a sentence about one of them and the members to be told."""
        present: dict[str, list[Member]] = {}
        for member in members:
            if member.learner_id in self._learners:
                present.setdefault(member.learner_id, []).append(member)
                self._learners[member.learner_id].heard_s[member.member_id] = member.last_report_s
        for learner_id, learner in list(self._learners.items()):
            if learner_id not in present:
                del self._learners[learner_id]
                continue
            silent_s = {
                member_id: now_s - max(heard_s, learner.joined_s)
                for member_id, heard_s in learner.heard_s.items()
            }
            lost = [member_id for member_id in silent_s if silent_s[member_id] > self._limit_s]
            others = [m for m in present[learner_id] if m.connected and m.member_id not in lost]
            if lost and others:
                yield f"learner {lost[0]} is silent for {silent_s[lost[0]]:.0f} s", others
                for member_id in lost:
                    del learner.heard_s[member_id]
