"""The choice of a rollout worker for each conversation, on a clock of the test."""

from __future__ import annotations

from paceline.groups import Version
from paceline.services.environment.sampling_workers import RequiredWeights, WorkerList
from paceline.v1 import worker_pb2

ANY = RequiredWeights()


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def listed(**steps: int) -> list[worker_pb2.EngineAddress]:
    return [
        worker_pb2.EngineAddress(member_id=name, address=f"{name}:1", version={"session": 1, "step": step})
        for name, step in steps.items()
    ]


def choice(workers: WorkerList, conversation: str, required: RequiredWeights = ANY) -> str | None:
    worker = workers.choose(conversation, required)
    return None if worker is None else worker.member_id


def test_new_sessions_are_spread_and_stay_where_they_began() -> None:
    workers = WorkerList()
    workers.replace(listed(a=3, b=3, c=3))
    first = {name: choice(workers, name) for name in "123456"}
    assert sorted(first.values()) == ["a", "a", "b", "b", "c", "c"]  # type: ignore[type-var]
    assert {name: choice(workers, name) for name in "654321"} == dict(reversed(first.items()))
    workers.replace(listed(a=4, b=4, c=4, d=4))
    assert {name: choice(workers, name) for name in first} == first
    assert choice(workers, "7") == "d"
    assert workers.num_moved == 0


def test_sessions_of_a_worker_that_is_gone_go_to_the_others() -> None:
    workers = WorkerList()
    workers.replace(listed(a=3, b=3))
    first = {name: choice(workers, name) for name in "1234"}
    workers.replace(listed(b=3, c=3))
    moved = {name: choice(workers, name) for name in "1234"}
    assert [moved[s] for s in "1234" if first[s] == "b"] == ["b", "b"]
    assert [moved[s] for s in "1234" if first[s] == "a"] == ["c", "c"]
    assert workers.num_moved == 2


def test_a_session_that_has_ended_makes_room_where_it_was() -> None:
    workers = WorkerList()
    workers.replace(listed(a=3, b=3))
    assert [choice(workers, name) for name in "123"] == ["a", "b", "a"]
    workers.end_conversation("1")
    workers.end_conversation("3")
    workers.end_conversation("never begun")
    assert [choice(workers, name) for name in "45"] == ["a", "a"]


def test_only_workers_with_new_enough_weights_are_asked() -> None:
    workers = WorkerList()
    workers.replace(listed(a=3, b=5))
    assert choice(workers, "1", RequiredWeights(oldest_step=4)) == "b"
    assert choice(workers, "2", RequiredWeights(oldest_step=6)) is None
    assert workers.seconds_until_retry(RequiredWeights(oldest_step=6)) is None, "only another list helps"


def test_an_evaluation_asks_the_pinned_worker_at_the_pinned_version_alone() -> None:
    workers = WorkerList()
    workers.replace(listed(a=3, b=3))
    pinned = RequiredWeights(pinned=Version(1, 3), pinned_member="b")
    assert {choice(workers, name, pinned) for name in "1234"} == {"b"}
    workers.replace(listed(a=3, b=4))
    assert choice(workers, "1", pinned) is None


def test_a_worker_that_failed_is_left_alone_for_a_while() -> None:
    clock = Clock()
    workers = WorkerList(clock)
    workers.replace(listed(a=3, b=3))
    assert choice(workers, "1") == "a"
    workers.put_off("a", 2.0)
    assert choice(workers, "1") == "b"
    workers.put_off("b", 3.0)
    assert choice(workers, "1") is None
    assert workers.seconds_until_retry(ANY) == 2.0
    clock.now_s += 2.0
    assert choice(workers, "1") == "a"
    workers.replace(listed(b=3))
    assert workers.seconds_until_retry(ANY) == 1.0


def test_a_worker_without_an_address_is_not_asked() -> None:
    workers = WorkerList()
    workers.replace([worker_pb2.EngineAddress(member_id="a")])
    assert not len(workers)
    assert choice(workers, "1") is None
