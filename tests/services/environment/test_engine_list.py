"""The choice of a rollout worker for each session, on a clock of the test."""

from __future__ import annotations

from paceline.groups import Version
from paceline.services.environment.engines import EngineList, Wanted
from paceline.v1 import worker_pb2

ANY = Wanted()


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def listed(**steps: int) -> list[worker_pb2.EngineAddress]:
    return [
        worker_pb2.EngineAddress(member_id=name, address=f"{name}:1", version={"session": 1, "step": step})
        for name, step in steps.items()
    ]


def choice(engines: EngineList, session: str, wanted: Wanted = ANY) -> str | None:
    engine = engines.choose(session, wanted)
    return None if engine is None else engine.member_id


def test_new_sessions_are_spread_and_stay_where_they_began() -> None:
    engines = EngineList()
    engines.replace(listed(a=3, b=3, c=3))
    first = {session: choice(engines, session) for session in "123456"}
    assert sorted(first.values()) == ["a", "a", "b", "b", "c", "c"]  # type: ignore[type-var]
    assert {session: choice(engines, session) for session in "654321"} == dict(reversed(first.items()))
    engines.replace(listed(a=4, b=4, c=4, d=4))
    assert {session: choice(engines, session) for session in first} == first
    assert choice(engines, "7") == "d"
    assert engines.num_moved == 0


def test_sessions_of_a_worker_that_is_gone_go_to_the_others() -> None:
    engines = EngineList()
    engines.replace(listed(a=3, b=3))
    first = {session: choice(engines, session) for session in "1234"}
    engines.replace(listed(b=3, c=3))
    moved = {session: choice(engines, session) for session in "1234"}
    assert [moved[s] for s in "1234" if first[s] == "b"] == ["b", "b"]
    assert [moved[s] for s in "1234" if first[s] == "a"] == ["c", "c"]
    assert engines.num_moved == 2


def test_a_session_that_has_ended_makes_room_where_it_was() -> None:
    engines = EngineList()
    engines.replace(listed(a=3, b=3))
    assert [choice(engines, session) for session in "123"] == ["a", "b", "a"]
    engines.end_session("1")
    engines.end_session("3")
    engines.end_session("never begun")
    assert [choice(engines, session) for session in "45"] == ["a", "a"]


def test_only_workers_with_new_enough_weights_are_asked() -> None:
    engines = EngineList()
    engines.replace(listed(a=3, b=5))
    assert choice(engines, "1", Wanted(oldest_step=4)) == "b"
    assert choice(engines, "2", Wanted(oldest_step=6)) is None
    assert engines.seconds_until_retry(Wanted(oldest_step=6)) is None, "only another list helps"


def test_an_evaluation_asks_the_pinned_worker_at_the_pinned_version_alone() -> None:
    engines = EngineList()
    engines.replace(listed(a=3, b=3))
    pinned = Wanted(pinned=Version(1, 3), pinned_member="b")
    assert {choice(engines, session, pinned) for session in "1234"} == {"b"}
    engines.replace(listed(a=3, b=4))
    assert choice(engines, "1", pinned) is None


def test_a_worker_that_failed_is_left_alone_for_a_while() -> None:
    clock = Clock()
    engines = EngineList(clock)
    engines.replace(listed(a=3, b=3))
    assert choice(engines, "1") == "a"
    engines.put_off("a", 2.0)
    assert choice(engines, "1") == "b"
    engines.put_off("b", 3.0)
    assert choice(engines, "1") is None
    assert engines.seconds_until_retry(ANY) == 2.0
    clock.now_s += 2.0
    assert choice(engines, "1") == "a"
    engines.replace(listed(b=3))
    assert engines.seconds_until_retry(ANY) == 1.0


def test_a_worker_without_an_address_is_not_asked() -> None:
    engines = EngineList()
    engines.replace([worker_pb2.EngineAddress(member_id="a")])
    assert not len(engines)
    assert choice(engines, "1") is None
