"""Node 0's decisions, with a rendezvous store in memory and a clock that the tests advance."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from paceline.services.learner.nodes.assembly import (
    ALIVE_S,
    DEAD_S,
    LAST_CALL_S,
    REVISION,
    SILENT_S,
    Assembly,
)
from paceline.services.learner.nodes.settings import NodeSettings
from paceline.services.learner.nodes.store import PREFIX, NodeStore


class Nodes:
    """Other nodes, which join, send heartbeats and leave."""

    def __init__(self, least: int, most: int):
        self.raw = dist.HashStore()  # type: ignore[attr-defined]
        self.store = NodeStore(self.raw)
        self.assembly = Assembly(self.store, NodeSettings(least, most, 0, "host:1"))
        self.now_s = 100.0
        self._beats = 0

    def join(self, node_rank: Any, ranks: Any = 1, revision: Any = REVISION, **entry: Any) -> int:
        number = self.store.number("joined", 1)
        entry = {"host": f"host-{node_rank}", "life": f"life {number}", "started_s": number} | entry
        self.store.write(f"node/{number}", revision=revision, node_rank=node_rank, ranks=ranks, **entry)
        self.beat(number)
        return number

    def beat(self, *numbers: int) -> None:
        self._beats += 1
        for number in numbers:
            self.store.write(f"beat/{number}", beat=self._beats)

    def place(self, number: int) -> dict[str, Any] | None:
        return self.store.read(f"place/{number}")

    def assemble(self, seconds: float = 0.0) -> str:
        self.now_s += seconds
        return self.assembly.assemble(self.now_s)

    def check(self, seconds: float = 0.0) -> Any:
        self.now_s += seconds
        return self.assembly.check(self.now_s)


def test_ranks_are_numbered_by_the_nodes_positions() -> None:
    nodes = Nodes(2, 2)
    second = nodes.join(1, ranks=3)
    assert nodes.assemble() == "node 1"
    first = nodes.join(0, ranks=2)
    assert nodes.assemble() == "nodes 0, 1"
    places = [nodes.place(number) for number in (first, second)]
    assert [place and (place["first_rank"], place["world_size"], place["nodes"]) for place in places] == [
        (0, 5, 2),
        (2, 5, 2),
    ]
    assert nodes.check() is None


def test_enough_nodes_wait_a_while_for_the_others() -> None:
    nodes = Nodes(2, 3)
    numbers = [nodes.join(0), nodes.join(1)]
    nodes.assemble()
    nodes.beat(*numbers)
    nodes.assemble(LAST_CALL_S - 1)
    assert nodes.place(numbers[0]) is None
    nodes.beat(*numbers)
    nodes.assemble(1)
    assert [nodes.place(number) is not None for number in numbers] == [True, True]


def test_no_session_begins_without_the_host_of_the_store() -> None:
    nodes = Nodes(1, 2)
    number = nodes.join(1)
    nodes.assemble()
    nodes.beat(number)
    nodes.assemble(LAST_CALL_S + 1)
    assert nodes.place(number) is None


def started(least: int = 2, most: int = 2) -> tuple[Nodes, list[int]]:
    nodes = Nodes(least, most)
    numbers = [nodes.join(0), nodes.join(1)]
    nodes.assemble()
    if most > 2:
        nodes.beat(*numbers)
        nodes.assemble(LAST_CALL_S)
    assert nodes.check() is None
    return nodes, numbers


def test_a_silent_node_ends_the_session() -> None:
    nodes, numbers = started()
    nodes.check(SILENT_S - 1)
    nodes.beat(numbers[0])
    end = nodes.check(2)
    assert (end.reason, end.orderly) == ("node 1 is silent for 15 s", False)
    session = nodes.place(numbers[0])["session"]  # type: ignore[index]
    assert nodes.store.read(f"over/{session}") == {"reason": end.reason, "orderly": False}


def test_a_node_that_leaves_ends_the_session_with_its_reason() -> None:
    nodes, numbers = started()
    nodes.store.write(f"left/{numbers[1]}", reason="has lost rank 1")
    assert nodes.check().reason == "node 1 has lost rank 1"


def test_a_node_that_was_started_anew_ends_the_session_before_it_is_missed() -> None:
    nodes, _ = started()
    nodes.join(1)
    assert nodes.check().reason == "node 1 was started again"
    nodes.join(0)
    assert nodes.assemble() == "nodes 0, 1"


def test_a_further_node_joins_by_an_orderly_end() -> None:
    nodes, numbers = started(2, 3)
    third = nodes.join(2)
    assert nodes.check() is None
    nodes.beat(third, *numbers)
    end = nodes.check(LAST_CALL_S)
    assert (end.reason, end.orderly) == ("node 2 joins", True)


def test_old_lives_take_no_part_in_the_next_session() -> None:
    nodes, _ = started()
    assert nodes.assemble() == "nodes none"
    first, second = nodes.join(0), nodes.join(1)
    nodes.assemble()
    assert nodes.place(first)["world_size"] == 2  # type: ignore[index]
    assert nodes.place(second)["first_rank"] == 1  # type: ignore[index]


def test_two_hosts_with_one_position_are_told_apart_by_their_beats() -> None:
    nodes, numbers = started()
    again = nodes.join(1, host="elsewhere")
    assert nodes.check(1.0) is None
    nodes.beat(again, *numbers)
    assert nodes.check(ALIVE_S) is None
    assert "--node-rank 1 belongs to a node that runs on 'host-1'" in nodes.place(again)["refusal"]  # type: ignore[index]


def test_a_node_that_was_moved_to_another_host_replaces_its_old_life() -> None:
    nodes, numbers = started()
    again = nodes.join(1, host="elsewhere")
    assert nodes.check() is None
    nodes.beat(numbers[0], again)
    assert nodes.check(DEAD_S).reason == "node 1 was started again"
    nodes.join(0, life="life 1")
    nodes.assemble()
    assert nodes.place(again)["first_rank"] == 1  # type: ignore[index]


def test_no_session_begins_while_it_is_open_which_life_counts() -> None:
    nodes = Nodes(2, 2)
    nodes.join(1)
    nodes.assemble()
    assert nodes.join(0) == 2
    again = nodes.join(1, host="elsewhere")
    assert nodes.assemble() == "node 0"
    nodes.beat(2, again)
    assert nodes.assemble(DEAD_S) == "nodes 0, 1"
    assert (nodes.place(1), nodes.place(again) is None) == (None, False)


def test_of_two_processes_on_one_host_the_one_that_was_started_last_stays() -> None:
    nodes, numbers = started()
    again = nodes.join(1)
    assert nodes.check().reason == "node 1 was started again"
    first = nodes.join(1, life=f"life {numbers[1]}", started_s=numbers[1])
    nodes.assemble()
    assert "--node-rank 1 belongs to" in nodes.place(first)["refusal"]  # type: ignore[index]
    assert nodes.place(again) is None


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"node_rank": 2}, "--node-rank 2 is none of the 2 nodes"),
        ({"node_rank": "x"}, "--node-rank 'x' is none"),
        ({"node_rank": 1, "ranks": 0}, "--ranks 0 is not between"),
        ({"node_rank": 1, "revision": 7}, "revision 7, not 1"),
    ],
)
def test_a_node_that_cannot_take_part_is_told(entry: dict[str, Any], said: str) -> None:
    nodes = Nodes(2, 2)
    number = nodes.join(**entry)
    assert nodes.assemble() == "nodes none"
    assert said in nodes.place(number)["refusal"]  # type: ignore[index]


def test_junk_in_the_store_is_no_node() -> None:
    nodes = Nodes(1, 1)
    for junk in (b"\xff", b"[" * 3000, b"7", b"x" * 5000):
        nodes.raw.set(f"{PREFIX}node/{nodes.store.number('joined', 1)}", junk)
    assert nodes.assemble() == "nodes none"
    nodes.join(0)
    assert nodes.assemble() == "node 0"
