"""The only message of a reader: anything else is refused before it is stored."""

from __future__ import annotations

import pytest

from paceline.errors import WireError
from paceline.v1 import host_agent_pb2
from paceline.weights.hosts import frames


class Said:
    """A channel on which the peer has sent everything already."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = data

    def send(self, data: bytes | memoryview) -> None:
        self.data += bytes(data)

    def receive_into(self, memory: memoryview) -> None:
        memory[:] = self.data[: len(memory)]
        self.data = self.data[len(memory) :]

    def close(self) -> None:
        raise AssertionError("its owner closes it")


def test_a_request_comes_as_it_was_sent() -> None:
    channel, request = Said(), host_agent_pb2.ReadRequest(protocol=frames.PROTOCOL, run_id="run-1")
    frames.send_request(channel, request)
    assert frames.receive_request(channel) == request


def test_what_is_no_request_is_refused() -> None:
    with pytest.raises(WireError, match="not a request of a relay"):
        frames.receive_request(Said(frames.LENGTH.pack(2) + b"\xff\xff"))
    with pytest.raises(WireError, match="a relay's request has 1048577 bytes"):
        frames.receive_request(Said(frames.LENGTH.pack(frames.MAX_MESSAGE_BYTES + 1)))


def test_a_frame_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(WireError, match="the unknown kind 99"):
        frames.receive_head(Said(frames.HEAD.pack(99, 0, 0)))
