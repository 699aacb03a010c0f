"""Nodes that meet in a real rendezvous store on loopback, each in a thread."""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor

import pytest
from free_ports import free_port

from paceline.errors import Conflict, InvalidInput, Unavailable
from paceline.services.learner.nodes.assembly import SessionEnd
from paceline.services.learner.nodes.launcher import Rendezvous, SessionPart
from paceline.services.learner.nodes.settings import NodeSettings

DEADLINE_S = 60.0


def never() -> bool:
    return False


@pytest.fixture
def address() -> str:
    return f"127.0.0.1:{free_port()}"


def node(address: str, node_rank: int, nodes: int = 2, wait_s: float = DEADLINE_S) -> Rendezvous:
    return Rendezvous(NodeSettings(nodes, nodes, node_rank, address), 2, "127.0.0.1", wait_s)


def meet(*nodes: Rendezvous) -> list[SessionPart]:
    with ThreadPoolExecutor() as pool:
        places = list(pool.map(lambda one: one.meet(never), nodes))
    return [place for place in places if place is not None]


def test_two_nodes_meet_and_the_end_of_one_reaches_the_other(address: str) -> None:
    first, second = node(address, 0), node(address, 1)
    places = meet(first, second)
    assert [(place.first_rank, place.world_size, place.nodes) for place in places] == [(0, 4, 2), (2, 4, 2)]
    assert places[0].session == places[1].session
    ends: queue.Queue[SessionEnd] = queue.Queue()
    watched = [one.watch(place, ends.put) for one, place in zip((first, second), places, strict=True)]
    second.leave("has lost rank 3")
    assert [ends.get(timeout=DEADLINE_S).reason for _ in watched] == ["node 1 has lost rank 3"] * 2
    again = meet(first, second)
    assert again[0].session == again[1].session != places[0].session
    ended = first.watch(again[0], ends.put)
    second.watch(again[1], ends.put)
    first.leave("has lost rank 0")
    ended.set()
    assert ends.get(timeout=DEADLINE_S).reason == "node 0 has lost rank 0"
    assert meet(first, second)[1].session != again[1].session


def test_a_node_whose_store_is_gone_ends_its_part(address: str) -> None:
    first, second = node(address, 0), node(address, 1)
    place = meet(first, second)[1]
    ends: queue.Queue[SessionEnd] = queue.Queue()
    del first  # its store stops listening
    second.watch(place, ends.put)
    assert "node 0, which hosts the rendezvous, does not answer" in ends.get(timeout=DEADLINE_S).reason


def test_a_node_that_never_comes_is_named_with_the_remedy(address: str) -> None:
    with pytest.raises(Unavailable, match=r"has node 0 of 2 nodes after 0.2 s; start the other nodes with the same"):
        node(address, 0, wait_s=0.2).meet(never)


def test_a_rendezvous_that_nobody_hosts_is_named(address: str) -> None:
    with pytest.raises(Unavailable, match=r"no rendezvous answers at .* start node 0 at this address"):
        node(address, 1, wait_s=0.2).meet(never)


def test_a_node_of_another_size_is_refused(address: str) -> None:
    first, other = node(address, 0), node(address, 5, nodes=6)
    with ThreadPoolExecutor() as pool:
        stop = False
        waiting = pool.submit(first.meet, lambda: stop)
        with pytest.raises(Conflict, match="--node-rank 5 is none of the 2 nodes"):
            other.meet(never)
        stop = True
        assert waiting.result(DEADLINE_S) is None


def test_an_address_that_cannot_be_taken_is_named(address: str) -> None:
    taken = node(address, 0)
    with pytest.raises(InvalidInput, match=r"cannot host the rendezvous .* give an address of this host as --host"):
        node(address, 0)
    with pytest.raises(InvalidInput, match="--host 'no such host' is not an address of this host"):
        Rendezvous(NodeSettings(2, 2, 0, address), 1, "no such host", 1.0)
    del taken


def test_a_first_node_that_listens_on_loopback_alone_is_refused() -> None:
    settings = NodeSettings(2, 2, 0, "192.0.2.1:29400")
    with pytest.raises(
        InvalidInput,
        match=r"--host 127.0.0.1 can be reached only from this host.*give as --host the address that --rendezvous names, or 0.0.0.0",
    ):
        Rendezvous(settings, 1, "127.0.0.1", 1.0)
