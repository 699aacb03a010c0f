"""The bounds of messages in a byte stream of ZeroMQ: the framing of ZMTP 3.x (https://rfc.zeromq.org/spec/23).

A connection begins with a greeting of 64 bytes in each direction, of which a side writes the rest when it has seen the
beginning of the other's. Frames follow: a byte of flags, the body's size in one byte
or, when LONG is set, in eight, and the body. A frame with COMMAND belongs to the connection (READY, PING); the others make up
messages, which end with the first frame without MORE. Only the mechanism NULL leaves messages readable.
"""

from __future__ import annotations

from dataclasses import dataclass

GREETING_BYTES = 64
MORE, LONG, COMMAND = 1, 2, 4


@dataclass(frozen=True)
class Piece:
    """Bytes that can be sent on by themselves."""

    data: bytes
    is_message: bool
    """A whole message of the application, all frames of it; else some of the greeting, or a command."""


class MessageSplitter:
    """Cuts one direction of one connection into pieces, however it is cut into chunks on its way here."""

    def __init__(self) -> None:
        self._greeting = bytearray()
        self._unread = bytearray()
        self._frames = bytearray()
        """Of a message whose last frame has not come yet."""

    def feed(self, chunk: bytes) -> list[Piece]:
        """The pieces that the chunk completes, in order; of the greeting, whatever has come. Raises ValueError when the
        stream is not ZMTP 3."""
        left = GREETING_BYTES - len(self._greeting)
        greeting, rest = chunk[:left], chunk[left:]
        pieces = []
        if greeting:
            self._greeting += greeting
            self._check_greeting()
            pieces.append(Piece(greeting, is_message=False))
        self._unread += rest
        while (size := self._next_size()) is not None:
            frame = bytes(self._unread[:size])
            del self._unread[:size]
            if frame[0] & COMMAND:
                pieces.append(Piece(frame, is_message=False))
                continue
            self._frames += frame
            if not frame[0] & MORE:
                pieces.append(Piece(bytes(self._frames), is_message=True))
                self._frames.clear()
        return pieces

    def _check_greeting(self) -> None:
        for place, value in ((0, 0xFF), (9, 0x7F), (10, 3)):
            if len(self._greeting) > place and self._greeting[place] != value:
                raise ValueError(f"a greeting of ZMTP 3 does not begin with {self._greeting[:11].hex()}")

    def _next_size(self) -> int | None:
        """Bytes of the frame at the beginning of what is unread; None while it has not come whole."""
        unread = self._unread
        header = 9 if unread and unread[0] & LONG else 2
        if len(unread) < header:
            return None
        size = header + int.from_bytes(unread[1:header], "big")
        return size if len(unread) >= size else None
