"""CURVE on the exchange's socket: connections are encrypted, and each one is known by its public key.

The socket's key is new for each coordinator's life and reaches workers by Welcome; a worker's key reaches the coordinator by Hello.
Both come over the control stream, which TLS authenticates. ZeroMQ asks a thread of pyzmq's (ZAP) whether a key is a member's before
the first message of its connection is read: a stranger's connection ends there and leaves nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from paceline.rate_limited_log import RateLimitedLog

DOMAIN = "exchange"
MAX_CACHED = 4096
"""Keys whose text is decoded once."""
KnowsKey = Callable[[bytes], bool]

quiet = logging.getLogger(f"{__name__}.pyzmq")
quiet.setLevel(logging.CRITICAL)  # it writes lines for each attempt
seldom = RateLimitedLog(logging.getLogger(__name__))


class CurveServer:
    """The keys of one socket and the thread that asks for its peers."""

    def __init__(self, context: zmq.Context[Any], knows: KnowsKey):
        """`knows` tells, in a thread, whether a public key is a member's."""
        self._knows = knows
        public, self._secret = zmq.curve_keypair()
        self.public_key = z85.decode(public)
        """The socket's public key, 32 bytes."""
        self._authenticator = ThreadAuthenticator(context, log=quiet)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(DOMAIN, self)

    def protect(self, socket: zmq.Socket[Any]) -> None:
        """Let a socket take connections of members alone. Call it before it is bound."""
        socket.curve_server = True
        socket.curve_secretkey = self._secret
        socket.zap_domain = DOMAIN.encode()
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def callback(self, domain: str, key: bytes) -> bool:
        """Answer pyzmq whether a peer is let in; `key` is in Z85."""
        known = self._knows(z85.decode(key))
        if not known:
            seldom.warning("key", "refused a connection to the exchange: its key is no member's")
        return known

    def close(self) -> None:
        """End the thread."""
        self._authenticator.stop()


@lru_cache(MAX_CACHED)
def _decoded(text: str) -> bytes:
    return bytes(z85.decode(text))


def key_of(frame: zmq.Frame) -> bytes:
    """Return the public key of the connection that a frame came on; empty where it is not encrypted."""
    try:
        return _decoded(str(frame.get("User-Id")))
    except (zmq.ZMQError, ValueError):
        return b""
