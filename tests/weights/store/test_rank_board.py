"""A board over a rendezvous that is away, or that fails with an unexpected error."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from paceline.weights.store.rank_board import RankBoard, _TcpBoard


class Store:
    """A store whose waiting ends with these errors, one after the other; then the note is there."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    def check(self, keys: list[str]) -> bool:
        return not self.errors

    def get(self, key: str) -> bytes:
        return b"note"

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        raise self.errors.pop(0)


def test_a_time_out_is_waited_out() -> None:
    errors: list[Any] = [dist.DistStoreError("wait timeout"), RuntimeError("connection reset")]
    assert _TcpBoard(Store(*errors), poll_s=0.01).wait("key", threading.Event()) == b"note"
    closed = threading.Event()
    closed.set()
    assert _TcpBoard(Store(*errors), poll_s=0.01).wait("key", closed) is None


def test_what_nobody_foresaw_rises() -> None:
    with pytest.raises(TypeError, match="no key"):
        _TcpBoard(Store(TypeError("no key"))).wait("key", threading.Event())


def test_one_rank_alone_has_what_it_left() -> None:
    board = RankBoard()
    board.put("a", b"1")
    assert board.wait("a", threading.Event()) == b"1"
    board.remove("a")
    board.remove("a")
    with pytest.raises(KeyError):
        board.wait("a", threading.Event())
