"""Metadata of scalers: pools with bounds, and refusals with the name, the value and what may be there."""

from __future__ import annotations

import pytest

from paceline.errors import InvalidInput
from services.coordinator.scaling.policy import Bounds
from services.coordinator.scaling.pools import PoolConfig, read_pool


def test_metadata_become_a_pool() -> None:
    metadata = {
        "scalerAddress": "paceline:7071",
        "pool": "rollout",
        "members": "rollout-h100-",
        "minWorkers": "1",
        "maxWorkers": "12",
        "firstWorkers": "2",
        "coldStartSeconds": "240",
        "idleSeconds": "60",
        "holdSeconds": "90.5",
        "costPerHour": "2.5",
    }
    bounds = Bounds(least=1, most=12, first=2, cold_start_s=240.0, idle_s=60.0, low_s=90.5)
    pool = read_pool(metadata)
    assert pool == PoolConfig("rollout", "rollout-h100-", bounds, 2.5)
    assert pool.has("rollout", "rollout-h100-5d9")
    assert not pool.has("rollout", "rollout-a10-5d9")
    assert not pool.has("reward", "rollout-h100-5d9")


def test_only_the_pool_has_to_be_named() -> None:
    assert read_pool({"pool": "reward"}) == PoolConfig("reward")
    assert read_pool({"pool": "reward"}).bounds.hold_s == 300.0


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        ({}, "pool is ''; it has to be one of rollout, reward, environment"),
        ({"pool": "learner"}, "pool is 'learner'"),
        ({"pool": "reward", "maxworkers": "3"}, "'maxworkers' is not known; there are pool, members"),
        (
            {"pool": "reward", "maxWorkers": "many"},
            "maxWorkers is 'many'; it has to be a number from 0 to 100000",
        ),
        ({"pool": "reward", "minWorkers": "-1"}, "minWorkers is '-1'"),
        ({"pool": "reward", "idleSeconds": "nan"}, "idleSeconds is 'nan'"),
        ({"pool": "reward", "costPerHour": "inf"}, "costPerHour is 'inf'"),
        ({"pool": "reward", "minWorkers": "5", "maxWorkers": "2"}, "minWorkers is 5 and maxWorkers 2"),
        ({"pool": "reward", "maxWorkers": "0"}, "the largest size has to be 1 at least"),
        ({"pool": "reward", "members": "a\nb"}, "not the begin of a member's name"),
        ({"pool": "x" * 1000}, "x" * 128 + "'"),
    ],
)
def test_what_is_wrong_is_said(metadata: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_pool(metadata)
    assert text in str(caught.value)
    assert len(str(caught.value)) < 400
