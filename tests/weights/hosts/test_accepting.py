"""Connections are accepted, whatever peers do."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any, cast

from paceline.weights.hosts.transport import next_connection


class Listener:
    """Answers of accept(2), in turn."""

    def __init__(self, *answers: Any) -> None:
        self._answers = iter(answers)

    def accept(self) -> Any:
        answer = next(self._answers)
        if isinstance(answer, int):
            raise OSError(answer, os.strerror(answer))
        return answer


def test_errors_end_nothing_but_a_closed_listener() -> None:
    taken, closed = ("connection", "address"), False
    listener = cast(socket.socket, Listener(errno.EMFILE, errno.ECONNABORTED, taken, errno.EINVAL))
    assert next_connection(listener, lambda: closed, pause_s=0.0) == taken
    closed = True
    assert next_connection(listener, lambda: closed) is None
