"""Each harm does what it says to real connections, and ends when it is repaired."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import zmq
from links.harm import HARMS, WHOLE_CHUNKS
from links.proxy import Proxy

DEADLINE_S = 60.0
HOUR_S = 3600.0
NUMBER = 60
"""Messages that are enough for every way in which the seed sends them."""


class Link:
    """A proxy before a listening socket."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(DEADLINE_S)
        self.proxy = Proxy(lambda: f"127.0.0.1:{self._server.getsockname()[1]}")
        self._sockets: list[socket.socket] = []

    def dial(self) -> socket.socket:
        """A connection to the proxy."""
        host, _, port = self.proxy.address.rpartition(":")
        near = socket.create_connection((host, int(port)), timeout=DEADLINE_S)
        self._sockets.append(near)
        return near

    def connect(self) -> tuple[socket.socket, socket.socket]:
        """Both ends of a connection through the proxy, over which something has come already."""
        near = self.dial()
        far, _ = self._server.accept()
        far.settimeout(DEADLINE_S)
        self._sockets.append(far)
        near.sendall(b"hello")
        assert read(far, 5) == b"hello"
        return near, far

    def until_met(self, what: str, number: int) -> None:
        """Returns when that many chunks have met the harm."""
        until(lambda: self.proxy.met[what] >= number)

    def close(self) -> None:
        """Ends everything."""
        for each in self._sockets:
            each.close()
        self.proxy.close()
        self._server.close()


@pytest.fixture
def link() -> Iterator[Link]:
    made = Link()
    yield made
    made.close()


def until(true: Callable[[], bool]) -> None:
    deadline_s, pause = time.monotonic() + DEADLINE_S, threading.Event()
    while not true():
        assert time.monotonic() < deadline_s
        pause.wait(0.01)


def read(end: socket.socket, size: int) -> bytes:
    """So many bytes, or those before the end of the connection."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while len(data) < size and (more := end.recv(size - len(data))):
            data += more
    return data


def is_silent(end: socket.socket) -> bool:
    """Return whether the connection stands and nothing has come."""
    end.setblocking(False)
    try:
        end.recv(1)
    except BlockingIOError:
        return True
    finally:
        end.settimeout(DEADLINE_S)
    return False


def is_whole(link: Link) -> bool:
    near, far = link.connect()
    far.sendall(b"back")
    return read(near, 4) == b"back"


def test_cut_closes_connections_and_refuses_new_ones(link: Link) -> None:
    near, far = link.connect()
    link.proxy.harm("cut")
    assert read(near, 1) == read(far, 1) == b""
    assert read(link.dial(), 1) == b""
    link.proxy.repair()
    assert is_whole(link)


def test_drop_is_silence_and_then_the_end_of_what_it_met(link: Link) -> None:
    near, far = link.connect()
    link.proxy.harm("drop")
    near.sendall(b"there")
    far.sendall(b"back")
    link.until_met("dropped", 2)
    late = link.dial()
    late.sendall(b"anybody?")
    link.until_met("dropped", 3)
    assert is_silent(near)
    assert is_silent(far)
    assert is_silent(late)
    link.proxy.repair()
    assert read(near, 1) == read(far, 1) == read(late, 1) == b""
    assert is_whole(link)


def test_drop_keeps_the_end_of_a_connection_to_itself(link: Link) -> None:
    near, far = link.connect()
    link.proxy.harm("drop")
    far.close()
    link.until_met("unheard", 1)
    assert is_silent(near)
    link.proxy.repair()
    assert read(near, 1) == b""


def test_delay_holds_back_and_keeps_the_order(link: Link) -> None:
    near, far = link.connect()
    link.proxy.state.hold_s = (HOUR_S, HOUR_S)
    link.proxy.harm("delay")
    for number in range(3):
        near.sendall(b"%d" % number)
        link.until_met("delayed", number + 1)
    assert is_silent(far)
    link.proxy.repair()
    assert read(far, 3) == b"012"
    link.proxy.state.hold_s = (0.05, 0.1)
    link.proxy.harm("delay")
    near.sendall(b"345")
    assert read(far, 3) == b"345"  # without repairing


def test_truncate_ends_a_connection_in_the_middle_of_a_chunk(link: Link) -> None:
    near, far = link.connect()
    link.proxy.harm("truncate")
    chunks = []
    while not chunks or len(chunks[-1]) == 100:
        near.sendall(bytes(100))
        chunks.append(read(far, 100))
    assert len(chunks[-1]) == 50
    assert len(chunks) <= WHOLE_CHUNKS + 1
    assert read(near, 1) == b""
    link.proxy.repair()
    assert is_whole(link)


def test_only_messages_can_be_duplicated(link: Link) -> None:
    with pytest.raises(ValueError, match="duplicate"):
        link.proxy.harm("duplicate")
    with pytest.raises(ValueError, match="burn"):
        link.proxy.harm("burn")


@pytest.fixture
def exchange() -> Iterator[tuple[Proxy, zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """A proxy between a DEALER and a ROUTER, both of them real."""
    context = zmq.Context()
    router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    for end in (router, dealer):
        end.setsockopt(zmq.LINGER, 0)
        end.setsockopt(zmq.RCVTIMEO, int(DEADLINE_S * 1000))
    dealer.setsockopt(zmq.IDENTITY, b"dealer")
    port = router.bind_to_random_port("tcp://127.0.0.1")
    proxy = Proxy(lambda: f"127.0.0.1:{port}", messages=True)
    dealer.connect(f"tcp://{proxy.address}")
    yield proxy, dealer, router
    proxy.close()
    context.destroy()


@pytest.mark.parametrize("back", [False, True], ids=["there", "back"])
def test_duplicate_brings_messages_twice_and_in_another_order(
    exchange: tuple[Proxy, zmq.Socket[bytes], zmq.Socket[bytes]], back: bool
) -> None:
    proxy, dealer, router = exchange
    dealer.send(b"hello")
    assert router.recv_multipart() == [b"dealer", b"hello"]
    router.send_multipart([b"dealer", b"hello"])
    assert dealer.recv() == b"hello"
    proxy.harm("duplicate")
    source, sink = (router, dealer) if back else (dealer, router)
    address = [b"dealer"] if back else []
    for number in range(NUMBER):
        source.send_multipart([*address, b"%d" % number, bytes(1000), b"end"])
    arrived: list[int] = []
    while len(arrived) < NUMBER + proxy.met["doubled"] or len(set(arrived)) < NUMBER:
        *_, number, middle, end = sink.recv_multipart()
        assert (middle, end) == (bytes(1000), b"end")
        arrived.append(int(number))
    assert set(Counter(arrived).values()) == {1, 2}
    assert Counter(Counter(arrived).values())[2] == proxy.met["doubled"]
    assert proxy.met["swapped"] > 0
    assert list(dict.fromkeys(arrived)) != list(range(NUMBER))
    proxy.repair()
    source.send_multipart([*address, b"last"])
    assert sink.recv_multipart()[-1] == b"last"


@pytest.mark.parametrize("kind", HARMS)
def test_messages_get_through_when_it_is_mended(
    exchange: tuple[Proxy, zmq.Socket[bytes], zmq.Socket[bytes]], kind: str
) -> None:
    """ZeroMQ makes the connection anew where it broke; what it lost on the way is sent again by those who wait."""
    proxy, dealer, router = exchange
    dealer.send(b"hello")
    router.recv_multipart()
    proxy.harm(kind)
    dealer.send(b"during")
    proxy.repair()
    router.setsockopt(zmq.RCVTIMEO, 200)
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        assert time.monotonic() < deadline_s
        dealer.send(b"after")
        with contextlib.suppress(zmq.Again):
            if router.recv_multipart()[-1] == b"after":
                return
