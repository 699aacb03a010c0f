"""A program for `test_connections.py`: reads the exchange's socket only after its peer has sent a PING among messages
and has reset the connection. Ends with status 0 if all messages were read."""

from __future__ import annotations

import socket
import struct

import zmq

from paceline.services.coordinator.exchange.transport.router_socket import ExchangeSocket

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\x00") + bytes(32)
SOCKET_TYPE = b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
READY = b"\x04" + bytes([6 + len(SOCKET_TYPE)]) + b"\x05READY" + SOCKET_TYPE
PING = b"\x04\x07\x04PING\x00\x00"
MESSAGE = b"\x00\x02hi"
MESSAGES = 1001
"""More than ZeroMQ keeps by default for an unread socket."""

EVENT_MS = 1000
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER value with which closing resets the connection."""


def main() -> None:
    """Raise RuntimeError if messages are missing."""
    exchange = ExchangeSocket("127.0.0.1", 0)
    with socket.create_connection(("127.0.0.1", exchange.port), timeout=60.0) as peer:
        peer.sendall(GREETING + READY)
        answered = 0
        while answered < len(GREETING) + len(READY):  # it has introduced itself too
            answered += len(peer.recv(4096))
        peer.sendall(MESSAGE * MESSAGES + PING + MESSAGE)
        zmq.select([exchange.descriptor], [], [], 10.0)  # the first of them have arrived
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    events = zmq.Poller()
    events.register(exchange._monitor, zmq.POLLIN)
    while events.poll(EVENT_MS):  # until ZeroMQ has reported all events that it reports without a read
        exchange.read_monitor()
    read = 0
    while exchange.receive() is not None or events.poll(EVENT_MS):
        exchange.read_monitor()
        read += 1
    exchange.close()
    if read < MESSAGES:
        raise RuntimeError(f"{read} of {MESSAGES} messages were read")


if __name__ == "__main__":
    main()
