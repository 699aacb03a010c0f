"""Connections that send without end, or that no member uses, are closed; those of members stay, whatever they send."""

from __future__ import annotations

import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from paceline.services.coordinator.exchange.transport import connections, router_socket
from paceline.services.coordinator.exchange.transport.connections import ConnectionLimits
from paceline.services.coordinator.exchange.transport.router_socket import ExchangeSocket, Message

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\x00") + bytes(32)
SOCKET_TYPE = b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
READY = b"\x04" + bytes([6 + len(SOCKET_TYPE)]) + b"\x05READY" + SOCKET_TYPE
MORE_FRAMES = b"\x03"
EMPTY_FRAME, LAST_FRAME = b"\x01\x00", b"\x00\x00"
LONG_MESSAGE, SMALL_MESSAGE = b"\x02", b"\x00\x02hi"
DEADLINE_S = 60.0


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


Listen = Callable[..., ExchangeSocket]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def listen(clock: Clock) -> Iterator[Listen]:
    """Makes the exchange's socket without a server, with some limits changed."""
    sockets: list[ExchangeSocket] = []

    def make(**limits: int) -> ExchangeSocket:
        sockets.append(ExchangeSocket("127.0.0.1", 0, limits=ConnectionLimits(**limits), clock=clock))
        return sockets[0]

    yield make
    for each in sockets:
        each.close()


@pytest.fixture
def exchange(listen: Listen) -> ExchangeSocket:
    return listen()


def until(
    exchange: ExchangeSocket,
    done: Callable[[], bool],
    *,
    member: bool = False,
    came: list[Message] | None = None,
) -> None:
    """Check the connections and read all messages until `done`."""
    end_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < end_s:
        while (message := exchange.receive()) is not None:
            exchange.note_message(message, of_member=member)
            if came is not None:
                came.append(message)
        exchange.check_connections()
        if done():
            return
        select.select([exchange.descriptor], [], [], 0.01)
    raise AssertionError("it never came to hold")


def until_it_stands(exchange: ExchangeSocket) -> None:
    """Wait for a connection without checking it."""
    end_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < end_s:
        exchange.read_monitor()
        if len(exchange.connections):
            return
        select.select([], [], [], 0.01)
    raise AssertionError("nobody connected")


def read_one(exchange: ExchangeSocket) -> Message:
    """Return the next message without checking the connections."""
    end_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < end_s:
        if (message := exchange.receive()) is not None:
            return message
        select.select([exchange.descriptor], [], [], 0.01)
    raise AssertionError("no message came")


def raw(exchange: ExchangeSocket) -> socket.socket:
    """Return a connection that speaks ZMTP by hand, after its handshake."""
    connection = socket.create_connection(("127.0.0.1", exchange.port), timeout=DEADLINE_S)
    connection.sendall(GREETING)
    heard = connection.recv(1 << 10)
    connection.sendall(READY)
    while b"READY" not in heard:  # ZeroMQ sometimes ignores bytes that arrive before its own
        heard += connection.recv(1 << 10)
    return connection


def is_cut_off_while_it_sends(
    connection: socket.socket, pieces: bytes, number: int, exchange: ExchangeSocket, *, all_read: bool = True
) -> bool:
    """Return whether the connection ends before `pieces` was sent `number` times. Sending may also hang: if the other
    side's kernel has no room at that moment, it refuses nothing until it has dropped the connection."""
    connection.settimeout(10.0)
    for _ in range(number):
        try:
            connection.sendall(pieces)
        except OSError:
            return is_cut(connection)
        exchange.check_connections(all_read=all_read)
        if len(exchange.connections) == 0:
            return True
    return False


def is_cut(connection: socket.socket) -> bool:
    """Return whether the other side has closed it."""
    connection.settimeout(0.01)
    try:
        while connection.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def until_closed(exchange: ExchangeSocket, connection: socket.socket) -> None:
    """Wait until both sides have closed a connection, without reading a message."""
    end_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < end_s:
        exchange.read_monitor()
        if is_cut(connection) and not len(exchange.connections):
            return
    raise AssertionError("it was not closed")


def test_a_message_without_end_is_cut_off(listen: Listen) -> None:
    exchange = listen(message_bytes=1 << 20)
    with raw(exchange) as connection:
        until(exchange, lambda: len(exchange.connections) == 1)
        frame = MORE_FRAMES + struct.pack(">Q", 64 << 10) + bytes(64 << 10)
        assert is_cut_off_while_it_sends(connection, frame, 4000, exchange)  # 250 MB, if the exchange allowed it
        until(exchange, lambda: is_cut(connection))
        assert len(exchange.connections) == 0


def test_empty_frames_without_end_are_cut_off(listen: Listen) -> None:
    """Few bytes, but much memory."""
    exchange = listen(growth_bytes=32 << 20)
    with raw(exchange) as connection:
        until(exchange, lambda: len(exchange.connections) == 1)
        # 25 MB, for which ZeroMQ takes 800
        assert is_cut_off_while_it_sends(connection, EMPTY_FRAME * (32 << 10), 400, exchange)
        until(exchange, lambda: is_cut(connection))


def test_a_message_of_many_frames_is_not_read_at_once(listen: Listen) -> None:
    exchange = listen(discarded_at_once=1000)
    came: list[Message] = []
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    try:
        with raw(exchange) as connection:
            connection.sendall(EMPTY_FRAME * 50_000 + LAST_FRAME)
            until(exchange, lambda: len(came) == 1, came=came)
            assert not exchange.discard(), "there is more of it than is read in one turn"
            assert len(came[0].payloads) == router_socket.MAX_FRAMES + 1
            until(exchange, lambda: is_cut(connection), came=came)
        dealer.connect(f"tcp://127.0.0.1:{exchange.port}")
        dealer.send(b"honest")
        until(exchange, lambda: len(came) == 2, came=came)
        assert came[1].header == b"honest"
    finally:
        dealer.close(linger=0)
        context.term()


def test_the_sender_of_many_frames_is_cut_off_once(listen: Listen) -> None:
    """The next connection gets the same descriptor while the rest of the message is still read."""
    exchange = listen(discarded_at_once=100)
    for _ in range(10):  # another file of this process may have taken the descriptor
        with raw(exchange) as connection:
            connection.sendall(EMPTY_FRAME * 5_000 + LAST_FRAME)
            long = read_one(exchange)
            assert not exchange.discard()
            until_closed(exchange, connection)
        with raw(exchange) as honest:
            honest.sendall(SMALL_MESSAGE)
            came: list[Message] = []
            assert not exchange.discard(), "there is more of it"
            until(exchange, lambda came=came: bool(came), came=came)  # type: ignore[misc]
            assert not is_cut(honest)
        if came[0].descriptor == long.descriptor:
            return
    raise AssertionError("no connection got the descriptor of the one before")


def test_a_large_whole_message_arrives_and_the_next_one_too(listen: Listen) -> None:
    exchange = listen(message_bytes=3 << 20)
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    try:
        dealer.connect(f"tcp://127.0.0.1:{exchange.port}")
        came: list[Message] = []
        sizes = [2 << 20, 2 << 20, 2 << 20, 10]
        for number, size in enumerate(sizes, 1):
            dealer.send_multipart([b"header", bytes(size)])
            until(exchange, lambda number=number: len(came) == number, member=True, came=came)  # type: ignore[misc]
        assert [sum(map(len, message.payloads)) for message in came] == sizes
        assert len({message.descriptor for message in came}) == 1, "one connection, never cut off"
    finally:
        dealer.close(linger=0)
        context.term()


def test_strangers_share_a_budget(listen: Listen) -> None:
    exchange = listen(strangers_bytes=1 << 20)
    with raw(exchange) as first, raw(exchange) as second:
        until(exchange, lambda: len(exchange.connections) == 2)
        for connection in (first, second):
            connection.sendall(MORE_FRAMES + struct.pack(">Q", 700 << 10) + bytes(700 << 10))
        until(exchange, lambda: len(exchange.connections) == 1)
        assert is_cut(first) != is_cut(second), "one of them is enough"


def test_strangers_leave_files_for_members(listen: Listen) -> None:
    exchange = listen(strangers=2)
    with raw(exchange) as first, raw(exchange) as second:
        until(exchange, lambda: len(exchange.connections) == 2)
        with raw(exchange) as third:
            until(exchange, lambda: is_cut(first))
            assert len(exchange.connections) == 2
            assert not is_cut(second)
            assert not is_cut(third)


def test_only_members_may_stay(exchange: ExchangeSocket, clock: Clock) -> None:
    came: list[Message] = []
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    try:
        with raw(exchange) as stranger:
            dealer.connect(f"tcp://127.0.0.1:{exchange.port}")
            dealer.send(b"I am")
            until(exchange, lambda: len(exchange.connections) == 2 and bool(came), member=True, came=came)
            assert exchange.connections.is_of_member(came[0].descriptor)
            clock.now_s = connections.STRANGER_S + 1
            until(exchange, lambda: is_cut(stranger))
            assert len(exchange.connections) == 1
            dealer.send(b"still")
            until(exchange, lambda: len(came) == 2, member=True, came=came)
    finally:
        dealer.close(linger=0)
        context.term()


def test_a_number_that_stands_for_another_file_is_left_alone(exchange: ExchangeSocket, clock: Clock) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        exchange.connections.opened(ours.fileno())
        clock.now_s = 1e6
        assert exchange.connections.check() == []
        ours.sendall(b"x")
        assert theirs.recv(1) == b"x"


def test_a_peer_that_sends_far_more_than_is_read_is_cut_off(listen: Listen) -> None:
    exchange = listen(unread_bytes=1 << 20)
    with raw(exchange) as connection:
        until(exchange, lambda: len(exchange.connections) == 1)
        message = LONG_MESSAGE + struct.pack(">Q", 64 << 10) + bytes(64 << 10)
        assert is_cut_off_while_it_sends(connection, message, 4000, exchange, all_read=False)


def test_a_member_may_wait_long_for_being_read(listen: Listen, clock: Clock) -> None:
    exchange = listen(strangers=0)
    with raw(exchange) as connection:
        until_it_stands(exchange)
        clock.now_s = connections.STRANGER_S + 1
        connection.sendall(SMALL_MESSAGE)
        exchange.check_connections(all_read=False)
        assert len(exchange.connections) == 1, "what it has sent may say that it is a member"
        message = read_one(exchange)
        exchange.note_message(message, of_member=True)
        exchange.check_connections()
        assert exchange.connections.is_of_member(message.descriptor)


def test_strangers_may_say_so_much_that_is_refused(listen: Listen) -> None:
    exchange = listen(refused=10)
    with raw(exchange) as connection:
        came: list[Message] = []
        connection.sendall(10 * SMALL_MESSAGE)
        until(exchange, lambda: len(came) == 10, came=came)
        assert len(exchange.connections) == 1
        connection.sendall(SMALL_MESSAGE)
        until(exchange, lambda: is_cut(connection))


def test_messages_that_are_read_are_not_under_way(listen: Listen) -> None:
    """Also while further ones are always waiting."""
    exchange = listen(unread_bytes=1 << 20)
    with raw(exchange) as connection:
        until_it_stands(exchange)
        for _ in range(20):  # 5 MB
            connection.sendall(LONG_MESSAGE + struct.pack(">Q", 256 << 10) + bytes(256 << 10))
            exchange.note_message(read_one(exchange), of_member=True)
            exchange.check_connections(all_read=False)
        assert len(exchange.connections) == 1


def test_a_peer_that_leaves_before_it_is_read_does_not_end_the_process() -> None:
    program = Path(__file__).parent / "reading_late.py"
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
