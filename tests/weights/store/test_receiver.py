"""The thread that reads stored weights survives unexpected errors of the store's client and of its listener."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paceline.groups import Version
from paceline.rate_limited_log import unforeseen
from paceline.weights.store import receiver as store_receiver
from paceline.weights.store.receiver import StoreReceiver
from paceline.weights.store.store_format import StoredObject, StoreOffer

DEADLINE_S = 60.0
Ack = tuple[Version, bool, str, bool]


class Member:
    """A receiver whose store answers as the test orders, and its answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
        self.error: Exception | None = None
        self.listener_error: Exception | None = None
        self.acks: queue.Queue[Ack] = queue.Queue()
        self.failed = threading.Event()
        """The listener has raised its error."""
        self.url = str(directory)
        monkeypatch.setattr(store_receiver.StoreReader, "fetch", lambda _, offer: self.fetch())
        self.receiver = StoreReceiver(run_id="run", on_weights=lambda *_: None, on_ack=self.on_ack)

    def fetch(self) -> dict[str, torch.Tensor]:
        if self.error is not None:
            raise self.error
        return {}

    def on_ack(self, version: Version, ok: bool, message: str, damaged: bool) -> None:
        error, self.listener_error = self.listener_error, None
        if error is not None:
            self.failed.set()
            raise error
        self.acks.put((version, ok, message, damaged))

    def offer(self, step: int) -> None:
        version, stored = Version(1, step), StoredObject(f"{step}/anchor.json", 1, "digest")
        self.receiver.offer(StoreOffer("run", 1, "m", version, self.url, "xxh3_64", stored, version, stored, 1))


@pytest.fixture
def member(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Member]:
    member = Member(monkeypatch, tmp_path)
    yield member
    member.receiver.close()


def test_an_unforeseen_error_refuses_its_version_and_is_counted(member: Member) -> None:
    before, member.error = unforeseen.total, KeyError("layer")
    member.offer(1)
    assert member.acks.get(timeout=DEADLINE_S) == ((1, 1), False, "'layer'", False)
    member.error = None
    member.offer(2)
    assert member.acks.get(timeout=DEADLINE_S) == ((1, 2), True, "", False)
    assert unforeseen.total == before + 1


def test_a_listener_that_fails_does_not_end_the_reading(member: Member) -> None:
    before, member.listener_error = unforeseen.total, KeyError("stream")
    member.offer(1)
    assert member.failed.wait(DEADLINE_S)
    member.offer(2)
    assert member.acks.get(timeout=DEADLINE_S) == ((1, 2), True, "", False)
    assert unforeseen.total == before + 1
