"""A rendezvous store on a host that is silent."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from paceline.services.learner.nodes.store import NodeStore


class Silent:
    """A store of torch whose server has stopped."""

    def __init__(self) -> None:
        self.awake = threading.Event()
        self.calls = 0

    def check(self, _: list[str]) -> bool:
        self.calls += 1
        return self.awake.wait()


@pytest.fixture
def silent() -> Iterator[Silent]:
    silent = Silent()
    yield silent
    silent.awake.set()


def test_an_operation_ends_at_its_deadline_and_the_next_one_at_once(silent: Silent) -> None:
    store = NodeStore(silent, 0.05)
    for _ in range(2):
        with pytest.raises(TimeoutError, match=r"no answer for 0.05 s"):
            store.read("key")
    assert silent.calls == 1


def test_errors_of_the_store_pass() -> None:
    with pytest.raises(AttributeError):
        NodeStore(None, 1.0).number("joined", 1)
