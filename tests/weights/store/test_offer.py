"""Offers of weights as messages."""

from __future__ import annotations

import pytest

from paceline.errors import WireError
from paceline.groups import Version
from paceline.weights.store.store_format import StoredObject, StoreOffer

STORE = StoreOffer(
    run_id="run",
    epoch=1,
    member_id="m",
    version=Version(3, 14),
    url="memory://weights",
    algorithm="xxh3_64",
    manifest=StoredObject("delta.json", 10, "aa"),
    snapshot_version=Version(3, 10),
    snapshot=StoredObject("anchor.json", 20, "bb"),
    snapshot_bytes=400,
)


def test_an_offer_is_the_same_after_the_wire() -> None:
    message = STORE.to_proto(max_wait_s=30.0)
    assert StoreOffer.from_proto(message) == STORE
    assert message.max_wait_s == 30.0


def test_an_object_outside_the_store_is_refused() -> None:
    message = STORE.to_proto(max_wait_s=30.0)
    message.stored.anchor.name = "../elsewhere"
    with pytest.raises(WireError, match="an object may not be called"):
        StoreOffer.from_proto(message)
