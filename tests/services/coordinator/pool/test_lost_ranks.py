"""Ranks that fall silent while others of their learner report."""

from __future__ import annotations

from control_plane import Plane, learner

from paceline.services.coordinator.members.registry import Introduction, Member
from paceline.services.coordinator.pool.pool import LostRanks
from paceline.v1 import common_pb2

LIMIT_S = 15.0


class Learner:
    """Two ranks that join at time 0; `check` takes the time of each one's last report, by rank."""

    def __init__(self) -> None:
        self.lost = LostRanks(LIMIT_S)
        for _ in range(2):
            self.lost.joined("a", 0.0)

    def check(self, now_s: float, **heard_s: float) -> list[tuple[str, list[str]]]:
        members = [
            Member(member_id, Introduction(common_pb2.ROLE_LEARNER, learner_id="a"), heard)
            for member_id, heard in heard_s.items()
        ]
        return [(why, [m.member_id for m in others]) for why, others in self.lost.check(members, now_s)]


def test_the_others_are_told_once() -> None:
    ranks = Learner()
    assert ranks.check(14.0, r0=14.0, r1=0.0) == []
    assert ranks.check(16.0, r0=16.0) == [("learner r1 is silent for 16 s", ["r0"])]  # removed meanwhile
    assert ranks.check(17.0, r0=17.0) == []


def test_a_rank_that_left_in_good_order_is_not_lost() -> None:
    ranks = Learner()
    assert ranks.check(1.0, r0=1.0, r1=1.0) == []
    ranks.lost.left("a", "r1")
    assert ranks.check(60.0, r0=60.0) == []


def test_ranks_that_were_all_away_have_the_whole_limit_again() -> None:
    ranks = Learner()
    assert ranks.check(20.0, r0=1.0, r1=1.0) == []  # no rank left to notify
    ranks.lost.joined("a", 20.5)
    assert ranks.check(21.0, r0=20.5, r1=1.0) == []
    assert ranks.check(36.0, r0=36.0, r1=1.0) == [("learner r1 is silent for 16 s", ["r0"])]


def test_the_coordinators_own_pause_is_no_silence() -> None:
    ranks = Learner()
    ranks.check(1.0, r0=1.0, r1=1.0)
    ranks.lost.ignore_silence(30.0)
    assert ranks.check(32.0, r0=32.0) == []


def test_a_learner_without_members_is_forgotten() -> None:
    ranks = Learner()
    assert ranks.check(1.0) == []
    assert ranks.lost._learners == {}
    ranks.lost.joined("", 0.0)
    assert ranks.lost._learners == {}


async def test_a_rank_hears_that_another_is_silent(plane: Plane) -> None:
    first = learner(plane, "learner-1", world_size=2, learner_id="a")
    second = learner(plane, "learner-2", rank=1, learner_id="a")
    other = learner(plane, "learner-3", world_size=2, learner_id="b")
    for worker in (first, second, other):
        await worker.hear("welcome")
    await plane.coordinator.pool.expire_silent()  # every rank has been seen
    age_s = plane.be_silent("learner-2")
    plane.coordinator.pool._lost_ranks.ignore_silence(-age_s)  # its learner joined before that
    plane.run_loops()
    lost = await first.hear("rank_lost")
    assert lost.reason.startswith("learner learner-2 is silent for")
